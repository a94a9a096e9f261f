"""Every setting of a training job that is a plain value, declared once: name, type, range, default and meaning.

A field of `Settings` is a setting. All others read it from there: the job file (`TrainingJob` inherits the fields), the
options of the command line, the client's and the coordinator's checks, the `Ready` message of ranks, the page, and the
table in docs/settings.md.

- `SharedSettings`: settings that the coordinator reads too; all ranks of a job must agree on them.
- `Settings`: all settings; those that it adds are read only by the ranks.
- `AgreedSettings`: what ranks report when they are ready: the shared settings, resolved, and values found in the job's
  file.
"""

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin

from elche.errors import InvalidJob
from elche.extent import Extent
from elche.policies import POLICIES, Traits

Kind = Literal["whole", "number", "flag", "word", "pair"]
KINDS: dict[object, Kind] = {int: "whole", float: "number", bool: "flag", str: "word", tuple[int, float]: "pair"}


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a field of `Settings` beyond its type and its default."""

    help: str
    """One sentence, shown by the command line."""
    least: float = 0
    below: float = math.inf
    choices: tuple[str, ...] = ()
    """The allowed words; empty: any."""
    also: tuple[str, ...] = ()
    """Words that are allowed instead of a number."""
    kind: Kind = "word"
    """Follows from the field's type, unless that is `Any`."""
    name: str = ""
    """Name of the field."""
    may_be_none: bool = False
    """True if None is a value, such as "no limit"; follows from the field's type, unless that is `Any`."""
    is_shared: bool = False
    """True if the coordinator reads it too."""

    @property
    def flag(self) -> str:
        """Its option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """Its value in the help of the command line."""
        plain = {"whole": "N", "number": "X", "flag": "true|false", "word": "TEXT", "pair": "RANK=RATIO"}[self.kind]
        words = self.choices or (plain, *self.also)
        return "|".join([*words, "none"] if self.may_be_none else words)

    def check(self, value: object) -> None:
        """Raises `InvalidJob`, naming the setting, the value and what is allowed."""
        if (value is None and self.may_be_none) or value in self.also:
            return
        if not self._has_kind(value) or (self.choices and value not in self.choices):
            raise InvalidJob(f"{self.name} must be {self._allowed()}, not {_shown(value)}")
        if isinstance(value, int | float) and value < self.least:
            raise InvalidJob(f"{self.name} must be at least {self.least:g}, not {value}")
        if isinstance(value, int | float) and value >= self.below:
            raise InvalidJob(f"{self.name} must be below {self.below}, not {value}")

    def parse(self, text: str) -> Any:
        """Parses a text of the command line. Raises `InvalidJob`."""
        value: Any = text
        if text.lower() == "none" and self.may_be_none:
            value = None
        elif self.kind == "flag" and text.lower() in ("true", "false"):
            value = text.lower() == "true"
        elif self.kind != "word":
            try:
                value = json.loads(f"[{text.replace('=', ',')}]" if self.kind == "pair" else text)
            except ValueError:
                pass  # it stays a text, which `check` refuses
        self.check(value)
        return value

    def unparse(self, value: object) -> str | None:
        """The text for `parse` of a value; None for one without a text, such as a function."""
        match value:
            case None if self.may_be_none:
                return "none"
            case bool():
                return str(value).lower()
            case int() | float() | str():
                return str(value)
            case (rank, ratio):
                return f"{rank}={ratio}"
            case _:
                return None

    def _has_kind(self, value: object) -> bool:
        match self.kind:
            case "flag":
                return isinstance(value, bool)
            case "word":
                return isinstance(value, str)
            case "whole":
                return isinstance(value, int) and not isinstance(value, bool)
            case "number":
                return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            case "pair":
                return isinstance(value, list | tuple) and len(value) == 2 and _is_hint(*value)

    def _allowed(self) -> str:
        none = "".join(f" or {word}" for word in (*self.also, *(("None",) if self.may_be_none else ())))
        if self.choices:
            return f"one of {', '.join(self.choices)}{none}"
        if self.kind == "flag":
            return "True or False"
        if self.kind == "word":
            return f"a string{none}"
        if self.kind == "pair":
            return f"(slowest rank, ratio), such as (1, 2.3){none}"
        return ("a whole number" if self.kind == "whole" else "a number") + none


def _is_hint(rank: object, ratio: object) -> bool:
    is_rank = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0
    return is_rank and isinstance(ratio, int | float) and 0 < ratio < math.inf


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value)
    return f"{type(value).__name__} ({value!r})" if isinstance(value, int | float) else type(value).__name__


SHARINGS = ("average", "from_source", "local")
COMPRESSIONS = ("bf16", "int8", "int4", "int2", "topk")
BLOCKING_ANCHOR = 10
OVERLAPPED_ANCHOR = 1
"""Short rounds train better. In blocking ones ranks also wait for each other, which El Che does not count as overhead,
so that those begin longer."""


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """The settings that the coordinator reads too. All ranks of a job must agree on them."""

    epochs: Annotated[int, Setting("How many times the data set is trained.", least=1, below=100_001)]
    """How many times the data set is trained."""
    max_steps: Annotated[
        int | None, Setting("Training ends after this many batches of all ranks.", least=1, below=2**48)
    ] = None
    """Full batches, of all ranks together, after which training ends if its epochs have not ended before: this times
    `batch_size` samples."""
    batch_size: Annotated[
        Any,  # a job file may give a function or a mapping too; see `TrainingJob`
        Setting(
            "Samples per batch on each rank; auto: as many as fit, up to 256.",
            kind="whole",
            least=1,
            below=2**32,
            also=("auto",),
        ),
    ]
    """Samples per batch on each rank."""
    seed: Annotated[
        int, Setting("Seed of the initial parameters, the order of samples and the ranks' random numbers.", below=2**63)
    ] = 0
    """Seed of the initial parameters, of the order of samples and, with the rank's number added, of each rank's random
    numbers.
    """
    drop_last: Annotated[bool, Setting("Leave out the epoch's incomplete last batch.")] = False
    """True if an epoch's incomplete last batch is left out."""
    policy: Annotated[
        str,
        Setting(
            "When ranks average: at the slowest rank's pace, when all have made their counts, or after every batch.",
            choices=tuple(POLICIES),
        ),
    ] = "cadence"
    """When ranks average: "cadence", when the slowest has trained its anchor of batches and the others as many as fit
    in that time; "async", when every rank has trained its count, without stopping meanwhile; "sync", after every batch,
    which excludes settings on the length of rounds or a rank's lead.
    """
    backend: Annotated[
        str,
        Setting(
            "How ranks average: among GPUs, among hosts, or (cpu) through the coordinator.",
            choices=("auto", "nccl", "gloo", "cpu"),
        ),
    ] = "auto"
    """How ranks average: "nccl", among GPUs with equal builds; "gloo", among ranks that reach each other; "cpu",
    through the coordinator, for those that do not; "auto" takes NCCL if all support it, else gloo, and logs the reason.
    """
    averaging: Annotated[
        str,
        Setting("Whether ranks wait for an average or train on meanwhile.", choices=("auto", "blocking", "overlapped")),
    ] = "auto"
    """"overlapped": ranks train on while the average is made, and it comes as a correction; "blocking": they wait for
    it; "auto": blocking with policy "sync" and in lockstep (`max_batch_diff` 0), else overlapped."""
    nonfinite: Annotated[
        str,
        Setting(
            "When a rank's parameters are not finite: fail the job, skip the rank's part, or ignore it.",
            choices=("fail", "skip", "ignore"),
        ),
    ] = "fail"
    """When a rank's parameters are not finite at a round: "fail" the job, "skip" the rank's part, or "ignore" it."""
    outliers: Annotated[
        str,
        Setting(
            "When a rank's step is over 20 times as long as any lately, and others' are not: skip or keep its part.",
            choices=("skip", "keep"),
        ),
    ] = "skip"
    """When a rank's step is over 20 times as long as its longest recent one, and others' are not, as of a device that
    computes wrong: "skip" its part, or "keep" it. Not detected if rounds make only the mean, which does not keep the
    last result.
    """
    on_rank_loss: Annotated[str, Setting("What is done when a rank's process dies.", choices=("continue", "fail"))] = (
        "continue"
    )
    """When a rank's process or its host dies: "continue" with the others, while it is restarted, or "fail"."""
    ride_out_s: Annotated[
        float, Setting("Seconds for which ranks train on while the coordinator is away.", least=0, below=86400)
    ] = 10.0
    """Seconds for which ranks train and average while the coordinator is away; then they wait for it."""
    max_batch_diff: Annotated[
        int | None, Setting("Batches that a rank may be ahead of the slowest; 0: lockstep.", below=2**32)
    ] = None
    """Most batches that a rank may be ahead of the slowest since the last averaging; None: as many as fit. 0 is
    lockstep: all ranks make equally many batches in each round, except an epoch's last ones.
    """
    anchor: Annotated[
        int | None, Setting("Batches of the slowest rank between averagings, at least.", least=1, below=2**32)
    ] = None
    """First and fewest batches of the slowest rank between averagings; None: 1 if averaging overlaps, else 10."""
    max_anchor: Annotated[int, Setting("Upper limit of the anchor.", least=1, below=2**32)] = 200
    """The most batches of the slowest rank between averagings."""
    overhead_target: Annotated[
        float,
        Setting(
            "Averaging time, as a fraction of the time for batches, above which averagings become rarer.",
            least=-math.inf,
        ),
    ] = 0.02
    """The anchor grows while averaging takes more than this fraction of the time for batches; in [0.01, 0.50]."""
    divergence_threshold: Annotated[
        float, Setting("How far a round may move a rank before averagings become more frequent; 0: never.")
    ] = 0.05
    """Relative L2 distance of a rank from the average above which averagings become more frequent; 0 switches
    it off.
    """
    speed_hint: Annotated[
        tuple[int, float] | None,
        Setting("The slowest rank, and how many times faster the others are; used until speeds are measured."),
    ] = None
    """(slowest rank, factor by which the others are faster): a first guess until times are measured."""
    checkpoint_every_epochs: Annotated[
        int | None, Setting("Write a checkpoint every N epochs, and at the end.", least=1, below=2**32)
    ] = None
    """Epochs between checkpoints; None: no rule by epochs."""
    checkpoint_every_minutes: Annotated[
        float | None, Setting("Write a checkpoint every X minutes, and at the end.")
    ] = 10.0
    """Minutes between checkpoints; None: no rule by time."""
    keep_checkpoints: Annotated[
        int, Setting("Number of newest checkpoints that are kept, besides the best.", least=1, below=2**16)
    ] = 3
    """Number of newest checkpoints that are kept, besides the best."""
    monitor: Annotated[str | None, Setting("Metric of the evaluation by which the best checkpoint is chosen.")] = None
    """The metric by which the best checkpoint is chosen; each epoch then has a checkpoint."""
    mode: Annotated[
        str,
        Setting("Whether the lowest or the highest value of the monitored metric is the best.", choices=("min", "max")),
    ] = "min"
    """Whether a lower ("min") or a higher ("max") value of the monitored metric is better."""
    restore: Annotated[str, Setting("With monitor: which model is the job's final one.", choices=("best", "last"))] = (
        "best"
    )
    """The final model of a job with a monitored metric: the "best" one or the "last" one. The other is stored beside
    it, as `last.safetensors` or `best.safetensors`.
    """
    patience: Annotated[
        int | None,
        Setting(
            "Training ends after this many evaluations without improvement of the monitored metric.",
            least=1,
            below=2**32,
        ),
    ] = None
    """Evaluations in a row without improvement after which training ends early; None: never."""

    @property
    def traits(self) -> Traits:
        """Properties of the job's policy."""
        return POLICIES[self.policy]

    @property
    def overlaps(self) -> bool:
        """True if ranks train on while an average is made."""
        return self.averaging == "overlapped" or (
            self.averaging == "auto" and self.traits.may_overlap and self.max_batch_diff != 0
        )

    @property
    def first_anchor(self) -> int:
        """The first anchor, with None resolved."""
        return self.anchor or (OVERLAPPED_ANCHOR if self.overlaps else BLOCKING_ANCHOR)

    @property
    def checkpoint_every_s(self) -> float | None:
        """Seconds between checkpoints; None: no rule by time."""
        return None if self.checkpoint_every_minutes is None else self.checkpoint_every_minutes * 60

    @property
    def more_is_better(self) -> bool:
        """True if more of the monitored metric is better."""
        return self.mode == "max"


@dataclass(frozen=True, kw_only=True)
class Settings(SharedSettings):
    """Every setting of a training job. Those that this class adds are read only by the ranks."""

    group_size: Annotated[
        int, Setting("Processes on one host that share one model and are one rank.", least=1, below=2**16)
    ] = 1
    """Processes, each on a device of one host, that share one model: a replica group. Each rank is then a group, whose
    processes train parts of its batches, and rounds average between groups. Needs `shard`."""
    shard: Annotated[
        Any,  # a job file may give a `Strategy` too
        Setting(
            "How the processes of a group divide their model.",
            choices=("full_shard", "shard_grad_op", "no_shard"),
            may_be_none=True,
        ),
    ] = None
    """How the processes of a group shard their model."""
    num_workers: Annotated[int, Setting("Processes that fetch samples on each rank.", below=2**16)] = 0
    """Processes that fetch samples on each rank; 0: a thread of the rank fetches them."""
    timeline: Annotated[bool, Setting("Record what every rank does when, for `elche timeline`.")] = False
    """True if ranks record times of batches, waits, copies and rounds. `elche timeline` shows them, with the
    coordinator's decisions."""
    audit: Annotated[bool, Setting("Write down which samples went into which round, for `elche audit`.")] = False
    """True if ranks write a file of what they have trained and of the rounds into which it went. `elche audit` proves
    by these that every sample of every epoch is in the final parameters once."""
    precision: Annotated[
        str,
        Setting(
            "Precision of forward and loss, by autocast; fp32 where a device has no fast form of it.",
            choices=("fp32", "bf16", "fp16"),
        ),
    ] = "fp32"
    """Precision of forward and loss: "fp32", or "bf16" or "fp16" by autocast. A device without fast support of it uses
    "fp32", and logs that. Parameters keep their dtypes.
    """
    accumulate: Annotated[
        int,
        Setting(
            "Number of parts in which a batch goes through the model, for one optimizer step.", least=1, below=2**32
        ),
    ] = 1
    """Parts into which a batch is split to fit into memory (gradient accumulation); one optimizer step for all."""
    compile: Annotated[bool, Setting("Compile the model that train_step gets with torch.compile.")] = False
    """True if `train_step` gets the model that `torch.compile` makes."""
    max_grad_norm: Annotated[float | None, Setting("Clip the gradient to this L2 norm.")] = None
    """Limit of the gradient's L2 norm over all parameters, to which it is clipped before each step."""
    lr_scale_ratio: Annotated[float, Setting("Multiply learning rates by 1 + this * (ranks - 1).")] = 0.0
    """Learning rates are multiplied by 1 + this * (ranks - 1)."""
    weighting: Annotated[
        str,
        Setting(
            "Weight of a rank: its number of samples, or the same for all; auto: by samples for the mean.",
            choices=("auto", "samples", "uniform"),
        ),
    ] = "auto"
    """Weight of a rank in the average: "samples", the number that it has trained, or "uniform", equal for all. "auto"
    is "samples" for means; with "adascale" it is "uniform", since in a sum each rank's step has weight 1.
    """
    merge: Annotated[
        str,
        Setting(
            "How rounds merge what ranks have trained: further than their mean where they differ by noise, or not.",
            choices=("auto", "adascale", "mean"),
        ),
    ] = "auto"
    """How a round merges its ranks' steps: "adascale" takes larger steps than their mean where they differ only by
    batch noise, up to their sum (arXiv 2007.05105), and keeps the last result; "mean" takes the mean. "auto" is "mean"
    for models that train against each other (several optimizers with `manual_optimization`) and for steps that need a
    closure (LBFGS); in trainings of up to 800 batches it is the mean of the ranks that have changed the row of a
    weight; else it is "adascale".
    """
    buffers: Annotated[
        str, Setting("What rounds do with buffers that are statistics (`running_...`).", choices=SHARINGS)
    ] = "average"
    """What rounds do with floating-point buffers named `running_...`, such as BatchNorm's: "average", "from_source"
    (copied from one rank, like all other buffers), or "local": each rank keeps all of its buffers."""
    optimizer_state: Annotated[str, Setting("What rounds do with the optimizer's moments.", choices=SHARINGS)] = "local"
    """What rounds do with the optimizer's moments: "local", "average" or "from_source", as above."""
    compress: Annotated[
        str | None,
        Setting(
            "Compress what rounds send; the error is added to the next round. int2 and topk lose in short jobs.",
            choices=("auto", *COMPRESSIONS),
        ),
    ] = None
    """How rounds send values: None, in 32 bits; else compressed, with the error added to the next round's: "bf16" and
    "int8" in a half and a quarter of the bytes, "int4" in 1/7.5, "int2" in 1/15, and "topk", the largest 1/32 of the
    values, in 1/73. The fewer bits, the later a change has arrived: jobs of some hundred rounds lose
    a little with "int2", and much with "topk" (docs/convergence.md). "auto" chooses among none, "int8", "int4" and
    "int2" while it trains, the least compression with which an averaging takes less than the time between two rounds;
    it needs averagings that overlap.
    """
    memory: Annotated[
        str,
        Setting(
            "Where a GPU's rank holds what rounds need beside the model; auto: on the GPU if there is room.",
            choices=("auto", "device", "host"),
        ),
    ] = "auto"
    """Where a rank on a GPU holds rounds' copies of the model, by default three of the trained parameters: "device", on
    the GPU; "host", in pinned host memory; "auto", on the GPU if training leaves room there after its first batches.
    Results are the same. Without effect on a CPU, and in rounds over gloo or through the coordinator, whose copies are
    always in host memory.
    """
    outer_optimizer: Annotated[
        Any,  # a job file may give an `OuterOptimizer` too
        Setting(
            "Outer optimizer, which is applied to the averages of rounds (DiLoCo).",
            choices=("average", "sgd", "nesterov", "adam"),
        ),
    ] = "average"
    """The optimizer that is applied to the averages of rounds; None: the average is the result."""
    ema: Annotated[
        float | None,
        Setting("Evaluate and export a moving average of the weights, which decays by this factor per batch.", below=1),
    ] = None
    """Decay, per batch of all ranks, of an exponential moving average of the weights, such as 0.999. The average is
    evaluated and saved as final and best model; training goes on from the weights themselves. None: no average.
    """
    save_frozen: Annotated[
        bool, Setting("Whether checkpoints and models contain the parameters that are not trained.")
    ] = True
    """True if checkpoints and models contain parameters that do not require a gradient. False leaves them out, such as
    the base model of trained adapters (LoRA); a resumed training takes those that `model()` makes.
    """
    checkpoint_dir: Annotated[str, Setting("Folder or URL for checkpoints; by default the job's folder.")] = ""
    """Folder, or URL for fsspec, in which the job's checkpoints get a folder; empty: the job's own folder."""


@dataclass(frozen=True, kw_only=True)
class AgreedSettings(SharedSettings):
    """Values on which all ranks of a job must agree: the shared settings, resolved, and values found in the
    job's file.
    """

    batch_size: int
    """The nominal batch size, in which steps and `drop_last` count; a rank's own may differ."""
    averaging: str = "blocking"
    """"blocking" or "overlapped", with "auto" resolved."""
    anchor: int = BLOCKING_ANCHOR
    """First and fewest batches of the slowest rank between averagings."""
    dataset_size: int
    """Samples of an epoch."""
    averaging_options: str = ""
    """Further options of rounds that must be equal on all ranks, as text."""
    has_evaluation: bool = False
    eval_size: int = 0
    """Samples that all ranks evaluate together; 0: one rank calls the job's `evaluate`."""
    wants_metrics: bool = False
    """True if finished epochs are sent to the lowest rank, for callbacks and loggers."""
    keeps_state: bool = False
    """True if the job has its own `state`: the lowest rank, which receives epochs, then writes the checkpoints."""
    shard_sizes: tuple[int, ...] = ()
    """Samples of each shard of the data set; empty if it has none."""
    is_drawn: bool = False
    """True if samples are drawn by weights, with replacement."""
    layout_hash: int = 0
    """Hash of the names, shapes and types of the model's parameters and buffers."""

    @property
    def extent(self) -> Extent:
        """The numbers of samples that the job trains."""
        return Extent(
            dataset_size=self.dataset_size,
            batch_size=self.batch_size,
            epochs=self.epochs,
            drop_last=self.drop_last,
            max_steps=self.max_steps,
        )


def _declared(field_name: str, annotation: Any) -> Setting:
    """The setting that a field of `Settings` declares, completed by the field's type."""
    type_: Any
    setting: Setting
    type_, setting = get_args(annotation)
    is_shared = field_name in SharedSettings.__dataclass_fields__
    if type_ is Any:
        return replace(setting, name=field_name, is_shared=is_shared)
    options = (type_,) if get_origin(type_) is tuple else get_args(type_) or (type_,)
    kind, may_be_none = KINDS[options[0]], type(None) in options
    return replace(setting, name=field_name, is_shared=is_shared, kind=kind, may_be_none=may_be_none)


SETTINGS: dict[str, Setting] = {one.name: _declared(one.name, one.type) for one in fields(Settings)}
"""Settings by name, first those that the coordinator reads too."""


def shared_values(settings: SharedSettings) -> dict[str, Any]:
    """The values that the coordinator reads, by name."""
    return {one.name: getattr(settings, one.name) for one in fields(SharedSettings)}


def first_invalid_setting(settings: AgreedSettings) -> str | None:
    """Describes the first invalid value; None if all are valid. Rank processes check theirs too."""
    try:
        for name, value in shared_values(settings).items():
            SETTINGS[name].check(value)
    except InvalidJob as error:
        return str(error)
    size = settings.dataset_size
    return f"dataset_size must be at least 1, not {size}" if size < 1 else None

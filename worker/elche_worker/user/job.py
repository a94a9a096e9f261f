"""What a user writes: one training run, described by functions and settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from elche.errors import InvalidJob, Misuse
from elche.knobs import KNOBS
from elche_worker.outer import SGD, Adam, Average, Nesterov, OuterOptimizer
from elche_worker.user.callbacks import EpochMetrics, Rank
from elche_worker.user.device import Device
from elche_worker.user.loggers import Logger
from elche_worker.user.schedule import Progress
from elche_worker.user.strategy import Strategy

OUTER_OPTIMIZERS: dict[str, Callable[[], OuterOptimizer]] = {
    "average": Average,
    "sgd": SGD,
    "nesterov": Nesterov,
    "adam": Adam,
}
STRATEGIES = {
    "full_shard": Strategy.FULL_SHARD,
    "shard_grad_op": Strategy.SHARD_GRAD_OP,
    "no_shard": Strategy.NO_SHARD,
}
OPTIONAL_FUNCTIONS = (
    "evaluate",
    "eval_dataset",
    "eval_step",
    "collate_fn",
    "sample_weights",
    "schedule",
    "scheduler",
    "epoch_fn",
    "metrics_fn",
    "checkpoint_fn",
    "after_round",
)

NOT_IN_GROUPS: dict[str, tuple[object, ...]] = {
    "manual_optimization": (False,),
    "compile": (False,),
    "precision": ("fp32", "bf16"),
    "buffers": ("average",),
    "optimizer_state": ("local",),
    "backend": ("auto", "gloo", "nccl"),
}
"""What a sharded job can have; the default first."""

Loss = torch.Tensor | Mapping[str, Any]
BatchSize = int | str | Callable[[Device], int] | Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class JobDefinition:
    """One training run, described by functions, so that every rank builds its own parts on its own device.

    The functions are called on the ranks' hosts, in the environment of their agents; what lies beside the file does not
    travel. Raise `InvalidJob` in them to refuse a job with one clear line.

    Raises `InvalidJob` itself for a value that cannot work, and names it.
    """

    model: Callable[[], nn.Module]
    """Builds the model on the CPU; the rank moves it to its device."""
    optimizer: Callable[[nn.Module], Any]
    """Builds the optimizer of the model that it is given; with `manual_optimization` a list or dict of several."""
    dataset: Callable[[], Any]
    """Builds a map-style data set: `len(dataset)` and `dataset[index]`."""
    train_step: Callable[..., Loss]
    """Forward and loss of one batch: a scalar tensor, or a mapping with "loss" and more scalars to record."""
    batch_size: BatchSize
    """Samples per batch on each rank; or a function of the rank's `Device`; or by parts of the device's name, such as
    {"RTX 3090": 256, "GTX 1060": 32, "": 64}; or "auto": as many as its memory holds, up to 256. Steps and `drop_last`
    count in one number: the function's for "cpu", or that of "", or the least."""
    epochs: int
    """How many times the data set is trained."""
    max_steps: int | None = None
    """Full batches, of all ranks together, after which training ends, if its epochs have not ended it before: so many
    times `batch_size` samples."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Metrics of a model in eval mode, without gradients and autocast; called after each epoch on one rank."""
    eval_dataset: Callable[[], Any] | None = None
    """Builds a map-style data set, which all ranks evaluate together after each epoch, each as much as it is fast."""
    eval_step: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    """Metrics of one batch of `eval_dataset`: means over its samples. The model is in eval mode, without gradients."""
    monitor: str | None = None
    """The metric that says which checkpoint is the best; each epoch has a checkpoint then."""
    mode: str = "min"
    """Whether less ("min") or more ("max") of the monitored metric is better."""
    restore: str = "best"
    """Which model is the job's at its end, where a metric is monitored: the "best" one or the "last" one. The other is
    beside it, as `last.safetensors` or `best.safetensors`."""
    patience: int | None = None
    """Evaluations without a better one after which training ends early; None: never."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; by default torch's own."""
    precision: str = "fp32"
    """Of forward and loss: "fp32", or "bf16" or "fp16" by autocast; a device without a fast form of it takes "fp32",
    and says so. Parameters stay as the model has them."""
    accumulate: int = 1
    """Parts in which a batch goes through the model, one after the other, to fit memory; one optimizer step in all."""
    compile: bool = False
    """Let `torch.compile` make the model that `train_step` gets."""
    manual_optimization: bool = False
    """`train_step(model, batch, optimizers)` does backward and steps itself, as a GAN needs it. `optimizers` is what
    `optimizer(model)` returned: one, or a list, tuple or dict of several."""
    sample_weights: Callable[[], Sequence[float]] | None = None
    """Gives each sample's weight: an epoch is then as many draws, with replacement, each sample as likely as its weight
    is. For data sets whose classes are not balanced."""
    num_workers: int = 0
    """Processes that fetch samples on each rank; 0: a thread of the rank does it."""
    timeline: bool = False
    """Whether ranks record what they do when: batches, waits, copies, rounds. `elche timeline` shows it, with the
    coordinator's decisions."""
    policy: str = "cadence"
    """When ranks average: "cadence", when the slowest has made its anchor of batches and the others as many as fit;
    "async", when every rank has made its count, and nobody stops meanwhile; "sync", after every batch."""
    backend: str = "auto"
    """How ranks average: "nccl", among GPUs of one kind of build; "gloo", among all that reach each other; "cpu",
    through the coordinator, for those that do not; "auto" takes NCCL if all can, else gloo, and says why."""
    averaging: str = "auto"
    """"overlapped": ranks train on while the average is made, and it comes as a correction; "blocking": they wait for
    it; "auto": blocking with policy "sync" and in lockstep (`max_batch_diff` 0), else overlapped."""
    weighting: str = "samples"
    """What a rank counts in the average: "samples", as many as it trained, or "uniform", as much as any other."""
    outer_optimizer: OuterOptimizer | str = field(default_factory=Average)
    """What is done with the average: `outer.Average()`, or a step of `outer.SGD`, `outer.Nesterov` or `outer.Adam` on
    the way to it (DiLoCo); or the name of one, in lower case."""
    buffers: str = "average"
    """What rounds do with floating-point buffers, such as BatchNorm's: "average", "from_source" (from one rank, as
    integers and frozen parameters always are), or "local", nothing: each rank keeps its own, integers too."""
    optimizer_state: str = "local"
    """What rounds do with the optimizer's moments: "local", "average" or "from_source", as above."""
    compress: str | None = None
    """What is sent in rounds: None, all 32 bits; "bf16" or "int8", less, and what is lost is sent with the next."""
    nonfinite: str = "fail"
    """When a rank's parameters are not finite at a round: "fail" the job, "skip" the rank's part, or "ignore" it."""
    max_batch_diff: int | None = None
    """How many batches a rank may be ahead of the slowest, counted from the last averaging; None: as many as fit. 0 is
    lockstep: batch by batch side by side, and equally many in each round, an epoch's last ones aside."""
    max_grad_norm: float | None = None
    """Gradients longer than this (L2 over all parameters) are shortened to it before each step."""
    schedule: Callable[[Progress], float] | None = None
    """Factor of the optimizer's learning rates, by how far the job is."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Builds a torch scheduler, which is never stepped: its learning rate at the job's position, in batches of all
    ranks, is taken. Instead of `schedule`."""
    lr_scale_ratio: float = 0.0
    """Learning rates are multiplied by 1 + this * (ranks - 1)."""
    group_size: int = 1
    """Processes, each on a device of one host, that share one model: a replica group. Ranks are groups then: a batch
    is one of the group, each process trains its part of it, and rounds average between groups. Needs `shard`."""
    shard: Strategy | str | None = None
    """How the processes of a group divide their model: `Strategy.FULL_SHARD`, `SHARD_GRAD_OP`, `HYBRID_SHARD(n)` or
    `NO_SHARD`; or the name of one, in lower case."""
    seed: int = 0
    """Of the start state, of the order of samples, and, with the rank's number added, of each rank's random numbers."""
    drop_last: bool = False
    """Leave out the epoch's incomplete last batch."""
    anchor: int = 10
    """Batches of the slowest rank between averagings, at first and at least."""
    max_anchor: int = 200
    """The most batches of the slowest rank between averagings."""
    overhead_target: float = 0.10
    """Averaging time as a part of compute time above which the anchor grows; clamped to [0.01, 0.50]."""
    divergence_threshold: float = 0.05
    """How far (L2, relative) a round may move a rank before averagings become more frequent; 0 switches that off."""
    speed_hint: tuple[int, float] | None = None
    """(slowest rank, how many times faster the others are), a first guess until times are measured."""
    checkpoint_every_epochs: int | None = None
    """Epochs between checkpoints; None: no rule by epochs."""
    checkpoint_every_minutes: float | None = 10.0
    """Minutes between checkpoints; None: no rule by time."""
    checkpoint_dir: str = ""
    """Folder, or URL that fsspec knows, in which the job's checkpoints get a folder; empty: the job's own folder."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints are kept, beside the best."""
    epoch_fn: Callable[[Rank, int], None] | None = None
    """Called on every rank before its first batch of an epoch: (rank, epoch). May set learning rates: see `Rank`."""
    metrics_fn: Callable[[EpochMetrics], None] | None = None
    """Called on one rank with every finished epoch, in order, once."""
    loggers: Sequence[Logger] = ()
    """Experiment trackers that get every finished epoch: `TensorBoard`, `WandB`, `MLflow`, or one of your own."""
    checkpoint_fn: Callable[[int, nn.Module], None] | None = None
    """Called on the rank that writes a checkpoint: (version, model that holds the version)."""
    after_round: Callable[[nn.Module, int], None] | None = None
    """Called on every rank when a round's result is in its model: (model, version). For a running mean of weights, or a
    learning rate that follows rounds (`this_rank().set_lr`)."""

    def __post_init__(self) -> None:
        for name, kind in (("model", nn.Module), ("optimizer", Optimizer), ("dataset", Dataset)):
            built = getattr(self, name)
            _require(not isinstance(built, kind), f"{name} must be a function that builds one, not {_kind(built)}")
        for name in ("model", "optimizer", "dataset", "train_step"):
            _require(callable(getattr(self, name)), f"{name} must be a function, not {_kind(getattr(self, name))}")
        for name in OPTIONAL_FUNCTIONS:
            value = getattr(self, name)
            _require(value is None or callable(value), f"{name} must be a function or None, not {_kind(value)}")
        if isinstance(self.outer_optimizer, str):
            KNOBS["outer_optimizer"].check(self.outer_optimizer)
            object.__setattr__(self, "outer_optimizer", OUTER_OPTIMIZERS[self.outer_optimizer]())
        if isinstance(self.shard, str):
            KNOBS["shard"].check(self.shard)
            object.__setattr__(self, "shard", STRATEGIES[self.shard])
        for knob in KNOBS.values():
            if knob.name not in ("batch_size", "outer_optimizer", "shard"):
                knob.check(getattr(self, knob.name))
        _check_batch_size(self.batch_size)
        _require(
            all(callable(getattr(self.outer_optimizer, name, None)) for name in ("step", "num_moments")),
            f"outer_optimizer must be outer.Average(), SGD(), Nesterov() or Adam(), not {_kind(self.outer_optimizer)}",
        )
        _require(
            isinstance(self.loggers, list | tuple) and all(isinstance(one, Logger) for one in self.loggers),
            "loggers must be a list of TensorBoard(), WandB(), MLflow() or what has their methods begin, log and end",
        )
        self._check_together()
        self._check_group()

    def _check_together(self) -> None:
        _require(
            self.policy != "sync" or isinstance(self.outer_optimizer, Average),
            "policy 'sync' averages after every batch and takes no outer optimizer: use 'cadence' or 'async'",
        )
        _require(
            self.policy != "sync" or self.averaging != "overlapped",
            "policy 'sync' averages after every batch and cannot overlap: use averaging='blocking', or 'cadence'",
        )
        _require(
            self.max_batch_diff != 0 or self.averaging != "overlapped",
            "max_batch_diff 0 is lockstep, in which no rank trains on while an average is made: use "
            "averaging='blocking', or let a rank be ahead by at least 1",
        )
        _require(self.schedule is None or self.scheduler is None, "give schedule or scheduler, not both")
        _require(
            (self.eval_dataset is None) == (self.eval_step is None),
            "eval_dataset and eval_step need each other: give both",
        )
        _require(
            self.evaluate is None or self.eval_step is None, "give evaluate, or eval_dataset and eval_step, not both"
        )
        _require(
            self.monitor is None or self.has_evaluation,
            f"monitor names a metric, {self.monitor!r}, but there is no evaluation that gives it: give evaluate",
        )
        _require(self.patience is None or self.monitor is not None, "patience needs monitor, the metric to watch")
        _require(
            not self.manual_optimization or self.batch_size != "auto",
            "batch_size 'auto' has no effect with manual_optimization: give a number",
        )
        for name in ("max_grad_norm", "accumulate", "precision"):
            is_default = getattr(self, name) == getattr(JobDefinition, name)
            _require(
                not self.manual_optimization or is_default,
                f"{name} has no effect with manual_optimization: train_step does it itself",
            )

    def _check_group(self) -> None:
        """What a replica group can do, and what it cannot."""
        if self.shard is None:
            _require(
                self.group_size == 1,
                f"group_size is {self.group_size}: say how its processes divide the model, such as shard='full_shard'",
            )
            return
        _require(
            isinstance(self.shard, Strategy),
            f"shard must be a Strategy, the name of one, or None, not {_kind(self.shard)}",
        )
        _require(
            self.group_size > 1,
            "shard needs group_size, the number of processes that share one model: at least 2 (--group-size N)",
        )
        try:
            cast(Strategy, self.shard).num_shards(self.group_size)
        except Misuse:
            raise InvalidJob(f"{self.shard} cannot divide a group of {self.group_size} (group_size)") from None
        for name, allowed in NOT_IN_GROUPS.items():
            value = getattr(self, name)
            _require(value in allowed, f"{name}={value!r} does not work with shard yet; leave it at {allowed[0]!r}")
        _require(self.batch_size != "auto", "batch_size='auto' does not work with shard yet; give a number")

    @property
    def has_evaluation(self) -> bool:
        """Whether epochs are evaluated."""
        return self.evaluate is not None or self.eval_step is not None

    @property
    def wants_metrics(self) -> bool:
        """Whether somebody wants to hear of every finished epoch."""
        return self.metrics_fn is not None or bool(self.loggers)

    @property
    def overlaps(self) -> bool:
        """Whether ranks train on while an average is made."""
        return self.averaging == "overlapped" or (
            self.averaging == "auto" and self.policy != "sync" and self.max_batch_diff != 0
        )


def _check_batch_size(value: object) -> None:
    if isinstance(value, Mapping):
        _require(bool(value), "batch_size must name at least one device")
        for name, size in value.items():
            _require(isinstance(name, str), f"batch_size must map parts of device names, not {_kind(name)}")
            KNOBS["batch_size"].check(size)
    elif not callable(value):
        KNOBS["batch_size"].check(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidJob(message)


def _kind(value: object) -> str:
    return f"{type(value).__name__} ({value!r})" if isinstance(value, int | float | str) else type(value).__name__

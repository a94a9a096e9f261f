"""Every setting of a training job that is a plain value: its name, its range, and what it does.

One table serves the job file, the command line and the client, so that a setting has one name, one range and one
sentence everywhere. What a setting does exactly is said where `TrainingJob` defines it.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from elche.errors import InvalidJob

Kind = Literal["whole", "number", "flag", "word", "pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting."""

    name: str
    kind: Kind
    help: str
    choices: tuple[str, ...] = ()
    """Known words; empty: any."""
    least: float = 0
    below: float = math.inf
    may_be_none: bool = False
    """Whether None is a value of its own, such as "no limit"."""
    also: tuple[str, ...] = ()
    """Words that may stand for a number."""

    @property
    def metavar(self) -> str:
        """How the command line shows its value."""
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
        """The value that a text on the command line means. Raises `InvalidJob`."""
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
            return f"a text{none}"
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

KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(name="epochs", kind="whole", least=1, below=100_001, help="How many times the data set is trained."),
        Knob(name="max_steps", kind="whole", least=1, below=2**48, may_be_none=True, help="End after so many batches."),
        Knob(
            name="batch_size",
            kind="whole",
            least=1,
            below=2**32,
            also=("auto",),
            help="Samples per batch on each rank; auto: as many as fit, up to 256.",
        ),
        Knob(
            name="group_size",
            kind="whole",
            least=1,
            below=2**16,
            help="Processes, on one host, that share one model; ranks are groups of so many.",
        ),
        Knob(
            name="shard",
            kind="word",
            choices=("full_shard", "shard_grad_op", "no_shard"),
            may_be_none=True,
            help="How the processes of a group divide their model.",
        ),
        Knob(name="seed", kind="whole", below=2**63, help="Of the start state and of the order of samples."),
        Knob(name="drop_last", kind="flag", help="Leave out the epoch's incomplete last batch."),
        Knob(name="timeline", kind="flag", help="Record what every rank does when, for `elche timeline`."),
        Knob(name="num_workers", kind="whole", below=2**16, help="Processes that fetch samples on each rank."),
        Knob(
            name="precision",
            kind="word",
            choices=("fp32", "bf16", "fp16"),
            help="Of forward and loss; fp32 where a device has no fast form of it.",
        ),
        Knob(
            name="accumulate", kind="whole", least=1, below=2**32, help="Parts in which a batch goes through the model."
        ),
        Knob(name="compile", kind="flag", help="Let torch.compile make the model that train_step gets."),
        Knob(name="max_grad_norm", kind="number", may_be_none=True, help="Shorten longer gradients to this."),
        Knob(name="lr_scale_ratio", kind="number", help="Multiply learning rates by 1 + this * (ranks - 1)."),
        Knob(name="policy", kind="word", choices=("cadence", "async", "sync"), help="When ranks average."),
        Knob(name="backend", kind="word", choices=("auto", "nccl", "gloo", "cpu"), help="How ranks average."),
        Knob(
            name="averaging",
            kind="word",
            choices=("auto", "blocking", "overlapped"),
            help="Whether ranks train on while an average is made.",
        ),
        Knob(name="weighting", kind="word", choices=("samples", "uniform"), help="What a rank counts in an average."),
        Knob(name="buffers", kind="word", choices=SHARINGS, help="What rounds do with floating-point buffers."),
        Knob(
            name="optimizer_state", kind="word", choices=SHARINGS, help="What rounds do with the optimizer's moments."
        ),
        Knob(
            name="compress",
            kind="word",
            choices=("bf16", "int8"),
            may_be_none=True,
            help="What is sent in rounds, if less.",
        ),
        Knob(
            name="nonfinite",
            kind="word",
            choices=("fail", "skip", "ignore"),
            help="What is done with values that are not finite.",
        ),
        Knob(
            name="max_batch_diff",
            kind="whole",
            below=2**32,
            may_be_none=True,
            help="Batches that a rank may be ahead of the slowest; 0: lockstep.",
        ),
        Knob(
            name="outer_optimizer",
            kind="word",
            choices=("average", "sgd", "nesterov", "adam"),
            help="What is done with the average (DiLoCo).",
        ),
        Knob(name="anchor", kind="whole", least=1, below=2**32, help="Batches of the slowest rank between averagings."),
        Knob(name="max_anchor", kind="whole", least=1, below=2**32, help="The most of these."),
        Knob(
            name="overhead_target",
            kind="number",
            least=-math.inf,
            help="Averaging time, as a part of compute time, above which averagings become rarer.",
        ),
        Knob(
            name="divergence_threshold",
            kind="number",
            help="How far a round may move a rank before averagings become more frequent; 0: any.",
        ),
        Knob(
            name="speed_hint", kind="pair", may_be_none=True, help="The slowest rank, and how much faster others are."
        ),
        Knob(
            name="checkpoint_every_epochs",
            kind="whole",
            least=1,
            below=2**32,
            may_be_none=True,
            help="Write a checkpoint every N epochs.",
        ),
        Knob(
            name="checkpoint_every_minutes", kind="number", may_be_none=True, help="Write a checkpoint every X minutes."
        ),
        Knob(name="checkpoint_dir", kind="word", help="Folder or URL of checkpoints; else in the job's folder."),
        Knob(name="keep_checkpoints", kind="whole", least=1, below=2**16, help="Newest checkpoints that are kept."),
        Knob(
            name="monitor",
            kind="word",
            may_be_none=True,
            help="Metric of the evaluation that says which checkpoint is the best.",
        ),
        Knob(name="mode", kind="word", choices=("min", "max"), help="Whether less or more of it is better."),
        Knob(name="restore", kind="word", choices=("best", "last"), help="Which model is the job's, by monitor."),
        Knob(
            name="patience",
            kind="whole",
            least=1,
            below=2**32,
            may_be_none=True,
            help="End after so many evaluations without a better one.",
        ),
    )
}
"""By name, in the order in which people are shown them."""

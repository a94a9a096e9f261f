"""What a user writes: one `TrainingJob`, and `record_scalar` to record more than the loss."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from elche.errors import InvalidJob
from elche_worker.outer import Average, OuterOptimizer

if TYPE_CHECKING:
    from elche_worker.state import TrainedState

POLICIES = ("cadence", "async", "sync")
BACKENDS = ("auto", "nccl", "gloo", "cpu")
AVERAGINGS = ("auto", "blocking", "overlapped")
WEIGHTINGS = ("samples", "uniform")
COMPRESSIONS = (None, "bf16", "int8")
NONFINITE = ("fail", "skip", "ignore")
PRECISIONS = ("fp32", "bf16", "fp16")
SHARINGS = ("average", "from_source", "local")

Loss = torch.Tensor | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training run, described by functions, so that every rank builds its own parts on its own device.

    Raises `InvalidJob` when a value cannot work, naming the value.
    """

    model: Callable[[], nn.Module]
    """Builds the model on the CPU; the rank moves it to its device."""
    optimizer: Callable[[nn.Module], Optimizer]
    """Builds the optimizer of the model that it is given."""
    dataset: Callable[[], Any]
    """Builds a map-style data set: `len(dataset)` and `dataset[index]`."""
    train_step: Callable[[nn.Module, Any], Loss]
    """Forward and loss of one batch: a scalar tensor, or a mapping with "loss" and more scalars to record."""
    batch_size: int
    """Samples per batch on each rank."""
    epochs: int
    """How many times the data set is trained."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Metrics of a model in eval mode, without gradients; called after each epoch on one rank."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; by default torch's own."""
    precision: str = "fp32"
    """Of forward and loss: "fp32", or "bf16" or "fp16" by autocast; a device without a fast form of it takes "fp32",
    and says so. Parameters stay as the model has them."""
    accumulate: int = 1
    """Parts in which a batch goes through the model, one after the other, to fit memory; one optimizer step in all."""
    compile: bool = False
    """Let `torch.compile` make the model that `train_step` gets."""
    num_workers: int = 0
    """Processes that fetch samples on each rank; 0: a thread of the rank does it."""
    policy: str = "cadence"
    """When ranks average: "cadence", when the slowest has made its anchor of batches and the others as many as fit;
    "async", when every rank has made its count, and nobody stops meanwhile; "sync", after every batch."""
    backend: str = "auto"
    """How ranks average: "nccl", among GPUs of one kind of build; "gloo", among all that reach each other; "cpu",
    through the coordinator, for those that do not; "auto" takes NCCL if all can, else gloo, and says why."""
    averaging: str = "auto"
    """"overlapped": ranks train on while the average is made, and it comes as a correction; "blocking": they wait for
    it; "auto": blocking with policy "sync", else overlapped."""
    weighting: str = "samples"
    """What a rank counts in the average: "samples", as many as it trained, or "uniform", as much as any other."""
    outer_optimizer: OuterOptimizer = field(default_factory=Average)
    """What is done with the average: `Average()`, or a step of `SGD`, `Nesterov` or `Adam` along it (DiLoCo)."""
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
    """How many batches a rank may be ahead of the slowest, counted from the last averaging; None: as many as fit."""
    max_grad_norm: float | None = None
    """Gradients longer than this (L2 over all parameters) are shortened to it before each step."""
    schedule: Callable[[int], float] | None = None
    """Factor of the optimizer's learning rates by position: batches of all ranks so far."""
    lr_scale_ratio: float = 0.0
    """Learning rates are multiplied by 1 + this * (ranks - 1)."""
    seed: int = 0
    """Of the start state and of the order of samples."""
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
    speed_hint: tuple[int, float] | None = field(default=None)
    """(slowest rank, how many times faster the others are), a first guess until times are measured."""

    def __post_init__(self) -> None:
        for name, kind in (("model", nn.Module), ("optimizer", Optimizer), ("dataset", Dataset)):
            built = getattr(self, name)
            _require(not isinstance(built, kind), f"{name} must be a function that builds one, not {_kind(built)}")
        for name in ("model", "optimizer", "dataset", "train_step"):
            _require(callable(getattr(self, name)), f"{name} must be a function, not {_kind(getattr(self, name))}")
        for name in ("evaluate", "collate_fn", "schedule"):
            value = getattr(self, name)
            _require(value is None or callable(value), f"{name} must be a function or None, not {_kind(value)}")
        for name in ("batch_size", "epochs", "anchor", "max_anchor", "accumulate"):
            _require_int(name, getattr(self, name), least=1)
        if self.max_batch_diff is not None:
            _require_int("max_batch_diff", self.max_batch_diff, least=1)
        _require_int("num_workers", self.num_workers, least=0)
        _require_int("seed", self.seed, least=0)
        _require(self.seed < 2**63, f"seed must be below 2**63, not {self.seed}")
        _require(isinstance(self.drop_last, bool), f"drop_last must be True or False, not {_kind(self.drop_last)}")
        _require_one_of("policy", self.policy, POLICIES)
        _require_one_of("backend", self.backend, BACKENDS)
        _require_one_of("precision", self.precision, PRECISIONS)
        _require(isinstance(self.compile, bool), f"compile must be True or False, not {_kind(self.compile)}")
        _require_one_of("buffers", self.buffers, SHARINGS)
        _require_one_of("optimizer_state", self.optimizer_state, SHARINGS)
        _require_one_of("averaging", self.averaging, AVERAGINGS)
        _require_one_of("weighting", self.weighting, WEIGHTINGS)
        _require_one_of("compress", self.compress, COMPRESSIONS)
        _require_one_of("nonfinite", self.nonfinite, NONFINITE)
        _require(
            all(callable(getattr(self.outer_optimizer, name, None)) for name in ("step", "num_moments")),
            f"outer_optimizer must be Average(), SGD(), Nesterov() or Adam(), not {_kind(self.outer_optimizer)}",
        )
        _require(
            self.policy != "sync" or isinstance(self.outer_optimizer, Average),
            "policy 'sync' averages after every batch and takes no outer optimizer: use 'cadence' or 'async'",
        )
        for name in ("max_grad_norm", "lr_scale_ratio", "divergence_threshold"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
            _require(is_number or (value is None and name == "max_grad_norm"), f"{name} cannot be {value!r}")
        _require(
            self.policy != "sync" or self.averaging != "overlapped",
            "policy 'sync' averages after every batch and cannot overlap: use averaging='blocking', or 'cadence'",
        )
        _require(
            isinstance(self.overhead_target, int | float) and math.isfinite(self.overhead_target),
            f"overhead_target must be a number, not {self.overhead_target!r}",
        )
        if self.speed_hint is not None:
            _check_speed_hint(self.speed_hint)

    @property
    def overlaps(self) -> bool:
        """Whether ranks train on while an average is made."""
        return self.averaging == "overlapped" or (self.averaging == "auto" and self.policy != "sync")

    def run(
        self, *, device: str = "auto", on_epoch: Callable[[int, dict[str, float]], None] | None = None
    ) -> "TrainedState":
        """Trains on one device, in this process and without a coordinator; returns the trained state.

        `on_epoch(epoch, metrics)` is called after each epoch with what `evaluate` returned.
        """
        from elche_worker.alone import train_alone

        return train_alone(self, device=device, on_epoch=on_epoch)


def _check_speed_hint(hint: object) -> None:
    valid = isinstance(hint, tuple) and len(hint) == 2 and isinstance(hint[0], int) and hint[0] >= 0
    valid = valid and isinstance(hint[1], int | float) and math.isfinite(hint[1])  # type: ignore[index]
    _require(valid, f"speed_hint must be (slowest rank, ratio), such as (1, 2.3), not {hint!r}")


def _require_int(name: str, value: object, *, least: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(is_int, f"{name} must be a whole number, not {_kind(value)}")
    _require(isinstance(value, int) and value >= least, f"{name} must be at least {least}, not {value}")


def _require_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    _require(value in known, f"{name} must be one of {', '.join(map(str, known))}, not {value!r}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidJob(message)


def _kind(value: object) -> str:
    return f"{type(value).__name__} ({value!r})" if isinstance(value, int | float | str) else type(value).__name__

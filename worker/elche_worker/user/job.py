"""The definition of a training run, by functions and settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from elche.errors import InvalidJob, Misuse
from elche.settings import SETTINGS, Settings
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
    "eval_metrics",
    "collate_fn",
    "sample_weights",
    "state",
    "schedule",
    "scheduler",
    "epoch_fn",
    "metrics_fn",
    "checkpoint_fn",
    "after_round",
)

ALLOWED_WITH_SHARD: dict[str, tuple[object, ...]] = {
    "manual_optimization": (False,),
    "compile": (False,),
    "precision": ("fp32", "bf16"),
    "buffers": ("average",),
    "optimizer_state": ("local",),
    "backend": ("auto", "gloo", "nccl"),
    "ema": (None,),
    "save_frozen": (True,),
    "state": (None,),
}
"""Values of settings that a sharded job supports; the default first."""

Loss = torch.Tensor | Mapping[str, Any]
BatchSize = int | str | Callable[[Device], int] | Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class JobDefinition(Settings):
    """One training run, described by functions, so that every rank builds its own parts on its own device.

    Its plain settings are the fields of `elche.settings.Settings`; the fields here are functions or objects.

    The functions are called on the ranks' hosts, in the environment of their agents, in a copy of the file's folder.
    Raise `InvalidJob` in them to refuse a job with one clear line.

    Raises `InvalidJob`, naming it, for an invalid value.
    """

    model: Callable[[], nn.Module]
    """Builds the model on the CPU; the rank moves it to its device."""
    optimizer: Callable[[nn.Module], Any]
    """Builds the optimizer for the model; or a list, tuple or dict of several, such as Muon and AdamW, which are
    stepped one after the other, or by the train step with `manual_optimization`.
    """
    dataset: Callable[[], Any]
    """Builds a map-style data set: `len(dataset)` and `dataset[index]`."""
    train_step: Callable[..., Loss]
    """Forward and loss of one batch: a scalar tensor, or a mapping with "loss" and more scalars to record. A rank that
    joins others first calls it for a batch without effect, for compilation and imports."""
    batch_size: BatchSize
    """Samples per batch on each rank; or a function of the rank's `Device`; or by parts of the device's name, such as
    {"RTX 3090": 256, "GTX 1060": 32, "": 64}; or "auto": as many as its memory holds, up to 256. Steps and `drop_last`
    count batches of one nominal size: the function's for "cpu", the one of "", or the smallest.
    """
    outer_optimizer: OuterOptimizer | str = Settings.outer_optimizer
    """Outer optimizer: `outer.Average()` takes the average itself; `outer.SGD`, `outer.Nesterov` and `outer.Adam` make
    a step towards it (DiLoCo). Or the name of one, in lower case.
    """
    shard: Strategy | str | None = Settings.shard
    """Sharding of the model over the processes of a group: `Strategy.FULL_SHARD`, `SHARD_GRAD_OP`, `HYBRID_SHARD(n)` or
    `NO_SHARD`; or the name of one, in lower case."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Metrics of a model in eval mode, without gradients and autocast; called after each epoch on one rank. It draws
    the same random numbers each time, and those of training stay as they are.
    """
    eval_dataset: Callable[[], Any] | None = None
    """Builds a map-style data set, which all ranks evaluate together after each epoch, in proportion to their speed."""
    eval_step: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    """Metrics of one batch of `eval_dataset`: means over its samples. The model is in eval mode, without gradients.
    Each rank tries it on the first batch before training, without effect.
    """
    eval_metrics: Callable[[dict[str, torch.Tensor]], Mapping[str, Any]] | None = None
    """Metrics of sums, such as F1 of a confusion matrix: tensors with dimensions that `eval_step` returns besides its
    metrics are summed over all batches of all ranks, in int64 or float64 on the CPU, up to 1 MiB. Called with the sums
    by name, on one rank after each evaluation, and before training on each with those of two batches."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; by default torch's `default_collate`. A batch for which it returns None is
    skipped, and its samples count as seen.
    """
    manual_optimization: bool = False
    """`train_step(model, batch, optimizers)` calls backward and steps itself, as a GAN needs. `optimizers` is the
    result of `optimizer(model)`: one, or a list, tuple or dict of several.
    """
    sample_weights: Callable[[], Sequence[float]] | None = None
    """Returns each sample's weight: an epoch then draws samples with replacement, with probabilities in proportion to
    weights. For data sets with unbalanced classes."""
    state: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """Returns objects of your own to store with the model, by name, such as `{"ema": AveragedModel(model)}`: objects
    with `state_dict()` and `load_state_dict()`, or dicts. Called once on each rank, with its model on its device.
    Functions find them in `this_rank().state`; checkpoints contain them, and a rank that joins receives another's.
    """
    schedule: Callable[[Progress], float] | None = None
    """Returns the factor on the optimizer's learning rates at the job's progress."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Builds a torch scheduler. It is never stepped: elche takes its learning rate at the job's position, in batches of
    all ranks. Use it instead of `schedule`.
    """
    epoch_fn: Callable[[Rank, int], None] | None = None
    """Called on every rank before its first batch of an epoch: (rank, epoch). May set learning rates: see `Rank`."""
    metrics_fn: Callable[[EpochMetrics], None] | None = None
    """Called on one rank with every finished epoch, in order, once. A resumed training calls it for an epoch that was
    not reported when its checkpoint was made.
    """
    loggers: Sequence[Logger] = ()
    """Experiment trackers that get every finished epoch: `TensorBoard`, `WandB`, `MLflow`, or one of your own."""
    checkpoint_fn: Callable[[int, nn.Module], None] | None = None
    """Called on the rank that writes a checkpoint: (version, model that holds the version)."""
    after_round: Callable[[nn.Module, int], None] | None = None
    """Called on every rank when the result of a round with trained samples is in its model: (model, version). Its
    changes to the model are kept: make the same on all ranks. For a running mean of weights, which belongs to `state`,
    or a rate that follows rounds (`this_rank().set_lr`).
    """

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
            SETTINGS["outer_optimizer"].check(self.outer_optimizer)
            object.__setattr__(self, "outer_optimizer", OUTER_OPTIMIZERS[self.outer_optimizer]())
        if isinstance(self.shard, str):
            SETTINGS["shard"].check(self.shard)
            object.__setattr__(self, "shard", STRATEGIES[self.shard])
        for setting in SETTINGS.values():
            if setting.name not in ("batch_size", "outer_optimizer", "shard"):
                setting.check(getattr(self, setting.name))
        _check_batch_size(self.batch_size)
        _require(
            all(callable(getattr(self.outer_optimizer, name, None)) for name in ("step", "num_moments")),
            f"outer_optimizer must be outer.Average(), SGD(), Nesterov() or Adam(), not {_kind(self.outer_optimizer)}",
        )
        _require(
            isinstance(self.loggers, list | tuple) and all(isinstance(one, Logger) for one in self.loggers),
            "loggers must be a list of TensorBoard(), WandB(), MLflow() or objects with methods begin, log and end",
        )
        self._check_together()
        self._check_group()

    def _check_together(self) -> None:
        _require(
            self.traits.takes_outer_optimizer or isinstance(self.outer_optimizer, Average),
            f"policy {self.policy!r} averages after every batch, without an outer optimizer: use 'cadence' or 'async'",
        )
        _require(
            self.traits.may_overlap or self.averaging != "overlapped",
            f"policy {self.policy!r} averages after every batch and cannot overlap: use averaging='blocking', or "
            "'cadence'",
        )
        for name in self.traits.ignores:
            _require(
                getattr(self, name) == getattr(JobDefinition, name),
                f"{name} has no effect with policy {self.policy!r}, which averages after every batch: leave it at "
                f"{SETTINGS[name].unparse(getattr(JobDefinition, name))}, or use 'cadence' or 'async'",
            )
        _require(
            self.max_batch_diff != 0 or self.averaging != "overlapped",
            "max_batch_diff 0 is lockstep, in which no rank trains on while an average is made: use "
            "averaging='blocking', or let a rank be ahead by at least 1",
        )
        _require(
            self.compress != "auto" or self.overlaps,
            "compress='auto' hides averagings behind training, and these block: name a compression, such as 'int8', or "
            "use averaging='overlapped'",
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
            self.eval_metrics is None or self.eval_step is not None,
            "eval_metrics needs the sums of eval_step: give eval_dataset and eval_step, too",
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
        """Raises `InvalidJob` for settings that replica groups do not support."""
        if self.shard is None:
            _require(
                self.group_size == 1,
                f"group_size is {self.group_size}: choose how they shard the model, such as shard='full_shard'",
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
        for name, allowed in ALLOWED_WITH_SHARD.items():
            value = getattr(self, name)
            _require(value in allowed, f"{name}={value!r} does not work with shard yet; leave it at {allowed[0]!r}")
        _require(self.batch_size != "auto", "batch_size='auto' does not work with shard yet; give a number")

    @property
    def has_evaluation(self) -> bool:
        """True if epochs are evaluated."""
        return self.evaluate is not None or self.eval_step is not None

    @property
    def wants_metrics(self) -> bool:
        """True if the job has a `metrics_fn` or loggers."""
        return self.metrics_fn is not None or bool(self.loggers)


def _check_batch_size(value: object) -> None:
    if isinstance(value, Mapping):
        _require(bool(value), "batch_size must name at least one device")
        for name, size in value.items():
            _require(isinstance(name, str), f"batch_size must map parts of device names, not {_kind(name)}")
            SETTINGS["batch_size"].check(size)
    elif not callable(value):
        SETTINGS["batch_size"].check(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidJob(message)


def _kind(value: object) -> str:
    return f"{type(value).__name__} ({value!r})" if isinstance(value, int | float | str) else type(value).__name__

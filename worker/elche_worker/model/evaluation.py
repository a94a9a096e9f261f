"""Evaluates a model by the job's functions: means over samples, and metrics of sums over all samples."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset

from elche.errors import InvalidJob
from elche.evaluation import MAX_SUM_BYTES, missing_metric
from elche.output import notice
from elche_worker.device.faults import is_out_of_memory
from elche_worker.device.rng import seeded
from elche_worker.device.transfer import to_device
from elche_worker.model.layout import STATISTIC, digest_of
from elche_worker.model.modes import evaluating
from elche_worker.model.step import named
from elche_worker.model.tensors import is_plain, is_wrapper
from elche_worker.model.trial import unchanged
from elche_worker.user.job import JobDefinition
from elche_worker.user.scalars import Sum, described, number_of, take_scalars


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The outcome of an evaluation, or of a part of one."""

    sums: dict[str, Sum]
    """Metrics by name, as sums and counts of samples, or a value with count 1."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over all samples of the tensors that `eval_step` returned: int64 or float64, on the CPU."""


def evaluate(
    job: JobDefinition, model: nn.Module, file_name: str, *, optimizers: Sequence[Optimizer] = ()
) -> Evaluated:
    """Calls the job's `evaluate`, in eval mode and without gradients; restores the modes of modules afterwards.

    What it draws follows from the seed alone, and training draws on as if there had been no evaluation: which rank
    evaluates depends on time, and after a resume an evaluation may come again.
    """
    assert job.evaluate is not None
    with evaluating(model, optimizers), seeded(job.seed), _telling_changes(job, model, "evaluate"):
        returned = job.evaluate(model)
    return Evaluated({name: (value, 1) for name, value in _numbers(returned, "evaluate", file_name).items()})


def evaluate_part(
    job: JobDefinition,
    model: nn.Module,
    dataset: Any,
    offset: int,
    size: int,
    file_name: str,
    *,
    batch_size: int,
    optimizers: Sequence[Optimizer] = (),
) -> Evaluated:
    """Calls `eval_step` for `size` samples of the data set from `offset` on, and returns the sums. What is drawn
    follows from seed and offset.
    """
    assert job.eval_step is not None
    device = next(model.parameters()).device
    part = Subset(dataset, range(offset, offset + size))
    sums: dict[str, Sum] = {}
    tensors: dict[str, torch.Tensor] = {}
    with evaluating(model, optimizers), seeded(job.seed + offset):
        own = torch.Generator().manual_seed(0)  # the DataLoader would draw a seed from training's generator
        for batch in DataLoader(part, batch_size=batch_size, collate_fn=job.collate_fn, generator=own):
            # A mean over samples needs their number, and ranks that share an evaluation must count the same ones.
            if batch is None:
                raise InvalidJob(
                    f"{file_name}: collate_fn gave None for a batch of eval_dataset(): leave what cannot be evaluated "
                    "out of that data set"
                )
            num_samples = min(batch_size, size)
            size -= num_samples
            returned = _named(job.eval_step(model, to_device(batch, device)), "eval_step", file_name)
            for name in [name for name, value in returned.items() if job.eval_metrics and _has_dimensions(value)]:
                _add_tensor(tensors, name, returned.pop(name), file_name)
            for name, value in _numbers(returned, "eval_step", file_name).items():
                total, count = sums.get(name, (0.0, 0))
                sums[name] = (total + value * num_samples, count + num_samples)
    if job.eval_metrics is not None and not tensors:
        raise InvalidJob(
            f"{file_name}: eval_metrics is given, and eval_step() returns no tensor with dimensions to be summed for "
            "it: return one, or leave eval_metrics out"
        )
    return Evaluated({name: (float(total), count) for name, (total, count) in sums.items()}, tensors)


def make_metrics(
    job: JobDefinition, tensors: dict[str, torch.Tensor], names: Iterable[str], file_name: str
) -> dict[str, float]:
    """Calls `eval_metrics` with the sums of a whole evaluation, whose other metrics have `names`. Raises `InvalidJob`
    for a name that is in both.
    """
    assert job.eval_metrics is not None
    made = _numbers(job.eval_metrics(tensors), "eval_metrics", file_name)
    for name in names:
        if name in made:
            raise InvalidJob(
                f"{file_name}: eval_metrics returns {name!r}, which eval_step returns, too: give one another name"
            )
    return made


def metrics_of(job: JobDefinition, whole: Evaluated, file_name: str) -> dict[str, float]:
    """The metrics of a whole evaluation."""
    means = {name: float(total) / count for name, (total, count) in whole.sums.items()}
    if job.eval_metrics is None:
        return means
    return means | make_metrics(job, whole.tensors, means, file_name)


def rehearse(
    job: JobDefinition,
    model: nn.Module,
    dataset: Any,
    file_name: str,
    *,
    batch_size: int,
    backs_off: bool,
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Evaluates the data set's first batch as if it were all, so that a mistake in the job's evaluation is found before
    training, not after the first epoch. Restores the model's parameters, buffers and modes, and all random generators.

    With `eval_metrics` it is two batches, the second shorter by one sample, to check that tensors to sum have one
    shape. With `backs_off` batches are halved when memory runs out, as in training.
    """
    with unchanged(model):
        while True:
            size = min(batch_size if job.eval_metrics is None else 2 * batch_size - 1, len(dataset))
            try:
                part = (job, model, dataset, 0, size, file_name)
                with _telling_changes(job, model, "eval_step"):
                    done = evaluate_part(*part, batch_size=batch_size, optimizers=optimizers)
                break
            except Exception as error:
                if not (backs_off and batch_size > 1 and is_out_of_memory(error)):
                    raise
            batch_size //= 2
        metrics = metrics_of(job, done, file_name)
        take_scalars()
    if job.monitor is not None and job.monitor not in metrics:
        raise InvalidJob(f"{file_name}: {missing_metric(job.monitor, metrics)}")


_looked_at: "WeakSet[nn.Module]" = WeakSet()
"""The models of this process whose first evaluation `_telling_changes` has seen."""


@contextmanager
def _telling_changes(job: JobDefinition, model: nn.Module, function: str) -> Iterator[None]:
    """Says if the job's function leaves other weights or statistics than it found. Only the rank that evaluates would
    have them: nothing else would show that, and the final model is one that was evaluated. Looks at a model's first
    evaluation alone, since it reads the whole model twice.
    """
    # Of a sharded model, parts are gathered and freed in its forward pass.
    if job.shard is not None or model in _looked_at:
        yield
        return
    _looked_at.add(model)
    before = _digests(model)
    yield
    after = _digests(model)
    changed = [name for name, digest in before.items() if after.get(name) != digest]
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        notice(
            f"{function}() leaves other values in the model's {changed[0]}{others} than it found: they may be in the "
            "trained model, and in what one rank trains further. Let it change a copy (copy.deepcopy(model)), or put "
            "them back"
        )


def _digests(model: nn.Module) -> dict[str, int]:
    """Digests of parameters and of buffers that are statistics; an evaluation may change others, such as caches."""
    statistics = ((name, one) for name, one in model.named_buffers() if name.rpartition(".")[2].startswith(STATISTIC))
    named = [*model.named_parameters(), *statistics]
    plain = ((name, one.detach().resolve_conj()) for name, one in named if is_plain(one) and not is_wrapper(one))
    return {name: digest_of([one]) for name, one in plain}


def rehearse_modes(model: nn.Module, file_name: str) -> None:
    """Goes into eval mode and back: a model that cannot is found before training."""
    try:
        with evaluating(model):
            pass
    except NotImplementedError as error:
        raise InvalidJob(
            f"{file_name}: the model cannot be evaluated: model.eval() raised NotImplementedError ({error}). What "
            "torch.export makes has no modes: return the module that was exported"
        ) from error
    except TypeError as error:
        raise InvalidJob(
            f"{file_name}: the model cannot be evaluated: model.eval() calls its train(False), which raised {error}; "
            "give a method of another purpose another name than train"
        ) from error


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _add_tensor(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor, file_name: str) -> None:
    """Adds a batch's tensor to the sum of those before it."""
    if value.is_complex() or value.layout is not torch.strided:
        raise InvalidJob(f"{file_name}: eval_step() returned {name!r}, which must be a dense tensor of real numbers")
    value = value.detach().cpu().to(torch.float64 if value.is_floating_point() else torch.int64)
    before = tensors.get(name)
    if before is not None and before.shape != value.shape:
        raise InvalidJob(
            f"{file_name}: eval_step() returned {name!r} of shape {tuple(value.shape)}, and of shape "
            f"{tuple(before.shape)} for a batch before it: only tensors of one shape can be summed"
        )
    # A copy: the job may keep the tensor, and change it with the next batch.
    tensors[name] = value.clone() if before is None else before + value
    size_bytes = sum(8 * tensor.numel() for tensor in tensors.values())
    if size_bytes > MAX_SUM_BYTES:
        raise InvalidJob(
            f"{file_name}: eval_step() returned tensors whose sums take {size_bytes} bytes, with {name!r}; at most "
            f"{MAX_SUM_BYTES} are possible, 8 for each value"
        )


def _named(returned: Any, function: str, file_name: str) -> dict[str, Any]:
    """Checks that a function returned a mapping, and returns it with names as texts. Raises `InvalidJob`."""
    if not isinstance(returned, Mapping):
        raise InvalidJob(f"{file_name}: {function}() must return a dict of numbers, not {type(returned).__name__}")
    return named(returned, function, file_name)


def _numbers(returned: Any, function: str, file_name: str) -> dict[str, float]:
    """As `_named`, with all values as floats. Raises `InvalidJob` for other values."""
    numbers = {}
    for name, value in _named(returned, function, file_name).items():
        number = number_of(value)
        if number is None:
            hint = "; eval_metrics makes metrics of tensors that are summed" if function == "eval_step" else ""
            raise InvalidJob(
                f"{file_name}: {function}() returned {name!r}, which must be a number, not {described(value)}{hint}"
            )
        numbers[name] = number
    return numbers

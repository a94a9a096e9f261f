"""Builds a job's model and optimizers, and makes training steps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from elche.errors import InvalidJob
from elche.extent import Extent
from elche.output import notice
from elche_worker.device.faults import is_out_of_memory as is_out_of_memory
from elche_worker.device.kinds import kind_of
from elche_worker.device.rng import seed_all
from elche_worker.device.transfer import InParts, bounds_of, like_mapping, like_sequence
from elche_worker.model.modes import begin_training
from elche_worker.model.savable import check_steps, needs_closure, problem_of_model, take_form, without_closure
from elche_worker.model.trial import unchanged
from elche_worker.model.wrapped import complete
from elche_worker.user.job import JobDefinition
from elche_worker.user.loading import refused
from elche_worker.user.scalars import MAX_NAME_CHARS, Sum, described, number_of, take_scalars, wide

MAX_METRICS = 1000
"""Most metrics or recorded values of one function, to bound reports."""

SHORT_BATCHES = 800
"""A training of up to so many batches, over all ranks, takes no gains with `merge="auto"`: docs/quality.md has such
trainings, docs/convergence.md longer ones.
"""

ALONE = "Expected more than 1 value per channel when training"
"""The beginning of PyTorch's error for a single sample in BatchNorm."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The setting `precision` as the dtype of autocast."""


class ShardedModel(Protocol):
    """The part of `elche_worker.Sharded` that a job's replica groups use."""

    def parameters(self) -> list[nn.Parameter]:
        """This process's shards, for the optimizer."""

    def sync_gradients(self) -> None:
        """Waits for the reduction of gradients that backward has begun."""

    def reshard(self) -> None:
        """Frees the parameters that forward has gathered."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model on its device, and its optimizers."""

    model: nn.Module
    optimizers: Any
    """The value of `optimizer(model)`: one optimizer, or a list, tuple or dict of them."""
    sharded: ShardedModel | None = None
    """The handle of a model that the processes of a replica group share."""
    came_in_eval_mode: bool = False
    """True if `model()` returned the whole model in eval mode, as libraries return pretrained ones."""

    @property
    def all_optimizers(self) -> list[Optimizer]:
        """All optimizers as a flat list."""
        if isinstance(self.optimizers, Mapping):
            return list(self.optimizers.values())
        return list(self.optimizers) if isinstance(self.optimizers, list | tuple) else [self.optimizers]


def build_model(
    job: JobDefinition,
    device: torch.device,
    file_name: str,
    shard: Callable[[nn.Module], ShardedModel] | None = None,
) -> Built:
    """Builds the model on its device, and its optimizer. Raises `InvalidJob`, or `UserCodeRaised`.

    `shard` shards the model over the processes of a replica group instead of moving the whole to the device.
    """
    seed_all(job.seed)
    model = _called_model(job, file_name)
    came_in_eval_mode = not model.training
    if came_in_eval_mode:
        model.train()
    sharded = None
    try:
        take_form(model)
    except InvalidJob as error:
        raise InvalidJob(f"{file_name}: {error}") from None
    if shard is None:
        model.to(device)
    else:
        sharded = shard(model)
    try:
        built = Built(model, job.optimizer(model), sharded, came_in_eval_mode)
    except BaseException as error:
        raise refused(error, file_name) from None
    _check_optimizers(built, file_name)
    for optimizer in built.all_optimizers:
        complete(optimizer)
    if not job.manual_optimization:
        check_steps(built.all_optimizers)
    begin_training(built.all_optimizers)
    return built


def _called_model(job: JobDefinition, file_name: str) -> nn.Module:
    """The model that `model()` returns. Raises as `build_model` does."""
    try:
        model = job.model()
    except BaseException as error:
        raise refused(error, file_name) from None
    if not isinstance(model, nn.Module):
        raise InvalidJob(f"{file_name}: model() must return a torch.nn.Module, not {type(model).__name__}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        why = ": none has requires_grad" if any(True for _ in model.parameters()) else ""
        raise InvalidJob(f"{file_name}: model() returned a model without parameters to train{why}")
    if problem := problem_of_model(model):
        raise InvalidJob(f"{file_name}: {problem}")
    return model


def _check_optimizers(built: Built, file_name: str) -> None:
    """Raises `InvalidJob` unless the file has left gradients on, and returned optimizers of the model's parameters."""
    if not torch.is_grad_enabled():
        raise InvalidJob(
            f"{file_name}: it has switched gradients off (torch.set_grad_enabled(False)), so nothing could be trained: "
            "use `with torch.no_grad():` around what needs none"
        )
    for optimizer in built.all_optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidJob(f"{file_name}: optimizer() must return a torch Optimizer, not {type(optimizer).__name__}")
    if not built.all_optimizers:
        raise InvalidJob(f"{file_name}: optimizer() returned no optimizer")
    if built.sharded is None:
        _check_parameters(built, file_name)


def _check_parameters(built: Built, file_name: str) -> None:
    """Raises `InvalidJob` if an optimizer has parameters of its own, which rounds and checkpoints would leave out."""
    of_model = {id(one) for one in built.model.parameters()}
    num_others = sum(id(one) not in of_model for one in _stepped(built.all_optimizers))
    if num_others:
        raise InvalidJob(
            f"{file_name}: the optimizer has {num_others} parameters that the model does not have, which would "
            "differ between ranks and be in no checkpoint: let model() return one module that holds them, too, such as "
            "nn.ModuleDict({'net': net, 'loss': loss}), and build the optimizer of what optimizer(model) gets"
        )


def _stepped(optimizers: list[Optimizer]) -> list[nn.Parameter]:
    """The parameters that the optimizers step, each once."""
    groups = (group for one in optimizers for group in one.param_groups)
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))


def merge_of(job: JobDefinition, built: Built, extent: Extent) -> str:
    """The job's merge of the ranks' steps in rounds, with "auto" resolved: "adascale", "mean", or "rows", which is the
    mean of the ranks that have changed the row of a weight.

    Gains did harm on many short trainings, and so did the mean of all ranks where rows change seldom (docs/quality.md).
    """
    if job.merge != "auto":
        return job.merge
    if why_mean(job, built):
        return "mean"
    return "rows" if extent.total_samples <= SHORT_BATCHES * extent.batch_size else "adascale"


def why_mean(job: JobDefinition, built: Built) -> str | None:
    """Why `merge="auto"` is the mean for a job; None if it is not.

    AdaScale's gain assumes that sequential training would go as far as the sum of the ranks' steps. Models that train
    against each other do not: on two ranks the gain made a GAN's Fréchet distance worse, by 1.2 from 1.9, and the mean
    did not. Nor does LBFGS: each of its steps goes to the minimum of a quadratic model of the loss, and the sum of two
    overshoots.
    """
    optimizers = built.all_optimizers
    if job.merge != "auto" or not job.manual_optimization:
        return None
    if len(optimizers) > 1:
        why = f"train_step steps {len(optimizers)} optimizers itself, as of models that train against each other"
    elif any(map(needs_closure, optimizers)):
        why = "its optimizer needs a closure"
    else:
        return None
    return f"rounds take the mean of the ranks' steps (merge='mean'): {why}"


class TrainStep:
    """Forward, backward and optimizer step of one batch, with the job's precision and gradient accumulation."""

    def __init__(
        self,
        job: JobDefinition,
        built: Built,
        device: torch.device,
        file_name: str,
        *,
        backs_off: bool = False,
        make_room: Callable[[], bool] = bool,
        order_change: Callable[[], None] = lambda: None,
    ) -> None:
        """With `backs_off`, a batch for which memory runs out, and all later ones, are split into twice as many parts.
        Before that, `make_room` may free device memory; it returns True if it did. `order_change` is called before
        parameters are changed.
        """
        self.precision = possible_precision(job.precision, device)
        """The job's precision, or "fp32" where the device has no fast form of it."""
        self._job = job
        self._model = built.model
        self._sharded = built.sharded
        self._called: Any = torch.compile(built.model) if job.compile else built.model
        self._given_optimizers, self._optimizers = built.optimizers, built.all_optimizers
        stepped = set(map(id, _stepped(self._optimizers)))
        parameters = () if built.sharded else built.model.parameters()
        self._unstepped = [one for one in parameters if id(one) not in stepped]
        """Parameters whose gradients no optimizer clears."""
        self._to_compare = [] if built.sharded else _stepped(self._optimizers)
        """Parameters of which the first backward pass is to make gradients, and that it is to leave as they are."""
        self._device = device
        self._file_name = file_name
        self.num_parts = job.accumulate
        """Number of parts in which a batch goes through the model."""
        self.grad_norm: torch.Tensor | None = None
        """Norm of the last gradient before clipping; None if the job does not clip."""
        self._backs_off = backs_off
        # Processes that share a model must call its collectives equally often: one that repeated a batch, because its
        # own memory ran out, would leave the others waiting.
        self._make_room = make_room if built.sharded is None else bool
        self._order_change = order_change
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")

    def run(
        self, data: Any, size: int, *, weight: float = 1.0, max_parts: int | None = None
    ) -> tuple[torch.Tensor, dict[str, Sum]]:
        """Trains one batch of `size` samples; returns the loss and what was recorded.

        Gradients are multiplied by `weight`, and the batch is split into at most `max_parts` parts: so the processes of
        a replica group, whose parts of a batch may differ in size, make the whole batch's gradient in equally many
        passes.

        Does not synchronise with the device, except in fp16, where a step depends on whether its gradients are finite,
        and where memory runs out.
        """
        with self._explaining_figures(size):
            if self._job.manual_optimization:
                self._order_change()
                returned = self._job.train_step(self._called, data, self._given_optimizers)
                loss, recorded = _loss_of(returned, self._file_name, needs_grad=False)
            else:
                loss, recorded = self._accumulate_or_back_off(data, size, weight, max_parts)
                self._step()
        return loss, {**take_scalars(), **recorded}

    def make_gradients(self, data: Any, size: int) -> None:
        """Forward and backward of one batch without a step, to try whether it fits into memory."""
        self._accumulate(data, size)
        take_scalars()

    def warm_up(self, data: Any, size: int, *, weight: float = 1.0, max_parts: int | None = None) -> None:
        """Forward and backward as in `run`, without a step, to compile, import and allocate what the first batch needs.
        Does nothing with manual optimization, whose step cannot be undone.
        """
        if self._job.manual_optimization:
            return
        with unchanged(self._model), self._explaining_figures(size):
            self._accumulate_or_back_off(data, size, weight, max_parts)
            take_scalars()
            if self._sharded is not None:
                self._sharded.sync_gradients()

    def _accumulate_or_back_off(
        self, data: Any, size: int, weight: float, max_parts: int | None
    ) -> tuple[torch.Tensor, dict[str, Sum]]:
        """Trains the batch; if memory runs out, again after making room, or else in twice as many parts."""
        while True:
            try:
                return self._accumulate(data, size, weight, max_parts)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                has_room = self._make_room()
                if not has_room and not (self._backs_off and self.num_parts < size):
                    raise
            # Outside the handler: there the error's traceback still holds the batch's activations.
            if not has_room:
                self._back_off()
            self._forget_batch()

    def _accumulate(
        self, data: Any, size: int, weight: float = 1.0, max_parts: int | None = None
    ) -> tuple[torch.Tensor, dict[str, Sum]]:
        """Forward and backward of the batch, part by part. The loss is the mean over samples."""
        num_parts = self.num_parts if max_parts is None else min(self.num_parts, max_parts)
        parts = self._parts_of(data, size, num_parts)
        size = sum(part_size for _, part_size in parts)  # less where collate_fn has left parts out
        total: torch.Tensor | None = None
        scalars: dict[str, Sum] = {}
        for part, part_size in parts:
            with self._autocast():
                loss, recorded = _loss_of(self._job.train_step(self._called, part), self._file_name)
            # Gradients of parts add up, so that each part counts by its samples.
            loss = loss if len(parts) == 1 else loss * (part_size / size)
            self._backward(loss if weight == 1 else loss * weight)
            total = loss if total is None else total.detach() + loss.detach()
            for name, (value, count) in recorded.items():
                old, old_count = scalars.get(name, (0.0, 0))
                scalars[name] = (old + value, old_count + count)
        assert total is not None
        return total, scalars

    def _parts_of(self, data: Any, size: int, num_parts: int) -> list[tuple[Any, int]]:
        """Splits the batch into parts. Raises `InvalidJob` for one of a `collate_fn`, which only that can split."""
        is_own = self._job.collate_fn is not None
        if num_parts == 1 or (is_own and self.num_parts == self._job.accumulate):
            return data if isinstance(data, InParts) else [(data, size)]
        if not is_own:
            return split(data, size, num_parts)
        raise InvalidJob(
            f"{self._file_name}: no memory for {size // (self.num_parts // 2)} samples at once, and batches of "
            f"collate_fn cannot be split: give accumulate={self.num_parts}, with which collate_fn is called for each "
            "part, or a smaller batch_size"
        )

    def _backward(self, loss: torch.Tensor) -> None:
        compared, self._to_compare = self._to_compare, []
        versions = [one._version for one in compared]
        try:
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise InvalidJob(
                f"{self._file_name}: train_step() has called backward(), or kept a graph of an earlier batch: return "
                "the loss without calling backward() or step(), and detach() tensors that are kept between batches"
            ) from None
        if versions != [one._version for one in compared]:
            raise InvalidJob(
                f"{self._file_name}: parameters are changed within backward(), as by an optimizer that steps in a hook "
                "(register_post_accumulate_grad_hook): trial batches, accumulate and max_grad_norm do not go with "
                "that. Give manual_optimization=True, and let train_step(model, batch, optimizers) call backward()"
            )
        if compared and all(one.grad is None for one in compared):
            raise InvalidJob(
                f"{self._file_name}: the loss that train_step(model, batch) returned depends on no parameter that the "
                "optimizer has, so the model would stay as it is: compute it with the model that is given, not with "
                "another one, such as a global variable or a copy"
            )

    def _back_off(self) -> None:
        self.num_parts *= 2
        notice(
            f"there is no memory for a whole batch ({self._memory()}): batches are split into {self.num_parts} parts"
        )

    @contextmanager
    def _explaining_figures(self, size: int) -> Iterator[None]:
        """Adds memory figures and advice to an out-of-memory error, and advice to BatchNorm's on a single sample."""
        try:
            yield
        except ValueError as error:
            if str(error).startswith(ALONE):
                error.add_note(self._why_alone(size))
            raise
        except Exception as error:
            if is_out_of_memory(error):
                can = "" if self._backs_off or self._job.manual_optimization else ', give batch_size="auto"'
                parts = f" in {self.num_parts} parts" if self.num_parts > 1 else ""
                where = f"at a batch of {size} samples{parts}; {self._memory()}"
                error.add_note(f"{where}: lower batch_size{can}, or make the model smaller")
            raise

    def _why_alone(self, size: int) -> str:
        """How a sample comes to be alone in a batch, or in a part of one, and what helps."""
        if self.num_parts > 1 and size > 1:
            return f"a batch of {size} samples went through the model in {self.num_parts} parts: lower accumulate"
        if self._job.drop_last:
            return "a batch had 1 sample, though drop_last is set: give all ranks one batch_size, of more than 1"
        ways = "drop_last=True, which leaves samples out at its end, or another batch_size"
        return f"a batch had 1 sample, as the last one of an epoch may: give {ways}"

    def _memory(self) -> str:
        return f"of {self._device}'s memory {kind_of(self._device).memory(self._device)}"

    def _forget_batch(self) -> None:
        """Drops the state of a batch for which memory ran out, and frees the allocator's cache for others."""
        take_scalars()
        self._clear_gradients()
        kind_of(self._device).empty_cache()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=DTYPES[self.precision])

    def _step(self) -> None:
        if self._sharded is not None:
            self._sharded.sync_gradients()
        if self._job.max_grad_norm is not None:
            for optimizer in self._optimizers:
                # In fp16 gradients are scaled up: clipped as they are, hardly anything of them would be left.
                self.scaler.unscale_(optimizer)
            clipped = _stepped(self._optimizers) if self._sharded is None else self._model.parameters()
            norm: Any = nn.utils.clip_grad_norm_(clipped, self._job.max_grad_norm)
            self.grad_norm = norm if self._sharded is None else norm.full_tensor()
        # a round may still be copying the parameters, on another stream
        self._order_change()
        for optimizer in self._optimizers:
            with without_closure(optimizer, self._file_name):
                self.scaler.step(optimizer)
        self.scaler.update()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._unstepped:  # otherwise they would add up from batch to batch
            parameter.grad = None


def possible_precision(wanted: str, device: torch.device) -> str:
    """The wanted precision, or "fp32" where the device has no fast form of it."""
    if wanted == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    if wanted == "fp16" and device.type != "cuda":
        return "fp32"
    return wanted


def split(data: Any, size: int, num_parts: int) -> list[tuple[Any, int]]:
    """Splits a batch of `default_collate` into nearly equal parts, by tensors and lists of `size` entries."""
    return [(_cut(data, size, start, end), end - start) for start, end in bounds_of(size, num_parts)]


def _cut(data: Any, size: int, start: int, end: int) -> Any:
    """The samples from `start` to `end`, of tensors and lists of texts with `size` entries; the rest as it is."""
    if isinstance(data, torch.Tensor):
        return data[start:end] if data.dim() and data.shape[0] == size else data
    if isinstance(data, Mapping):
        return like_mapping(data, {key: _cut(value, size, start, end) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_cut(value, size, start, end) for value in data))
    if isinstance(data, list | tuple):
        is_per_sample = len(data) == size and all(isinstance(one, str | bytes) for one in data)
        return data[start:end] if is_per_sample else like_sequence(data, [_cut(one, size, start, end) for one in data])
    return data


def _loss_of(returned: Any, file_name: str, *, needs_grad: bool = True) -> tuple[torch.Tensor, dict[str, Sum]]:
    """The loss in the result of the train step, and the scalars besides it. Raises `InvalidJob`."""
    values = named(returned if isinstance(returned, Mapping) else {"loss": returned}, "train_step", file_name)
    loss = values.pop("loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        hint = "" if number_of(loss) is None else ": leave out item(), as backward() needs the tensor"
        raise InvalidJob(
            f"{file_name}: train_step() must return a scalar loss, or a dict with one at 'loss', not {got}{hint}"
        )
    if needs_grad and not loss.requires_grad:
        raise InvalidJob(
            f"{file_name}: train_step() returned a loss that depends on no parameter (no gradient): return it as it "
            "was computed, without backward(), step(), detach() or item(), which are elche's part"
        )
    return loss, {name: (_plain(name, value, file_name), 1) for name, value in values.items()}


def named(returned: Mapping[Any, Any], function: str, file_name: str) -> dict[str, Any]:
    """A function's result with names as texts. Raises `InvalidJob` for too many or too long names."""
    if len(returned) > MAX_METRICS:
        raise InvalidJob(
            f"{file_name}: {function}() returned {len(returned)} metrics; at most {MAX_METRICS} are possible"
        )
    for key in returned:
        if len(str(key)) > MAX_NAME_CHARS:
            raise InvalidJob(
                f"{file_name}: {function}() returned a metric whose name has {len(str(key))} characters; at most "
                f"{MAX_NAME_CHARS} are possible: {str(key)[:40]!r}..."
            )
    return {str(key): value for key, value in returned.items()}


def _plain(name: str, value: Any, file_name: str) -> float | torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return wide(value)
    number = None if isinstance(value, torch.Tensor) else number_of(value)
    if number is not None:
        return number
    got = described(value)
    raise InvalidJob(f"{file_name}: train_step() returned {name!r}, which must be a number, not {got}")

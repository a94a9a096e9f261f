"""Forward passes over the batches of `epoch`, with loss and backward where a loss function is set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elche.errors import Misuse
from elche_worker.collectives.sparse import scale
from elche_worker.collectives.world import World
from elche_worker.trainer.capture import Capture, Caught, detached, joined
from elche_worker.trainer.data import Batch, Fields, Wiring
from elche_worker.trainer.gathering import Gathered, gather


@dataclass(frozen=True, slots=True)
class LossContext:
    """Argument of a loss function, of one batch. Its tensors are part of the autograd graph."""

    output: Any
    """The model's output."""
    batch: Fields
    tags: dict[str, Any]
    """The last output of each module that `capture(tags=...)` names."""
    traces: dict[str, list[Any]]
    """The outputs, call by call, of each module that `capture(traces=...)` names."""


LossFn = Callable[[LossContext], torch.Tensor]


class Forward:
    """The model's forward passes of the present step. `on_loss` receives the loss of each batch that counts."""

    def __init__(self, model: nn.Module, on_loss: Callable[[torch.Tensor], None]) -> None:
        self._model = model
        self._on_loss = on_loss
        self.wiring: Wiring | None = None
        """Mapping of a batch's fields to the model's arguments; set with the data loader."""
        self.loss_fn: LossFn | None = None
        self.capture = Capture(model)
        self._caught: Caught | None = None
        self._count = 0.0
        """Batches whose gradients the loss function has accumulated, in units of the first one's size."""
        self._unit = 0
        """Samples of that first batch."""

    def begin_step(self) -> None:
        """Resets the state of the step."""
        self._caught = None
        self._count = 0.0
        self._unit = 0
        self.capture.forget()

    def run(self, batch: Batch) -> Any:
        """Returns the concatenated output of all parts of a batch; see `Trainer.forward_batch`."""
        self._caught = self._caught or Caught()
        outputs = []
        for part, size in zip(batch.parts, batch.sizes, strict=True):
            if batch.size and not self._unit:
                self._unit = size
            weight = size / self._unit if batch.size else 0.0
            outputs.append(self._run_part(part, weight, counts=bool(batch.size)))
        return joined(outputs, batch.sizes)

    def _run_part(self, part: Fields, weight: float, *, counts: bool) -> Any:
        """Runs one part. With a loss function also its backward, which frees the graph."""
        wiring, caught = self.wiring, self._caught
        assert wiring is not None
        assert caught is not None
        output = wiring.call(self._model, part)
        if self.loss_fn is not None:
            loss = self.loss_fn(LossContext(output, part, self.capture.tags, self.capture.traces))
            self._backward(loss, weight)
            self._count += weight
        if counts:
            caught.add({name: part[name] for name in wiring.targets}, output, self.capture)
        if self.loss_fn is None:
            return output
        self.capture.detach()
        return detached(output)

    def _backward(self, loss: Any, weight: float) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            without = ", without a gradient" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
            raise Misuse(f"the loss function must return a scalar with a gradient, not {got}{without}")
        if weight:
            self._on_loss(loss)
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]

    def divide_gradients(self) -> None:
        """Turns the gradients that the loss function has accumulated into their mean over batches."""
        if self._count and self._count != 1.0:
            gradients = [one.grad for one in self._model.parameters() if one.grad is not None]
            scale(gradients, 1 / self._count)

    def set_capture(self, tags: Sequence[str], traces: Sequence[str]) -> None:
        """Replaces the modules whose outputs are captured. Raises `Misuse` for a name that the model does not have."""
        capture = Capture(self._model, tags, traces)
        self.capture.close()
        self.capture = capture

    def gather(self, world: World) -> Gathered:
        """Gathers the step's batches of all ranks. Raises `Misuse` before the first batch of a step."""
        if self._caught is None:
            raise Misuse("gather() has nothing to gather: call it after forward_batch and before step")
        return gather(world, self._caught, self.capture, self.wiring.targets if self.wiring else ())

"""Says once that an optimizer steps with gradients that another one's loss has left, too, as where a GAN's generator
fills its discriminator's gradients and nothing clears them.

A step clears the gradients of its own optimizers only: those of the others may be of the same backward pass, for their
own step.
"""

from collections.abc import Sequence
from weakref import ref

from torch import Tensor, nn

from elche.output import notice
from elche_worker.trainer.optimizers import Key, Optimizers

NUM_STEPS = 10
"""Steps of an optimizer, whose gradients another one's steps had left, after which it is looked at no more."""


class Leftovers:
    """Watches the optimizers whose gradients the steps of others leave."""

    def __init__(self, optimizers: Optimizers, *, tells: bool) -> None:
        """`tells` is true on the rank that prints."""
        self._optimizers = optimizers
        self._tells = tells
        self._watched: dict[Key, _Watched] = {}

    def note_step(self, stepped: Sequence[Key]) -> None:
        """Called when a step has cleared the gradients of the optimizers `stepped`."""
        for key in self._optimizers.by_key:
            if not self._tells or key in stepped:
                continue
            if key not in self._watched:
                parameters = self._optimizers.parameters_of([key])
                # A frozen one takes no hook, and nothing is added to its gradient.
                left = next((one for one in parameters if one.grad is not None and one.requires_grad), None)
                if left is None:
                    continue
                self._watched[key] = _Watched(left)
            self._watched[key].note_step_of_another()

    def close(self) -> None:
        """Watches no more."""
        for watched in self._watched.values():
            watched.close()

    def check(self, keys: Sequence[Key]) -> None:
        """Called before the optimizers `keys` step."""
        for key in keys:
            if key in self._watched and self._watched[key].begin_step() and self._tells:
                self._tells = False
                notice(
                    f"step(optimizer={key!r}) steps with the sum of two losses' gradients: those of its own loss, and "
                    "those that the loss of another optimizer has left, whose step cleared only its own. Call the "
                    f"zero_grad() of optimizer {key!r} before its loss's backward(), unless the sum is meant"
                )


class _Watched:
    """The gradient of one parameter, which stands for all of its optimizer."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        assert parameter.grad is not None
        self._note_gradient(parameter.grad)
        self._is_left = False
        """True if another optimizer has stepped since this gradient began."""
        self._is_sum = False
        """True if a gradient was added after that."""
        self._num_steps = 0
        self._handle = parameter.register_post_accumulate_grad_hook(self._note_added)  # type: ignore[no-untyped-call]

    def note_step_of_another(self) -> None:
        self._is_left = self._parameter.grad is not None

    def begin_step(self) -> bool:
        """Returns True if this optimizer is to step with a sum of two losses' gradients."""
        is_sum, self._is_left, self._is_sum = self._is_sum, False, False
        self._num_steps += 1
        if self._num_steps == NUM_STEPS:
            self.close()
        return is_sum

    def close(self) -> None:
        self._handle.remove()

    def _note_gradient(self, gradient: Tensor) -> None:
        self._gradient, self._version = ref(gradient), gradient._version

    def _note_added(self, parameter: Tensor) -> None:
        # Adding in place makes one version more; a gradient that was set to zero before has two more.
        gradient = parameter.grad
        if gradient is not None and gradient is self._gradient() and gradient._version == self._version + 1:
            self._is_sum |= self._is_left
        else:
            self._is_left = self._is_sum = False
        if gradient is not None:  # a hook of the script may have cleared it
            self._note_gradient(gradient)

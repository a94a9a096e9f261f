"""Gradients averaged over the ranks, in buckets that travel while backward still computes the next ones.

Every rank sends every bucket once per step and in the same order, with zeros for gradients that it lacks: a rank that
left out a bucket would make the others wait forever. The last bucket waits for `finish`. It carries, besides its
gradients, a 1 for each parameter of which the rank has a gradient; a parameter without one on any rank is left alone.

Source: rows T7, G3, G4.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elche.errors import Misuse
from elche_worker.collectives.sparse import summed
from elche_worker.collectives.world import World, lost_peers_named

BUCKET_BYTES = 25 << 20
"""Size of a bucket, as in PyTorch's DistributedDataParallel."""
FIRST_BUCKET_BYTES = 1 << 20
"""Size of the first bucket: small, so that communication starts early."""
SUMMED_STEPS = 16
"""The first steps in which gradients are summed to notice changes that have no version counter, by `grad.data`."""
SUMMED_EVERY = 128
"""Later ones: each so many. The sums take as long as several percent of a step of many small parameters."""


class Bucket:
    """Gradients of one dtype, end to end in one tensor, in the order in which backward makes them."""

    def __init__(
        self, indices: list[int], parameters: Sequence[nn.Parameter], num_notes: int, device: torch.device
    ) -> None:
        """`indices`: those of its parameters. `num_notes`: last elements, for what ranks sum besides gradients."""
        self.indices = indices
        dtype = parameters[indices[0]].dtype if indices else torch.float32
        sizes = [parameters[index].numel() for index in indices]
        self.flat = torch.zeros(sum(sizes) + num_notes, dtype=dtype, device=device)
        *parts, self.notes = torch.split(self.flat, [*sizes, num_notes])
        self.views = [_laid_out_as(parameters[index], part) for index, part in zip(indices, parts, strict=True)]
        self.num_expected = 0
        """Accumulations that backward must still make into its gradients before the bucket may be sent."""
        self.work: Any = None
        """The all-reduce of this step, once it is sent."""


class Gradients:
    """The gradients of parameters, by name, averaged over a world of at least two ranks.

    With `overlaps`, buckets leave during backward, once a step has shown how many times each gradient is accumulated.
    `num_requests` numbers of each rank are summed with them. Parameters named in `sparse` are in no bucket: ranks send
    their rows.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        world: World,
        *,
        overlaps: bool,
        num_requests: int = 0,
        sparse: Collection[str] = (),
    ) -> None:
        self._world = world
        self._overlaps = overlaps
        self.follow(named, sparse)
        # What leaves during backward has a group of its own, since the loop's other collectives may come before it on
        # one rank and after it on another: a rank without samples in an epoch's tail sends only at the step's end.
        self._group = world.another_group() if overlaps else world.group
        self._num_requests = num_requests
        self._sparse_sums: dict[str, torch.Tensor | None] = {}
        self._hooks: list[Any] = []
        self._fraction = 0.0
        """Weight of this rank's gradients in the average; 0 while it is not known."""
        self._num_sent = 0
        """Buckets sent in this step. They are sent in order, so that it is also the index of the next one."""
        self._num_fired: list[int] = []
        """Number of times that backward has accumulated each gradient in this step."""
        self._most_fired: list[int] = []
        """The most times each gradient was accumulated in one step."""
        self._is_known = False
        """True if `_most_fired` is known from a step."""
        self._has_counted = True
        """True if `_num_fired` counts the whole step."""
        self._may_send = False
        """True if buckets may be sent during this step's backward."""
        self._made: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]] = {}
        """Gradients that backward has made in this step, by index, their version counters, and their sums if they are
        summed; else only those that were sent. By these later changes are noticed.
        """
        self._num_begun = 0
        """Steps begun."""
        self._is_summed = False
        """True if gradients are summed in this step."""
        self._failure: RuntimeError | None = None
        """The error by which a bucket could not be sent during backward."""
        self._own: list[bool] = []
        """True if this rank has a gradient of each parameter."""
        self._begin_anew()
        self.begin()

    def follow(self, named: Mapping[str, nn.Parameter], sparse: Collection[str]) -> None:
        """Averages these parameters from the next `finish` on. Every rank calls it before the same step."""
        self._named = dict(named)
        self._sparse = {name: one for name, one in named.items() if name in sparse}
        self._trained: list[str] = []

    def begin(self) -> None:
        """Begins a step. Nothing is sent before its end unless `weigh` gives the weight of its gradients."""
        self._num_sent = 0
        self._num_fired = [0] * len(self._parameters)
        self._fraction = 0.0
        self._may_send = False
        self._failure = None
        self._has_counted = True
        self._made.clear()
        self._num_begun += 1
        self._is_summed = self._num_begun <= SUMMED_STEPS or self._num_begun % SUMMED_EVERY == 0
        self._set_hooks()
        for bucket in self._buckets:
            bucket.num_expected = sum(self._most_fired[index] for index in bucket.indices)

    def rejoin(self) -> None:
        """Adopts the world's new group. What was sent of this step is sent again, as backward left it."""
        self._group = self._world.another_group() if self._overlaps and self._world.size > 1 else self._world.group
        # When layers were frozen in this step, some ranks may have rebuilt their buckets for it already, others not. So
        # all rebuild them now, and send nothing during backward until then: ranks would send different buckets.
        self._trained, self._is_known = [], False
        self._num_sent = 0
        self._may_send = False
        self._failure = None
        for bucket in self._buckets:
            bucket.work = None

    def weigh(self, fraction: float | None) -> None:
        """Sets the weight of this step's gradients in the average; None while it is not known."""
        self._fraction = fraction or 0.0
        self._may_send = self._overlaps and bool(fraction) and self._is_known

    @torch.no_grad()
    def finish(self, fraction: float, requests: Sequence[float] = ()) -> torch.Tensor:
        """Averages the gradients, this rank's with weight `fraction`. Parameters keep their own gradients until
        `replace`. Returns the sums of the requests over all ranks, on the device.
        """
        if self._trained != [name for name, one in self._named.items() if one.requires_grad]:
            self._change_trained()
        if fraction != self._fraction and self._num_sent:
            raise Misuse(
                "the gradients of this step were sent with another weight than they have now: where steps have "
                "different numbers of batches, set TrainerConfig(overlap=False)"
            )
        self._fraction = fraction
        with lost_peers_named():
            if self._failure is not None:
                raise self._failure
        own = [bool(fraction) and parameter.grad is not None for parameter in self._parameters]
        notes = [*map(float, own), *requests] + [0.0] * (self._num_requests - len(requests))
        last = self._buckets[-1]
        for bucket in self._buckets[self._num_sent :]:
            if bucket is last:
                pinned = torch.tensor(notes, pin_memory=last.flat.is_cuda)  # so that the copy is asynchronous
                last.notes.copy_(pinned, non_blocking=True)
            with lost_peers_named():
                self._send(bucket)
        with lost_peers_named():
            for bucket in self._buckets:
                bucket.work.wait()
        self._own = own
        trained = {name: one for name, one in self._sparse.items() if one.requires_grad}
        self._sparse_sums = summed(trained, fraction, self._world) if trained else {}
        sums: torch.Tensor = last.notes[len(own) :].clone()  # the bucket is filled again in the next step
        return sums

    @torch.no_grad()
    def replace(self) -> None:
        """Sets each gradient to the average, equal on every rank; None where no rank has one."""
        own = self._own
        presence = self._buckets[-1].notes[: len(own)]  # per parameter, the number of ranks that have a gradient
        anywhere = own if all(own) else (presence > 0).tolist()  # waits for the device only if one is missing here
        for bucket in self._buckets:
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                # Not the view: the bucket is filled again in the next step, and a loop may keep gradients (Grokfast).
                parameter = self._parameters[index]
                parameter.grad = _copied(view, parameter) if anywhere[index] else None
        for name, total in self._sparse_sums.items():
            self._sparse[name].grad = total
        if self._has_counted:
            self._most_fired = [max(pair) for pair in zip(self._most_fired, self._num_fired, strict=True)]
            self._is_known = True

    def _change_trained(self) -> None:
        """Rebuilds the buckets after layers were frozen or unfrozen, and discards what was sent of the old ones."""
        with lost_peers_named():
            for bucket in self._buckets[: self._num_sent]:
                bucket.work.wait()
        self._begin_anew()
        self.begin()
        self._has_counted = False  # backward is over

    def close(self) -> None:
        """Removes its hooks from the model."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begin_anew(self) -> None:
        """Builds buckets for the parameters that are trained now. Checks that all ranks train the same ones."""
        self.close()
        trained = {name: one for name, one in self._named.items() if one.requires_grad}
        self._world.agree("" if trained else "the model has no parameter to train: all are frozen")
        if len(set(self._world.gather_texts(hashlib.sha256("\n".join(trained).encode()).hexdigest()[:32]))) > 1:
            raise Misuse("ranks train different parameters: freeze and unfreeze the same ones on all of them")
        self._trained = list(trained)
        self._dense = [name for name in trained if name not in self._sparse]
        self._parameters = [trained[name] for name in self._dense]
        device = next(iter(trained.values())).device
        num_notes = len(self._parameters) + self._num_requests
        groups = list(_groups(self._parameters))
        last = len(groups) - 1
        self._buckets = [
            Bucket(group, self._parameters, num_notes if at == last else 0, device) for at, group in enumerate(groups)
        ]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._most_fired = [1] * len(self._parameters)
        self._is_known = False

    def _set_hooks(self) -> None:
        """Hooks are on the parameters where they are needed: a call of each takes time in every step."""
        if not (self._overlaps or self._is_summed):
            self.close()
        elif not self._hooks:
            for index, parameter in enumerate(self._parameters):
                register: Any = parameter.register_post_accumulate_grad_hook  # untyped
                self._hooks.append(register(self._hook(index)))

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            self._num_fired[index] += 1
            if self._is_summed:
                self._note_made(index)
            if not self._may_send:
                return
            bucket = self._bucket_of[index]
            bucket.num_expected -= 1
            if bucket.num_expected < 0:
                raise Misuse(
                    f"backward has added to the gradient of {self._dense[index]!r} {self._num_fired[index]} times in "
                    "this step, more often than in earlier ones, so the gradient was sent too early. If this rank has "
                    "left out a step(), leave it out on all ranks, and clear the gradients. Where steps have different "
                    "numbers of backward passes, or another model's loss goes through this one, set "
                    "TrainerConfig(overlap=False)"
                )
            # In order, and never the last: backward may complete buckets in another order on another rank, and
            # collectives must be called in the same order everywhere. The last one carries numbers known at `finish`.
            while self._num_sent < len(self._buckets) - 1 and not self._buckets[self._num_sent].num_expected:
                bucket = self._buckets[self._num_sent]
                try:
                    self._send(bucket)
                except RuntimeError as error:  # raised by `finish`: here it would end the user's backward
                    self._failure, self._may_send = error, False
                    return
                if not self._is_summed:
                    for sent in bucket.indices:
                        self._note_made(sent)

        return on_gradient

    def _note_made(self, index: int) -> None:
        gradient = self._parameters[index].grad
        if gradient is not None:
            self._made[index] = gradient, gradient._version, _sum_of(gradient) if self._is_summed else None

    def find_changed(self) -> bool:
        """True if the values of a gradient have changed since backward made it, as far as that is looked at (see
        `SUMMED_STEPS`). Raises `Misuse` where it was sent before: the change would be lost.
        """
        changed = self._changed()
        for bucket in self._buckets[: self._num_sent]:
            for index in bucket.indices:
                if index in changed or self._is_touched(index):
                    raise Misuse(
                        f"the gradient of {self._dense[index]!r} was changed after backward, when it had been sent: "
                        "call trainer.average_gradients() first, then clip or unscale what it has made, then step()"
                    )
        return bool(changed)

    def _is_touched(self, index: int) -> bool:
        """True if the gradient was replaced, or written to, perhaps with the same values."""
        now, (made, version, _) = self._parameters[index].grad, self._made.get(index, (None, 0, None))
        return now is not made or (now is not None and now._version != version)

    def _changed(self) -> set[int]:
        """The gradients that have another sum than backward has made, where they were summed."""
        changed: set[int] = set()
        if not self._is_summed:
            return changed
        summed, flags = [], []
        for index, (_, _, total) in self._made.items():
            gradient = self._parameters[index].grad
            now = None if total is None or gradient is None else _sum_of(gradient)
            if total is not None and now is not None:
                summed.append(index)
                flags.append(torch.isclose(now, total, rtol=0, atol=0, equal_nan=True))
            elif total is not None:
                changed.add(index)
        # All at once: each look at a device's number waits for the device.
        are_same = torch.stack(flags).tolist() if flags else []
        return changed.union(index for index, is_same in zip(summed, are_same, strict=True) if not is_same)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        for index, view in zip(bucket.indices, bucket.views, strict=True):
            gradient = self._parameters[index].grad
            if gradient is not None and gradient.layout is not torch.strided:  # sparse, and not named in `sparse`
                gradient = gradient.to_dense()
            if gradient is None or not self._fraction:
                view.zero_()
            else:
                torch.mul(gradient, self._fraction, out=view)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        self._num_sent += 1


@torch.no_grad()
def _sum_of(gradient: torch.Tensor) -> torch.Tensor | None:
    """The sum of its elements, on its device; None of a sparse one."""
    if gradient.layout is not torch.strided:
        return None
    is_rough = gradient.dtype in (torch.float16, torch.bfloat16)
    return gradient.sum(dtype=torch.float32) if is_rough else gradient.sum()


def _groups(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Indices of parameters that share a bucket: the last parameters first, in backward's order. Without parameters, or
    after complex ones, an empty bucket, for the requests.
    """
    group: list[int] = []
    num_bytes, limit = 0, FIRST_BUCKET_BYTES
    # Every rank must cut the same buckets: they follow from names, shapes and dtypes alone, never from times.
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        is_other = bool(group) and parameters[group[0]].dtype != parameter.dtype
        if group and (num_bytes >= limit or is_other):
            yield group
            group, num_bytes, limit = [], 0, BUCKET_BYTES
        group.append(index)
        num_bytes += parameter.nbytes
    yield group
    if group and parameters[group[0]].is_complex():
        yield []


def _laid_out_as(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """A view of the bucket in the parameter's shape, with its strides where these are dense."""
    strides = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, size in strides:
        if size > 1 and stride != expected:
            return part.view(parameter.shape)
        expected *= size
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())


def _copied(average: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The average, in the memory of the parameter's own gradient where that is a plain tensor, as in DDP."""
    own = parameter.grad
    if own is None or own.layout is not torch.strided or own.requires_grad or not own.is_contiguous():
        return average.clone()
    return own.copy_(average)

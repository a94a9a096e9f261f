"""The layout of a model: which tensors are averaged or broadcast, and their places in the flat buffers."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from elche.errors import InvalidJob
from elche_worker.device.chunks import alike
from elche_worker.model.bounds import UNBOUNDED, Bounds, keep_within
from elche_worker.model.optimizer_state import sizes_of
from elche_worker.model.storage import without_copies
from elche_worker.model.tensors import is_divided, is_plain, local_of, raw_bytes

Kind = Literal["float32", "float64", "broadcast"]
CPU = torch.device("cpu")
NOT_NEGATIVE = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "row_var", "col_var", "variance"}
)
"""Moments of PyTorch's optimizers that are means of squares, or norms, and so must not become negative."""
STATISTIC = "running_"
"""Prefix of the names of buffers with statistics, as in normalisation layers."""
COLUMNS = 1024
"""Words of 8 bytes in a row of digested values."""
FIXED = (
    "the trained parameters are fixed when training begins. Let model() return all that are trained at any time, with "
    "requires_grad, and freeze a part for a while in epoch_fn, with requires_grad_(False) in epoch 0"
)
DTYPES: dict[Kind, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One tensor of the model. It is looked up in its owner each time, since user code may replace it by another of the
    same dtype and shape.
    """

    name: str
    find: Callable[[], torch.Tensor | None] = field(repr=False)
    """Returns the model's present tensor of this name; None if it is gone."""
    shape: torch.Size
    """Shape of this process's part; complex numbers are pairs, in a last dimension of 2."""
    dtype: torch.dtype
    kind: Kind
    """The dtype in which rounds average it, or "broadcast": rounds copy it from the source."""
    is_trained: bool
    """True for a parameter; a parameter of kind "broadcast" is frozen."""
    whole: torch.Size | None = None
    """The shape of the whole tensor, where this process has only a part of it."""
    moment: str = ""
    """Its key in the optimizer's state, if it is an averaged moment."""

    @property
    def is_corrected(self) -> bool:
        """True if a result is added to it as a correction, so that newer steps are kept."""
        return self.is_trained or bool(self.moment)

    @property
    def tensor(self) -> torch.Tensor:
        """The model's present tensor. Raises `InvalidJob` if its dtype or shape has changed."""
        tensor = _plain(self.find())
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype:
            got = "is gone" if tensor is None else f"is {tensor.dtype} {tuple(tensor.shape)} now"
            raise InvalidJob(
                f"the model's {self.name} was {self.dtype} {tuple(self.shape)} and {got}: keep its dtype and "
                "shape. If the first forward pass sets them, as for quantization's observers, let model() make one "
                "forward pass, on one sample"
            )
        return tensor

    @property
    def size(self) -> int:
        """Number of values."""
        return self.shape.numel()

    def __str__(self) -> str:
        kind = "from the source" if self.kind == "broadcast" else "averaged"
        shape = tuple(self.shape if self.whole is None else self.whole)
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {shape} {kind}"


class Layout:
    """All storage of a model, each shared part once, with flat buffers for the averaged values.

    For a sharded model it is this process's part: processes of equal position have equal layouts.

    Trained parameters and floating-point buffers that are statistics (`STATISTIC`) are averaged in float32 (float64 for
    float64). Other buffers, such as counters, queues and masks, are broadcast from the source in each round, bit for
    bit; frozen parameters only when they are not equal on all ranks. The settings `buffers` and `optimizer_state`
    choose for buffers and for the optimizer's state: "average", "from_source" or "local" (neither).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        buffers: str = "average",
        optimizer_state: str = "local",
    ) -> None:
        self._model = model
        self.entries = _entries(model, buffers)
        self._began = [
            (entry, entry.find())
            for entry in self.entries
            if entry.is_trained and entry.kind != "broadcast" and entry.whole is None
        ]
        """Trained parameters as they were when training began. Not those of a sharded model: PyTorch exchanges them."""
        self._optimizers, self._sizes = optimizers, sizes_of(optimizers)
        self._empty = [] if buffers == "local" else _empty_buffers(model)
        self.model_tensors = [str(entry) for entry in self.entries]
        """Descriptions of parameters and buffers."""
        if optimizer_state != "local":
            for optimizer in optimizers:
                _materialize(optimizer)
                self.entries += _optimizer_entries(model, optimizer, optimizer_state)
        self.hash = _hash(self.entries)
        self._names = dict(model.named_parameters()).keys()
        self._known = {id(one): one for one in _parameters(model)}
        """The parameters when training began, by id; kept, so that no later one gets the id of one that has gone."""
        self.flat_buffers: dict[Kind, torch.Tensor] = {}
        """By kind: the values to average, and then the result until the next round. Empty until `place`."""
        self._device: torch.device | None = None
        """None while there are no flat buffers."""
        self._is_pinned = False
        self._snapshot: dict[Kind, torch.Tensor] = {}
        """By kind: the snapshot of this rank's values, kept if it may train on; after `compare` the corrections."""
        self.is_kept = False
        """True if the snapshot is of the latest round."""
        self._by_kind = {
            kind: [entry for entry in self.entries if entry.kind == kind] for kind in (*DTYPES, "broadcast")
        }
        self._views: dict[Kind, list[torch.Tensor]] = {}
        """By kind: views of the flat buffer, in the order of `of_kind`."""

    @property
    def device(self) -> torch.device:
        """The device of the flat buffers."""
        assert self._device is not None
        return self._device

    @property
    def size_bytes(self) -> int:
        """Size of the flat buffers in bytes."""
        return sum(entry.size * dtype.itemsize for kind, dtype in DTYPES.items() for entry in self.of_kind(kind))

    @property
    def has_result(self) -> bool:
        """True if the flat buffers exist: they hold the last round's result."""
        return self._device is not None

    def check(self) -> None:
        """Raises `InvalidJob` if parameters that were frozen or missing when training began are trained now, one or its
        module was replaced, an optimizer has other groups, or a buffer that was empty has values.
        """
        parameters = dict(self._model.named_parameters())
        places = {entry.name: entry.find() for entry in self.entries if entry.is_trained}
        for name, one in parameters.items():
            if name not in self._names and one.requires_grad:
                raise InvalidJob(f"the model has a new parameter, {name}, that rounds do not average: {FIXED}")
            if name in places and places[name] is not one:
                raise InvalidJob(f"the module of the model's {name} was replaced while it is trained: {FIXED}")
        if sizes_of(self._optimizers) != self._sizes:
            raise InvalidJob(
                f"the optimizer's groups of parameters have changed: {FIXED}. Let optimizer() return all groups: a "
                "rank that is started again, or resumes from a checkpoint, has only those"
            )
        self._check_kept()

    def _is_as_known(self) -> bool:
        """True if no other parameters are trained than when training began. Takes half of the time of `check`, which
        looks at names, and all rounds ask.
        """
        are_known = all(id(one) in self._known for one in _parameters(self._model) if one.requires_grad)
        return are_known and sizes_of(self._optimizers) == self._sizes

    def _check_kept(self) -> None:
        """Raises `InvalidJob` if a frozen parameter is trained now, or a trained one was replaced: the optimizer would
        go on with the former one. Also if a buffer that was empty has values now: other ranks would not get them, and
        no checkpoint with them could be resumed from.
        """
        for entry in self._empty:
            entry.tensor  # noqa: B018
        for entry, began in self._began:
            present = entry.find()
            if present is not None and present is not began:
                raise InvalidJob(f"the model's {entry.name} was replaced while it is trained: {FIXED}")
        for entry in self._frozen:
            tensor = entry.find()
            if tensor is not None and tensor.requires_grad:
                raise InvalidJob(f"the model's {entry.name} was frozen and is to be trained now: {FIXED}")

    def place(self, device: torch.device, *, is_pinned: bool = True) -> None:
        """Allocates the flat buffers on a device, on the host pinned if `is_pinned`, unless they are there."""
        is_pinned = is_pinned and device == CPU and any(entry.tensor.is_cuda for entry in self.entries)
        if (self._device, self._is_pinned) == (device, is_pinned):
            return
        self._device, self._is_pinned = device, is_pinned
        for kind in DTYPES:
            self.flat_buffers[kind] = self._new_flat(kind)
            self._views[kind] = _views(self.flat_buffers[kind], self.of_kind(kind))
        self._snapshot = {}

    def release(self) -> None:
        """Frees the flat buffers until the next `place`."""
        self._device, self.is_kept = None, False
        self.flat_buffers, self._views, self._snapshot = {}, {}, {}

    def _new_flat(self, kind: Kind) -> torch.Tensor:
        """A new flat buffer for all values of a kind."""
        size = sum(entry.size for entry in self.of_kind(kind))
        return torch.zeros(size, dtype=DTYPES[kind], device=self._device, pin_memory=self._is_pinned)

    def num_trained(self, kind: Kind) -> int:
        """Number of values of trained parameters, which come first in the flat buffer."""
        return sum(entry.size for entry in self.of_kind(kind) if entry.is_trained)

    @property
    def is_divided(self) -> bool:
        """True if this is one process's part of a sharded model."""
        return any(entry.whole is not None for entry in self.entries)

    def trained(self, kind: Kind) -> list[LayoutEntry]:
        """Trained parameters of a kind, in the order of the flat buffer."""
        return [entry for entry in self.of_kind(kind) if entry.is_trained]

    def weights(self, kind: Kind, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views, by name, of the model's own tensors of a kind in a flat one; optimizers' moments come last."""
        entries = [entry for entry in self.of_kind(kind) if not entry.moment]
        views = _views(flat[: sum(entry.size for entry in entries)], entries)
        return {entry.name: view for entry, view in zip(entries, views, strict=True)}

    def of_kind(self, kind: Kind) -> list[LayoutEntry]:
        """The tensors of a kind, in the model's order."""
        return self._by_kind[kind]

    def averaged(self) -> Iterator[tuple[LayoutEntry, torch.Tensor]]:
        """Each averaged tensor with its view of a flat buffer."""
        for kind, views in self._views.items():
            yield from zip(self.of_kind(kind), views, strict=True)

    def gather(self, *, keep: bool = False) -> None:
        """Copies the averaged tensors into the flat buffers, or with `keep` into the snapshot, from which `fill` copies
        them. Asynchronous on CUDA.
        """
        self.gather_buffers(keep=keep)
        self.gather_parameters()

    @torch.no_grad()
    def gather_buffers(self, *, keep: bool) -> None:
        """The first part of `gather`: the tensors that a forward pass may change."""
        if self._is_as_known():
            self._check_kept()
        else:
            self.check()
        self.is_kept = keep
        for kind in self._views:
            if keep and kind not in self._snapshot:
                self._snapshot[kind] = self._new_flat(kind)
        self._gather(is_corrected=False)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """The second part of `gather`: the tensors that only optimizers' steps change."""
        self._gather(is_corrected=True)

    def _gather(self, *, is_corrected: bool) -> None:
        for kind, views in self._views.items():
            entries = self.of_kind(kind)
            targets = _views(self._snapshot[kind], entries) if self.is_kept else views
            pairs = zip(targets, entries, strict=True)
            _copy_all((view, entry.tensor) for view, entry in pairs if entry.is_corrected == is_corrected)

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the snapshot into the flat buffers, if one was gathered."""
        if self.is_kept:
            for kind, flat in self.flat_buffers.items():
                flat.copy_(self._snapshot[kind])

    @torch.no_grad()
    def is_finite(self) -> bool:
        """True if all values in the flat buffers are finite."""
        return all(_is_finite(flat) for flat in self.flat_buffers.values())

    @torch.no_grad()
    def is_model_finite(self) -> bool:
        """True if all averaged values of the model are finite. Waits for the device once."""
        tensors = [entry.tensor for kind in DTYPES for entry in self.of_kind(kind)]
        extremes = [extreme.double() for tensor in tensors if tensor.numel() for extreme in torch.aminmax(tensor)]
        return not extremes or bool(torch.stack(extremes).isfinite().all())

    @torch.no_grad()
    def apply(self) -> None:
        """Replaces the model's averaged tensors by the flat buffers."""
        _copy_all((entry.tensor, view) for entry, view in self.averaged())

    @property
    def _buffers(self) -> list[LayoutEntry]:
        """Broadcast tensors that training changes: all but parameters."""
        return [entry for entry in self.of_kind("broadcast") if not entry.is_trained]

    @property
    def _frozen(self) -> list[LayoutEntry]:
        return [entry for entry in self.of_kind("broadcast") if entry.is_trained]

    @torch.no_grad()
    def copied_buffers(self) -> dict[str, torch.Tensor]:
        """Copies, by name, of the bytes of broadcast tensors that training changes."""
        return {entry.name: raw_bytes(entry.tensor).clone() for entry in self._buffers}

    def frozen_digest(self) -> int:
        """63-bit digest of the frozen parameters, computed where they are; 0 without any."""
        return digest_of(entry.tensor for entry in self._frozen)

    @torch.no_grad()
    def compare(self) -> tuple[float, float]:
        """L2 norms over trained parameters: (this rank's values - result, result). Turns the snapshot into corrections;
        without a snapshot, the model must not have changed since it was gathered.
        """
        changes, sizes = [], []
        for kind, flat in self.flat_buffers.items():
            num, trained = self.num_trained(kind), self.trained(kind)
            # The snapshot becomes result - snapshot in place: another tensor would be one more copy of the model.
            if self.is_kept:
                self._snapshot[kind].neg_().add_(flat)
                changes += _norms(torch.split(self._snapshot[kind][:num], [entry.size for entry in trained]))
            else:
                views = self._views[kind][: len(trained)]
                changes += _norms([entry.tensor.to(flat) - view for entry, view in zip(trained, views, strict=True)])
            sizes += _norms(torch.split(flat[:num], [entry.size for entry in trained]))
        return _norm(changes), _norm(sizes)

    @torch.no_grad()
    def correct(self, bounds: Mapping[Kind, Bounds] | None = None, *, is_alone: bool = False) -> None:
        """Adds the corrections of `compare`, (result - snapshot), to trained parameters and averaged moments, so that
        newer steps are kept; replaces everything else by the result, unless the rank `is_alone`: then the result has
        nothing that its newer values lack. `bounds` has, by kind, those of its trained parameters: a sum goes beyond
        one only as far as the newer steps or the result already do.
        """
        for kind, views in self._views.items():
            entries, known = self.of_kind(kind), (bounds or {}).get(kind, [])
            limits = [*known, *[UNBOUNDED] * (len(entries) - len(known))]  # trained parameters come first
            parts = zip(entries, views, _views(self._snapshot[kind], entries), limits, strict=True)
            for entry, view, correction, ends in parts:
                if not entry.is_corrected:
                    if not is_alone:
                        _copy_all([(entry.tensor, view)])
                    continue
                if entry.moment in NOT_NEGATIVE:
                    # The next step divides by its root, and would be huge for a value near 0.
                    # The lower end is infinite: `keep_within` then lets the sum be as small as the smaller of its two,
                    # and no smaller.
                    ends = [math.inf, math.inf]
                for tensor, result, change in alike(entry.tensor, view, correction):
                    newer = tensor.clone() if ends != UNBOUNDED else None
                    tensor += change.to(tensor.device, non_blocking=True)
                    if newer is not None:
                        keep_within(tensor, ends, newer, result.to(tensor))

    @torch.no_grad()
    def copied_tensors(self) -> list[torch.Tensor]:
        """Copies of the model's averaged tensors, in order."""
        return [entry.tensor.clone() for entry, _ in self.averaged()]

    @torch.no_grad()
    def take_changes(self, before: Sequence[torch.Tensor] | None) -> None:
        """Takes changes that a callback made to the model into the flat buffers. If the model has newer steps, `before`
        has its tensors before the callback, and the differences are added.
        """
        for index, (entry, view) in enumerate(self.averaged()):
            now = entry.tensor.to(view)
            if before is not None:
                old = before[index].to(view)
                # Where result and model were equal, the callback's value is taken as it is: adding would round it.
                now = torch.where(view == old, now, view + (now - old))
            view.copy_(now)

    def result_views(self) -> dict[str, torch.Tensor]:
        """The round's result, as views of the flat buffers, by name."""
        return {entry.name: view for entry, view in self.averaged()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's present tensors that are averaged, by name."""
        found = {entry.name: entry.find() for entry, _ in self.averaged()}
        return {name: one for name, one in found.items() if one is not None}

    @torch.no_grad()
    def swap(self) -> None:
        """Swaps the model's averaged tensors and the flat buffers."""
        for entry, view in self.averaged():
            for tensor, part in alike(entry.tensor, view):
                held = tensor.clone()
                tensor.copy_(part)
                part.copy_(held)

    @torch.no_grad()
    def digest(self) -> int:
        """63-bit digest of all the model's tensors, computed where they are."""
        return digest_of(entry.tensor for entry in self.entries)

    @torch.no_grad()
    def result_digest(self) -> int:
        """63-bit digest of the result in the flat buffers and of the broadcast tensors that training changes, computed
        where they are. Not of frozen ones: they were equal when the round was entered, and newer steps may change them.
        """
        return digest_of((*self.flat_buffers.values(), *(entry.tensor for entry in self._buffers)))

    @torch.no_grad()
    def buffer_bytes(self, copies: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The bytes of the broadcast tensors that training changes, or their `copies`, where the flat buffers are."""
        kept = copies or {}
        return self._joined(kept[one.name] if one.name in kept else raw_bytes(one.tensor) for one in self._buffers)

    @torch.no_grad()
    def frozen_bytes(self) -> torch.Tensor:
        """The bytes of the frozen parameters, in order, on the device of the flat buffers."""
        return self._joined(raw_bytes(one.tensor) for one in self._frozen)

    def _joined(self, raws: Iterable[torch.Tensor]) -> torch.Tensor:
        parts = [raw.to(self._device) for raw in raws]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def apply_bytes(self, raw: torch.Tensor) -> None:
        """Copies the bytes of `buffer_bytes` into the model, and those of `frozen_bytes` if they follow."""
        for entry, start, end in self._parts_of(raw):
            # copied, since only aligned bytes can be viewed as another dtype
            entry.tensor.copy_(raw[start:end].clone().view(entry.dtype).reshape(entry.shape))

    def _parts_of(self, raw: torch.Tensor) -> Iterator[tuple[LayoutEntry, int, int]]:
        """The tensors whose bytes are in `raw`, each with start and end there."""
        offset = 0
        for entry in (*self._buffers, *self._frozen):
            if offset == raw.numel():
                return
            size = entry.size * entry.dtype.itemsize
            yield entry, offset, offset + size
            offset += size

    @torch.no_grad()
    def own_values(self, raw: torch.Tensor) -> Callable[[], None]:
        """Copies the model's tensors whose bytes are in `raw`; the returned function copies them back."""
        own = [(entry, entry.tensor.clone()) for entry, _, _ in self._parts_of(raw)]

        @torch.no_grad()
        def put_back() -> None:
            for entry, tensor in own:
                entry.tensor.copy_(tensor)

        return put_back


@torch.no_grad()
def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """63-bit digest of the tensors' bytes, in order, computed where they are; 0 without any."""
    digest = 0
    for tensor in tensors:
        digest = (digest * 1_000_003 + _fast_digest(raw_bytes(tensor))) % 2**64
    return (digest ^ digest >> 63) % 2**63  # a change of a word's highest bit changes only this highest bit


def _parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters, those of modules with several places once for each of them."""
    waiting, seen = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield from (one for one in module._parameters.values() if one is not None)
            waiting.extend(one for one in module._modules.values() if one is not None)


def _entries(model: nn.Module, buffers: str) -> list[LayoutEntry]:
    named = [*model.named_parameters(), *([] if buffers == "local" else model.named_buffers())]
    owners = dict(model.named_modules(remove_duplicate=False))  # a ScriptModule has no get_submodule
    entries = []
    for name, tensor in without_copies((name, one) for name, one in named if is_plain(one)):
        path, _, key = name.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        is_statistic = buffers == "average" and key.startswith(STATISTIC)
        is_averaged = tensor.requires_grad if is_parameter else is_statistic
        if is_statistic and not is_parameter and not tensor.isfinite().all():
            raise InvalidJob(
                f"the model's {name} is not finite (NaN or infinite), and rounds average buffers named {STATISTIC}...: "
                "give a buffer that is no mean another name, or buffers='from_source', with which one rank's is copied"
            )
        entries.append(_entry(name, owners[path], key, tensor, is_averaged, is_parameter))
    return entries


def _empty_buffers(model: nn.Module) -> list[LayoutEntry]:
    """Buffers of a `state_dict` that have no values yet. Others without values, such as caches, stay each rank's."""
    owners = dict(model.named_modules(remove_duplicate=False))
    kept = model.state_dict().keys()
    empty = [(name, one) for name, one in model.named_buffers() if is_plain(one) and not one.numel() and name in kept]
    return [
        _entry(name, owners[path], key, one, False, False)
        for name, one in empty
        for path, _, key in [name.rpartition(".")]
    ]


def _entry(
    name: str, owner: nn.Module, key: str, tensor: torch.Tensor, is_averaged: bool, is_parameter: bool
) -> LayoutEntry:
    data = _plain(tensor)
    assert data is not None
    kind = _kind(data, is_averaged)
    whole = torch.Size((*tensor.shape, 2) if tensor.is_complex() else tensor.shape) if is_divided(tensor) else None
    return LayoutEntry(name, lambda: getattr(owner, key, None), data.shape, data.dtype, kind, is_parameter, whole)


def _optimizer_entries(model: nn.Module, optimizer: Optimizer, policy: str) -> list[LayoutEntry]:
    """The optimizer's state tensors, named after their parameters, and in the order of the model: a group that is made
    of a set has another in each process. Step counters are broadcast.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    places = {parameter: place for place, parameter in enumerate(names)}
    stepped = enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])
    entries = []
    for index, parameter in sorted(stepped, key=lambda one: places.get(one[1], len(places))):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            data = _plain(value) if isinstance(value, torch.Tensor) and value.numel() else None
            if data is not None:
                name = f"optimizer state {key} of {names.get(parameter, f'parameter {index}')}"
                kind = _kind(data, policy == "average" and data.numel() > 1)
                find = _finder(optimizer, parameter, key)
                moment = key if kind != "broadcast" else ""
                entries.append(LayoutEntry(name, find, data.shape, data.dtype, kind, False, moment=moment))
    return entries


def _finder(optimizer: Optimizer, parameter: torch.Tensor, key: str) -> Callable[[], torch.Tensor | None]:
    return lambda: optimizer.state[parameter].get(key)


FIRST_VALUES = {"step": 0.0, "mu_product": 1.0, "eta": None, "step_size": None}
"""Initial values of the state that a step with zero gradients and rate 0 changes, in PyTorch's optimizers (the last
three are of NAdam, ASGD and Rprop); None: the learning rate."""


def _materialize(optimizer: Optimizer) -> None:
    """Has the optimizer create its state by a step with zero gradients and learning rate 0, which is not counted:
    rounds need the state's tensors before the first batch.
    """
    if optimizer.state:
        return
    # Weight decay, too: optimizers that add it to the gradient would begin with moments that are not zero.
    changed = ("lr", "weight_decay")
    kept: list[dict[str, Any]] = [
        {key: group[key] for key in changed if key in group} for group in optimizer.param_groups
    ]
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        for key, value in values.items():
            group[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    try:
        optimizer.step()
    except TypeError:
        raise InvalidJob("optimizer_state needs an optimizer whose step() needs no closure; use 'local'") from None
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)
    optimizer.zero_grad(set_to_none=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, first in FIRST_VALUES.items():
                if isinstance(value := state.get(name), torch.Tensor):
                    value.fill_(group["lr"] if first is None else first)
            if isinstance(state.get("step"), int):  # as optimizers outside of PyTorch count steps
                state["step"] = 0


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, or this process's part of it, detached and with complex numbers as pairs."""
    if tensor is None:
        return None
    tensor = local_of(tensor)
    return torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data


def _kind(tensor: torch.Tensor, is_averaged: bool) -> Kind:
    if not is_averaged or not tensor.is_floating_point():
        return "broadcast"
    return "float64" if tensor.dtype == torch.float64 else "float32"


def _views(flat: torch.Tensor, entries: list[LayoutEntry]) -> list[torch.Tensor]:
    parts = torch.split(flat, [entry.size for entry in entries]) if entries else ()
    return [part.view(entry.shape) for part, entry in zip(parts, entries, strict=True)]


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second of each pair to the first, on CUDA asynchronously."""
    for one, other in pairs:
        for target, source in alike(one, other):
            target.copy_(source, non_blocking=target.is_cuda or source.is_cuda)


def _norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(one).double() for one in tensors]


def _norm(parts: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0


def _is_finite(flat: torch.Tensor) -> bool:
    """Checks both extremes in one pass without a temporary: a NaN shows in both."""
    return not flat.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(flat))


def _fast_digest(raw: torch.Tensor) -> int:
    """64-bit digest of bytes: a weighted sum of its 64-bit words, from their sums by row and by column, in wrapping
    integer arithmetic. So it does not depend on the order in which a device adds, and costs one pass over the bytes
    where they are. Each word has an odd weight of its own, so that it changes the digest whatever bits of it change. It
    finds faults, not attacks.
    """
    num_words = raw.numel() // 8 - raw.numel() // 8 % COLUMNS
    # Only bytes that begin at a multiple of 8 can be viewed as words.
    if raw.storage_offset() % 8:
        raw = raw.clone()
    rest = raw[8 * num_words :].to(torch.int64)
    weights = torch.arange(1, 2 * len(rest) + 1, 2, device=raw.device)
    total = (rest * weights).sum()
    if num_words:
        rows = raw[: 8 * num_words].view(torch.int64).view(-1, COLUMNS)
        of_columns, of_rows = rows.sum(0), rows.sum(1)
        total += (of_columns * torch.arange(1, 2 * COLUMNS + 1, 2, device=raw.device)).sum()
        total += (of_rows * torch.arange(0, 2 * COLUMNS * len(rows), 2 * COLUMNS, device=raw.device)).sum()
    return int(total) % 2**64


def _hash(entries: list[LayoutEntry]) -> int:
    """63-bit hash of the layout, which fits the header's signed integers."""
    text = "\n".join(str(entry) if entry.whole is None else f"{entry} {tuple(entry.shape)}" for entry in entries)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

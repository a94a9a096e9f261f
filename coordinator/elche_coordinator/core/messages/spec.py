"""Values of which messages are made: what a client submits, leases, headers, and what ranks are compared by."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from math import prod
from operator import add
from typing import Any

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import Epoch, LeaseId, Rank

MAX_WHOLE = 2**53
"""The largest whole number that JSON represents exactly."""


def whole_number(value: object, name: str) -> int:
    """The value, which a checkpoint or a record has for a count. Raises `ValueError` when it is none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WHOLE:
        raise ValueError(f"the checkpoint's {name} is {str(value)[:40]}, which is no count")
    return value


def figures(state: Mapping[str, object]) -> dict[str, float]:
    """A checkpoint's metrics by name. Raises `ValueError` for a value that is no number or a name that is no UTF-8."""
    for name, value in state.items():
        if not isinstance(value, int | float) or len(name.encode("utf-8", "ignore").decode()) != len(name):
            raise ValueError(
                f"the checkpoint's metric {name[:40]!a} is {str(value)[:40]!a}, which is no number with a name"
            )
    return {name: float(value) for name, value in state.items() if isinstance(value, int | float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSum:
    """A tensor that an evaluation sums over its samples, as 8 bytes per value, little-endian."""

    shape: tuple[int, ...]
    is_integer: bool
    """True if its values are int64, and not float64."""
    data: bytes

    @property
    def is_whole(self) -> bool:
        """True if there are as many values as the shape says."""
        return len(self.data) == 8 * prod(self.shape)

    def plus(self, other: "TensorSum") -> "TensorSum":
        """The sum with a tensor of the same shape; of integers if both are."""
        is_integer = self.is_integer and other.is_integer
        values: Iterable[Any] = map(add, self._values(), other._values())
        if is_integer:  # as torch adds them: without a limit check
            values = ((value + 2**63) % 2**64 - 2**63 for value in values)
        data = struct.pack(f"<{prod(self.shape)}{'q' if is_integer else 'd'}", *values)
        return TensorSum(shape=self.shape, is_integer=is_integer, data=data)

    def _values(self) -> tuple[Any, ...]:
        return struct.unpack(f"<{prod(self.shape)}{'q' if self.is_integer else 'd'}", self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Part of an epoch's permutation."""

    epoch: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A slice of an epoch's permutation, given to one rank."""

    id: LeaseId
    epoch: Epoch
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What one rank brought into a round."""

    slices: tuple[Slice, ...] = ()
    """In the order in which it trained them; whole batches, but for an epoch's tail."""
    num_batches: int = 0
    newer_batches: int = 0
    """Batches that it had made after these when the result was applied to its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRound:
    """A committed round, as far as it can be repeated."""

    parts: tuple[RankPart, ...]
    """In rank order."""
    generation: int = 0
    """Differs from that of the round before when the ranks have changed; 0: not recorded."""

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return sum(piece.size for part in self.parts for piece in part.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another rank, as it can be reached."""

    rank: Rank
    address: str
    """HOST:PORT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a client asked for."""

    name: str
    source_hash: str
    """Names the text of the user's file, which the core does without; empty: there is none."""
    file_name: str
    num_ranks: int = 0
    """Ranks, or replica groups; 0: as many as fit the slots that are free when the job is placed."""
    min_ranks: int = 0
    """How many suffice to begin with; others join when there are slots for them. 0: all."""
    slow_factors: dict[int, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Replace the file's; values as JSON."""
    output_dir: str = ""
    verify_rounds: bool = False
    resume: str = ""
    """Checkpoint to go on from."""
    replay: tuple[RecordedRound, ...] = ()
    """Rounds to repeat instead of planning them."""
    is_loop: bool = False
    """A loop of the user's own: its processes run already, and elche cannot start them."""
    arguments: tuple[str, ...] = ()
    """What the user's file finds in `sys.argv` after its own name."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """What it finds in its environment beside that of the agent. Values are shown to nobody."""
    submitted_by: str = ""
    """Who submitted it, as USER@HOST; the client's word, not checked."""
    bundle: str = ""
    """The packed folder in which `file_name` is; empty: the file is alone."""
    priority: int = 0
    """Jobs with more get slots first, and may take them from those with less."""
    project: str = ""
    """Whose slots it takes; empty: its submitter's own."""
    conditions: tuple[str, ...] = ()
    """What every device that it gets meets (`elche.selector`)."""
    requirements: tuple[str, ...] = ()
    """Packages that its file needs beside those of the hosts."""
    module: str = ""
    """The job in the bundle, as PACKAGE.MODULE:NAME; empty: `job` of `file_name`."""
    secrets: tuple[str, ...] = ()
    """Environment variables whose values are the hosts'."""

    @property
    def account(self) -> str:
        """The project, or the user who submitted it."""
        return self.project or self.submitted_by.partition("@")[0]

    @property
    def group_size(self) -> int:
        """Processes that are one rank: a replica group. It is known before the file is read, from the settings."""
        return _group_size(self.settings.get("group_size", "1"))

    @property
    def least_ranks(self) -> int:
        """How many ranks suffice to begin with."""
        return self.min_ranks or self.num_ranks or 1

    @property
    def on_rank_loss(self) -> str | None:
        """What the submission asks for; None: what the file says."""
        text = self.settings.get("on_rank_loss")
        return None if text is None else str(json.loads(text))


@lru_cache(maxsize=256)
def _group_size(text: str) -> int:
    return int(json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device of an agent that can hold one rank."""

    device: str
    model: str = ""
    memory_bytes: int = 0
    """Its memory, or its share of it; 0: unknown."""
    repeats: bool = False
    """True if one job may get the device as often as it is offered. CPUs need not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A rank's device and libraries, on which the choice of the backend depends."""

    device_type: str = "cpu"
    device_id: str = ""
    """Names one device among all hosts'; empty when it has no name."""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    needs_encryption: bool = False
    """True if nothing that leaves its host may be sent unencrypted, as gloo and NCCL do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRow:
    """What one rank brought into a round."""

    weight: int
    """Samples since the last average."""
    cut: int
    """Samples, in the order of its leases, that its snapshot contains."""
    local_step: int
    """Batches that its snapshot contains."""
    compute_us: int
    """Time of the batches since the last round, without the waits for their data."""
    finite: bool = True
    version: int = 0
    """The version of its parameters before the round; 0: none yet."""
    unusual: bool = False
    """True if its step is far longer than its steps before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWork:
    """What one rank trained in one epoch, as the losses and scalars say it."""

    epoch: int
    num_batches: int
    num_samples: int
    loss_sum: float
    has_loss: bool = True
    """True if the losses are known, as they may not be in a loop of the user's own."""
    scalars: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Name to (sum, count)."""


def first_disagreement(settings: dict[Rank, AgreedSettings]) -> str | None:
    """Names the first field on which two ranks' files differ, and both values; None when all agree."""
    (first_rank, first), *others = sorted(settings.items())
    for rank, other in others:
        for name in AgreedSettings.__dataclass_fields__:
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                what = "the model's parameters" if name == "layout_hash" else name
                values = "" if name == "layout_hash" else f": {mine!r} and {theirs!r}"
                return f"ranks {first_rank} and {rank} differ in {what}{values}; the file must not depend on the host"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A rank's model in words, one line for each tensor: "NAME DTYPE SHAPE KIND"."""

    rank: Rank
    layout_hash: int
    tensors: tuple[str, ...]

    def difference(self, other: "Architecture") -> str | None:
        """Names the first tensor in which another rank's model differs; None when it does not."""
        if self.layout_hash == other.layout_hash:
            return None
        for mine, theirs in zip_longest(self.tensors, other.tensors, fillvalue=""):
            if mine != theirs:
                has = f"rank {self.rank} has {mine or 'nothing more'}"
                return f"the ranks' models differ: {has}, and rank {other.rank} has {theirs or 'nothing more'}"
        return None


def plain(value: Any) -> Any:
    """A message as plain values, its fields by name; many times faster than `asdict`, since nothing is copied."""
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: plain(getattr(value, name)) for name in fields}

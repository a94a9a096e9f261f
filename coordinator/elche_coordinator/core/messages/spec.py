"""Values in messages: submissions, leases, headers, and the settings by which ranks are compared."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from math import prod
from operator import add
from typing import Any

from elche.samples import are_alike
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.ids import Epoch, LeaseId, Rank

MAX_WHOLE = 2**53
"""The largest integer that all JSON implementations represent exactly."""


def whole_number(value: object, name: str) -> int:
    """Returns `value`, read from a checkpoint or a record, if it is a count. Raises `ValueError` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WHOLE:
        raise ValueError(f"the checkpoint's {name} is {str(value)[:40]}, which is not a count")
    return value


def figures(state: Mapping[str, object]) -> dict[str, float]:
    """A checkpoint's metrics by name. Raises `ValueError` unless all values are numbers and all names are UTF-8."""
    found = {}
    for name, value in state.items():
        if not isinstance(value, int | float):
            raise ValueError(f"the checkpoint's metric {name[:40]!a} is {str(value)[:40]!a}, which is not a number")
        # JSON may have half of a surrogate pair, which no message and no database can carry.
        if len(name.encode("utf-8", "ignore").decode()) != len(name):
            raise ValueError(f"the checkpoint has a metric named {name[:40]!a}, which is not UTF-8")
        found[name] = float(value)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSum:
    """A tensor that an evaluation sums over its samples, as 8 bytes per value, little-endian."""

    shape: tuple[int, ...]
    is_integer: bool
    """True for int64, False for float64."""
    data: bytes

    @property
    def is_whole(self) -> bool:
        """True if the number of values fits the shape."""
        return len(self.data) == 8 * prod(self.shape)

    def plus(self, other: "TensorSum") -> "TensorSum":
        """The sum with a tensor of the same shape, int64 if both are."""
        is_integer = self.is_integer and other.is_integer
        values: Iterable[Any] = map(add, self._values(), other._values())
        if is_integer:  # wraps on overflow, as torch does
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
    """One rank's contribution to a round."""

    slices: tuple[Slice, ...] = ()
    """Slices in the order of training; whole batches, except at an epoch's end."""
    num_batches: int = 0
    newer_batches: int = 0
    """Batches that it had made after these when it applied the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRound:
    """A committed round, with the data to repeat it."""

    parts: tuple[RankPart, ...]
    """In rank order."""
    generation: int = 0
    """Differs from the previous round's if the ranks have changed; 0: not recorded."""

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return sum(piece.size for part in self.parts for piece in part.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another rank's address."""

    rank: Rank
    address: str
    """HOST:PORT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A client's submission."""

    name: str
    source_hash: str
    """Id of the text of the user's file, which the core does not need; empty: there is none."""
    file_name: str
    num_ranks: int = 0
    """Ranks, or replica groups; 0: as many as fit the slots that are free when the job is placed."""
    min_ranks: int = 0
    """Ranks that suffice to begin; others join when there are slots for them. 0: all."""
    slow_factors: dict[int, float] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Settings that replace the file's, as JSON."""
    output_dir: str = ""
    verify_rounds: bool = False
    resume: str = ""
    """Checkpoint to resume from."""
    resume_host: str = ""
    """Name of the host that wrote it."""
    resume_work_folder: str = ""
    """Id of the work folder that it is in, which one of the job's hosts must have; empty: any hosts will do."""
    resume_version: int = 0
    """Version of the newest checkpoint that was known there. With an older one a job does not go back, and a new one
    says so.
    """
    replay: tuple[RecordedRound, ...] = ()
    """Rounds to repeat instead of planning them."""
    is_loop: bool = False
    """True for a user-owned loop."""
    arguments: tuple[str, ...] = ()
    """`sys.argv` of the user's file, without its own name."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variables in addition to the agent's. Values are never shown."""
    submitted_by: str = ""
    """The name of the submitter's token; without one USER@HOST, as the client says."""
    bundle: str = ""
    """Checksum of the bundle that contains `file_name`; empty: the file is sent alone."""
    priority: int = 0
    """Jobs with a higher priority get slots first, and may preempt those with a lower one."""
    project: str = ""
    """Project whose slots it uses; empty: its submitter's."""
    conditions: tuple[str, ...] = ()
    """Conditions on each device that it gets (`elche.selector`)."""
    requirements: tuple[str, ...] = ()
    """Packages that its file needs in addition to the hosts'."""
    module: str = ""
    """The job in the bundle, as PACKAGE.MODULE:NAME; empty: `job` of `file_name`."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables whose values the hosts have."""
    artifacts: str = ""
    """Its artifact store; empty: the coordinator's."""

    @property
    def account(self) -> str:
        """The project, or the user who submitted it."""
        return self.project or self.submitted_by.partition("@")[0]

    @property
    def is_attached(self) -> bool:
        """True for a user-owned loop whose processes the user has started: elche cannot start them."""
        return self.is_loop and not self.source_hash

    @property
    def group_size(self) -> int:
        """Processes of each rank: its replica group's size. Taken from the settings, before the file is read."""
        return _group_size(self.settings.get("group_size", "1"))

    @property
    def least_ranks(self) -> int:
        """Number of ranks that suffice to begin."""
        return self.min_ranks or self.num_ranks or 1

    def scaled(self, num_ranks: int) -> "JobSpec":
        """The submission with another number of ranks; the least number is lowered to it."""
        return replace(self, num_ranks=num_ranks, min_ranks=min(self.min_ranks, num_ranks))

    @property
    def slots_on_one_host(self) -> int:
        """Number of slots that must be on one host: a replica group's, or all of a loop's."""
        return self.least_ranks if self.is_loop else self.group_size

    @property
    def on_rank_loss(self) -> str | None:
        """The submission's setting; None: the file's."""
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
    """Memory in bytes of the device, or its share of it; 0: unknown."""
    repeats: bool = False
    """True if one job may use several slots of the device. Always so for CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A rank's device and libraries, by which the backend is chosen."""

    device_type: str = "cpu"
    device_id: str = ""
    """Unique id of the device; empty if it has none."""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    needs_encryption: bool = False
    """True if gloo and NCCL, which do not encrypt, may not be used between hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRow:
    """One rank's contribution to a round."""

    weight: int
    """Samples since the last average."""
    cut: int
    """Samples, in the order of its leases, that its snapshot contains."""
    local_step: int
    """Batches that its snapshot contains."""
    compute_us: int
    """Compute time in microseconds of the batches since the last round, without waits for data."""
    finite: bool = True
    version: int = 0
    """The version of its parameters before the round; 0: none yet."""
    unusual: bool = False
    """True if its step is far longer than its earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochWork:
    """One rank's work in one epoch, with losses and scalars."""

    epoch: int
    num_batches: int
    num_samples: int
    loss_sum: float
    has_loss: bool = True
    """True if the losses are known; they may not be in a user-owned loop."""
    scalars: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Name to (sum, count)."""
    num_skipped: int = 0
    """Further batches, whose samples count too, for which the data gave None: they were not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFigures:
    """Figures of one value of a sample, as in `elche.samples`."""

    figures: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRead:
    """A sample of the data set, as a rank has read it."""

    index: int
    values: tuple[ValueFigures, ...]

    def is_like(self, other: "SampleRead") -> bool:
        """True if the other rank has read the same."""
        return are_alike([one.figures for one in self.values], [one.figures for one in other.values])


def first_disagreement(settings: dict[Rank, AgreedSettings]) -> str | None:
    """Describes the first field in which two ranks' files differ, with both values; None when all agree."""
    (first_rank, first), *others = sorted(settings.items())
    for rank, other in others:
        for name in AgreedSettings.__dataclass_fields__:
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                what = "the model's parameters" if name == "layout_hash" else name
                values = "" if name == "layout_hash" else f": {mine!r} and {theirs!r}"
                return f"ranks {first_rank} and {rank} differ in {what}{values}; they must agree: seed random choices"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Descriptions of the tensors of a rank's model, "NAME DTYPE SHAPE KIND"."""

    rank: Rank
    layout_hash: int
    tensors: tuple[str, ...]

    def difference(self, other: "Architecture") -> str | None:
        """Describes the first tensor in which another rank's model differs; None when they are equal."""
        if self.layout_hash == other.layout_hash:
            return None
        for mine, theirs in zip_longest(self.tensors, other.tensors, fillvalue=""):
            if mine != theirs:
                has = f"rank {self.rank} has {mine or 'nothing more'}"
                return f"the ranks' models differ: {has}, and rank {other.rank} has {theirs or 'nothing more'}"
        return None


def plain(value: Any) -> Any:
    """A message as plain values, fields by name. Much faster than `asdict`, since values are not copied."""
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: plain(getattr(value, name)) for name in fields}

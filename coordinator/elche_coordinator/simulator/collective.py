"""Process groups of synthetic ranks: what a round's collective gives to each member, also when one dies in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Protocol

from elche_coordinator.core.messages.ids import Attempt, GenerationId, Rank, RoundId
from elche_coordinator.core.messages.spec import HeaderRow, Lease
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.core.work.intervals import IntervalSet
from elche_coordinator.simulator.clock import VirtualClock


@dataclass(slots=True)
class Parameters:
    """Stands for a model's parameters: the samples that they were trained with. A new version is a new value."""

    version: int = 0
    seen: dict[int, IntervalSet] = field(default_factory=dict)
    """By epoch, the positions in them."""

    def with_pieces(self, pieces: list[Lease]) -> "Parameters":
        """The next version, with these slices in it. Raises `ValueError` when one is there already."""
        seen = {epoch: IntervalSet(parts) for epoch, parts in self.seen.items()}
        for piece in pieces:
            seen.setdefault(piece.epoch, IntervalSet()).add(piece.offset, piece.offset + piece.size)
        return Parameters(self.version + 1, seen)


@dataclass(slots=True)
class RoundEntry:
    """One rank's contribution to a collective."""

    rank: "GroupMember"
    generation: GenerationId
    row: HeaderRow
    pieces: list[Lease]
    compute_s: float
    entered_s: float


class GroupMember(Protocol):
    """A rank, as its process groups know it."""

    address: Address
    attempt: Attempt
    is_alive: bool
    parameters: Parameters
    positions: dict[GenerationId, int]
    """Of each of its groups, where it is in it."""

    @property
    def is_frozen(self) -> bool:
        """True if the process is stopped."""

    def is_in(self, entry: "RoundEntry") -> bool:
        """True if it still waits for the result of this contribution."""

    def on_formed(self, generation: GenerationId) -> None:
        """The process group of a generation stands."""

    def on_apart(self, generation: GenerationId) -> None:
        """The process group of a generation cannot be built: its members cannot reach each other."""

    def receive_result(
        self, round_id: RoundId, header: tuple[HeaderRow, ...], result: Parameters, entry: RoundEntry
    ) -> None:
        """The collective has finished."""

    def give_up(self, round_id: RoundId, entry: RoundEntry) -> None:
        """The round is given up on all members."""

    def fail(self, round_id: RoundId, entry: RoundEntry) -> None:
        """The collective has failed here, since a member is gone."""


FROZEN_S = 0.02
"""A collective with a member that is stopped, or over a broken link, looks again after this time."""


class Fate(Enum):
    """The end of a collective for a survivor when another member dies in it."""

    RECEIVES = auto()
    FAILS = auto()
    BLOCKS = auto()
    """Until the generation is abandoned."""


class Collective:
    """The process groups of all generations: a round's result is there when every member has entered. `breaks` says
    which rounds are given up instead; `fate` how a round ends for each that is left of a group in which one has died.
    """

    def __init__(
        self,
        clock: VirtualClock,
        sync_s: Callable[[], float],
        *,
        breaks: Callable[[RoundId], bool],
        fate: Callable[[], Fate],
        build_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._sync_s = sync_s
        self.breaks = breaks
        self.fate = fate
        self._build_s = build_s
        self.broken: set[frozenset[int]] = set()
        """Pairs of ranks that cannot reach each other."""
        self.unreached_s = 30.0
        """Seconds until the building of a group over a broken link fails; without any link it fails at once."""
        self.death_seen_s: float | None = None
        """Seconds until the building of a group in which a rank has died fails on the others; None: it does not end."""
        self.mistaken: set[int] = set()
        """Ranks that say that they reach all."""
        self._relayed: set[tuple[Attempt, GenerationId]] = set()
        self._groups: dict[tuple[Attempt, GenerationId], list[GroupMember]] = {}
        self._entries: dict[tuple[Attempt, GenerationId, RoundId], list[RoundEntry]] = {}

    def join(self, generation: GenerationId, rank: "GroupMember", world_size: int, *, is_relayed: bool) -> None:
        """One member is ready to build the group; it stands a while after the last one is, if all live. A relayed one
        needs no links.
        """
        if is_relayed:
            self._relayed.add((rank.attempt, generation))
        members = self._groups.setdefault((rank.attempt, generation), [])
        members.append(rank)
        if len(members) == world_size:
            self._clock.after(self._build_s, partial(self._stand, generation, members))

    def can_meet(self, generation: GenerationId, members: "Sequence[GroupMember]") -> bool:
        """True if no link that they need between any two of them is broken."""
        if (members[0].attempt, generation) in self._relayed:
            return True
        ranks = {int(member.address["rank"]) for member in members}
        return not any(pair <= ranks for pair in self.broken)

    def reached(self, rank: int, others: Sequence[Rank]) -> tuple[Rank, ...]:
        """Those of the others that the rank says it can reach."""
        return tuple(one for one in others if rank in self.mistaken or {one, rank} not in self.broken)

    def _stand(self, generation: GenerationId, members: "list[GroupMember]") -> None:
        if not self.can_meet(generation, members):
            self._fail_to_build(generation, members, self.unreached_s)
        elif any(member.is_frozen for member in members):
            self._clock.after(FROZEN_S, partial(self._stand, generation, members))
        elif all(member.is_alive for member in members):
            for member in members:
                member.on_formed(generation)
        elif self.death_seen_s is not None:
            self._fail_to_build(generation, members, self.death_seen_s)

    def _fail_to_build(self, generation: GenerationId, members: "list[GroupMember]", after_s: float) -> None:
        for member in members:
            self._clock.after(after_s, partial(member.on_apart, generation))

    def enter(self, round_id: RoundId, entry: RoundEntry) -> None:
        """One rank's part; the last one's entry starts the averaging."""
        attempt, generation = entry.rank.attempt, entry.generation
        entries = self._entries.setdefault((attempt, generation, round_id), [])
        entries.append(entry)
        if len(entries) == len(self._groups[attempt, generation]):
            entries.sort(key=lambda one: one.rank.positions[one.generation])
            self._clock.after(self._sync_s(), partial(self._finish, round_id, entries))

    def _finish(self, round_id: RoundId, entries: list[RoundEntry]) -> None:
        members = self._groups[entries[0].rank.attempt, entries[0].generation]
        if any(member.is_frozen for member in members):
            self._clock.after(FROZEN_S, partial(self._finish, round_id, entries))
            return
        if not all(entry.rank.is_in(entry) for entry in entries):
            for entry in entries:  # some have given it up, and closed their connections
                entry.rank.fail(round_id, entry)
            return
        if not self.can_meet(entries[0].generation, members):
            self._clock.after(FROZEN_S, partial(self._finish, round_id, entries))
            return
        if self.breaks(round_id):
            for entry in entries:
                entry.rank.give_up(round_id, entry)
            return
        header = tuple(entry.row for entry in entries)
        source = max(entries, key=lambda entry: entry.row.version)
        result = source.rank.parameters.with_pieces([piece for entry in entries for piece in entry.pieces])
        is_whole = all(member.is_alive for member in members)
        for entry in entries:
            fate = Fate.RECEIVES if is_whole else self.fate()
            if fate is Fate.RECEIVES:
                entry.rank.receive_result(round_id, header, result, entry)
            elif fate is Fate.FAILS:
                entry.rank.fail(round_id, entry)

"""Finds ranks that cannot reach each other, when all are in an averaging that does not end (protocol P24.1), or a first
group does not form (P24.4).
"""

from collections.abc import Mapping

from elche_coordinator.core.messages.commands import SendProbe
from elche_coordinator.core.messages.events import LinksProbed
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.spec import Peer
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, present
from elche_coordinator.core.rounds.generation import Generation

STUCK_S = 1.0
"""Seconds after which the ranks of an averaging test their links, or `TIMES` the longest recent averaging if that is
longer. If all are connected, they test again after twice the time, and so on: a large model on a slow link takes long.
"""
TIMES = 4.0
"""Multiple of the longest recent averaging after which another one counts as too long."""
BUILD_S = 5.0
"""Seconds after which the ranks of a group that is being built test their links."""


class LinkWatch:
    """Has the ranks of one training test their links, and decides whom to leave out if not all are connected."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._watched: tuple[str, int] | None = None
        """The averaging, or the group being built, that is watched."""
        self._since_s = 0.0
        """Time at which it was first seen."""
        self._num_asked = 0
        """Number of times that its ranks were asked."""
        self._asked: RankRecords = {}
        """Ranks that are asked now; empty between two tests."""
        self._answers: dict[Rank, frozenset[Rank]] = {}
        """The ranks that each of them can reach, as far as they have answered."""

    def is_of(self, generation: Generation | None) -> bool:
        """True if the asked ranks build the group of this generation."""
        return generation is not None and self._watched == ("group", generation.id)

    @property
    def is_of_group(self) -> bool:
        """True if the asked ranks build a group."""
        return self._watched is not None and self._watched[0] == "group"

    def check(
        self, standing: Generation | None, first: Generation | None, longest_averaging_ms: float, now_s: float
    ) -> None:
        """Asks the members of an averaging that all have entered and that takes too long, or those of a `first` group
        that takes too long or could not be built. Ranks that average through the coordinator are not asked.
        """
        generation = first or standing
        if generation is None or generation.backend.is_relayed:
            return None
        if first is not None:
            return self._watch(("group", first.id), first, 0.0 if first.failure else BUILD_S, now_s)
        assert standing is not None
        # Before all have entered, a round waits for whoever is late, and links prove nothing.
        stuck = next((one for one in standing.rounds if len(one.entered) == len(one.targets)), None)
        if stuck is None or standing.abandoned is not None or all(rank in stuck.results for rank in stuck.targets):
            self._watched, self._asked = None, {}
            return None
        patience_s = max(STUCK_S, TIMES * longest_averaging_ms / 1000)
        return self._watch(("round", stuck.id), standing, patience_s, now_s)

    def _watch(self, what: tuple[str, int], generation: Generation, patience_s: float, now_s: float) -> None:
        """Asks the ranks once `what` has lasted for `patience_s` seconds, and again after twice the time, and so on."""
        if what != self._watched:
            self._watched, self._since_s, self._num_asked = what, now_s, 0
            self._asked.clear()
        there = {rank: one for rank, one in present(generation.members).items() if one.links_address}
        if self._asked or now_s - self._since_s < patience_s * 2**self._num_asked or len(there) < 2:
            return
        self._num_asked += 1
        self._asked, self._answers = there, {}
        for rank, record in there.items():
            peers = tuple(Peer(rank=one.rank, address=one.links_address) for one in there.values() if one.rank != rank)
            self._outbox.add(SendProbe(**record.address, peers=peers))

    def on_probed(self, record: RankRecord, event: LinksProbed) -> dict[Rank, str] | None:
        """Records a rank's answer. Returns None until all have answered; then the ranks to leave out with reasons, of
        equally connected ones the highest. Empty if all reach each other: the averaging is only slow.
        """
        if self._asked.get(record.rank) is not record:
            self._outbox.refuse(event, f"rank {record.rank} was not asked", "the averaging has gone on, or ended")
            return None
        self._answers[record.rank] = frozenset(event.ranks)
        there = present(self._asked)
        if not there.keys() <= self._answers.keys():
            return None
        self._asked = {}
        links = {
            rank: {other for other in there if other in self._answers[rank] and rank in self._answers[other]}
            for rank in there
        }
        return {rank: _why(rank, links[rank], there) for rank in _apart(links)}


def _apart(links: Mapping[Rank, set[Rank]]) -> list[Rank]:
    """The ranks to leave out so that all others reach each other: the one with the fewest links, of several the
    highest, until that holds. Not always the fewest ranks, which take exponential time to find.
    """
    left, apart = {rank: set(others) for rank, others in links.items()}, []
    while any(len(others) < len(left) - 1 for others in left.values()):
        worst = min(left, key=lambda rank: (len(left[rank]), -rank))
        apart.append(worst)
        del left[worst]
        for others in left.values():
            others.discard(worst)
    return apart


def _why(rank: Rank, reached: set[Rank], there: RankRecords) -> str:
    missing = [one for one in there.values() if one.rank != rank and one.rank not in reached]
    first = f"rank {missing[0].rank} on {missing[0].host}"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"it and {first}{more} cannot reach each other"

"""Replay of the rounds that an earlier run of the job recorded, with the same samples and steps."""

from collections.abc import Sequence

from elche_coordinator.core.messages.ids import Epoch, Rank, by_rank
from elche_coordinator.core.messages.spec import Lease, RankPart, RecordedRound
from elche_coordinator.core.work.ledger import Ledger


class Replay:
    """The rest of a recording. Raises `ValueError`, naming the round, if it does not fit the job."""

    def __init__(self, rounds: tuple[RecordedRound, ...], ranks: Sequence[Rank], ledger: Ledger) -> None:
        self._ranks = ranks
        self._rounds = [one for one in rounds if one.num_samples]
        for index, one in enumerate(self._rounds):
            if one.generation != self._rounds[0].generation:
                raise ValueError(
                    f"round {index} of the recording is the first after its ranks have changed (one was lost, or came "
                    "back): only a run that kept its ranks can be repeated, or one with audit in one process "
                    "(elche replay RUN --one-process)"
                )
            if len(one.parts) != len(ranks):
                raise ValueError(
                    f"round {index} of the recording has {len(one.parts)} ranks, and the job has {len(ranks)}; "
                    "replay it with as many"
                )
        # A checkpoint may include none, such as the one from which the recorded run itself was resumed. One that ends
        # within a round leaves a part of it that cannot be leased.
        self._next = next((at for at, one in enumerate(self._rounds) if not _has(ledger, one)), len(self._rounds))
        self._leased = self._next
        """Rounds before this one are leased."""
        self._check(ledger)

    def _check(self, ledger: Ledger) -> None:
        """Checks that the rest can be leased, in a copy of the books."""
        copy = Ledger(ledger.extent)
        copy.restore(ledger.to_json())
        for index in range(self._next, len(self._rounds)):
            try:
                for rank, part in self._parts(index).items():
                    _lease_part(copy, rank, part)
            except ValueError as error:
                raise ValueError(f"round {index} of the recording does not fit the job: {error}") from None

    @property
    def is_over(self) -> bool:
        """True if no recorded round is left."""
        return self._next >= len(self._rounds)

    def begin(self) -> dict[Rank, RankPart]:
        """Begins the next round; returns each rank's part in it."""
        self._next += 1
        return self._parts(self._next - 1)

    def _parts(self, index: int) -> dict[Rank, RankPart]:
        return by_rank(self._ranks, self._rounds[index].parts)

    def lease(self, ledger: Ledger, *, num_more: int) -> list[tuple[Rank, Lease]]:
        """Leases the samples of the announced rounds and of `num_more` rounds after them."""
        leases = []
        while self._leased < min(self._next + num_more, len(self._rounds)):
            for rank, part in self._parts(self._leased).items():
                leases += [(rank, lease) for lease in _lease_part(ledger, rank, part)]
            self._leased += 1
        return leases


def _has(ledger: Ledger, recorded: RecordedRound) -> bool:
    """True if the books have the round."""
    slices = [one for part in recorded.parts for one in part.slices]
    return all(ledger.is_committed(Epoch(one.epoch), one.offset, one.size) for one in slices)


def _lease_part(ledger: Ledger, rank: Rank, part: RankPart) -> list[Lease]:
    return [ledger.grant_slice(rank, Epoch(one.epoch), one.offset, one.size) for one in part.slices]

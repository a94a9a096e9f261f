"""One generation: its ranks' reports of batches and rounds, and the commit or giving up of rounds."""

from collections import Counter
from itertools import takewhile

from elche_coordinator.core.messages.events import (
    BatchesTrained,
    HeaderReported,
    ReserveRecalled,
    ResultReceived,
    RoundEntered,
    RoundFailed,
)
from elche_coordinator.core.messages.ids import GenerationId, Rank, RoundId
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import Hold, RankPhase, RankTrigger
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, present
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.backends import Choice
from elche_coordinator.core.rounds.scheduler import RoundScheduler

MAX_GIVEN_UP = 5
"""Rounds given up in a row after which the job fails, if these have taken `GIVEN_UP_S`."""
GIVEN_UP_S = 30.0
"""A network that breaks all connections again and again for some seconds ends no job."""


class Generation:
    """The ranks of one process group, and the rounds in which they average.

    A change of membership makes a new generation of the same training, which begins when no round of this one is open.
    """

    def __init__(
        self,
        generation: GenerationId,
        members: RankRecords,
        backend: Choice,
        training: Training,
        outbox: Outbox,
    ) -> None:
        self.id = generation
        self.members = members
        """Its ranks, in the order of their positions in the group; a lost one stays until the next generation."""
        self.backend = backend
        """The backend over which its members average."""
        self.formed: dict[Rank, None] = {}
        """Members whose process group is built."""
        self.failure = ""
        """Reason for which its group could not form, while its members test their links; else empty."""
        self.abandoned: dict[Rank, None] | None = None
        """Members that have abandoned it; None unless it is being abandoned."""
        self.asked_for_headers: set[Rank] = set()
        """Members that were asked for the rows of headers, since it is being abandoned and nobody has sent them."""
        self.scheduler = RoundScheduler(generation, members, training, outbox)
        """Has its open rounds."""
        self.is_closing = False
        """True if it announces no more rounds, since another generation will take over."""
        self.num_given_up = 0
        """Number of rounds given up."""
        self._given_up_in_a_row = 0
        """Rounds given up since the last commit."""
        self._given_up_since_s = 0.0
        """Time at which the first of these was given up."""
        self._training = training
        self._outbox = outbox

    @property
    def rounds(self) -> list[Round]:
        """Its open rounds, in order: announced, or entered by grant, and not committed."""
        return self.scheduler.rounds

    @property
    def is_formed(self) -> bool:
        """True if every member's process group stands."""
        return len(self.formed) == len(self.members)

    @property
    def is_abandoned(self) -> bool:
        """True if all present members have abandoned it."""
        return self.abandoned is not None and all(
            rank in self.abandoned or not record.is_present for rank, record in self.members.items()
        )

    def begin(self, now_s: float) -> None:
        """Announces the next round, once every member's process group stands."""
        training = self._training
        training.ride_out_s = 0.0 if self.backend.is_relayed else training.settings.ride_out_s
        if any(record.has_model for record in self.members.values()):
            self.scheduler.go_on(now_s)
        else:
            self.scheduler.begin(now_s)

    def reopen(self, now_s: float) -> None:
        """Goes on announcing rounds, since no other generation takes over after all."""
        if self.is_closing:
            self.is_closing = False
            if not self.rounds:
                self.scheduler.plan_next(now_s)

    def resolve(self, num_rounds: int, now_s: float) -> Failure | None:
        """Commits the first `num_rounds` open rounds that were not given up, and drops the others, once all members
        have abandoned it.
        """
        for opened in self._not_given_up[:num_rounds]:
            if failure := self._commit(opened, now_s):
                return failure
        self.rounds.clear()
        return None

    def lacks_header(self, num_rounds: int) -> bool:
        """True if nobody has sent the header of one of the first `num_rounds` open rounds that were not given up."""
        return any(not opened.header for opened in self._not_given_up[:num_rounds])

    def split(self) -> tuple[int, list[RankRecord]]:
        """Returns the number of open rounds to commit, and the present members that have received more or fewer than
        these.

        The model that most members have is kept; of equally common ones, the newer. Either would be right, since none
        of these rounds is committed yet.
        """
        there = present(self.members).values()
        levels = {record.rank: self._num_received(record.rank) for record in there}
        sizes = Counter(levels.values())
        kept = max(sizes, key=lambda level: (sizes[level], level), default=0)
        return kept, [record for record in there if levels[record.rank] != kept]

    def _num_received(self, rank: Rank) -> int:
        """Number of open rounds that were not given up, from the first on, whose results the rank has."""
        return sum(1 for _ in takewhile(lambda opened: rank in opened.results, self._not_given_up))

    @property
    def _not_given_up(self) -> list[Round]:
        """The open rounds without those that nobody has the result of and some have given up. Members give up the same
        rounds, and go on with the next one before all have said so: results of later ones may be there.
        """
        return [opened for opened in self.rounds if opened.results or not opened.failures]

    @property
    def is_torn(self) -> bool:
        """True if some members have a round's result and others never will, so that it can make no more rounds."""
        return any(opened.results and opened.failures for opened in self.rounds)

    def open_round(self, round_id: RoundId, generation: GenerationId) -> Round | None:
        """The open round with this id; None if there is none, or the event is of another generation."""
        if generation != self.id:
            return None
        return next((opened for opened in self.rounds if opened.id == round_id), None)

    # Duties

    def should_work(self, record: RankRecord) -> bool:
        """True if the rank has a batch to make now: it has work, and waits for no other rank."""
        training = self._training
        overlaps = training.settings.averaging == "overlapped"
        trains = record.phase is RankPhase.TRAINING or (overlaps and record.phase is RankPhase.AVERAGING)
        if training.is_paused or not trains or training.is_waited_for(record.rank):
            return False
        if training.policy.stops_ranks and (not self.rounds or record.rank in self.rounds[-1].results):
            return False
        is_limited = record.limit_step != 0 and record.local_step >= record.limit_step
        return not is_limited and training.ledger.has_work(record.rank)

    def should_enter(self, record: RankRecord) -> bool:
        """True if the rank has reached a round, by its steps or the end of its work, and has not entered it."""
        if self._training.is_paused or record.phase is not RankPhase.TRAINING:
            return False
        opened = next((one for one in self.rounds if record.rank not in one.entered), None)
        if opened is None or self._training.is_waited_for(record.rank):
            return False
        is_there = record.local_step >= opened.targets.get(record.rank, 0)
        return is_there or not self._training.ledger.has_work(record.rank)

    def is_averaging(self, record: RankRecord) -> bool:
        """True if the rank is in a round that every member has entered, so that it waits for no other rank to enter."""
        return self.scheduler.has_committed and any(
            record.rank in opened.entered
            and record.rank not in opened.results
            and len(opened.entered) == len(opened.targets)
            for opened in self.rounds
        )

    # Members' reports

    def on_batches(self, record: RankRecord, event: BatchesTrained, now_s: float) -> None:
        """Records progress; revises the open round's targets when a rank has become faster or slower."""
        is_news = event.local_step > record.local_step
        record.on_batches(event.local_step, event.batch_ms, now_s)
        if event.gauges is not None and event.local_step >= record.local_step:
            record.gauges = event.gauges
        record.data_wait_ms = max(record.data_wait_ms, event.data_wait_ms)
        if event.loss_count and is_news:
            self._training.loss = record.loss = event.loss_sum / event.loss_count
        self._training.num_made += record.note_made(event.num_processed)
        self._training.ledger.set_processed(record.rank, event.num_processed)
        if self.abandoned is None:
            self.scheduler.follow_progress(record, now_s)

    def _reached(self, event: RoundEntered | ResultReceived | RoundFailed, now_s: float) -> Round | None:
        """Returns the open round of an event, after opening the granted rounds up to it. None if the round is neither
        open nor granted.
        """
        if event.generation == self.id:
            # Members of a generation that is abandoned are told of no more of its rounds: they would enter them
            # (protocol P18.1).
            self.scheduler.open_granted(event.round, now_s, is_announced=self.abandoned is None)
        return self.open_round(event.round, event.generation)

    def on_entered(self, record: RankRecord, event: RoundEntered, now_s: float) -> None:
        """Records that the rank has taken its snapshot for an open round."""
        opened = self._reached(event, now_s)
        if opened is None or record.rank in opened.entered:
            self._refuse(event, opened)
            return
        record.life.advance(RankTrigger.ENTERED_ROUND)
        opened.entered[record.rank] = None
        if self.abandoned is None:
            self.scheduler.on_entered(now_s)

    def on_result(self, record: RankRecord, event: ResultReceived, now_s: float) -> Failure | None:
        """Records that the rank has a round's result; commits the rounds whose results all members have.

        A round that has failed on other members is decided only when the generation is abandoned (`is_torn`).
        """
        opened = self._reached(event, now_s)
        if opened is None or record.rank in opened.results:
            self._refuse(event, opened)
            return None
        if record.phase is RankPhase.AVERAGING:
            record.life.advance(RankTrigger.RECEIVED_RESULT)
        opened.entered[record.rank] = None  # the `RoundEntered` of a granted round may be lost or come later
        opened.results[record.rank] = event
        # A later round may be complete before an earlier one. Rounds are committed in order, so that versions rise with
        # them.
        while self.abandoned is None and self.rounds and self.rounds[0].is_received_by_all:
            if failure := self._commit(self.rounds[0], now_s):
                return failure
        return None

    def on_header(self, event: HeaderReported) -> None:
        """Records a header's rows of a round whose result the rank has, since the member that sends rows may
        be lost.
        """
        opened = self.open_round(event.round, event.generation)
        if opened is None or event.rank not in opened.results:
            self._refuse(event, opened)
        else:
            opened.reported_header = opened.reported_header or event.header

    def _commit(self, received: Round, now_s: float) -> Failure | None:
        """Commits the first open round and plans the next one. Returns a failure if it must not be committed,
        or if nothing was trained in an epoch that it ends.
        """
        training = self._training
        allows_nonfinite = training.settings.nonfinite != "fail"
        failure = received.failure(allows_nonfinite=allows_nonfinite)
        # all checks come before the first change: a round that fails one leaves the training as it was
        if (
            failure := failure
            or training.unequal_results(received)
            or training.impossible_cut(received)
            or training.discarded_too_often(received)
        ):
            return failure
        del self.rounds[0]
        self._given_up_in_a_row = 0
        training.commit(received, now_s)
        if training.epochs.untrained is not None:
            return training.epochs.untrained
        self.scheduler.has_committed = True
        # After `commit`, so that members hear of this round's outcome before the next one (protocol P6.3).
        if not training.is_complete and not self.is_closing and self.abandoned is None:
            self.scheduler.plan_next(now_s)
        return None

    def on_round_failed(self, record: RankRecord, event: RoundFailed, now_s: float) -> Failure | None:
        """Records that the rank will not receive a round's result. If no member will, the round is given up, and its
        samples go into the next one. Returns a failure after `MAX_GIVEN_UP` of these in a row, and `GIVEN_UP_S`.
        """
        opened = self._reached(event, now_s)
        if opened is None or record.rank in opened.results or record.rank in opened.failures:
            self._refuse(event, opened)
            return None
        if record.phase is RankPhase.AVERAGING:
            record.life.advance(RankTrigger.GAVE_ROUND_UP)
        opened.entered[record.rank] = None
        opened.failures[record.rank] = event.reason
        if self.abandoned is not None or not opened.is_given_up:
            return None
        self.num_given_up += 1
        self._training.num_given_up += 1
        self._given_up_since_s = self._given_up_since_s if self._given_up_in_a_row else now_s
        self._given_up_in_a_row += 1
        num_s = now_s - self._given_up_since_s
        if self._given_up_in_a_row >= MAX_GIVEN_UP and num_s >= GIVEN_UP_S:
            all_of = f"{self._given_up_in_a_row} averagings in a row, over {num_s:.0f} s,"
            return Failure(f"{all_of} were given up, the last one because {event.reason}")
        self.rounds.remove(opened)
        if self.scheduler.has_committed:
            self.scheduler.plan_next(now_s)
            self.scheduler.reason = f"again, because the last averaging was given up: {event.reason}"
        else:
            self.scheduler.begin(now_s)
        return None

    def _refuse(
        self, event: RoundEntered | ResultReceived | HeaderReported | RoundFailed, opened: Round | None
    ) -> None:
        if opened is None:
            state, why = f"round {event.round} is not open", f"this is of generation {event.generation}"
        elif isinstance(event, HeaderReported):
            state, why = f"round {event.round} is open", f"rank {event.rank} has not said that it has its result"
        else:
            state, why = f"round {event.round} is open", f"rank {event.rank} has already reported this, or the opposite"
        self._outbox.refuse(event, state, why)

    def on_recalled(self, record: RankRecord, event: ReserveRecalled, now_s: float) -> None:
        """Records the reserve that the rank has given back."""
        if not self._training.ledger.take_back(record.rank, event.num_samples):
            self._outbox.refuse(event, f"rank {record.rank} was not asked", "or the position is not in its leases")
            return
        if self.abandoned is None and not self.is_closing:
            self.scheduler.on_recalled(now_s)

    # Pausing

    def pause(self, hold: Hold) -> None:
        """Has ranks stop at the last announced round."""
        was_paused = self._training.is_paused
        self._training.holds.add(hold)
        if not was_paused:
            self.scheduler.pause()

    def unpause(self, hold: Hold, now_s: float) -> None:
        """Has training go on, unless another hold remains. An early end that was decided meanwhile comes with the next
        round, which is planned first.
        """
        was_paused = self._training.is_paused
        self._training.holds.discard(hold)
        if was_paused and not self._training.is_paused:
            self.scheduler.unpause(now_s, may_plan=self.abandoned is None and not self.is_closing)
        self._training.stop_if_decided()

    def target(self, rank: Rank) -> int:
        """The step after which the rank joins the first open round; 0 without one."""
        return self.rounds[0].targets.get(rank, 0) if self.rounds else 0

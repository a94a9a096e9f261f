"""Membership of a training: one generation stands, another may be forming; after a death the next one follows."""

from collections.abc import Callable

from elche_coordinator.core.messages.commands import SendAbandon, SendFormGroup
from elche_coordinator.core.messages.events import GenerationAbandoned, GroupFormed
from elche_coordinator.core.messages.ids import Attempt, GenerationId
from elche_coordinator.core.messages.reports import MembershipReport
from elche_coordinator.core.records.failure import BackToCheckpoint, Failure
from elche_coordinator.core.records.machine import RankPhase, RankTrigger
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, host_by_host, num_hosts, present, staying
from elche_coordinator.core.records.roster import Roster
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.backends import Choice
from elche_coordinator.core.rounds.generation import Generation

DIGESTS_FROM = 8
"""Number of members from which on only the first sends the rows of headers, and the others a digest: if each member
sent the rows of all, the coordinator's work for a round would grow with the square of their number."""
MAX_ABANDONED = 5
"""Generations in a row, without a death and without a round, after which the job fails."""
NOT_MET = "the ranks could not meet"
"""The reason of a group that could not form, where its ranks gave none."""
Problem = Failure | BackToCheckpoint
"""Reasons for which a training cannot go on as before."""


class Membership:
    """The generations of one attempt of a training.

    The **standing** generation makes rounds. After a member's death, or a failed collective, it is abandoned: each
    member reports the outcome of its rounds (`SendAbandon`, `GenerationAbandoned`); then the rounds are resolved, and
    the remaining ranks form the next one. A rank that becomes ready is admitted without that: the next generation forms
    while the standing one makes rounds, and takes over between two of them. In the same way a rank that leaves is
    dismissed: the next generation forms without it, and its work is in the last round of the standing one.

    A reason for which the training ends, or goes back, is returned to its job.
    """

    def __init__(
        self,
        roster: Roster,
        outbox: Outbox,
        training: Training,
        choose: Callable[[RankRecords], Choice],
        attempt: Attempt,
    ) -> None:
        self.standing: Generation | None = None
        """The generation that makes rounds, or is being abandoned; None before the first group stands."""
        self.forming: Generation | None = None
        """The generation whose members build its process group, or wait to take over; None if there is none. It is
        always newer than the standing one.
        """
        self.newest = GenerationId(0)
        """The highest generation so far. Ids are never reused: news of a dropped generation must not fit another."""
        self._roster = roster
        self._outbox = outbox
        self._training = training
        self._choose = choose
        self._attempt = attempt
        self._relay: Choice | None = None
        """The relayed backend for ranks on several hosts, with the reason; None: the backend of `choose`."""
        self._have_met = False
        """True if a group of ranks on several hosts has stood."""
        self._num_failed = 0
        """Generations in a row that were abandoned without a death and without a round."""

    def form(self, members: RankRecords) -> None:
        """Has these ranks build a process group, in which those of one host follow each other."""
        self.newest = GenerationId(self.newest + 1)
        members = host_by_host(members)
        backend = self._relay if self._relay is not None and num_hosts(members) > 1 else self._choose(members)
        self.forming = Generation(self.newest, members, backend, self._training, self._outbox)
        for position, record in enumerate(members.values()):
            self._outbox.add(
                SendFormGroup(
                    **record.address,
                    attempt=self._attempt,
                    generation=self.newest,
                    position=position,
                    world_size=len(members),
                    backend=backend.backend,
                    sends_digest=position > 0 and len(members) >= DIGESTS_FROM,
                )
            )

    def relay(self, why: str) -> bool:
        """Forms the first group of ranks on several hosts again with the relay, since they cannot reach each other.
        Returns False if they use it already, or the job's `backend` is not "auto".
        """
        forming = self.first_of_several_hosts
        if forming is None or forming.backend.is_relayed or self._training.settings.backend != "auto":
            return False
        self._relay = Choice(backend="cpu", reason=why)
        self.form(present(forming.members))
        return True

    @property
    def first_of_several_hosts(self) -> Generation | None:
        """The generation that is forming, if it is the first one whose members are on several hosts."""
        forming = None if self._have_met else self.forming
        return forming if forming is not None and num_hosts(forming.members) > 1 else None

    def on_formed(self, record: RankRecord, event: GroupFormed) -> None:
        """Records that the rank's process group stands. Once all members' do, the generation may take over."""
        forming = self.forming
        if forming is None or event.generation != forming.id or record.rank in forming.formed:
            now = f"job is in generation {self.newest}"
            self._outbox.refuse(event, now, f"this is of generation {event.generation}")
            return
        if record.phase is RankPhase.READY:
            record.life.advance(RankTrigger.GROUPED)
        forming.formed[record.rank] = None

    def take_over(self, now_s: float) -> Failure | None:
        """Makes the formed generation the standing one, once no round of the present one is open."""
        forming, standing, training = self.forming, self.standing, self._training
        if training.is_over or forming is None or not forming.is_formed or not self._closes(standing, now_s):
            return None
        before = list(training.members)
        if standing is not None or before != list(forming.members):  # a rank may die before the first group stands
            like = [[before.index(rank)] if rank in before else [] for rank in forming.members]
            training.set_members(forming.members, like)
        if standing is not None:
            self._report_newcomers(standing, forming)
        self.standing, self.forming = forming, None
        self._have_met |= num_hosts(forming.members) > 1 and not forming.backend.is_relayed
        for record in list(standing.members.values()) if standing is not None else ():
            is_left = record.is_present and record.rank not in forming.members
            if is_left and (failure := self._dismiss(record)):
                return failure
        # Last: it announces a round, and the leases of those that have left must be free by then.
        forming.begin(now_s)
        self.change_members()
        return None

    def _closes(self, standing: Generation | None, now_s: float) -> bool:
        """Has the standing generation, if any, announce no more rounds; returns True once none is open."""
        if standing is None or standing.abandoned is not None:
            return True
        if not standing.is_closing:
            standing.is_closing = True
            standing.scheduler.hurry(now_s)
        # Revokes grants first: a rank that is cut off could enter a granted round of this generation while the next one
        # trains.
        return standing.scheduler.reserve.revoke() and not standing.rounds

    def _report_newcomers(self, before: Generation, now: Generation) -> None:
        for record in now.members.values():
            if before.members.get(record.rank) is not record and not record.has_model:
                again = " again" if record.num_before else ""
                text = f"rank {record.rank} trains{again} on {record.host} ({record.device})"
                report = MembershipReport(rank=record.rank, text=text, num_ranks=len(now.members), is_back=True)
                self._outbox.publish(report)

    def change_members(self) -> None:
        """Forms a generation with ranks that have become ready, and without ranks that leave, unless one is forming or
        being abandoned.
        """
        standing = self.standing
        if standing is None or standing.abandoned is not None or self.forming is not None:
            return
        stay, newcomers = self._staying(standing.members), self._newcomers(standing)
        if newcomers or len(stay) < len(present(standing.members)):
            self.form(stay | newcomers)

    def _newcomers(self, standing: Generation) -> RankRecords:
        """The ranks that are ready, and in no generation that stood. One of them may have been in a group that took
        over nothing, since another of its members was lost.
        """
        return {
            rank: record
            for rank, record in staying(self._roster.ranks).items()
            if record.phase is not RankPhase.STARTING and standing.members.get(rank) is not record
        }

    def _staying(self, ranks: RankRecords) -> RankRecords:
        """The present ranks without those that leave; all of them if none of the rest can go on with the model."""
        stay = staying(ranks)
        can_go_on = any(self._training.has_model(one) and one.phase is not RankPhase.STARTING for one in stay.values())
        return stay if can_go_on else present(ranks)

    def on_leaving(self, now_s: float) -> Failure | None:
        """Called when ranks are to leave, or may stay after all."""
        if self.forming is not None and self.standing is not None:
            self._stop_forming(now_s)
        self.change_members()
        return self._resolve(now_s)  # if the standing generation is abandoned, the remaining ranks form the next one

    def _dismiss(self, record: RankRecord) -> Failure | None:
        """Asks the rank to exit, since its work is committed."""
        failure = self._training.lose(record)
        # Its last round is committed: what it has trained since is in no result, and is leased to others.
        self._training.ledger.release(record.rank)
        self._roster.dismiss(record)
        return failure

    # The end of a generation

    def abandon(self, now_s: float) -> Failure | None:
        """Abandons the standing generation, after a member's loss or a failed collective."""
        standing = self.standing
        if standing is not None and standing.abandoned is None:
            standing.abandoned = {}
            for record in present(standing.members).values():
                self._send_abandon(standing, record, keeps_headers=True)
        self.forming = None  # its members may have changed: another one is formed afterwards
        return self._resolve(now_s)

    def on_lost(self, record: RankRecord, now_s: float) -> Failure | None:
        """Handles the loss of a rank."""
        standing, forming = self.standing, self.forming
        if standing is None:  # the first group never stood
            self.form(present(self._training.members))
            return None
        if forming is not None and forming.members.get(record.rank) is record:
            self._stop_forming(now_s)
        if standing.abandoned is None and standing.members.get(record.rank) is record:
            return self.abandon(now_s)
        self.change_members()
        return self._resolve(now_s)

    def on_abandoned(self, record: RankRecord, event: GenerationAbandoned, now_s: float) -> Problem | None:
        """Records that the rank has abandoned a generation."""
        standing, forming = self.standing, self.forming
        if forming is not None and event.generation == forming.id:
            return self._fail_to_form(forming, event.reason, now_s)
        if standing is None or event.generation != standing.id:
            return None
        if standing.abandoned is None:
            self._num_failed += 1
            if self._num_failed >= MAX_ABANDONED:
                return Failure(
                    f"{MAX_ABANDONED} generations in a row were abandoned, the last one because {event.reason}"
                )
            if failure := self.abandon(now_s):
                return failure
        # A report with a reason is the rank's own. Its later answer to `SendAbandon` counts; of two, the second one.
        is_repeated = event.keeps_headers and record.rank in standing.asked_for_headers
        if not event.reason and not is_repeated and standing.abandoned is not None:
            standing.abandoned[record.rank] = None
        return self._resolve(now_s)

    def on_committed(self, now_s: float) -> Failure | None:
        """Called when a round of the standing generation is committed."""
        self._num_failed = 0  # a round was made, so that the group works
        failure = self.take_over(now_s)
        self.change_members()  # newcomers may have the model now, so that leaving ranks can go
        return failure

    def _stop_forming(self, now_s: float) -> None:
        self.forming = None
        if self.standing is not None and self.standing.abandoned is None:
            self.standing.reopen(now_s)

    def _fail_to_form(self, forming: Generation, reason: str, now_s: float) -> Problem | None:
        """Handles a group that could not form. Ranks of the first group, or of the first one on several hosts, test
        their links before anything else: one of them may just have ended.
        """
        is_first = self.standing is None or forming is self.first_of_several_hosts
        num_with_links = sum(bool(one.links_address) for one in forming.members.values())
        if is_first and not forming.backend.is_relayed and num_with_links > 1:
            forming.failure = forming.failure or reason or NOT_MET
            return None
        return self.try_again(forming, reason or NOT_MET, now_s, are_apart=False)

    def try_again(self, forming: Generation, reason: str, now_s: float, *, are_apart: bool) -> Problem | None:
        """Handles a group that could not form, of which some ranks cannot reach each other (`are_apart`) or might do
        better: newcomers are restarted later; without newcomers the group is tried again, and in the end the job goes
        back to a checkpoint. If no group has stood yet, the next one is relayed through the coordinator, or the job
        fails, unless it has gone back before.
        """
        if self.standing is None:
            self._num_failed += 1
            if self._num_failed < MAX_ABANDONED and not are_apart:
                self.form(present(forming.members))
                return None
            if self.relay(reason):
                return None
            return BackToCheckpoint(next(iter(forming.members)), reason) if self._attempt > 1 else Failure(reason)
        newcomers = [record for record in present(forming.members).values() if not record.has_model]
        self._num_failed += not newcomers
        if self._num_failed >= MAX_ABANDONED:
            return BackToCheckpoint(next(iter(forming.members)), reason)
        for record in newcomers:
            self._roster.stop(record)
        self._stop_forming(now_s)
        return self._resolve(now_s)

    def _resolve(self, now_s: float) -> Failure | None:
        """Once all members have abandoned the standing generation: commits the rounds that most members have received,
        replaces members with another model, and forms the next generation of the remaining ranks.
        """
        standing, training = self.standing, self._training
        if standing is None or not standing.is_abandoned or self.forming is not None:
            return None
        num_rounds, apart = standing.split()
        if standing.lacks_header(num_rounds) and self._ask_for_headers(standing, apart):
            return None
        # Before the rounds commit: a rank that is replaced must get no outcome, evaluation or checkpoint of them.
        for record in apart:
            self._roster.stop(record)
        failure = standing.resolve(num_rounds, now_s)
        for record in apart:
            failure = failure or training.lose(record)
        for record in standing.members.values():
            # After the rounds are resolved, which may have a part of what it had leased (protocol P18.4).
            if not record.is_present:
                training.ledger.release(record.rank)
        if failure is not None or training.is_over:
            return failure
        there = self._staying(self._roster.ranks)
        for record in present(standing.members).values():
            # a stopped rank's draft may be all that is left of the model
            if record.rank not in there and record.stopped_round is None:
                failure = failure or self._dismiss(record)
        self.form({rank: record for rank, record in there.items() if record.phase is not RankPhase.STARTING})
        return failure

    def _ask_for_headers(self, standing: Generation, apart: list[RankRecord]) -> bool:
        """Asks a member that has the rounds to commit for their headers, since who was to send the rows is lost
        (protocol P5.5). Returns False if all have been asked.
        """
        assert standing.abandoned is not None
        for record in present(standing.members).values():
            if record not in apart and record.rank not in standing.asked_for_headers:
                standing.asked_for_headers.add(record.rank)
                del standing.abandoned[record.rank]  # it answers once more
                self._send_abandon(standing, record, keeps_headers=False)
                return True
        return False

    def _send_abandon(self, standing: Generation, record: RankRecord, *, keeps_headers: bool) -> None:
        self._outbox.add(SendAbandon(**record.address, generation=standing.id, keeps_headers=keeps_headers))

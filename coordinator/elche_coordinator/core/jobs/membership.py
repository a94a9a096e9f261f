"""Which ranks train together: one generation stands, another may be forming, and a death leads from one to the next."""

from collections.abc import Callable

from elche_coordinator.core.jobs.job import Job
from elche_coordinator.core.messages.commands import Publish, SendAbandon, SendFormGroup
from elche_coordinator.core.messages.events import GenerationAbandoned, GroupFormed
from elche_coordinator.core.messages.ids import Attempt, GenerationId
from elche_coordinator.core.messages.reports import MembershipReport
from elche_coordinator.core.records.machine import JobPhase, JobTrigger, RankPhase, RankTrigger
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, num_hosts, present, staying
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.backends import Choice
from elche_coordinator.core.rounds.generation import MAX_GIVEN_UP, Generation


class Membership:
    """The generations of one managed training.

    The **standing** generation makes rounds. A member's death, or a collective that fails, has it given up: each member
    says how its rounds ended (`SendAbandon`, `GenerationAbandoned`); then the rounds are resolved, and those that are
    left form the next one. A rank that has become ready is taken in without that: the next generation forms while the
    standing one makes rounds, and takes over between two of them. In the same way a rank that leaves is let go:
    the next generation is formed without it, and its work is in the last round of the standing one.
    """

    def __init__(self, job: Job, training: Training, choose: Callable[[RankRecords], Choice], attempt: Attempt) -> None:
        self.standing: Generation | None = None
        self.forming: Generation | None = None
        """Whose members build its process group."""
        self.newest = GenerationId(0)
        self._job = job
        self._training = training
        self._choose = choose
        self._attempt = attempt
        self._relay: Choice | None = None
        """Ranks of several hosts average through the coordinator, and why; None: as `choose` says."""
        self._have_met = False
        """Whether ranks of several hosts have averaged among themselves: a group of theirs has stood."""
        self._num_failed = 0
        """Generations in a row that were given up without a death and without a round."""

    def form(self, members: RankRecords) -> None:
        """These ranks build a process group, in rank order."""
        job = self._job
        self.newest = GenerationId(self.newest + 1)
        members = dict(sorted(members.items()))
        backend = self._relay if self._relay is not None and num_hosts(members) > 1 else self._choose(members)
        self.forming = Generation(job.id, self.newest, members, backend, self._training, job.outbox)
        for position, record in enumerate(members.values()):
            job.outbox.add(
                SendFormGroup(
                    **record.address(job.id),
                    attempt=self._attempt,
                    generation=self.newest,
                    position=position,
                    world_size=len(members),
                    backend=backend.backend,
                )
            )

    def relay(self, why: str) -> bool:
        """Has ranks of several hosts, the first that are to meet, average through the coordinator, which all of them
        reach. Returns whether that is another way than the one that they have tried.
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

    def on_formed(self, record: RankRecord, event: GroupFormed, now_s: float) -> None:
        """The rank's process group stands. When all members' do, the generation takes over between two rounds."""
        forming = self.forming
        if forming is None or event.generation != forming.id or record.rank in forming.formed:
            now = f"job is in generation {self.newest}"
            self._job.refuse(event, now, f"this is of generation {event.generation}")
            return
        if record.phase is RankPhase.READY:
            record.life.advance(RankTrigger.GROUPED)
        forming.formed[record.rank] = None
        self.take_over(now_s)

    def take_over(self, now_s: float) -> None:
        """Has the generation that is formed make the next rounds, once no round of the standing one is open."""
        forming, standing, training = self.forming, self.standing, self._training
        if forming is None or not forming.is_formed or self._job.phase not in (JobPhase.GROUPING, JobPhase.TRAINING):
            return
        if standing is not None and standing.abandoned is None:
            if not standing.is_closing:
                standing.is_closing = True
                standing.scheduler.hurry(now_s)
            if not standing.scheduler.reserve.revoke() or standing.rounds:
                return
        before = list(training.members)
        if standing is not None or before != list(forming.members):  # one may have died before the first group stood
            like = [[before.index(rank)] if rank in before else [] for rank in forming.members]
            training.set_members(forming.members, like)
        if standing is not None:
            self._report_newcomers(standing, forming)
        self.standing, self.forming = forming, None
        self._have_met |= num_hosts(forming.members) > 1 and not forming.backend.is_relayed
        for record in list(standing.members.values()) if standing is not None else ():
            if record.is_present and record.rank not in forming.members:
                self._let_go(record)
        if not self._job.is_open:
            return
        if self._job.phase is JobPhase.GROUPING:
            self._job.advance(JobTrigger.GROUP_FORMED, "trains")
        else:
            self._job.reason = "trains"
        forming.begin(now_s)
        self.change_members()

    def _report_newcomers(self, before: Generation, now: Generation) -> None:
        for record in now.members.values():
            if before.members.get(record.rank) is not record and not record.has_model:
                again = " again" if record.is_again else ""
                text = f"rank {record.rank} trains{again} on {record.host} ({record.device})"
                report = MembershipReport(rank=record.rank, text=text, num_ranks=len(now.members), is_back=True)
                self._job.outbox.add(Publish(job_id=self._job.id, report=report))

    def change_members(self) -> None:
        """Forms a generation with the ranks that have become ready, and without those that leave, unless one is forming
        or to be given up.
        """
        standing = self.standing
        if standing is None or standing.abandoned is not None or self.forming is not None:
            return
        stay, there = self._staying(standing.members), staying(self._job.ranks)
        newcomers = {rank: record for rank, record in there.items() if record.phase is RankPhase.READY}
        if newcomers or len(stay) < len(present(standing.members)):
            self.form(stay | newcomers)

    def _staying(self, ranks: RankRecords) -> RankRecords:
        """The present ones without those that leave; all present ones as long as none of the others has the model."""
        stay = staying(ranks)
        return stay if any(map(self._training.has_model, stay.values())) else present(ranks)

    def on_leaving(self, now_s: float) -> str | None:
        """Some ranks are to leave, or may stay after all. Returns why the job cannot go on, if so."""
        if self.forming is not None and self.standing is not None:
            self._stop_forming(now_s)
        self.change_members()
        return self._resolve(now_s)  # where the standing one is given up, the next is formed of who is left

    def _let_go(self, record: RankRecord) -> None:
        """The rank's work is committed: it may exit."""
        problem = self._training.lose(record)
        self._training.ledger.release(record.rank)
        self._job.let_go(record)
        if problem is not None:
            self._job.fail(problem)

    # Giving a generation up

    def give_up(self, now_s: float) -> str | None:
        """A member is gone, or its collective has failed: the standing generation ends. Returns why the job cannot go
        on, if so.
        """
        standing = self.standing
        if standing is not None and standing.abandoned is None:
            standing.abandoned = {}
            for record in present(standing.members).values():
                self._job.outbox.add(SendAbandon(**record.address(self._job.id), generation=standing.id))
        self.forming = None  # its members may be others now, who build another group instead
        return self._resolve(now_s)

    def on_lost(self, record: RankRecord, now_s: float) -> str | None:
        """The rank is gone. Returns why the job cannot go on, if so."""
        standing, forming = self.standing, self.forming
        if standing is None:  # the first group never stood
            self.form(present(self._training.members))
            return None
        if forming is not None and forming.members.get(record.rank) is record:
            self._stop_forming(now_s)
        if standing.abandoned is None and standing.members.get(record.rank) is record:
            return self.give_up(now_s)
        self.change_members()
        return self._resolve(now_s)

    def on_abandoned(self, record: RankRecord, event: GenerationAbandoned, now_s: float) -> str | None:
        """Nothing of a generation runs on the rank any more. Returns why the job cannot go on, if so."""
        standing, forming = self.standing, self.forming
        if forming is not None and event.generation == forming.id:
            return self._fail_to_form(forming, event.reason, now_s)
        if standing is None or event.generation != standing.id:
            return None
        if standing.abandoned is None:
            self._num_failed += 1
            if self._num_failed >= MAX_GIVEN_UP:
                return f"{MAX_GIVEN_UP} generations in a row were given up, the last one because {event.reason}"
            problem = self.give_up(now_s)
            if problem is not None:
                return problem
        if not event.reason and standing.abandoned is not None:  # an answer: what is said unasked may come before it
            standing.abandoned[record.rank] = None
        return self._resolve(now_s)

    def on_committed(self, now_s: float) -> None:
        """A round of the standing generation is committed."""
        self._num_failed = 0
        self.take_over(now_s)
        self.change_members()  # who has come may have the model now, so that others may go

    def _stop_forming(self, now_s: float) -> None:
        self.forming = None
        if self.standing is not None and self.standing.abandoned is None:
            self.standing.reopen(now_s)

    def _fail_to_form(self, forming: Generation, reason: str, now_s: float) -> str | None:
        """The members could not meet: the first ones do so through the coordinator, if they may. Where others train
        meanwhile there is time to find out whether it is the way between hosts, or a rank that has just ended.
        """
        if self.standing is None and self.relay("its hosts cannot reach each other"):
            return None
        is_first = forming is self.first_of_several_hosts and not forming.backend.is_relayed
        if (
            is_first
            and self.standing is not None
            and sum(bool(one.links_address) for one in forming.members.values()) > 1
        ):
            forming.failure = forming.failure or reason or "the ranks could not meet"
            return None
        return self.try_others(forming, reason, now_s)

    def try_others(self, forming: Generation, reason: str, now_s: float) -> str | None:
        """The members could not meet, and are not to do so through the coordinator: newcomers among others are started
        again, later; without any it is tried again. When no group has stood yet, the job fails, or, after it has gone
        back to a checkpoint, does so again. Returns why the job cannot go on, if so.
        """
        if self.standing is None and self._attempt > 1 and self._job.body.goes_back(is_violent=True):
            first = next(iter(forming.members.values()))
            self._job.go_back(first, reason, now_s)
            return None
        newcomers = [record for record in present(forming.members).values() if not record.has_model]
        self._num_failed += not newcomers
        if self.standing is None or self._num_failed >= MAX_GIVEN_UP:
            return reason or "the ranks could not meet"
        for record in newcomers:
            self._job.stop(record)
        self._stop_forming(now_s)
        return self._resolve(now_s)

    def _resolve(self, now_s: float) -> str | None:
        """Once nothing of the standing generation runs any more: commits what most members have received, replaces the
        members that have another model, and forms the next generation of those that are left.
        """
        standing, job = self.standing, self._job
        if standing is None or not standing.is_abandoned or self.forming is not None:
            return None
        num_rounds, apart = standing.split()
        for record in apart:
            job.stop(record)
        problem = standing.resolve(num_rounds, now_s)
        for record in apart:
            problem = problem or self._training.lose(record)
        for record in standing.members.values():
            if not record.is_present:
                self._training.ledger.release(record.rank)
        if problem is None and not self._training.is_complete:
            there = self._staying(job.ranks)
            for record in present(standing.members).values():
                if record.rank not in there:
                    self._let_go(record)
            self.form({rank: record for rank, record in there.items() if record.phase is not RankPhase.STARTING})
        return problem

"""The core's only entry: events go in, commands come out."""

from dataclasses import replace
from typing import Any, assert_never

from elche.errors import LEFT_ALONE
from elche_coordinator.core.continuation import Continuation, continuation
from elche_coordinator.core.describe import (
    JobDetails,
    JobView,
    describe_loop,
    describe_training,
    details,
    why_not_started,
)
from elche_coordinator.core.jobs.deaths import Death
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.jobs.notices import death_notice
from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.placing import Placing
from elche_coordinator.core.life.job import Job, Timer
from elche_coordinator.core.loops.attached import AttachedLoop
from elche_coordinator.core.loops.loop import Loop
from elche_coordinator.core.loops.submitted import SubmittedLoop
from elche_coordinator.core.messages.commands import Command
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    AnyRankEvent,
    CheckpointRequested,
    DeadlinePassed,
    DrainRequested,
    Event,
    HostFitnessChanged,
    JobBroken,
    JobCancelled,
    JobsForgotten,
    JobSubmitted,
    LeaveRequested,
    LoopAttached,
    PauseRequested,
    QuotasSet,
    RankEvent,
    RankExited,
    RankReady,
    RankStarted,
    ScaleRequested,
    SessionLost,
    SlotsRequested,
    StacksReported,
)
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Incarnation, JobId, Rank, RoundId
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.deadlines import Deadlines
from elche_coordinator.core.records.fleet import AgentRecord, Fleet
from elche_coordinator.core.records.machine import JobPhase, RankPhase, Refused
from elche_coordinator.core.records.outbox import Refusal
from elche_coordinator.core.records.ranks import Address, RankRecord, present
from elche_coordinator.core.rounds.generation import Generation


class Coordinator:
    """All jobs and all hosts, as a synchronous state machine without I/O and without a clock.

    A job is a training or a loop of the user's own. Trainings and submitted loops get slots of hosts; attached loops
    have none.

    `handle` never raises for a message of a client, an agent or a rank: stale ones, and events that do not fit the
    present phase, change nothing. An exception out of it is a bug of the core.
    """

    def __init__(self) -> None:
        self.quotas: dict[str, int] = {}
        """Most slots of each project's jobs together; `shares.EVERYONE` names the entry of those without their own."""
        self.jobs: dict[JobId, Job] = {}
        """Trainings and loops, oldest first."""
        self.trainings: dict[JobId, ManagedJob] = {}
        self.placed: dict[JobId, PlacedJob] = {}
        """Trainings and submitted loops, which get slots."""
        self._num_placed = 0
        """Number of such jobs so far."""
        self.fleet = Fleet()
        self._deadlines: Deadlines[JobId] = Deadlines()
        """Times of `Job.set_deadline`."""
        self._checks: Deadlines[JobId] = Deadlines()
        """Times at which to look for silent ranks."""
        self._restarts: Deadlines[tuple[JobId, Rank]] = Deadlines()
        """Times from which lost ranks may be restarted."""
        self._next_incarnation = 1
        """Larger than every incarnation given out so far, so that a number never names two processes."""
        self._now_s = 0.0
        self._touched: dict[JobId, None] = {}
        """Jobs that the present event names or changes; their commands are taken once it has been handled. If it meets
        a bug, the next event takes those of all that it had reached. Ids, since the jobs may be loaded in between.
        """
        self.last_touched: list[JobId] = []
        """Jobs that the last event named or changed."""
        self.at_work: JobId | None = None
        """The job whose passed deadline is handled, or has met a bug in the last event; else None."""
        self.last_refusals: list[Refusal] = []
        """The refusals of these jobs: why parts of the last event changed nothing."""
        self._placing = Placing(self._touch_placed, self._try_again, self._new_incarnation)
        self.asked: list[SlotsRequested] = []
        """Events for other jobs that follow from the last event, to be handled next."""
        self._may_place = False
        """True if slots, or what waits for them, have changed since jobs were last given any."""
        self.keys: dict[str, JobId] = {}
        """Keys of submissions, with their jobs."""
        self._kept_views: dict[JobId, JobView] = {}
        """Views of queued and ended jobs that no event has named or changed since."""

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        """Handles one event at time `now_s` (seconds, monotonic); returns the commands that follow, in order."""
        self._now_s, self.at_work = now_s, None
        self.last_touched, self.last_refusals, self.asked = [], [], []
        try:
            self._take_in(event)
        except Refused as refused:
            for job_id in self._touched:  # an event that a phase table refuses concerns one job
                self.jobs[job_id].outbox.refuse(refused.trigger, refused.state, "the phase has no place for it")
        # Before slots are given: `place` goes by the queue and by who holds slots, as the event has left them.
        for job_id in self._touched:
            self._note_placed(job_id)
        if self._may_place:
            self._may_place = False
            self._placing.place(self.fleet, self.quotas, now_s)
            self.asked = self._placing.asked
        touched = {job_id: self.jobs[job_id] for job_id in self._touched if job_id in self.jobs}
        self._touched = {}
        self.last_touched = list(touched)
        self.last_refusals = [refusal for job in touched.values() for refusal in job.outbox.take_refusals()]
        for job in touched.values():
            job.began_s.setdefault(job.phase, now_s)
            self._set_timers(job)
            self._kept_views.pop(job.id, None)
        return [command for job in touched.values() for command in job.outbox.take()]

    def __getstate__(self) -> dict[str, object]:
        """The state that a restarted coordinator loads. Ended jobs are left out: their records are in the database."""
        kept: dict[str, object] = {
            name: {job_id: job for job_id, job in jobs.items() if job.result is None}
            for name, jobs in self.tables().items()
        }
        keys = self.living_keys() if self.jobs else self.keys
        return {**self.__dict__, **kept, "keys": keys, "_kept_views": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        for job_id in self.placed:
            self._note_placed(job_id)

    def tables(self) -> dict[str, dict[JobId, Any]]:
        """The attributes that contain jobs, by name."""
        return {"jobs": self.jobs, "trainings": self.trainings, "placed": self.placed}

    def living_keys(self) -> dict[str, JobId]:
        """The keys of jobs that have not ended."""
        jobs = self.jobs
        return {key: job_id for key, job_id in self.keys.items() if job_id in jobs and jobs[job_id].result is None}

    def forget_ended(self) -> None:
        """Drops ended jobs, whose records stay in the database."""
        self.__dict__ |= self.__getstate__()

    def adopt(self, job: Job) -> None:
        """Adds a job."""
        self.jobs[job.id] = job
        if job.key:
            self.keys[job.key] = job.id
        if isinstance(job, ManagedJob):
            self.trainings[job.id] = job
        if isinstance(job, PlacedJob):
            self._num_placed += 1
            job.number = self._num_placed
            self.placed[job.id] = job
            self._note_placed(job.id)

    def _note_placed(self, job_id: JobId) -> None:
        if (placed := self.placed.get(job_id)) is not None:
            self._placing.note(placed, self._now_s)

    def begin_incarnations_at(self, number: int) -> None:
        """Gives later processes incarnations of at least `number`, and never one that was given before."""
        self._next_incarnation = max(self._next_incarnation, number)

    def next_deadline_s(self) -> float | None:
        """The time by which `DeadlinePassed` must be handled; None without a deadline."""
        times = (self._deadlines.next_s(), self._checks.next_s(), self._restarts.next_s())
        return min((at_s for at_s in times if at_s is not None), default=None)

    # Queries. None of them changes anything.

    def job_ids(self) -> list[JobId]:
        """All jobs, oldest first."""
        return list(self.jobs)

    def view(self, job_id: JobId, now_s: float) -> JobView | None:
        """View of the job at time `now_s`; None for an unknown job."""
        job = self.jobs.get(job_id)
        if job is None:
            return None
        if job.result is not None and (kept := self._kept_views.get(job_id)) is not None:
            return kept
        view = describe_loop(job, now_s) if isinstance(job, Loop) else describe_training(self.trainings[job_id], now_s)
        placed = self.placed.get(job_id)
        if placed is not None and job.phase is JobPhase.QUEUED:
            return replace(view, reason=self._placing.reason(placed))
        if job.phase is JobPhase.STARTING and (why := why_not_started(job, self.fleet)):
            return replace(view, reason=why)
        return view

    def recent_view(self, job_id: JobId, now_s: float) -> JobView | None:
        """As `view`, but the view of a queued or ended job is kept until an event names or changes the job, so that a
        queued job's reason and waiting time may be old. Callers ask for all jobs every second: most of a long queue
        only wait, and most of all have ended.
        """
        if (kept := self._kept_views.get(job_id)) is not None:
            return kept
        view = self.view(job_id, now_s)
        if view is not None and (view.ended_s is not None or (view.state == JobPhase.QUEUED and not view.ranks)):
            self._kept_views[job_id] = view
        return view

    def is_behind(self, job_id: JobId) -> bool:
        """True if a queued job gets no slots because one before it waits for them."""
        placed = self.placed.get(job_id)
        return placed is not None and self._placing.is_behind(placed)

    def queued(self) -> set[JobId]:
        """The jobs that wait for slots."""
        return self._placing.queued

    def view_without_figures(self, job_id: JobId, reason: str) -> JobView:
        """The job's id, name and state alone. Raises `KeyError` for one that is not known."""
        job = self.jobs[job_id]
        return JobView(job_id=job.id, name=job.spec.name, state=job.phase, reason=reason)

    def details(self, job_id: JobId, now_s: float) -> JobDetails | None:
        """The job's submission and outcome; None for an unknown job."""
        job, training = self.jobs.get(job_id), self.trainings.get(job_id)
        return details(job, training, now_s) if job else None

    def spec(self, job_id: JobId) -> JobSpec | None:
        """The job's submission; None for an unknown job."""
        job = self.jobs.get(job_id)
        return job.spec if job else None

    def continuation(self, job_id: JobId) -> Continuation | None:
        """The job's continuation for a coordinator of another version; None for an unknown job."""
        job = self.jobs.get(job_id)
        return continuation(job) if job else None

    def num_wanted(self, job_id: JobId) -> int | None:
        """The number of ranks that the job should have; None if it cannot be changed."""
        training = self.trainings.get(job_id)
        return training.num_wanted if training is not None and training.can_scale else None

    def result(self, job_id: JobId) -> JobResult | None:
        """The job's result; None while it has not ended."""
        job = self.jobs.get(job_id)
        return job.result if job else None

    def explanation(self, job_id: JobId) -> str:
        """The reason of the next round's plan, or of the job's state. Raises `KeyError` for an unknown job."""
        job, generation = self.jobs[job_id], self._generation(job_id)
        if job.phase is JobPhase.QUEUED:
            return self._placing.reason(self.placed[job_id])
        return job.reason if generation is None else generation.scheduler.reason

    def addresses(self, job_id: JobId) -> list[Address]:
        """The processes of the job's ranks, in rank order. Raises `KeyError` for an unknown job."""
        job = self.jobs[job_id]
        return [record.address for record in job.ranks.values()]

    def num_ranks(self, job_id: JobId) -> int:
        """Number of ranks that the job's present attempt has had so far; 0 for an unknown job."""
        job = self.jobs.get(job_id)
        return len(job.ranks) if job else 0

    def is_there(self, address: Address) -> bool:
        """True if the address is that of a rank's present process, which has not ended."""
        job = self.jobs.get(address["job_id"])
        record = job.ranks.get(address["rank"]) if job and not job.result else None
        is_it = record is not None and record.incarnation == address["incarnation"]
        return is_it and record is not None and record.phase is not RankPhase.EXITED

    def owes_answer(self, address: Address) -> bool:
        """True if the process was asked whether it is there (protocol P20.3), and has not answered."""
        return self.is_there(address) and self.jobs[address["job_id"]].silence.hangs.is_asked(address["rank"])

    def agent_of(self, address: Address) -> AgentId | None:
        """The agent of a process; None for a process that no agent has started."""
        placed = self.placed.get(address["job_id"])
        record = placed.ranks.get(address["rank"]) if placed else None
        return record.agent_id if record else None

    def has_session_due(self, address: Address) -> bool:
        """False if the process may run on without a session: a script whose loop has ended. True for all others."""
        placed = self.placed.get(address["job_id"])
        return placed is None or placed.has_session_due(address["rank"])

    def ranks_of(self, agent_id: AgentId) -> list[Address]:
        """The processes on a host."""
        return [self.jobs[job_id].ranks[rank].address for job_id, rank in self._ranks_on(agent_id)]

    def is_awaited(self, agent_id: AgentId) -> bool:
        """True if a job that has ranks on the host has others elsewhere, which may wait for these."""
        jobs = {job_id for job_id, _ in self._ranks_on(agent_id)}
        return any(one.agent_id != agent_id for job_id in jobs for one in present(self.jobs[job_id].ranks).values())

    def can_begin_again(self, agent_id: AgentId) -> bool:
        """True if a job that has ranks on the host can go back to a checkpoint without it."""
        return any(self.jobs[job_id].can_begin_again for job_id, _ in self._ranks_on(agent_id))

    def beside_stopped(self, agent_id: AgentId) -> list[list[Address]]:
        """For each rank on a host whose ranks have all stopped without a coordinator: the ranks of its job that have
        not stopped, and have the model. Empty if a rank on the host has not stopped, or there is none.
        """
        found = []
        for job_id, rank in self._ranks_on(agent_id):
            ranks = self.jobs[job_id].ranks
            if ranks[rank].stopped_round is None:
                return []
            # Without newcomers: a draft of the stopped ranks may be all that is left of the model.
            training = self.trainings[job_id].run.training
            others = [one for one in present(ranks).values() if one.stopped_round is None]
            found.append([one.address for one in others if training is not None and training.has_model(one)])
        return found

    @property
    def now_s(self) -> float:
        """Time of the last event."""
        return self._now_s

    def position_in_round(
        self, address: Address, generation: GenerationId, round_id: RoundId
    ) -> tuple[int, int] | None:
        """A rank's position among the members of an open round, and their number. None if it is no member, or another
        member has lost the round.
        """
        standing = self._generation(address["job_id"])
        opened = standing.open_round(round_id, generation) if standing is not None else None
        record = standing.members.get(address["rank"]) if standing is not None else None
        if record is None or record.incarnation != address["incarnation"] or record.is_ending:
            return None
        if opened is None or opened.failures:
            return None
        return list(opened.targets).index(record.rank), len(opened.targets)

    def has_lost_round(self, job_id: JobId, generation: GenerationId, round_id: RoundId) -> bool:
        """True if a member will not receive the result of a job's open round."""
        standing = self._generation(job_id)
        opened = standing.open_round(round_id, generation) if standing is not None else None
        return opened is not None and bool(opened.failures)

    def _generation(self, job_id: JobId) -> Generation | None:
        """The generation of a training that makes rounds; None if there is none."""
        training = self.trainings.get(job_id)
        return training.run.generation if training is not None else None

    # Events

    def _take_in(self, event: Event) -> None:
        match event:
            case RankEvent():
                self._take_in_rank(event)
            case JobSubmitted():
                self._submit(event)
            case LoopAttached():
                self._attach(event)
            case JobCancelled() | JobBroken() | CheckpointRequested() | PauseRequested() | ScaleRequested():
                if (job := self._touch(event.job_id)) is not None:
                    self._take_in_request(job, event)
            case SlotsRequested():
                if (placed := self._touch_placed(event.job_id)) is not None:
                    placed.give_slots(event.num_ranks, event.by, self._now_s)
            case DrainRequested():
                self._drain(event)
            case HostFitnessChanged():
                self._may_place |= self.fleet.set_problem(event.agent_id, event.problem)
            case QuotasSet():
                self.quotas, self._may_place = dict(event.quotas), True
            case JobsForgotten():
                self._forget({job_id for job_id in event.job_ids if job_id in self.jobs and self.jobs[job_id].result})
            case AgentJoined():
                host = AgentRecord(
                    host=event.host,
                    slots=event.slots,
                    labels=event.labels,
                    folder=event.folder,
                    jobs=event.jobs,
                )
                self.fleet.join(event.agent_id, host)
                self._may_place = True
            case AgentLost():
                self._lose_agent(event)
                self._may_place = True
            case DeadlinePassed():
                self._on_deadlines()
            case _:
                assert_never(event)

    def _on_deadlines(self) -> None:
        """Handles the jobs whose time has come."""
        for job_id in self._deadlines.take_passed(self._now_s):
            self.at_work = job_id
            if (job := self._touch(job_id)) is not None:
                job.on_deadline()
        self._may_place |= bool(list(self._restarts.take_passed(self._now_s)))
        for job_id in self._checks.take_passed(self._now_s):
            self.at_work = job_id
            if (job := self._touch(job_id)) is not None:
                job.check_silence(self._now_s)
        self.at_work = None

    def _take_in_request(
        self, job: Job, event: JobCancelled | JobBroken | CheckpointRequested | PauseRequested | ScaleRequested
    ) -> None:
        """Handles a request of a client, or of the shell, for one job."""
        match event:
            case JobCancelled():
                job.cancel()
                self._may_place = True  # the job may have held back others in the queue
            case JobBroken():
                job.on_broken(event, self._now_s)
                self._may_place = True
            case CheckpointRequested():
                job.request_checkpoint()
            case PauseRequested():
                job.pause(self._now_s, is_paused=event.is_paused)
                self._may_place = True  # a paused job is not asked for slots; one that goes on may be
            case ScaleRequested() if isinstance(job, ManagedJob):
                job.scale(event.num_ranks, self._now_s)
                self._may_place = True
            case ScaleRequested():
                job.refuse_now(event, "a loop of the user's own has the ranks that it was started with")
            case _:
                assert_never(event)

    def _take_in_rank(self, event: AnyRankEvent) -> None:
        """Handles a rank's event. Refuses one of an earlier incarnation, and one from a host other than the rank's."""
        job = self._touch(event.job_id)
        record = job.ranks.get(event.rank) if job else None
        if job is None:
            return
        if record is None or record.incarnation != event.incarnation:
            now = f"incarnation {record.incarnation}" if record else "not of the job"
            job.outbox.refuse(event, f"rank {event.rank} is {now}", f"this is of incarnation {event.incarnation}")
            return
        # The others go on without its work, so what it says of work counts no more. Its end still has to free its
        # slots.
        if record.is_ending and not isinstance(event, RankExited | RankStarted | StacksReported | SessionLost):
            job.outbox.refuse(event, f"rank {record.rank} is being ended", "the other ranks go on without it")
            return
        match event:
            case RankStarted() | RankExited() | StacksReported() if event.agent_id != record.agent_id:
                job.outbox.refuse(
                    event, f"rank {record.rank} is on {record.agent_id}", "no host speaks for another's processes"
                )
            case RankExited() if (placed := self.placed.get(event.job_id)) is not None:
                # A process that exits with `LEFT_ALONE` has lost others that it needs, and is not at fault: it counts
                # as killed, since it may be started again (protocol P19.6).
                is_victim = event.exit_code < 0 or event.exit_code == LEFT_ALONE
                death = Death.KILLED if is_victim else Death.BY_ITSELF
                death = Death.NEVER_LIVED if event.not_started else death
                record.exit_code = event.exit_code
                if event.was_stopped:
                    job.silence.on_was_stopped(record.rank)
                self._exit(placed, record, event, death, death_notice(record, event), event.log_tail)
            case RankExited():
                job.outbox.refuse(event, "it is an attached loop", "no host has its processes")
            case RankReady():
                before = job.phase
                job.take_in(record, event, self._now_s)
                # From the last one on the job accepts further ranks, and can give some; those before change nothing.
                self._may_place |= job.phase is not before
            case _:
                job.take_in(record, event, self._now_s)
                self._may_place |= isinstance(event, LeaveRequested)

    def _touch(self, job_id: JobId) -> Job | None:
        """Returns the job, None if unknown, and notes that its commands must be taken when the event has been
        handled.
        """
        if (job := self.jobs.get(job_id)) is not None:
            self._touched[job_id] = None
        return job

    def _touch_placed(self, job_id: JobId) -> PlacedJob | None:
        """As `_touch` for a job that gets slots; None for an attached loop."""
        return self.placed.get(job_id) if self._touch(job_id) is not None else None

    def _submit(self, event: JobSubmitted) -> None:
        """Adds a job to the queue. Ignores a repeated submission, and refuses one whose id is taken."""
        if event.key in self.keys or self._is_there(event):
            return
        job = SubmittedLoop(event, self._now_s) if event.spec.is_loop else ManagedJob(event)
        self.adopt(job)
        job.began_s[JobPhase.QUEUED] = self._now_s
        self._touch(event.job_id)
        self._may_place = True

    def _attach(self, event: LoopAttached) -> None:
        if not self._is_there(event):
            self.adopt(AttachedLoop(event, self._new_incarnation, self._now_s))
            self._touch(event.job_id)

    def _is_there(self, event: JobSubmitted | LoopAttached) -> bool:
        """Refuses the event and returns True if there is a job with its id."""
        job = self._touch(event.job_id)
        if job is not None:
            job.refuse_now(event, "a job with this id exists already")
        return job is not None

    def _forget(self, gone: set[JobId]) -> None:
        """Drops these ended jobs and the keys of their submissions."""
        for job_id in gone:
            for jobs in self.tables().values():
                jobs.pop(job_id, None)
            self._kept_views.pop(job_id, None)
        self.keys = {key: job_id for key, job_id in self.keys.items() if job_id not in gone}

    def _set_timers(self, job: Job) -> None:
        """Applies the job's changes of timers since the last event."""
        for timer, delay_s in job.timers.items():
            deadlines = self._deadlines if timer is Timer.DEADLINE else self._checks
            if delay_s is None:
                deadlines.clear(job.id)
            else:
                deadlines.set(job.id, self._now_s + delay_s)
        job.timers.clear()

    def _try_again(self, job_id: JobId, rank: Rank, at_s: float) -> None:
        self._restarts.set((job_id, rank), at_s)

    def _new_incarnation(self) -> Incarnation:
        incarnation = Incarnation(self._next_incarnation)
        self._next_incarnation += 1
        return incarnation

    def _exit(
        self, job: PlacedJob, record: RankRecord, event: Event, death: Death, notice: str, log_tail: str = ""
    ) -> None:
        """Frees the slots of a process that has ended, and tells its job. Refuses a second report of the end."""
        # By now the slot may be another job's: freed a second time, it would be given to two ranks.
        if record.phase is RankPhase.EXITED:
            job.outbox.refuse(event, f"rank {record.rank} is {record.phase}", "its process has exited already")
            return
        for place in record.places:
            self.fleet.give_back(place)
        job.on_exited(record, death, notice, self._now_s, log_tail=log_tail)
        self._may_place = True

    def _drain(self, event: DrainRequested) -> None:
        """Drains a host, so that its ranks leave and are restarted elsewhere; or makes it available again, so that they
        stay.
        """
        self._may_place |= self.fleet.drain(event.agent_id, is_drained=event.is_drained)
        by_job: dict[JobId, list[RankRecord]] = {}
        for job_id, rank in self._ranks_on(event.agent_id):
            if (job := self._touch(job_id)) is not None:
                by_job.setdefault(job_id, []).append(job.ranks[rank])
        for job_id, records in by_job.items():
            placed = self.placed[job_id]
            (placed.leave if event.is_drained else placed.stay)(records, self._now_s)

    def _ranks_on(self, agent_id: AgentId) -> list[tuple[JobId, Rank]]:
        taken = self.fleet.taken
        return list(dict.fromkeys(taken[place] for place in self.fleet.places(agent_id) if place in taken))

    def _lose_agent(self, event: AgentLost) -> None:
        """Treats every rank on the lost host as exited."""
        # First: with the host goes the record of which ranks are on its slots.
        lost = self._ranks_on(event.agent_id)
        self.fleet.leave(event.agent_id)
        for job_id, rank in lost:
            if (job := self._touch_placed(job_id)) is not None:
                record = job.ranks[rank]
                notice = f"rank {rank} is lost: its host {record.host} is gone"
                self._exit(job, record, event, Death.WITH_HOST, notice)

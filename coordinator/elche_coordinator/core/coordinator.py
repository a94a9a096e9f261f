"""The one door of the core: events go in, commands come out."""

from itertools import chain
from typing import assert_never

from elche_coordinator.core.commands import Command
from elche_coordinator.core.deadlines import Deadlines
from elche_coordinator.core.events import (
    AgentJoined,
    AgentLost,
    AnyRankEvent,
    BatchesTrained,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSaved,
    DeadlinePassed,
    DrainRequested,
    EpochMetricsTaken,
    EvaluationDone,
    Event,
    FinalStateSaved,
    GroupFormed,
    JobCancelled,
    JobSubmitted,
    LoopAttached,
    LoopEpochEnded,
    LoopLeft,
    LoopProgressed,
    PauseRequested,
    RankEvent,
    RankExited,
    RankFailed,
    RankReady,
    RankStarted,
    RoundEntered,
    RoundFailed,
    RoundHeld,
    SessionLost,
    SessionOpened,
    UserEventRecorded,
)
from elche_coordinator.core.fleet import Fleet
from elche_coordinator.core.ids import AgentId, Incarnation, JobId
from elche_coordinator.core.jobs import Job, death_notice
from elche_coordinator.core.machine import JobPhase, RankPhase, Refused
from elche_coordinator.core.ranks import RankRecord


class Coordinator:
    """All jobs and all hosts, as a synchronous state machine without I/O and without a clock.

    `handle` never raises for what a client, an agent or a rank may say: old news and what has no place in the
    present phase change nothing. An exception out of it is a bug of the core.
    """

    def __init__(self, *, first_incarnation: int = 1) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.fleet = Fleet()
        self._deadlines: Deadlines[JobId] = Deadlines()
        self._next_incarnation = first_incarnation
        self._now_s = 0.0
        self._touched: dict[JobId, Job] = {}

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        """Takes in one event at a time `now_s` (seconds, monotonic) and returns what is to be done, in order."""
        self._now_s = now_s
        try:
            self._take_in(event)
        except Refused:
            pass  # the table has no place for it: nothing was changed
        touched, self._touched = self._touched, {}
        for job in touched.values():
            job.began_s.setdefault(job.phase, now_s)
        return [command for job in touched.values() for command in job.take_commands()]

    def next_deadline_s(self) -> float | None:
        """When `DeadlinePassed` is to be handled, at the latest; None when nothing waits for a time."""
        return self._deadlines.next_s()

    def _take_in(self, event: Event) -> None:
        match event:
            case RankEvent():
                self._take_in_rank(event)
            case JobSubmitted():
                self._submit(event)
            case LoopAttached():
                self._attach(event)
            case JobCancelled():
                if (job := self._touch(event.job_id)) is not None:
                    job.cancel()
            case CheckpointRequested():
                if (job := self._touch(event.job_id)) is not None:
                    job.request_checkpoint()
            case PauseRequested():
                if (job := self._touch(event.job_id)) is not None:
                    job.pause(self._now_s, is_paused=event.is_paused)
            case DrainRequested():
                self.fleet.drain(event.agent_id, is_drained=event.is_drained)
                self._place_queued()
            case AgentJoined():
                self.fleet.join(event.agent_id, event.host, event.slots)
                self._place_queued()
            case AgentLost():
                self._lose_agent(event.agent_id)
            case DeadlinePassed():
                for job_id in self._deadlines.take_passed(self._now_s):
                    if (job := self._touch(job_id)) is not None:
                        job.stop_stragglers()
            case _:
                assert_never(event)

    def _take_in_rank(self, event: AnyRankEvent) -> None:
        """Fences by incarnation: what an earlier process of the rank did is old news."""
        job = self._touch(event.job_id)
        record = job.ranks.get(event.rank) if job else None
        if job is None or record is None or record.incarnation != event.incarnation:
            return
        now_s = self._now_s
        match event:
            case BatchesTrained():
                job.note_batches(record, event, now_s)
            case RoundEntered():
                job.note_entered(record, event)
            case RoundHeld():
                job.note_held(record, event, now_s)
            case RoundFailed():
                job.note_round_failed(record, event, now_s)
            case GroupFormed():
                job.note_grouped(record, event, now_s)
            case RankReady():
                job.note_ready(record, event)
            case EvaluationDone():
                job.note_evaluated(record, event)
            case CheckpointSaved():
                job.note_checkpoint_saved(record, event, now_s)
            case CheckpointFailed():
                job.note_checkpoint_failed(record, event)
            case EpochMetricsTaken():
                job.note_metrics_taken(record, event)
            case UserEventRecorded():
                job.note_user_event(event)
            case FinalStateSaved():
                job.note_saved(record, event)
            case LoopProgressed():
                job.note_loop_progress(record, event)
            case LoopEpochEnded():
                job.note_loop_epoch_ended(record, event)
            case SessionOpened():
                job.note_session_opened(record, event)
            case LoopLeft():
                job.note_loop_left(record, event)
            case RankFailed():
                job.note_failed(record, event)
            case SessionLost():
                job.note_session_lost(record, event)
            case RankStarted():
                job.note_started(record, event)
            case RankExited():
                self._exit(job, record, death_notice(record, event), event.log_tail)
            case _:
                assert_never(event)

    def _touch(self, job_id: JobId) -> Job | None:
        """The job, whose commands will be taken at the end of the event."""
        job = self.jobs.get(job_id)
        if job is not None:
            self._touched[job_id] = job
        return job

    def _submit(self, event: JobSubmitted) -> None:
        if self._new_job(event) is not None:
            self._place_queued()

    def _attach(self, event: LoopAttached) -> None:
        job = self._new_job(event)
        if job is not None:
            job.began_s[JobPhase.STARTING] = self._now_s
            job.attach(event, self._new_incarnation, self._now_s)

    def _new_job(self, event: JobSubmitted | LoopAttached) -> Job | None:
        """The job; None when it is there already."""
        if event.job_id in self.jobs:
            return None
        self.jobs[event.job_id] = Job(
            event.job_id,
            event.spec,
            submitted_at=event.submitted_at,
            set_deadline=lambda delay_s: self._set_deadline(event.job_id, delay_s),
        )
        self.jobs[event.job_id].began_s[JobPhase.QUEUED] = self._now_s
        return self._touch(event.job_id)

    def _set_deadline(self, job_id: JobId, delay_s: float | None) -> None:
        if delay_s is None:
            self._deadlines.clear(job_id)
        else:
            self._deadlines.set(job_id, self._now_s + delay_s)

    def _place_queued(self) -> None:
        """Gives free slots to queued jobs, the oldest first; one that needs more than are free waits."""
        for job in self.jobs.values():
            if job.phase is not JobPhase.QUEUED:
                continue
            if groups := self.fleet.take(job.id, job.spec.num_ranks, job.spec.group_size):
                self._touch(job.id)
                if job.refuse_places(len(groups)):
                    for place in chain.from_iterable(groups):
                        self.fleet.give_back(place)
                else:
                    job.place(groups, self.fleet, self._new_incarnation)

    def _new_incarnation(self) -> Incarnation:
        incarnation = Incarnation(self._next_incarnation)
        self._next_incarnation += 1
        return incarnation

    def _exit(self, job: Job, record: RankRecord, notice: str, log_tail: str = "") -> None:
        if record.phase is not RankPhase.EXITED:
            for place in record.places:
                self.fleet.give_back(place)
            job.note_exited(record, notice, log_tail)
            self._place_queued()

    def _lose_agent(self, agent_id: AgentId) -> None:
        """The host's processes are gone with it."""
        lost = dict.fromkeys(owner for place, owner in self.fleet.taken.items() if place.agent_id == agent_id)
        self.fleet.leave(agent_id)
        for job_id, rank in lost:
            if (job := self._touch(job_id)) is not None:
                record = job.ranks[rank]
                self._exit(job, record, f"rank {rank} is lost: its host {record.host} is gone")

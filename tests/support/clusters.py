"""A core whose jobs load forever: for who gets which slots."""

from typing import Any

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.commands import Command, StartRank, StopRank
from elche_coordinator.core.messages.events import AgentJoined, Event, JobCancelled, JobSubmitted, QuotasSet, RankExited
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase


def exit_of(command: StopRank) -> RankExited:
    return RankExited(
        job_id=command.job_id,
        rank=command.rank,
        incarnation=command.incarnation,
        agent_id=command.agent_id,
        exit_code=0,
    )


class Cluster:
    """A core with jobs whose ranks load forever."""

    def __init__(self, num_slots: int, **quotas: int) -> None:
        self.core = Coordinator()
        self.started: list[JobId] = []
        self.handle(QuotasSet(quotas=quotas))
        self.handle(AgentJoined(agent_id=AgentId("host"), host="host", slots=(Slot(device="cpu"),) * num_slots))

    def handle(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, now_s=1.0)
        asked = self.core.asked
        for command in commands:
            if isinstance(command, StartRank) and command.job_id not in self.started:
                self.started.append(command.job_id)
            if isinstance(command, StopRank):
                self.handle(exit_of(command))
        for one in asked:
            self.handle(one)
        return commands

    def submit(self, name: str, num_ranks: int, by: str = "", **fields: Any) -> None:
        """`by` is its submitter."""
        spec = JobSpec(name=name, source_hash="", file_name="", num_ranks=num_ranks, submitted_by=by, **fields)
        at_s = float(len(self.core.jobs))
        self.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=at_s))

    def end(self, name: str) -> None:
        self.handle(JobCancelled(job_id=JobId(name)))

    def reason(self, name: str) -> str:
        view = self.core.view(JobId(name), 2.0)
        assert view is not None
        return view.reason

    def slots_of(self, account: str) -> int:
        """How many slots a project has, or a submitter."""
        return sum(self.core.jobs[job_id].spec.account == account for job_id, _ in self.core.fleet.taken.values())

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.core.jobs.values() if job.phase is JobPhase.QUEUED]

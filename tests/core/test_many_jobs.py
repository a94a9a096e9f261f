"""What an event costs the core does not grow with the number of queued jobs, counted in lines that run."""

import pickle
from random import Random
from typing import Any

import pytest

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.jobs import lines
from elche_coordinator.core.messages.commands import Command, StartRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    DeadlinePassed,
    DrainRequested,
    Event,
    HostFitnessChanged,
    JobCancelled,
    JobSubmitted,
    QuotasSet,
    RankExited,
    ScaleRequested,
)
from elche_coordinator.core.messages.ids import AgentId, Incarnation, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase
from support.clusters import Cluster
from support.effort import lines_run

FEW, MANY = 40, 1200


def waiting(num_jobs: int) -> Cluster:
    """Two users' jobs, of one rank or two; the first has all slots."""
    cluster = Cluster(4)
    cluster.submit("first", 4)
    for number in range(num_jobs):
        cluster.submit(f"job-{number}", 1 + number % 2, by=f"user{number % 4 // 2}@host")
    return cluster


def test_events_cost_as_much_among_many_queued_jobs_as_among_few() -> None:
    """With 1,000 queued jobs a submission ran 124,000 lines, and the end of a job twice as many."""
    few, many = waiting(FEW), waiting(MANY)

    def costs(cluster: Cluster) -> list[int]:
        return [
            lines_run(lambda: cluster.submit("one more", 1, by="user1@host")),
            lines_run(lambda: cluster.end("job-7")),
            lines_run(lambda: cluster.end("first")),  # four slots for those that wait
            lines_run(
                lambda: cluster.handle(AgentJoined(agent_id=AgentId("b"), host="b", slots=(Slot(device="cpu"),)))
            ),
            lines_run(lambda: cluster.handle(DrainRequested(agent_id=AgentId("b"), is_drained=True))),
            lines_run(lambda: cluster.reason("job-30")),
        ]

    assert costs(many) == pytest.approx(costs(few), rel=0.02)
    assert few.started == many.started
    assert few.started[:4] == ["first", "job-0", "job-2", "job-1"]


def test_a_saved_core_has_its_queue_again() -> None:
    cluster = waiting(FEW)
    reasons = [cluster.reason(job.id) for job in cluster.waiting]
    cluster.core = pickle.loads(pickle.dumps(cluster.core))
    assert [cluster.reason(job.id) for job in cluster.waiting] == reasons
    check_invariants(cluster.core)
    cluster.end("first")
    assert len(cluster.started) > 1


def test_a_saved_placing_has_no_job_in_it() -> None:
    """A save of what all jobs have in common would otherwise contain each of them."""
    few, many = (pickle.dumps(waiting(number).core._placing.__getstate__()["_lines"]) for number in (0, FEW))
    assert many == few


class Story:
    """Random jobs, hosts and ends of processes."""

    def __init__(self, seed: int) -> None:
        self.random, self.core, self.now_s = Random(seed), Coordinator(), 0.0
        self.living: dict[tuple[JobId, Rank], tuple[Incarnation, AgentId]] = {}
        self.told: list[list[Command]] = []
        self.num_jobs = self.num_hosts = 0

    def handle(self, event: Event) -> None:
        commands = self.core.handle(event, now_s=self.now_s)
        asked = self.core.asked
        check_invariants(self.core)
        self.told.append(commands)
        for command in commands:
            if isinstance(command, StartRank):
                self.living[command.job_id, command.rank] = command.incarnation, command.agent_id
        for one in asked:
            self.handle(one)

    def exit(self, key: tuple[JobId, Rank], code: int) -> None:
        incarnation, agent_id = self.living.pop(key)
        self.handle(RankExited(job_id=key[0], rank=key[1], incarnation=incarnation, agent_id=agent_id, exit_code=code))

    def run(self, num_steps: int) -> list[list[Command]]:
        choose = self.random.choice
        for _ in range(num_steps):
            self.now_s += choose([0, 0.1, 1, 3])
            while (next_s := self.core.next_deadline_s()) is not None and next_s <= self.now_s:
                self.handle(DeadlinePassed())
            a_job = JobId(f"job-{self.random.randint(1, self.num_jobs + 1)}")
            a_host = AgentId(f"host-{self.random.randint(0, self.num_hosts)}")
            match choose(
                ["submit"] * 8
                + ["exit"] * 4
                + ["cancel"] * 3
                + ["join", "join", "lose", "drain", "scale", "quota", "fill"]
            ):
                case "submit":
                    self.submit()
                case "cancel":
                    self.handle(JobCancelled(job_id=a_job))
                case "exit" if self.living:
                    self.exit(choose(sorted(self.living)), choose([-9, -9, 0, 1]))
                case "join":
                    self.join()
                case "lose":
                    self.handle(AgentLost(agent_id=a_host))
                case "drain":
                    self.handle(DrainRequested(agent_id=a_host, is_drained=choose([True, False])))
                case "fill":
                    self.handle(HostFitnessChanged(agent_id=a_host, problem=choose(["its disk is full", ""])))
                case "scale":
                    self.handle(ScaleRequested(job_id=a_job, num_ranks=self.random.randint(1, 6)))
                case "quota":
                    self.handle(QuotasSet(quotas={choose(["ada", "ben", "vision", "*"]): self.random.randint(0, 6)}))
            for key in [key for key in self.living if self.core.jobs[key[0]].phase is JobPhase.STOPPING]:
                self.exit(key, -15)
        return self.told

    def submit(self) -> None:
        choose = self.random.choice
        self.num_jobs += 1
        num_ranks, is_loop = choose([0, 1, 1, 2, 3, 5, 9]), choose([False, False, False, True])
        fields: dict[str, Any] = {"min_ranks": choose([0, num_ranks and 1])}
        if is_loop:
            num_ranks, fields = max(1, num_ranks), {"is_loop": True}
        elif choose([True, False, False]):
            fields["settings"] = {"group_size": "2"}
        spec = JobSpec(
            name=f"job-{self.num_jobs}",
            source_hash="hash",
            file_name="",
            num_ranks=num_ranks,
            priority=choose([0, 0, 1, -1]),
            submitted_by=choose(["ada@a", "ben@b", "cy@c"]),
            project=choose(["", "", "vision"]),
            conditions=choose([(), (), ("device=cuda",), ("zone=a",), ("zone=b", "device=cpu")]),
            slow_factors=choose([{}, {}, {}, {3: 2.0}]),
            **fields,
        )
        self.handle(JobSubmitted(job_id=JobId(spec.name), spec=spec, submitted_at=float(self.num_jobs // 2)))

    def join(self) -> None:
        choose = self.random.choice
        self.num_hosts += 1
        name, devices = (
            f"host-{self.num_hosts}",
            choose([["cpu"] * 3, ["cuda:0", "cuda:1"], ["cuda:0", "cuda:0", "cpu"]]),
        )
        slots = tuple(Slot(device=device) for device in devices)
        labels = {"zone": choose(["a", "b"])}
        self.handle(AgentJoined(agent_id=AgentId(name), host=name, slots=slots, labels=labels))


@pytest.mark.parametrize("seed", range(6))
def test_to_look_at_the_first_of_a_line_decides_the_same_as_to_look_at_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Story(seed).run(120)
    monkeypatch.setattr(lines, "kind_of", lambda spec: (spec.name, (), False, 0, 0))
    assert Story(seed).run(120) == told

"""Projects share slots equally, and may have quotas."""

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest
from core.test_lost_ranks import succeeds
from core.test_queue import OTHER, end_other, submit_this

from elche_coordinator.core.messages.events import AgentJoined, JobSubmitted, QuotasSet, SlotsRequested
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase
from support.clusters import Cluster
from support.stories import in_mid_training
from support.watched import WatchedSimulation, ranks


def test_who_has_fewest_slots_is_next():
    cluster = Cluster(4)
    for number in range(6):
        cluster.submit(f"ada-{number}", 1, by="ada@a")
    cluster.submit("ben-0", 1, by="ben@b")
    cluster.submit("ben-1", 1, by="ben@c")
    assert cluster.started == ["ada-0", "ada-1", "ada-2", "ada-3"]
    for name in ("ada-0", "ada-1", "ada-2"):
        cluster.end(name)
    assert cluster.started[4:] == ["ben-0", "ben-1", "ada-4"]


def test_what_a_job_has_got_counts_for_those_of_other_sizes():
    cluster = Cluster(0)
    cluster.submit("ada-1", 1, by="ada@a")
    cluster.submit("ada-2", 2, by="ada@a")
    cluster.submit("ben", 1, by="ben@b")
    cluster.handle(AgentJoined(agent_id=AgentId("four"), host="four", slots=(Slot(device="cpu"),) * 4))
    assert cluster.started == ["ada-1", "ben", "ada-2"]


def test_priority_comes_before_shares():
    cluster = Cluster(1)
    cluster.submit("first", 1, by="ada@a")
    cluster.submit("ben", 1, by="ben@b")
    cluster.submit("ada", 1, by="ada@a", priority=1)
    cluster.end("first")
    assert cluster.started == ["first", "ada"]


def test_a_project_counts_before_its_submitter():
    cluster = Cluster(2)
    cluster.submit("a", 1, by="ada@a", project="vision")
    cluster.submit("b", 1, by="ben@b", project="vision")
    cluster.submit("c", 1, by="ada@a", project="vision")
    cluster.submit("d", 1, by="ada@a")
    cluster.end("a")
    assert cluster.started == ["a", "b", "d"], "ada herself has none"


def test_more_than_a_quota_waits_and_is_in_nobodys_way():
    cluster = Cluster(4, ada=2)
    cluster.submit("a", 2, by="ada@a")
    cluster.submit("b", 1, by="ada@a")
    cluster.submit("c", 2, by="ben@b")
    assert cluster.started == ["a", "c"]
    assert cluster.reason("b") == "waits for 1 of the 2 slots that ada may have: 2 are taken"
    cluster.end("a")
    assert cluster.started == ["a", "c", "b"]


def test_other_quotas_count_from_then_on():
    cluster = Cluster(2, ada=1)
    cluster.submit("a", 1, by="ada@a")
    cluster.submit("b", 1, by="ada@a")
    assert cluster.started == ["a"]
    cluster.handle(QuotasSet(quotas={}))
    assert cluster.started == ["a", "b"]


def test_a_job_that_no_quota_can_hold_says_so():
    cluster = Cluster(4, **{"*": 2, "ada": 4})
    cluster.submit("b", 3, by="ben@b")
    cluster.submit("a", 3, by="ada@a")
    assert cluster.started == ["a"]
    assert cluster.reason("b") == "waits for 3 of the 2 slots that ben may have: 0 are taken; ask for fewer ranks"


@pytest.mark.parametrize("num_ranks", [0, 4])
def test_who_takes_what_is_there_takes_no_more_than_the_quota(num_ranks):
    cluster = Cluster(4, ada=3)
    cluster.submit("a", num_ranks, by="ada@a", min_ranks=1 if num_ranks else 0)
    assert cluster.slots_of("ada") == 3


def submit_richer(simulation: WatchedSimulation, num_ranks: int, **fields: object) -> None:
    """Ada has four slots, and ben asks for some."""
    submit_this(simulation, 4, num_ranks=4, min_ranks=1, submitted_by="ada@a")
    in_mid_training(simulation)
    spec = JobSpec(name="other", source_hash="", file_name="", num_ranks=num_ranks, submitted_by="ben@b", **fields)  # type: ignore[arg-type]
    simulation.handle(JobSubmitted(job_id=OTHER, spec=spec, submitted_at=1.0))


@pytest.mark.parametrize("averaging", ["overlapped", "blocking"])
def test_who_has_more_makes_room_for_an_equal_that_has_less(simulate, averaging):
    simulation = simulate(ranks(25.0, 30.0, 57.5, 40.0), averaging=averaging, dataset_size=20_000, build_ms=10.0)
    submit_richer(simulation, 2)
    other = simulation.core.jobs[OTHER]
    simulation.run_until(lambda: other.phase is JobPhase.STARTING)
    assert sorted(simulation.job.run.generation.members) == [0, 1]
    end_other(simulation)
    simulation.run_until(lambda: len(simulation.job.run.generation.members) == 4)
    succeeds(simulation)
    assert simulation.job.roster.num_lost == 0


@pytest.mark.parametrize(("num_ranks", "fields"), [(3, {}), (1, {"priority": -1}), (2, {"project": "ada"})])
def test_who_has_more_keeps_as_much_as_the_other_gets(simulate, num_ranks, fields):
    """Three of four are more than half; a lower priority, or the same project, has no claim."""
    simulation = simulate(ranks(25.0, 30.0, 57.5, 40.0), dataset_size=6000)
    submit_richer(simulation, num_ranks, **fields)
    simulation.run_until(lambda: simulation.job.result is not None)
    assert simulation.events(SlotsRequested) == []
    end_other(simulation)


QUOTAS = {"ada": 5, "ben": 2, "*": 4}
NUM_SLOTS = 6


@pytest.mark.parametrize("seed", range(5))
def test_a_day_in_a_lab_of_three(seed):
    """Ada submits a hundred jobs in the morning, ben and eve some in the course of the day. Nobody has more than a
    quota, no slot is free that somebody may have, nobody waits for a hundred jobs, and all of them end.
    """
    dice, cluster = Random(seed), Cluster(NUM_SLOTS, **QUOTAS)
    due: list[tuple[float, str, str]] = []
    for user, num_jobs, until_h in (("ada", 100, 0.1), ("ben", 15, 8.0), ("eve", 15, 8.0)):
        for number in range(num_jobs):
            heappush(due, (dice.uniform(0.0, until_h), "submit", f"{user}-{number}"))
    submitted_h: dict[str, float] = {}
    waited_h: Counter[str] = Counter()
    num_known = 0
    while due:
        now_h, what, name = heappop(due)
        user = name.partition("-")[0]
        if what == "submit":
            submitted_h[name] = now_h
            cluster.submit(name, dice.choice([1, 1, 2]), by=f"{user}@lab")
        else:
            cluster.end(name)
        for started in cluster.started[num_known:]:
            num_known += 1
            heappush(due, (now_h + dice.uniform(0.1, 0.5), "end", started))
            whose = started.partition("-")[0]
            waited_h[whose] = max(waited_h[whose], now_h - submitted_h[started])
        held = {one: cluster.slots_of(one) for one in ("ada", "ben", "eve")}
        assert all(num <= QUOTAS.get(one, QUOTAS["*"]) for one, num in held.items())
        num_free = NUM_SLOTS - sum(held.values())
        could = [
            job.spec.num_ranks
            for job in cluster.waiting
            if job.spec.num_ranks + held[job.spec.account] <= QUOTAS.get(job.spec.account, QUOTAS["*"])
        ]
        assert not could or min(could) > num_free or max(could) > num_free, "or one that needs more is next"
    assert len(cluster.started) == 130
    assert not cluster.waiting
    assert waited_h["ada"] > 3.0
    assert waited_h["eve"] < 1.5
    assert waited_h["ben"] < 3.0, "whose quota holds one or two of them"


def test_a_thousand_jobs_wait_and_are_placed_in_little_time():
    cluster = Cluster(4)
    for number in range(300):
        cluster.submit(f"j{number}", 1, by=f"user-{number % 7}@lab")
    for number in range(300):
        cluster.end(f"j{number}")
    assert not cluster.waiting
    assert cluster.core.jobs[JobId("j0")].result is not None

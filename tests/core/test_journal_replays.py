"""A journal, written and read again, makes a fresh core say the same to every event."""

import json
from dataclasses import replace

import pytest

from elche.policies import POLICIES
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    BatchesTrained,
    CheckpointRequested,
    EvaluationDone,
    JobBroken,
    JobCancelled,
    JobSubmitted,
    LoopAttached,
    LoopBegan,
    LoopEpochEnded,
    LoopLeft,
    PauseRequested,
    RankExited,
    RankFailed,
    SessionLost,
    SessionOpened,
    StacksReported,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import Outcome, StallReport
from elche_coordinator.core.messages.spec import EpochWork, JobSpec, Slot
from elche_coordinator.journal.entries import MAX_TEXT
from elche_coordinator.journal.journals import JournalLimits
from elche_coordinator.journal.replaying import CannotReplay, Differs, replay
from elche_coordinator.simulator import RankModel
from support.journalled import JournalledCoordinator, JournalledSimulation
from support.watched import LONG_ROUNDS, ranks

JOB = JobId("job")


def simulation(*batch_ms: float, journal: JournalLimits | None = None, **options: object) -> JournalledSimulation:
    settings = {"dataset_size": 2000, "batch_size": 10, "epochs": 2, "policy": "cadence"} | LONG_ROUNDS
    settings |= {name: value for name, value in options.items() if name in AgreedSettings.__dataclass_fields__}
    rest = {name: value for name, value in options.items() if name not in AgreedSettings.__dataclass_fields__}
    core = JournalledCoordinator(journal) if journal else JournalledCoordinator()
    return JournalledSimulation(settings=AgreedSettings(**settings), ranks=ranks(*batch_ms), core=core, **rest)  # type: ignore[arg-type]


def replayed(core: JournalledCoordinator, job_id: str = JOB) -> int:
    return replay(core.lines(job_id))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_a_job_is_replayed_to_its_end(policy, averaging):
    one = simulation(
        5, 11.5, 7, policy=policy, averaging=averaging, has_evaluation=True, checkpoint_every_epochs=1, latency_ms=3.0
    )
    assert one.run().outcome is Outcome.SUCCEEDED
    assert replayed(one.core) == one.num_events - 1, "all but the host's, which are of no job"


@pytest.mark.parametrize("trouble", ["killed", "cancelled", "raises", "session lost", "host lost", "broken"])
def test_a_job_in_trouble_is_replayed(trouble):
    one = simulation(5, 12, **({"on_rank_loss": "fail"} if trouble == "host lost" else {}))
    one.run_until(lambda: len(one.rounds) == 5)
    address = one.processes[Rank(1)].address
    match trouble:
        case "killed":
            one.kill(1)
        case "cancelled":
            one.handle(JobCancelled(job_id=JOB))
        case "raises":
            one.handle(RankFailed(**address, error="it raised", traceback="x" * 3 * MAX_TEXT))
        case "session lost":
            one.handle(SessionLost(**address))
        case "host lost":
            for process in one.processes.values():
                process.is_alive = False
            one.handle(AgentLost(agent_id=AgentId("host")))
        case "broken":
            one.handle(JobBroken(job_id=JOB, reason="the disk is gone"))
    assert (one.run().outcome is Outcome.SUCCEEDED) == (trouble in ("killed", "session lost"))
    assert replayed(one.core) > 50


def test_a_long_log_is_cut_and_the_replay_is_exact():
    one = simulation(5, 12, on_rank_loss="fail")
    one.run_until(lambda: len(one.rounds) == 3)
    for rank in (0, 1):
        one.processes[Rank(rank)].is_alive = False
        address = one.processes[Rank(rank)].address
        log_tail = "".join(f"line {index}\n" for index in range(2 * MAX_TEXT))
        one.handle(RankExited(**address, agent_id=AgentId("host"), exit_code=1, log_tail=log_tail))
    one.run()
    assert one.job.result is not None
    assert len(one.job.result.traceback) > 2 * MAX_TEXT
    assert max(len(line) for line in one.core.lines()) < 4 * MAX_TEXT
    assert replayed(one.core)


def test_pauses_checkpoints_and_evaluations_are_replayed():
    one = simulation(5, 12, has_evaluation=True, checkpoint_every_minutes=1 / 60, monitor="loss", patience=5, epochs=4)
    one.evaluate = lambda epoch: {"loss": 1.0 / (epoch + 1)}
    one.run_until(lambda: len(one.rounds) == 4)
    one.handle(CheckpointRequested(job_id=JOB))
    one.handle(PauseRequested(job_id=JOB, is_paused=True))
    until_s = one.clock.now_s + 5
    one.clock.at(until_s, lambda: one.handle(PauseRequested(job_id=JOB, is_paused=False)))
    assert one.run().outcome is Outcome.SUCCEEDED
    assert replayed(one.core)


def test_a_resumed_job_is_replayed():
    first = simulation(5, 12, checkpoint_every_epochs=1)
    first.run()
    saved = first.saved[min(first.saved)]
    again = simulation(5, 12, resumed=saved, checkpoint_every_epochs=1)
    assert again.run().outcome is Outcome.SUCCEEDED
    assert replayed(again.core)


def test_a_repeated_recording_is_replayed():
    first = simulation(5, 12)
    first.run()
    again = simulation(5, 12, replay=tuple(report.recorded for report in first.rounds))
    assert again.run().outcome is Outcome.SUCCEEDED
    assert replayed(again.core)


def test_groups_and_rounds_that_are_given_up_are_replayed():
    one = simulation(5, 12, group_size=2, broken_rounds=frozenset({3, 4}))
    assert one.run().outcome is Outcome.SUCCEEDED
    assert replayed(one.core)


def test_a_stall_is_replayed():
    one = simulation(5, 12, dataset_size=40_000, on_rank_loss="fail")
    one.ranks[1] = RankModel(batch_ms=12, changes=((3.0, 60_000.0),))
    one.run_until(lambda: any(isinstance(report, StallReport) for report in one.reports))
    address = one.processes[Rank(1)].address
    one.handle(StacksReported(**address, agent_id=AgentId("host"), text="frame\n" * MAX_TEXT))
    one.handle(JobCancelled(job_id=JOB))
    one.run()
    former = [line.replace('"StacksReported"', '"StacksTold"') for line in one.core.lines(JOB)]
    assert former != list(one.core.lines(JOB))
    assert replay(former) == replayed(one.core), "with the event's former name, too"


def test_a_loop_of_the_users_own_is_replayed():
    core, now_s = JournalledCoordinator(), 100.0
    spec = JobSpec(name="job", source_hash="", file_name="loop.py", num_ranks=2, is_loop=True)
    places = (("here", "cpu"), ("there", "cpu"))
    core.handle(LoopAttached(job_id=JOB, spec=spec, ranks=places, policy="El Che", submitted_at=1.0), now_s=now_s)
    of = [record.address for record in core.jobs[JOB].ranks.values()]
    work = EpochWork(epoch=0, num_batches=3, num_samples=30, loss_sum=float("nan"), scalars={"a": (1.0, 3)})
    events = [
        *(SessionOpened(**one) for one in of),
        *(BatchesTrained(**one, local_step=3, num_processed=30, batch_ms=(1.0, float("inf"))) for one in of),
        PauseRequested(job_id=JOB, is_paused=True),
        EvaluationDone(**of[0], epoch=0, sums={"a": (1.0, 2)}, duration_ms=1),
        *(LoopEpochEnded(**one, work=work, duration_s=1.0) for one in of),
        *(LoopLeft(**one) for one in of),
    ]
    for event in events:
        now_s += 1.0
        core.handle(event, now_s=now_s)
    assert core.jobs[JOB].result is not None
    assert replayed(core) == len(events) + 1


def test_a_submitted_loop_is_replayed_though_others_had_its_slots_before():
    core = JournalledCoordinator()
    core.handle(joined("host", 2), now_s=1.0)
    core.handle(submitted("first", 1), now_s=2.0)
    core.handle(submitted("job", 2, is_loop=True), now_s=3.0)
    core.handle(exits(core, "first")[0], now_s=4.0)
    of = [record.address for record in core.jobs[JOB].ranks.values()]
    assert len(of) == 2
    events = [
        *(SessionOpened(**one) for one in of),
        *(LoopBegan(**one, policy="El Che") for one in of),
        *(LoopLeft(**one) for one in of),
        *(replace(one, exit_code=0) for one in exits(core, "job")),
    ]
    for index, event in enumerate(events):
        core.handle(event, now_s=5.0 + index)
    result = core.jobs[JOB].result
    assert result is not None
    assert result.outcome is Outcome.SUCCEEDED
    assert replayed(core) >= len(events) + 1


def submitted(name: str, num_ranks: int, **more: object) -> JobSubmitted:
    spec = JobSpec(name=name, source_hash="import torch", file_name="a.py", num_ranks=num_ranks, **more)  # type: ignore[arg-type]
    return JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=0.0)


def joined(name: str, num_slots: int) -> AgentJoined:
    slots = (Slot(device="cpu"),) * num_slots
    return AgentJoined(agent_id=AgentId(name), host=name, slots=slots)


def exits(core: JournalledCoordinator, job_id: str) -> list[RankExited]:
    job = core.jobs[JobId(job_id)]
    return [RankExited(**record.address, agent_id=record.agent_id, exit_code=1) for record in job.ranks.values()]


def test_jobs_that_wait_for_each_other_are_replayed_each_alone():
    """What one finds free is in its journal: nothing of the others is, and nothing of them is needed."""
    core = JournalledCoordinator()
    core.handle(joined("big", 3), now_s=1.0)
    core.handle(submitted("first", 2), now_s=2.0)
    core.handle(submitted("second", 3), now_s=3.0)
    core.handle(submitted("third", 0, settings={"group_size": "2"}), now_s=4.0)
    core.handle(submitted("fourth", 1), now_s=5.0)
    core.handle(joined("small", 3), now_s=6.0)  # for the second: the third waits until the first has ended
    for name in ("first", "second", "third", "fourth"):
        for index, event in enumerate(exits(core, name)):
            core.handle(event, now_s=10.0 + len(name) + index)
    core.handle(submitted("fifth", 9), now_s=20.0)
    core.handle(JobCancelled(job_id=JobId("fifth")), now_s=21.0)
    core.handle(submitted("sixth", 0, slow_factors={7: 2.0}), now_s=22.0)
    for name, job in core.jobs.items():
        assert job.result is not None, name
        assert replayed(core, name) >= 1
    lines = "".join(core.lines("third"))
    assert "Elsewhere" in lines
    assert "second" not in lines


@pytest.mark.parametrize("min_ranks", [1, 2])
def test_a_job_that_gives_slots_to_another_is_replayed_alone(min_ranks):
    """With fewer ranks, or from the checkpoint that is made as all of them leave."""
    one = simulation(5, 12, dataset_size=4000, build_ms=10.0)
    one.handle(joined("host", 2))
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=2, min_ranks=min_ranks)
    one.handle(JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0))
    one.run_until(lambda: len(one.rounds) == 5)
    other = JobSpec(name="other", source_hash="", file_name="", num_ranks=min_ranks, priority=1)
    one.handle(JobSubmitted(job_id=JobId("other"), spec=other, submitted_at=1.0))
    one.run_until(lambda: bool(one.core.jobs[JobId("other")].ranks))
    for event in exits(one.core, "other") if min_ranks == 2 else ():
        one.handle(event)
    assert one.run().outcome is Outcome.SUCCEEDED
    assert sum("SlotsRequested" in line for line in one.core.lines()) == 1
    assert replayed(one.core) > 5


def test_a_journal_without_its_beginning_is_not_replayed():
    one = simulation(5, 12, journal=JournalLimits(num_entries=100))
    one.run()
    with pytest.raises(CannotReplay, match=r"begins after \d+ events that are not in it"):
        replay(one.core.lines())
    with pytest.raises(CannotReplay, match="begins after"):
        replay(one.core.lines(num_entries=10))


def test_another_answer_is_found_and_named():
    one = simulation(5, 12)
    one.run()
    lines = list(one.core.lines())
    index = next(index for index, line in enumerate(lines) if "SendLease" in line)
    row = json.loads(lines[index])
    del row["commands"][-1]
    with pytest.raises(Differs, match=f"^event {index - 1}, ResultReceived"):
        replay([*lines[:index], json.dumps(row), *lines[index + 1 :]])


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "nonsense", '{"journal": 1, "job": "a", "num_dropped": 0}\n{"at": 1}']
)
def test_what_is_no_journal_is_refused(text):
    with pytest.raises(CannotReplay, match="this is not a journal"):
        replay(text.splitlines())


def test_a_journal_of_a_newer_format_is_refused():
    with pytest.raises(CannotReplay, match="has format 3, and this is 2"):
        replay(['{"journal": 3, "job": "a", "num_dropped": 0}'])


def test_refusals_are_in_it_and_replayed():
    one = simulation(5, 12)
    one.run_until(lambda: len(one.rounds) == 3)
    last = one.events(BatchesTrained)[-1]
    one.handle(replace(last, incarnation=99))
    one.run()
    (line,) = (line for line in one.core.lines() if '"refusals"' in line)
    assert json.loads(line)["refusals"] == [
        {
            "state": f"rank {last.rank} is incarnation {last.incarnation}",
            "trigger": "BatchesTrained",
            "why": "this is of incarnation 99",
        }
    ]
    assert replayed(one.core)

"""Jobs of which nobody is left that has the model: they begin anew, from their newest checkpoint or their start."""

import json
from dataclasses import replace

import pytest
from core.test_lost_ranks import THREE, by_policy

from elche.errors import LEFT_ALONE
from elche_coordinator.core.describe import describe_training
from elche_coordinator.core.jobs.deaths import FruitlessAttempts
from elche_coordinator.core.messages.commands import StartRank, StopRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    DrainRequested,
    JobBroken,
    JobCancelled,
    JobSubmitted,
    RankExited,
    RankReady,
    ScaleRequested,
)
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import EpochReport, MembershipReport, Outcome
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.simulator.simulation import JOB
from support.stories import at_phase, in_mid_training
from support.watched import WatchedSimulation, ranks


def goes_on(simulation: WatchedSimulation) -> None:
    """The job ends well, each sample in the final model once."""
    result = simulation.run(limit_s=simulation.clock.now_s + 3_000)
    assert result.outcome is Outcome.SUCCEEDED, result.error
    simulation.assert_exactly_once()


def told(simulation: WatchedSimulation) -> list[str]:
    return [report.text for report in simulation.reports if isinstance(report, MembershipReport) and not report.is_back]


def has_saved(simulation: WatchedSimulation) -> bool:
    return simulation.job.run.has_saved


def kill_all(simulation: WatchedSimulation) -> None:
    for rank, process in simulation.processes.items():
        if process.is_alive:
            simulation.kill(rank)


@by_policy
def test_all_ranks_die_and_the_job_goes_back_to_its_checkpoint(simulate, policy, averaging):
    simulation = simulate(
        ranks(*THREE), policy=policy, averaging=averaging, epochs=3, dataset_size=2000, checkpoint_every_epochs=1
    )
    simulation.run_until(lambda: has_saved(simulation))
    before = simulation.training.version
    kill_all(simulation)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED)
    assert "the job goes back to checkpoint " in told(simulation)[-1]
    goes_on(simulation)
    assert simulation.job.attempt == 2
    assert simulation.training.version > before
    started = simulation.sent(StartRank)
    assert len({command.incarnation for command in started}) == len(started)
    assert [command.rank for command in started[-3:]] == [0, 1, 2]
    told_of = [(report.attempt, report.epoch) for report in simulation.reports if isinstance(report, EpochReport)]
    assert len(set(told_of)) == len(told_of), "an epoch that is trained again is told again, as one of another attempt"
    assert {attempt for attempt, _ in told_of} == {1, 2}


def test_a_job_that_went_back_and_then_shrank_to_one_rank_goes_back_with_all(simulate):
    """Its last checkpoint has the speeds of two ranks, and named the three devices of those that had resumed."""
    simulation = simulate(ranks(*THREE), epochs=4, dataset_size=4000, checkpoint_every_epochs=1)
    simulation.run_until(lambda: has_saved(simulation))
    kill_all(simulation)
    simulation.run_until(lambda: simulation.job.attempt == 2 and has_saved(simulation))
    for num_ranks in (2, 1):
        simulation.handle(ScaleRequested(job_id=JOB, num_ranks=num_ranks))
        simulation.run_until(lambda num_ranks=num_ranks: len(simulation.training.members) == num_ranks)
    before = simulation.training.checkpoints.newest_version
    simulation.run_until(lambda: simulation.training.checkpoints.kept[-1].version > before)
    simulation.handle(ScaleRequested(job_id=JOB, num_ranks=3))
    kill_all(simulation)
    goes_on(simulation)
    assert len(simulation.training.members) == 3


def test_without_a_checkpoint_it_goes_back_to_its_start(simulate):
    simulation = simulate(ranks(*THREE), dataset_size=2000)
    in_mid_training(simulation)
    kill_all(simulation)
    goes_on(simulation)
    assert told(simulation)[-1].endswith("; the job goes back to its start")
    assert simulation.job.attempt == 2


def test_a_rank_that_was_left_alone_may_be_started_again_and_one_that_ends_by_itself_would_do_so_again(simulate):
    """Such as a process of a replica group that cannot meet the others, since the coordinator is away."""
    simulation = simulate(ranks(25.0), dataset_size=2000)
    at_phase(simulation, JobPhase.TRAINING)
    simulation.processes[0].exit(LEFT_ALONE)
    goes_on(simulation)
    assert "rank 0 on host (cpu) has lost the processes that it works with at batch " in told(simulation)[-1]
    simulation = simulate(ranks(25.0), dataset_size=2000)
    at_phase(simulation, JobPhase.TRAINING)
    simulation.processes[0].exit(1)
    assert simulation.run().error.startswith("rank 0 on host (cpu) left with exit code 1 at batch ")


def test_the_last_rank_dies_while_others_are_newcomers(simulate):
    """Who has no model is ended and started again with the others."""
    simulation = simulate(ranks(25.0, 30.0), dataset_size=4000, build_ms=200.0)
    in_mid_training(simulation)
    simulation.kill(0)
    simulation.run_until(lambda: simulation.job.run.membership.forming is not None and simulation.processes[0].is_alive)
    simulation.kill(1)
    goes_on(simulation)
    assert [command.rank for command in simulation.sent(StopRank)] == [0]
    assert simulation.job.attempt == 2


def test_a_host_is_lost_and_the_job_waits_for_another(simulate):
    simulation = simulate(ranks(*THREE), dataset_size=2000)
    in_mid_training(simulation)
    for process in simulation.processes.values():
        process.is_alive = False
    simulation.handle(AgentLost(agent_id=AgentId("host")))
    assert simulation.job.phase is JobPhase.QUEUED
    assert (
        simulation.core.explanation(simulation.job.id)
        == "waits for 3 free slots: no host offers any; start more workers"
    )
    simulation.handle(AgentJoined(agent_id=AgentId("another"), host="another", slots=(Slot(device="cpu"),) * 3))
    goes_on(simulation)


@pytest.mark.parametrize("phase", [JobPhase.STARTING, JobPhase.GROUPING, JobPhase.FINISHING])
def test_all_die_in_any_phase(simulate, phase):
    simulation = simulate(
        ranks(*THREE), epochs=2, dataset_size=1000, checkpoint_every_epochs=1, latency_ms=5.0, build_ms=50.0,
        has_evaluation=True, evaluation_ms=200.0, start_ms=50.0,
    )  # fmt: skip
    if phase is JobPhase.STARTING:
        simulation.start()
        simulation.run_until(lambda: len(simulation.processes) == 3)
    else:
        at_phase(simulation, phase)
    kill_all(simulation)
    goes_on(simulation)
    assert simulation.job.attempt == (1 if phase is JobPhase.STARTING else 2)


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_a_rank_that_is_killed_while_the_job_starts_is_started_again_once(simulate, num_deaths):
    """The others wait for it; if it dies again, all begin again, since it may never be able to start."""
    simulation = simulate(ranks(*THREE), epochs=2, dataset_size=1000, latency_ms=5.0, start_ms=500.0)
    simulation.start()
    for _ in range(num_deaths):
        simulation.run_until(lambda: 1 in simulation.processes and simulation.processes[1].is_alive)
        assert simulation.job.phase is JobPhase.STARTING
        simulation.kill(1)
    goes_on(simulation)
    assert simulation.job.attempt == num_deaths
    assert [command.rank for command in simulation.sent(StartRank)] == [0, 1, 2, 1] + [0, 1, 2] * (num_deaths - 1)


def test_a_starting_job_whose_rank_is_killed_gives_way_to_a_job_that_waits_for_the_slot(simulate):
    """The older job's rank gets the slot; the other ranks of the job that starts do not wait in theirs."""
    simulation = simulate(ranks(*THREE), dataset_size=20_000, num_hosts=3)
    in_mid_training(simulation)
    simulation.handle(AgentJoined(agent_id=AgentId("another"), host="another", slots=(Slot(device="cpu"),) * 2))
    spec = JobSpec(name="other", source_hash="", file_name="", num_ranks=2)
    simulation.handle(JobSubmitted(job_id=JobId("other"), spec=spec, submitted_at=1.0))
    other = simulation.core.jobs[JobId("other")]
    assert other.phase is JobPhase.STARTING
    simulation.processes[2].is_alive = False
    simulation.handle(AgentLost(agent_id=AgentId("host-3")))
    killed = other.ranks[1]
    address = killed.address
    simulation.handle(RankExited(**address, agent_id=killed.agent_id, exit_code=-9))
    assert other.phase is JobPhase.QUEUED
    assert [(one.job_id, one.rank) for one in simulation.sent(StartRank)][-1] == (JOB, 2)
    assert [(one.job_id, one.rank) for one in simulation.sent(StopRank)] == [("other", 0)]


def test_all_die_when_the_last_model_is_saved_as_a_checkpoint_and_not_yet_written(simulate):
    """From that checkpoint nothing is trained: the first round makes the final model."""
    simulation = simulate(
        ranks(*THREE), epochs=2, dataset_size=1000, checkpoint_every_epochs=1, has_evaluation=True, evaluation_ms=900.0
    )
    at_phase(simulation, JobPhase.FINISHING)
    simulation.run_until(lambda: simulation.training.checkpoints.kept[-1].version == simulation.training.version)
    assert simulation.job.phase is JobPhase.FINISHING
    num_rounds = len(simulation.rounds)
    kill_all(simulation)
    goes_on(simulation)
    assert simulation.job.attempt == 2
    assert len(simulation.rounds) == num_rounds + 1
    assert simulation.evaluations[-1].is_final


def test_a_job_that_ends_while_it_begins_again_goes_back_to_the_end_of_its_training(simulate):
    """All die after the last model is saved, and once more before the first round."""
    simulation = simulate(
        ranks(*THREE), epochs=2, dataset_size=1000, checkpoint_every_epochs=1, has_evaluation=True, evaluation_ms=900.0
    )
    at_phase(simulation, JobPhase.FINISHING)
    simulation.run_until(lambda: simulation.training.checkpoints.kept[-1].version == simulation.training.version)
    for attempt in (2, 3):
        kill_all(simulation)
        simulation.run_until(lambda attempt=attempt: simulation.job.attempt == attempt)
        at_phase(simulation, JobPhase.GROUPING)
    goes_on(simulation)


def until_it_fails(simulation):
    """The times at which its only rank is killed in its first batches, until the job fails."""
    killed_s = []
    while simulation.job.is_open:
        simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
        killed_s.append(simulation.clock.now_s)
        simulation.kill(0)
        simulation.run_until(lambda: simulation.job.phase is not JobPhase.TRAINING)
    return killed_s


def test_a_minute_of_attempts_without_a_checkpoint_is_enough(simulate):
    """A rank that is killed for its memory in each attempt's first batches will be in the next one, too."""
    simulation = simulate(ranks(25.0))
    simulation.run_until(lambda: simulation.job.phase is JobPhase.TRAINING)
    killed_s = until_it_fails(simulation)
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    assert result.error.endswith(f"; {len(killed_s) - 1} attempts in a row have reached no checkpoint")
    assert "was killed by signal 9" in result.error
    assert killed_s[-2] - killed_s[0] < 60 < killed_s[-1] - killed_s[0] < 100


def test_three_attempts_are_had_however_long_they_take():
    attempts = FruitlessAttempts()
    assert [attempts.add(now_s) for now_s in (0.0, 1000.0, 2000.0)] == [None] * 3
    assert attempts.add(2001.0) == "3 attempts in a row have reached no checkpoint"


def test_attempts_that_are_short_come_further_by_checkpoints_of_their_own(simulate):
    """All ranks die after each 8 s of training, and the settings ask for no checkpoint before 60 s."""
    simulation = simulate(ranks(25.0), epochs=2, dataset_size=10_000, checkpoint_every_minutes=1.0)
    for attempt in range(1, 7):
        at_phase(simulation, JobPhase.TRAINING)
        simulation.run_until(lambda end_s=simulation.clock.now_s + 8.0: simulation.clock.now_s >= end_s)
        assert has_saved(simulation) == (attempt > 1), "each after the first makes one after 4 s"
        simulation.kill(0)
        simulation.run_until(lambda attempt=attempt: simulation.job.attempt == attempt + 1)
    goes_on(simulation)


def test_an_attempt_that_comes_to_a_checkpoint_counts_anew(simulate):
    simulation = simulate(ranks(25.0), epochs=16, dataset_size=4000, checkpoint_every_epochs=1)
    for _ in range(14):
        attempt = simulation.job.attempt if simulation.num_events else 1
        simulation.run_until(lambda: has_saved(simulation))
        simulation.kill(0)
        simulation.run_until(lambda attempt=attempt: simulation.job.attempt == attempt + 1)
    goes_on(simulation)


def test_a_job_that_has_made_a_checkpoint_is_given_ten_minutes(simulate):
    """What kills it now is more likely around it than in it: a host that fails, other programs there."""
    simulation = simulate(ranks(25.0), epochs=8, dataset_size=500, checkpoint_every_epochs=1)
    simulation.run_until(lambda: has_saved(simulation))
    killed_s = until_it_fails(simulation)
    assert simulation.run().error.endswith(f"; {len(killed_s) - 1} attempts in a row have reached no checkpoint")
    assert killed_s[-2] - killed_s[0] < 600 < killed_s[-1] - killed_s[0] < 640


def test_a_job_that_waits_can_be_cancelled(simulate):
    simulation = simulate(ranks(*THREE))
    in_mid_training(simulation)
    kill_all(simulation)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED)
    simulation.handle(JobCancelled(job_id=JOB))
    assert simulation.run().outcome is Outcome.CANCELLED


def test_a_job_that_waits_to_go_back_still_has_its_checkpoints_and_so_has_its_result(simulate):
    """Of a job that was cancelled while it waited, the result said that it had made no epoch."""
    simulation = simulate(ranks(*THREE), epochs=3, dataset_size=2000, checkpoint_every_epochs=1)
    simulation.run_until(lambda: has_saved(simulation))
    kept = tuple(simulation.training.checkpoints.kept)
    kill_all(simulation)
    simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED)
    view = describe_training(simulation.job, simulation.clock.now_s)
    assert (view.checkpoints, view.epoch) == (kept, kept[-1].epoch)
    simulation.handle(JobCancelled(job_id=JOB))
    result = simulation.run()
    assert (result.checkpoints, result.epochs) == (kept, kept[-1].epoch)
    assert result.epochs > 0


def test_what_is_kept_of_a_job_says_where_it_would_go_on(simulate):
    """A coordinator of another version reads it."""
    simulation = simulate(ranks(*THREE), epochs=3, dataset_size=2000, checkpoint_every_epochs=1)
    simulation.disks = {}
    simulation.run_until(lambda: has_saved(simulation))
    kept = simulation.core.continuation(JOB)
    assert kept is not None
    assert kept.resume == simulation.training.checkpoints.kept[-1].path.rpartition("/")[0]
    assert (kept.resume_host, kept.resume_work_folder) == ("host", "host")
    assert (kept.end, kept.attempt, kept.last_incarnation) == (None, 1, 3)


def on_disks_of_their_own(simulation, *hosts, told):
    """What these ranks read, when the job goes back, is on their own disks."""
    tell = simulation.handle

    def tell_of_own(event):
        if isinstance(event, RankReady) and event.resumed and event.rank in hosts:
            event = replace(event, resumed=told(event.resumed))
        tell(event)

    simulation.handle = tell_of_own


def older(text):
    state = json.loads(text)
    return json.dumps(state | {"version": state["version"] - 1, "samples": 1})


def missing(_):
    return json.dumps({"missing": "there is no checkpoint runs/a"})


@pytest.mark.parametrize(
    ("told_of", "why"),
    [(older, "the newest checkpoint there has version "), (missing, "there is no checkpoint runs/a")],
)
@pytest.mark.parametrize("behind", [(0,), (1, 2), (2,)])
def test_hosts_that_share_no_disk_go_back_to_the_newest_checkpoint_of_one(simulate, told_of, why, behind):
    """The job failed, after each upgrade of the coordinator: ranks had read different checkpoints, or some none."""
    simulation = simulate(ranks(*THREE), epochs=4, dataset_size=4000, checkpoint_every_epochs=1)
    simulation.run_until(lambda: has_saved(simulation))
    on_disks_of_their_own(simulation, *behind, told=told_of)
    kill_all(simulation)
    simulation.run_until(lambda: simulation.job.attempt == 2 and simulation.job.phase is JobPhase.TRAINING)
    assert sorted(simulation.training.members) == [rank for rank in range(3) if rank not in behind]
    begin = [text for text in told(simulation) if "begins later, with the others' model" in text]
    assert [text.partition(" on ")[0] for text in begin] == [f"rank {rank}" for rank in behind]
    assert all(why in text for text in begin)
    simulation.run_until(lambda: len(simulation.training.members) == 3)
    goes_on(simulation)
    assert simulation.job.attempt == 2


def test_the_checkpoint_is_on_no_host_any_more(simulate):
    simulation = simulate(ranks(*THREE), epochs=4, dataset_size=4000, checkpoint_every_epochs=1)
    simulation.run_until(lambda: has_saved(simulation))
    on_disks_of_their_own(simulation, 0, 1, 2, told=missing)
    kill_all(simulation)
    assert simulation.run().error.startswith("there is no checkpoint runs/a (rank 0 on host): is the host with it away")


def test_who_may_lose_no_rank_begins_with_all_or_not_at_all(simulate):
    """A job that was resumed by hand: one of its hosts lacks the checkpoint that was named."""
    first = simulate(ranks(*THREE), epochs=4, dataset_size=4000, checkpoint_every_epochs=1)
    first.run_until(lambda: has_saved(first))
    saved = next(iter(first.saved.values()))
    for on_rank_loss in ("continue", "fail"):
        again = simulate(ranks(*THREE), epochs=4, dataset_size=4000, resumed=saved, on_rank_loss=on_rank_loss)
        on_disks_of_their_own(again, 1, told=missing)
        result = again.run()
        assert (result.outcome is Outcome.FAILED) is (on_rank_loss == "fail"), result.error
    assert result.error.startswith("there is no checkpoint runs/a (rank 1 on host)")


def alone_on(simulation, *hosts):
    """Hosts with disks and a slot of their own, and a job of one rank on the first, which makes a checkpoint."""
    simulation.disks = {}
    for name in hosts:
        join(simulation, name)
    spec = JobSpec(name="simulated", source_hash="", file_name="", num_ranks=1)
    simulation.handle(JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0))
    simulation.run_until(lambda: has_saved(simulation))
    in_mid_training(simulation)
    return simulation


def join(simulation, name):
    agent = AgentJoined(agent_id=AgentId(name), host=name, slots=(Slot(device="cpu"),), folder=f"disk-of-{name}")
    simulation.handle(agent)


def drain(simulation, name, *, is_drained=True):
    simulation.handle(DrainRequested(agent_id=AgentId(name), is_drained=is_drained))


def waits_because(simulation, why):
    with pytest.raises(TimeoutError, match="nothing more happens"):
        simulation.run()
    reason = f"waits for host a, which {why}: only that host's disk has its newest checkpoint"
    assert simulation.core.explanation(JOB) == reason


LONG = {"epochs": 4, "dataset_size": 4000, "checkpoint_every_epochs": 1}


@pytest.mark.parametrize("reaches", [True, False])
def test_a_host_that_does_not_come_back_is_waited_for_only_so_long(simulate, reaches):
    """Others may reach the same files; if not, the job fails, and says why."""
    simulation = alone_on(simulate(ranks(25.0), **LONG), "a", "b")
    if reaches:
        simulation.disks[AgentId("b")] = simulation.disks[AgentId("a")]
    simulation.lose_host(AgentId("a"))
    lost_s = simulation.clock.now_s
    result = simulation.run()
    assert [command.agent_id for command in simulation.sent(StartRank)] == ["a", "b"]
    assert simulation.clock.now_s > lost_s + 599.0
    assert result.error == "" if reaches else result.error.startswith("there is no checkpoint ")


@by_policy
def test_the_only_host_with_the_checkpoint_is_drained_and_another_gets_the_model_first(simulate, policy, averaging):
    """The job went back to a checkpoint that only the drained host's disk had, and failed on the other."""
    simulation = alone_on(simulate(ranks(25.0), policy=policy, averaging=averaging, **LONG), "a", "b")
    drain(simulation, "a")
    simulation.run_until(lambda: not simulation.processes[0].is_alive)
    assert [record.host for record in simulation.training.members.values()] == ["b"]
    goes_on(simulation)
    assert simulation.job.attempt == 1
    assert [command.agent_id for command in simulation.sent(StartRank)] == ["a", "b"]


def test_a_job_waits_for_the_host_whose_disk_has_its_newest_checkpoint(simulate):
    """On another host it would find none, or an older one."""
    simulation = alone_on(simulate(ranks(25.0), **LONG), "a", "b")
    before = simulation.training.checkpoints.newest_version
    simulation.lose_host(AgentId("a"))
    at_phase(simulation, JobPhase.QUEUED)
    why = "waits for host a, which is not connected: only that host's disk has its newest checkpoint"
    assert simulation.core.explanation(JOB) == why
    other = JobSpec(name="other", source_hash="", file_name="", num_ranks=1)
    simulation.handle(JobSubmitted(job_id=JobId("other"), spec=other, submitted_at=1.0))
    assert simulation.core.jobs[JobId("other")].phase is JobPhase.STARTING, "it holds no slots back"
    simulation.lose_host(AgentId("b"))
    simulation.handle(JobCancelled(job_id=JobId("other")))
    join(simulation, "a")
    at_phase(simulation, JobPhase.TRAINING)
    assert simulation.training.restored_version == before
    goes_on(simulation)


def test_a_job_waits_until_the_host_with_its_checkpoint_has_a_slot_and_is_not_drained(simulate):
    simulation = alone_on(simulate(ranks(25.0), **LONG), "a")
    drain(simulation, "a")
    waits_because(simulation, "is drained")
    join(simulation, "b")
    waits_because(simulation, "is drained")
    other = JobSpec(name="other", source_hash="", file_name="", num_ranks=2)
    simulation.handle(JobSubmitted(job_id=JobId("other"), spec=replace(other, priority=1), submitted_at=1.0))
    drain(simulation, "a", is_drained=False)
    assert simulation.core.jobs[JobId("other")].phase is JobPhase.STARTING
    waits_because(simulation, "has no free slot for it")


def test_a_checkpoint_that_is_gone_is_not_replaced_by_an_older_one_in_silence(simulate):
    simulation = alone_on(simulate(ranks(25.0), **LONG), "a")
    simulation.run_until(lambda: len(simulation.disks[AgentId("a")]) == 2)
    older, newest = sorted(simulation.disks[AgentId("a")])
    del simulation.disks[AgentId("a")][newest]
    kill_all(simulation)
    error = simulation.run().error
    assert error.startswith(f"the newest checkpoint that its ranks find has version {older}, ")
    assert (
        f"but one of version {newest} was written, in simulated/checkpoints on a: put a whole copy of it there" in error
    )


@pytest.mark.parametrize("past_attempts", [0, 1], ids=["resumed", "goes back under another coordinator"])
def test_hosts_with_an_older_checkpoint_than_is_known_are_told(simulate, past_attempts):
    """Once the host with the newest one has been away for long, others are tried: they may have one of before."""
    first = alone_on(simulate(ranks(25.0), **LONG), "a")
    first.run_until(lambda: len(first.training.checkpoints.kept) == 2)
    older, newest = sorted(first.disks[AgentId("a")])
    del first.disks[AgentId("a")][newest]
    again = simulate(ranks(25.0), **LONG)
    again.disks = first.disks
    join(again, "a")
    known = JobSubmitted(job_id=JOB, spec=first.job.resumption, submitted_at=1.0, past_attempts=past_attempts)
    again.handle(known)
    again.run_until(lambda: again.job.phase is JobPhase.TRAINING or again.job.result is not None)
    if again.job.result is None:
        attempt = again.job.attempt
        kill_all(again)  # before its first checkpoint: it goes back to where it has begun
        again.run_until(lambda: again.job.attempt > attempt and again.job.phase is JobPhase.TRAINING)
        again.handle(JobCancelled(job_id=JOB))
    result = again.run()
    told = [one.text for one in again.reports if isinstance(one, MembershipReport)]
    assert (result.outcome is Outcome.FAILED) == bool(past_attempts)
    said = result.error if past_attempts else told[0]
    assert f"find has version {older}, but one of version {newest} was written, in simulated/checkpoints on a" in said


@pytest.mark.parametrize("phase", [JobPhase.GROUPING, JobPhase.TRAINING, JobPhase.FINISHING])
def test_a_job_whose_state_was_wrong_goes_back_to_its_checkpoint(simulate, phase):
    """What its ledger and rounds said counts no more: a new attempt has its own."""
    simulation = simulate(ranks(*THREE), epochs=3, dataset_size=2000, checkpoint_every_epochs=1)
    at_phase(simulation, phase)
    simulation.handle(JobBroken(job_id=JOB, reason="its state was wrong", may_go_back=True))
    simulation.handle(JobBroken(job_id=JOB, reason="its state was wrong", may_go_back=True))
    assert simulation.job.phase is JobPhase.QUEUED
    goes_on(simulation)
    assert simulation.job.attempt == 2
    assert [one.partition(";")[0] for one in told(simulation)] == ["its state was wrong"]


def test_a_job_that_may_lose_no_rank_fails_when_its_state_was_wrong(simulate):
    simulation = simulate(ranks(*THREE), dataset_size=2000, on_rank_loss="fail")
    in_mid_training(simulation)
    simulation.handle(JobBroken(job_id=JOB, reason="its state was wrong", may_go_back=True))
    result = simulation.run(limit_s=100)
    assert (result.outcome, result.error) == (Outcome.FAILED, "its state was wrong")

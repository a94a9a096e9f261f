"""What fails a job, and what it says: processes, hosts, disagreeing ranks, numbers that make no sense."""

import json
from dataclasses import replace

import pytest
from core.test_checkpoints import ended_here
from core.test_scaling import joins, submit

from elche_coordinator.core.messages.commands import SendShutdown, StartRank, StopRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    BatchesTrained,
    FinalStateSaved,
    RankFailed,
    RankReady,
    ResultReceived,
    SessionLost,
)
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.core.messages.reports import MembershipReport, Outcome, UserEvent
from elche_coordinator.core.messages.spec import SampleRead, Slot, ValueFigures
from elche_coordinator.core.records.machine import JobPhase
from support.stories import UNEQUAL, at_phase, in_mid_training, submitted
from support.watched import WatchedSimulation, ranks


def fails(simulation: WatchedSimulation, *words: str) -> None:
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    missing = [word for word in words if word not in result.error]
    assert not missing, result.error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset_size": 4_001}, ("dataset_size", "4000", "4001")),
        ({"seed": 3}, ("seed", "0", "3")),
        ({"speed_hint": (0, 2.0)}, ("speed_hint",)),
        ({"layout_hash": 7}, ("the model's parameters",)),
    ],
)
def test_ranks_that_disagree_on_the_file_fail_the_job_as_invalid(simulate, changes, words):
    simulation = simulate(ranks(5, 5, 5))
    tell = simulation.handle

    def tell_another(event):
        if isinstance(event, RankReady) and event.rank == 2:
            event = replace(event, settings=replace(event.settings, **changes))
        tell(event)

    simulation.handle = tell_another
    fails(simulation, "ranks 0 and 2", *words)
    assert simulation.job.result.invalid


def test_a_rank_that_is_started_again_with_other_settings_is_compared_with_one_that_trains(simulate):
    simulation = simulate(ranks(5, 5, 5), dataset_size=20_000)
    tell, seen = simulation.handle, set()

    def tell_another(event):
        if isinstance(event, RankReady):
            changes = {"seed": 3} if event.rank in seen else {}
            seen.add(event.rank)
            event = replace(event, settings=replace(event.settings, **changes))
        tell(event)

    simulation.handle = tell_another
    in_mid_training(simulation)
    simulation.kill(1)
    fails(simulation, "rank 1 was restarted with other settings", "ranks 0 and 1 differ in seed: 0 and 3")


def sample(index, *figures):
    return SampleRead(index=index, values=tuple(ValueFigures(figures=one) for one in figures))


IMAGE, SAME_IMAGE, OTHER_IMAGE = (
    (0.05, 1.0, 3.0, 9.0, 1.0, 2.0),
    (0.05, 1.0, 3.0, 9.1, 1.1, 2.0),
    (0.05, 1.0, 3.0, 9.0, 7.0, 2.0),
)
READ = (sample(3, IMAGE), sample(30, IMAGE))


def reading(simulation: WatchedSimulation, read, *, random_on=-1, restarted=()) -> None:
    """Ranks have read these samples, each its own, and those that are `restarted` others."""
    tell, seen = simulation.handle, set()

    def tell_another(event):
        if isinstance(event, RankReady):
            samples = restarted[event.rank] if event.rank in seen and event.rank in restarted else read[event.rank]
            seen.add(event.rank)
            event = replace(event, samples=samples, are_samples_random=event.rank == random_on)
        tell(event)

    simulation.handle = tell_another


@pytest.mark.parametrize(
    "other",
    [
        (sample(3, IMAGE), sample(30, OTHER_IMAGE)),
        (sample(30, OTHER_IMAGE),),
        (sample(30, IMAGE, IMAGE),),
        (sample(30),),
        (sample(30, (0.0, *IMAGE[1:])),),
        (sample(30, (0.05, 2.0, 3.0, 1.0, 9.0, 1.0)),),
    ],
)
def test_ranks_whose_data_differ_fail_the_job_before_it_trains(simulate, other):
    """Two hosts have listed their files in another order: the same positions would be other samples."""
    simulation = simulate(ranks(5, 5, 5))
    reading(simulation, (READ, READ, other))
    fails(
        simulation, "ranks have different data: sample 30 of rank 2 on ", " is not that of rank 0 on ", "os.listdir()"
    )
    assert simulation.job.result.invalid
    assert not simulation.rounds


@pytest.mark.parametrize(
    ("read", "random_on"),
    [
        ((READ, (sample(3, SAME_IMAGE), sample(30, IMAGE))), -1),
        ((READ, (sample(4, OTHER_IMAGE),)), -1),
        ((READ, ()), -1),
        ((READ, (sample(3, OTHER_IMAGE),)), 0),
        ((READ, (sample(3, OTHER_IMAGE),)), 1),
    ],
)
def test_data_that_differ_by_their_decoder_or_by_chance_or_that_were_not_read_are_taken(simulate, read, random_on):
    simulation = simulate(ranks(5, 5))
    reading(simulation, read, random_on=random_on)
    assert simulation.run().outcome is Outcome.SUCCEEDED


def resuming(simulate, read, *, random_on=-1, **changes) -> list[str]:
    """What a job tells that goes on from a checkpoint, and has read these samples; `READ` was read before."""
    options = {"epochs": 2, "dataset_size": 600, "checkpoint_every_epochs": 1}
    first = simulate(ranks(5, 12), **options)
    reading(first, (READ, READ))
    first.run_until(lambda: bool(first.saved))
    ended_here(first)
    saved = next(iter(first.saved.values()))
    object.__setattr__(saved, "training", json.dumps(json.loads(saved.training) | changes))
    again = simulate(ranks(5, 12), **options, resumed=saved)
    reading(again, (read, read), random_on=random_on)
    assert again.run().outcome is Outcome.SUCCEEDED
    return [report.text for report in again.reports if isinstance(report, UserEvent)]


@pytest.mark.parametrize("other", [sample(30, OTHER_IMAGE), sample(30), sample(30, IMAGE, IMAGE)])
def test_a_job_whose_data_have_changed_since_its_checkpoint_says_so(simulate, other):
    """As many samples, so that it goes on: in another order perhaps, and then some count twice and others never."""
    (told,) = resuming(simulate, (sample(3, SAME_IMAGE), other))
    assert "the data set has changed since the checkpoint: its sample 30 is another. Training goes on" in told


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        (READ, {}),
        ((sample(3, SAME_IMAGE), sample(30, IMAGE)), {}),
        ((sample(4, OTHER_IMAGE),), {}),
        ((), {}),
        *((READ, {"samples_read": damaged}) for damaged in (None, 3, [[3]], [[3, 4]], [[[], []]])),
    ],
)
def test_of_data_that_are_the_same_or_not_known_nothing_is_said(simulate, read, changes):
    assert resuming(simulate, read, **changes) == []


def test_of_data_that_are_drawn_at_random_nothing_is_said(simulate):
    assert resuming(simulate, (sample(3, OTHER_IMAGE),), random_on=1) == []


def test_of_samples_of_many_values_few_are_kept(simulate):
    simulation = simulate(ranks(5, 5))
    large = sample(3, *[IMAGE] * 150)
    reading(simulation, [(large, sample(30, *[IMAGE] * 150))] * 2)
    in_mid_training(simulation)
    assert [index for index, _ in simulation.training.snapshot()["samples_read"]] == [3]


def test_a_rank_that_is_started_again_with_other_data_is_left_out_and_the_others_train_on(simulate):
    """On another host, say, whose copy is older. It is tried again later and later."""
    simulation = simulate(ranks(5, 5, 5), dataset_size=20_000)
    reading(simulation, (READ, READ, READ), restarted={1: (sample(3, OTHER_IMAGE),)})
    in_mid_training(simulation)
    simulation.kill(1)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    told = [report.text for report in simulation.reports if isinstance(report, MembershipReport)]
    why = [text for text in told if "is left out: ranks have different data: sample 3 of rank 1 on " in text]
    assert " is not that of rank 0 on " in why[0]
    assert len(why) == len([one for one in simulation.sent(StartRank) if one.rank == 1]) - 1
    assert 2 <= len(why) <= 4, "at once, after 1 s, 5 s, 30 s"
    assert simulation.job.ranks[1].base_step == 0


def test_ranks_are_compared_with_those_that_train_and_not_with_one_that_was_left_out(simulate):
    simulation = simulate(ranks(5, 5, 5), dataset_size=20_000)
    reading(simulation, (READ, READ, READ), restarted={0: (sample(3, OTHER_IMAGE),)})
    in_mid_training(simulation)
    simulation.kill(0)
    simulation.run_until(lambda: any("is left out" in getattr(one, "text", "") for one in simulation.reports))
    simulation.kill(2)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert [one.rank for one in simulation.sent(StartRank)].count(2) == 2
    assert simulation.job.ranks[2].base_step > 0, "it trains again"
    left_out = [one.rank for one in simulation.reports if "is left out" in getattr(one, "text", "")]
    assert set(left_out) == {0}


def test_a_job_that_may_lose_no_rank_fails_by_one_that_joins_with_other_data(simulate):
    simulation = simulate(ranks(5, 5, 5), dataset_size=20_000, on_rank_loss="fail")
    reading(simulation, (READ, READ, (sample(3, OTHER_IMAGE),)))
    submit(simulation, num_ranks=3, min_ranks=2, num_slots=2)
    in_mid_training(simulation)
    joins(simulation, "b", 1)
    fails(simulation, "ranks have different data: sample 3 of rank 2 on ", " is not that of rank 0 on ")


def test_an_unknown_policy_fails_the_job_as_invalid(simulate):
    simulation = simulate(ranks(5, 5), policy="wish")
    fails(simulation, "policy must be one of cadence, async, sync, not 'wish'")
    assert simulation.job.result.invalid


def with_result_changed(simulation: WatchedSimulation, change) -> None:
    """From the fourth round on, rank 1 says something else about what it has received."""
    tell = simulation.handle

    def tell_another(event):
        tell(change(event) if isinstance(event, ResultReceived) and event.rank == 1 and event.round >= 4 else event)

    simulation.handle = tell_another


def test_members_whose_results_differ_fail_the_job(simulate):
    simulation = simulate(ranks(5, 5))
    with_result_changed(simulation, lambda event: replace(event, digest=12345))
    fails(simulation, "parameters", "ranks", "0", "1", "round 4")


def with_digests(simulation: WatchedSimulation, digest_of) -> list[UserEvent]:
    """Each rank sends this digest after a round. Returns what is told when the job has succeeded."""
    tell = simulation.handle

    def tell_another(event):
        is_result = isinstance(event, ResultReceived)
        tell(replace(event, digest=digest_of(event.rank, event.round)) if is_result else event)

    simulation.handle = tell_another
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert len(simulation.rounds) > 8
    return [report for report in simulation.reports if isinstance(report, UserEvent)]


def test_a_rank_whose_result_is_another_than_that_of_most_is_named_once(simulate):
    """A bit has flipped in its memory. The others' parameters are equal, and every fourth round is compared."""
    simulation = simulate(ranks(5, 5, 5), verifies=False)
    (event,) = with_digests(simulation, lambda rank, number: None if number % 4 else 7 + (rank == 1 and number >= 4))
    assert event.rank == 1
    assert event.text.startswith("the parameters of rank 1 differ from those of the other ranks after round 4: ")


def test_of_two_ranks_that_differ_both_are_named(simulate):
    simulation = simulate(ranks(5, 5), verifies=False)
    events = with_digests(simulation, lambda rank, number: rank if number == 4 else None)
    assert [event.rank for event in events] == [0, 1]
    assert all(event.text.startswith("the parameters of ranks 0 and 1 differ after round 4: ") for event in events)


def test_ranks_that_send_digests_of_fewer_rounds_are_compared_where_they_do(simulate):
    simulation = simulate(ranks(5, 5, 5), verifies=False)
    assert not with_digests(simulation, lambda rank, number: None if number % (4 if rank else 2) else number)


def test_a_job_that_verifies_fails_by_the_name_of_the_one_that_differs(simulate):
    simulation = simulate(ranks(5, 5, 5))
    with_result_changed(simulation, lambda event: replace(event, digest=12345))
    fails(simulation, "the parameters of rank 1 differ from those of the other ranks after round 4")


def test_members_whose_headers_differ_fail_the_job(simulate):
    simulation = simulate(ranks(5, 11.5))
    with_result_changed(simulation, lambda event: replace(event, header=event.header[::-1]))
    fails(simulation, "different headers", "round 4")


def test_parameters_that_are_not_finite_fail_the_job_and_name_the_rank(simulate):
    simulation = simulate(ranks(5, 5))
    tell = simulation.handle

    def tell_another(event):
        if isinstance(event, ResultReceived) and event.round == 4:
            first, second = event.header
            event = replace(event, header=(first, replace(second, finite=False)))
        tell(event)

    simulation.handle = tell_another
    fails(simulation, "rank 1", "not finite")


def nonsense(kind: str, event: ResultReceived) -> ResultReceived:
    first, *others = event.header
    match kind:
        case "too short":
            return replace(event, header=(first,))
        case "empty":
            return replace(event, header=())
        case "a cut beyond its leases":
            return replace(event, header=(replace(first, cut=10**9), *others))
        case "a cut that goes back":
            return replace(event, header=(replace(first, cut=0), *others))
        case _:
            return replace(event, header=(replace(first, local_step=0), *others))


@pytest.mark.parametrize(
    "kind", ["too short", "empty", "a cut beyond its leases", "a cut that goes back", "a step that goes back"]
)
def test_a_header_that_makes_no_sense_fails_the_job(simulate, kind):
    simulation = simulate(ranks(5, 5))
    tell = simulation.handle
    simulation.handle = lambda event: tell(
        nonsense(kind, event) if isinstance(event, ResultReceived) and event.round >= 4 else event
    )
    fails(simulation)


NAN = float("nan")


@pytest.mark.parametrize(
    ("is_first", "times"),
    [
        pytest.param(True, (), id="first, none"),
        pytest.param(True, (0.0,), id="first, zero"),
        pytest.param(True, (0.0, 0.0, 5.0), id="first, mostly zero"),
        pytest.param(True, (NAN,), id="first, not a number"),
        pytest.param(True, (-5.0,), id="first, negative"),
        pytest.param(True, (float("inf"), 5.0), id="first, endless"),
        pytest.param(False, (), id="later, none"),
        pytest.param(False, (0.0, 0.0, 5.0), id="later, mostly zero"),
        pytest.param(False, (NAN,), id="later, not a number"),
        pytest.param(False, (-5.0,), id="later, negative"),
        pytest.param(False, (float("inf"), 5.0), id="later, endless"),
    ],
)
def test_batch_times_that_make_no_sense_stop_nothing(simulate, is_first, times):
    simulation = simulate(ranks(5, 11.5))
    tell, is_told = simulation.handle, False

    def tell_another(event):
        nonlocal is_told
        if isinstance(event, BatchesTrained) and event.local_step > (0 if is_first else 40) and not is_told:
            event, is_told = replace(event, batch_ms=times), True
        tell(event)

    simulation.handle = tell_another
    assert simulation.run().outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("stalled_ms", [NAN, float("inf"), -1.0])
def test_a_stall_that_makes_no_sense_stops_nothing(simulate, stalled_ms):
    simulation = simulate(ranks(5, 11.5))
    with_result_changed(simulation, lambda event: replace(event, stalled_ms=stalled_ms, collective_ms=stalled_ms))
    assert simulation.run(limit_s=100).outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize(
    ("num_ranks", "wrong"),
    [
        pytest.param(2, {"epochs": 0}, id="no epoch"),
        pytest.param(2, {"dataset_size": 0}, id="no sample"),
        pytest.param(2, {"anchor": 0}, id="no anchor"),
        pytest.param(2, {"batch_size": 0}, id="no batch"),
        pytest.param(2, {"epochs": -1}, id="fewer than no epoch"),
        pytest.param(2, {"dataset_size": -5}, id="fewer than no sample"),
        pytest.param(1, {"anchor": 0}, id="no anchor for one rank"),
    ],
)
def test_settings_that_make_no_sense_fail_the_job_as_invalid(simulate, num_ranks, wrong):
    simulation = simulate(ranks(*[5.0] * num_ranks), **wrong)
    result = simulation.run(limit_s=5)
    assert (result.outcome, result.invalid, result.failed_rank) == (Outcome.FAILED, True, None)


def test_a_killed_rank_fails_the_job_with_a_notice(simulate):
    simulation = simulate(ranks(*UNEQUAL, 30), dataset_size=3_000, on_rank_loss="fail")
    in_mid_training(simulation)
    simulation.kill(1)
    fails(simulation, "rank 1 on host (cpu)", "was killed by signal 9", "out of memory", "at batch")
    assert simulation.job.result.failed_rank == 1
    told = {command.rank: command.reason for command in simulation.sent(SendShutdown)}
    assert set(told) == {0, 2}
    assert all("rank 1" in reason for reason in told.values())


def test_user_code_that_raises_fails_the_job_with_its_traceback(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    address = simulation.processes[1].address
    simulation.handle(
        RankFailed(**address, error="ZeroDivisionError: division by zero", traceback="Traceback ...", batch=7)
    )
    fails(simulation, "ZeroDivisionError")
    assert simulation.job.result.traceback == "Traceback ..."
    assert simulation.job.result.failed_rank == 1
    assert not simulation.job.result.invalid


def test_the_first_failure_is_the_one_that_counts(simulate):
    simulation = simulate(ranks(5, 5))
    in_mid_training(simulation, 2)
    for rank, error in ((1, "the cause"), (0, "a consequence")):
        simulation.handle(RankFailed(**simulation.processes[rank].address, error=error))
    simulation.kill(0)
    fails(simulation, "the cause")


def test_a_lost_session_ends_the_process_and_then_the_job(simulate):
    simulation = simulate(ranks(5, 5), on_rank_loss="fail")
    in_mid_training(simulation, 2)
    simulation.handle(SessionLost(**simulation.processes[1].address))
    assert simulation.job.phase is JobPhase.TRAINING
    assert [command.rank for command in simulation.sent(StopRank)] == [1]
    fails(simulation, "rank 1")


def test_a_lost_host_fails_the_job_and_takes_its_slots_with_it(simulate):
    simulation = simulate(ranks(5, 5), on_rank_loss="fail")
    in_mid_training(simulation, 2)
    simulation.handle(AgentLost(agent_id=AgentId("host")))
    assert simulation.core.fleet.taken == {}
    assert simulation.core.fleet.free_places() == []
    assert simulation.job.phase is JobPhase.ENDED
    assert "its host host is gone" in simulation.job.result.error
    for process in simulation.processes.values():
        process.is_alive = False


def test_ranks_on_other_hosts_leave_when_one_host_is_lost(simulate):
    simulation = simulate(ranks(5, 5, 5), on_rank_loss="fail")
    slots = (Slot(device="cpu"),)
    for name in "abc":
        simulation.handle(AgentJoined(agent_id=AgentId(name), host=f"host {name}", slots=slots))
    simulation.handle(submitted("job", 3))
    in_mid_training(simulation, 2)
    simulation.processes[1].is_alive = False
    simulation.handle(AgentLost(agent_id=AgentId("b")))
    assert {command.rank for command in simulation.sent(SendShutdown)} == {0, 2}
    fails(simulation, "rank 1 is lost: its host host b is gone")
    assert len(simulation.core.fleet.free_places()) == 2


def test_a_rank_that_dies_while_it_writes_the_final_state_fails_the_job(simulate):
    simulation = simulate(ranks(5, 11.5), has_evaluation=True, on_rank_loss="fail")
    at_phase(simulation, JobPhase.FINISHING)
    simulation.kill(0)
    fails(simulation, "rank 0", "signal 9")


def test_a_job_ends_only_when_it_is_evaluated_and_written(simulate):
    simulation = simulate(ranks(5, 11.5), has_evaluation=True, evaluation_ms=500)
    at_phase(simulation, JobPhase.FINISHING)
    address = simulation.processes[0].address
    simulation.handle(FinalStateSaved(**address, path="model.safetensors"))
    assert simulation.job.phase is JobPhase.FINISHING
    assert simulation.run().metrics != {}

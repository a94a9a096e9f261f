"""Rounds that the coordinator's own averaging gives up lose nothing, and end a job after so many in a row."""

from dataclasses import replace
from random import Random

import pytest

from elche_coordinator.core.messages.commands import SendFormGroup, SendLease, StopRank
from elche_coordinator.core.messages.events import JobCancelled, ResultReceived, RoundEntered, RoundFailed
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.core.rounds.generation import GIVEN_UP_S, MAX_GIVEN_UP
from elche_coordinator.simulator.simulation import RankModel
from support.rounds import OFTEN, WAYS, books, every_way, headers
from support.watched import ranks


@every_way
def test_outcome_given_up_leaves_version_books_and_positions_as_they_were(simulate, policy, averaging):
    broken = frozenset({3, 5, 6})
    simulation = simulate(
        ranks(5, 11.5), policy=policy, averaging=averaging, backend="cpu", broken_rounds=broken, **OFTEN
    )
    simulation.start()
    tell, compared = simulation.handle, []

    def compare(event):
        before = books(simulation)
        tell(event)
        if isinstance(event, RoundFailed):
            compared.append(event.round)
            assert books(simulation) == before

    simulation.handle = compare
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert set(compared) == broken
    assert simulation.generation.num_given_up == 3


# cpu: rounds that are given up


@every_way
def test_cpu_the_group_averages_through_the_coordinator(simulate, policy, averaging):
    simulation = simulate(ranks(5, 5), policy=policy, averaging=averaging, backend="cpu", dataset_size=200)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert {command.backend for command in simulation.sent(SendFormGroup)} == {"cpu"}


@pytest.mark.parametrize("num_lost", [1, MAX_GIVEN_UP - 1])
@every_way
def test_cpu_the_first_rounds_may_be_given_up(simulate, policy, averaging, num_lost):
    """Until one is received there is no start state, and nobody trains."""
    broken = frozenset(range(1, num_lost + 1))
    simulation = simulate(
        ranks(5, 11.5), policy=policy, averaging=averaging, backend="cpu", broken_rounds=broken, **OFTEN
    )
    simulation.run_until(lambda: bool(simulation.rounds))
    assert simulation.rounds[0].round == num_lost + 1
    assert simulation.sent(SendLease) == [] or simulation.training.version == 1
    assert all(process.local_step == 0 for process in simulation.processes.values())
    assert simulation.run().outcome is Outcome.SUCCEEDED


@every_way
def test_cpu_the_work_of_a_given_up_round_is_in_a_later_one(simulate, policy, averaging):
    broken = frozenset({4, 5})
    simulation = simulate(
        ranks(5, 11.5), policy=policy, averaging=averaging, backend="cpu", broken_rounds=broken, **OFTEN
    )
    trained_in = {}

    def has_ended() -> bool:
        event = simulation.core.steps[-1].event
        if isinstance(event, RoundFailed):
            trained_in[event.rank] = simulation.job.ranks[event.rank].local_step
        return simulation.job.result is not None

    simulation.run_until(has_ended)
    assert simulation.rounds[3].round == 6
    for rank, row in enumerate(headers(simulation)[6]):
        assert row.local_step >= trained_in[rank]
        assert row.version == 3
        assert row.weight > 0


def test_cpu_results_after_a_given_up_round_count_when_a_rank_dies_before_all_have_said_that_it_was(simulate):
    """What one rank says arrives late, and others are rounds further; all that are left have the same results."""
    broken = frozenset({6})
    simulation = simulate(
        ranks(5, 5, 5), policy="sync", averaging="blocking", backend="cpu", broken_rounds=broken, dataset_size=2000
    )
    simulation.run_until(lambda: any(event.round == 5 for event in simulation.events(RoundEntered)))
    simulation.cut_off(1, 1.0)
    simulation.run_until(lambda: any(event.round == 8 for event in simulation.events(ResultReceived)))
    assert {event.rank for event in simulation.events(RoundFailed)} == {0, 2}
    simulation.kill(2)
    simulation.run_until(lambda: simulation.generation.id == 2)
    assert simulation.rounds[-1].round >= 8
    assert simulation.run().outcome is Outcome.SUCCEEDED
    simulation.assert_exactly_once()


@every_way
def test_cpu_rounds_that_always_break_fail_the_job_after_some_time(simulate, policy, averaging):
    """Five lost in four seconds ended a job whose network broke all connections again and again."""
    options = {"policy": policy, "averaging": averaging, "backend": "cpu"} | OFTEN
    slow = ranks(500, 1150)
    for first in (1, 5):
        failed = simulate(slow, broken_rounds=frozenset(range(first, 100_000)), sync_ms=500.0, **options)
        result = failed.run(limit_s=1000)
        assert result.outcome is Outcome.FAILED
        assert not result.invalid
        assert "averagings in a row, over " in result.error
        assert "were given up, the last one because it broke" in result.error
        times_s = [step.at_s for step in failed.core.steps if isinstance(step.event, RoundFailed)]
        assert GIVEN_UP_S <= times_s[-1] - times_s[0] < GIVEN_UP_S + 5
        num_broken = failed.generation.num_given_up
        assert num_broken >= MAX_GIVEN_UP
        survived = simulate(
            slow, broken_rounds=frozenset(range(first, first + num_broken - 1)), sync_ms=500.0, **options
        )
        assert survived.run(limit_s=2000).outcome is Outcome.SUCCEEDED


@every_way
def test_cpu_rounds_that_break_now_and_then_never_fail_the_job(simulate, policy, averaging):
    options = {"policy": policy, "averaging": averaging, "backend": "cpu"} | OFTEN
    broken = frozenset(round_id for round_id in range(2, 1000) if round_id % 6)
    simulation = simulate(ranks(500, 1150), broken_rounds=broken, sync_ms=500.0, **options)
    assert simulation.run(limit_s=2000).outcome is Outcome.SUCCEEDED
    assert simulation.generation.num_given_up > 10


def test_a_short_outage_that_takes_many_rounds_fails_no_job(simulate):
    """Under `sync` a rank whose connection was refused for a third of a second lost five rounds, and so the job."""
    simulation = simulate(ranks(5, 11.5), policy="sync", backend="cpu", broken_rounds=frozenset(range(20, 32)))
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.generation.num_given_up == 12


@every_way
def test_cpu_the_user_sees_that_a_round_was_given_up_and_why(simulate, policy, averaging):
    simulation = simulate(ranks(5, 11.5), policy=policy, averaging=averaging, broken_rounds=frozenset({5}), **OFTEN)
    simulation.run_until(lambda: simulation.job.run.generation is not None and simulation.generation.num_given_up == 1)
    assert simulation.generation.scheduler.reason == "again, because the last averaging was given up: it broke"
    simulation.run()


@pytest.mark.parametrize("failed_first", [True, False], ids=["given up first", "received first"])
@every_way
def test_cpu_a_round_that_some_received_and_others_gave_up_ends_their_generation(
    simulate, policy, averaging, failed_first
):
    """Who lacks the result lacks part of the model: it is started again, and takes the others'."""
    options = {**OFTEN, "dataset_size": 2_000}  # long enough for the rank to come back
    simulation = simulate(ranks(5, 5, 5), policy=policy, averaging=averaging, backend="cpu", **options)
    tell, changed, torn = simulation.handle, 0 if failed_first else 2, []

    def tell_another(event):
        if isinstance(event, ResultReceived) and event.round == 4:
            order = [told.rank for told in simulation.events(ResultReceived) if told.round == 4]
            if len(order) + len(simulation.events(RoundFailed)) == changed:
                address = simulation.processes[event.rank].address
                event = RoundFailed(**address, generation=event.generation, round=event.round, reason="it was alone")
                torn.append(event.rank)
        tell(event)

    simulation.handle = tell_another
    assert simulation.run(limit_s=1000).outcome is Outcome.SUCCEEDED
    assert [command.rank for command in simulation.sent(StopRank)] == torn
    assert simulation.generation.id == 3, "first without the rank, then with it again"


@pytest.mark.parametrize("seed", range(20))
def test_cpu_rounds_given_up_at_any_moment_lose_nothing(simulate, seed):
    random = Random(seed)
    policy, averaging = WAYS[seed % len(WAYS)]
    likelihood = random.choice([0.1, 0.3, 0.6])
    broken = {round_id for round_id in range(1, 400) if random.random() < likelihood}
    models = [
        RankModel(batch_ms=random.choice([0.3, 1, 5, 60]), jitter_fraction=random.choice([0, 0.5]))
        for _ in range(random.randint(1, 6))
    ]
    simulation = simulate(
        models,
        dataset_size=random.choice([random.randint(3, 20), random.randint(20, 300)]),
        batch_size=3,
        epochs=random.choice([1, 3]),
        policy=policy,
        averaging=averaging,
        backend="cpu",
        drop_last=random.random() < 0.3,
        anchor=random.choice([1, 3, 10]),
        has_evaluation=random.random() < 0.5,
        latency_ms=random.choice([0.01, 0.5, 30]),
        persist_ms=random.choice([0, 1, 30]),
        sync_ms=random.choice([0.0, 5.0, 100.0]),
        send_twice=random.random() < 0.3,
        broken_rounds=frozenset(i for i in broken if not {i - 4, i - 3, i - 2, i - 1} <= broken),
        seed=seed,
    )
    assert simulation.run().outcome is Outcome.SUCCEEDED


@every_way
def test_cpu_old_words_of_failure_change_nothing(simulate, policy, averaging):
    broken = frozenset({3, 5})
    simulation = simulate(
        ranks(5, 11.5), policy=policy, averaging=averaging, backend="cpu", broken_rounds=broken, **OFTEN
    )
    simulation.run_until(lambda: len(simulation.rounds) >= 5)
    until_s = simulation.clock.now_s + 0.02
    simulation.run_until(lambda: simulation.clock.now_s >= until_s)
    failed = simulation.events(RoundFailed)[-1]
    committed = simulation.rounds[-1].round
    opened = simulation.generation.rounds[0].id if simulation.generation.rounds else committed + 1
    for old in [
        failed,
        replace(failed, round=3, reason="another"),
        replace(failed, round=committed),
        replace(failed, round=10**6),
        replace(failed, round=opened, generation=0),
        replace(failed, round=opened, incarnation=99),
        replace(failed, round=opened, rank=7),
        replace(failed, round=opened, job_id="other"),
        replace(failed, round=0),
    ]:
        simulation.says_nothing(old)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.generation.num_given_up == 2
    simulation.says_nothing(failed)


@every_way
def test_cpu_a_member_that_repeats_its_failure_is_counted_once(simulate, policy, averaging):
    """All must give a round up before another is announced."""
    simulation = simulate(ranks(5, 5, 5), policy=policy, averaging=averaging, broken_rounds=frozenset({4}), **OFTEN)
    simulation.run_until(lambda: len(simulation.events(RoundFailed)) == 1)
    (failed,) = simulation.events(RoundFailed)
    simulation.says_nothing(failed)
    simulation.says_nothing(replace(failed, reason="another"))
    assert simulation.generation.rounds[0].failures == {failed.rank: "it broke"}
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.generation.num_given_up == 1


@every_way
def test_cpu_a_job_may_be_cancelled_while_a_round_is_being_given_up(simulate, policy, averaging):
    simulation = simulate(ranks(5, 5), policy=policy, averaging=averaging, broken_rounds=frozenset({4}), **OFTEN)
    simulation.run_until(lambda: len(simulation.events(RoundFailed)) == 1)
    simulation.handle(JobCancelled(job_id=simulation.job.id))
    assert simulation.job.phase is JobPhase.STOPPING
    assert simulation.run().outcome is Outcome.CANCELLED
    assert simulation.generation.num_given_up == 0

"""One member sends a round's header, and the others its digest: what all ranks bring is not sent by all ranks."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from elche.header import header_digest
from elche_coordinator.core.jobs import membership
from elche_coordinator.core.messages.commands import SendAbandon, SendFormGroup, SessionCommand
from elche_coordinator.core.messages.events import GenerationAbandoned, HeaderReported, ResultReceived
from elche_coordinator.core.messages.ids import Rank, RoundId
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.messages.spec import HeaderRow
from elche_coordinator.simulator.collective import Fate
from elche_coordinator.simulator.synthetic import SyntheticRank
from support.disasters import deaths, random_run
from support.rounds import every_way
from support.watched import AT_RANDOM, WatchedSimulation, ranks

THREE = (25.0, 30.0, 57.5)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are sent in jobs of two ranks already."""
    monkeypatch.setattr(membership, "DIGESTS_FROM", 2)


class RankOfAnEarlierRelease(SyntheticRank):
    """Rank 2 is one: it does not know of digests."""

    def _take(self, command: SessionCommand) -> None:
        if isinstance(command, SendFormGroup) and command.rank == 2:
            command = replace(command, sends_digest=False)
        super()._take(command)


def succeeds(simulation: WatchedSimulation) -> None:
    assert simulation.run().outcome is Outcome.SUCCEEDED


def test_ranks_of_a_large_job_send_the_rows_once_in_all(simulate) -> None:
    simulation = simulate(ranks(*[30.0] * membership.DIGESTS_FROM), dataset_size=8000)
    succeeds(simulation)
    assert [one.sends_digest for one in simulation.sent(SendFormGroup)] == [False, *[True] * 7]
    rows = {
        rank: {len(one.header) for one in simulation.events(ResultReceived) if one.rank == rank} for rank in range(8)
    }
    assert rows == {0: {8}, **{rank: {0} for rank in range(1, 8)}}


def test_ranks_of_a_small_job_send_the_rows_all(simulate) -> None:
    simulation = simulate(ranks(*[30.0] * (membership.DIGESTS_FROM - 1)), dataset_size=8000)
    succeeds(simulation)
    assert not any(one.sends_digest for one in simulation.sent(SendFormGroup))
    assert all(one.header for one in simulation.events(ResultReceived))


@every_way
def test_ranks_that_do_not_know_of_digests_send_their_rows(simulate, short, policy, averaging) -> None:
    """Those of an earlier release among others."""
    simulation = simulate(
        ranks(*THREE), policy=policy, averaging=averaging, dataset_size=3000, new_rank=RankOfAnEarlierRelease
    )
    succeeds(simulation)
    told = {bool(one.header) for one in simulation.events(ResultReceived) if one.rank == 2}
    assert told == {True}


def test_another_digest_than_that_of_the_rows_fails_the_job(simulate, short) -> None:
    simulation = simulate(ranks(5, 11.5))
    tell = simulation.handle

    def tell_another(event):
        if isinstance(event, ResultReceived) and event.rank == 1 and event.round >= 4:
            event = replace(event, header_digest=12345)
        tell(event)

    simulation.handle = tell_another
    result = simulation.run()
    assert result.outcome is Outcome.FAILED
    assert "ranks 0 and 1 received different headers in round 4" in result.error


def at_the_end_of_a_round(simulation: WatchedSimulation, then: Callable[[], None], *fates: Fate) -> RoundId:
    """Runs until all ranks are in a round, and calls `then` as its collective ends, with these fates of the ranks.
    Returns the round.
    """

    def is_under_way() -> bool:
        opened = simulation.generation.rounds
        return bool(opened) and len(opened[0].entered) == len(opened[0].targets) and not opened[0].results

    simulation.run_until(lambda: len(simulation.rounds) > 3 and is_under_way())
    opened, left = simulation.generation.rounds[0], iter(fates)

    def ends(round_id: RoundId) -> bool:
        if round_id == opened.id:
            then()
        return False

    simulation.collective.breaks = ends
    simulation.collective.fate = lambda: next(left, Fate.BLOCKS)
    return opened.id


def until_the_next_group(simulation: WatchedSimulation) -> None:
    simulation.run_until(lambda: simulation.generation.abandoned is None and simulation.generation.id > 1)


def asked_for_rows(simulation: WatchedSimulation) -> Rank:
    """Runs until a rank is asked for the rows of headers; returns the rank."""

    def asked() -> list[Rank]:
        return [one.rank for one in simulation.sent(SendAbandon) if not one.keeps_headers]

    simulation.run_until(lambda: bool(asked()))
    return asked()[0]


@pytest.mark.parametrize(("policy", "averaging"), [("cadence", "blocking"), ("async", "overlapped")])
@pytest.mark.parametrize(
    "fates", list(itertools.product(Fate, repeat=2)), ids=lambda fates: "-".join(one.name for one in fates)
)
def test_who_was_to_send_the_rows_dies_in_a_round_that_others_have(simulate, short, policy, averaging, fates) -> None:
    """One of them sends the rows when it is asked; without these what they have could not be committed."""
    simulation = simulate(ranks(*THREE), policy=policy, averaging=averaging, sync_ms=20.0, build_ms=10.0)
    round_id = at_the_end_of_a_round(simulation, lambda: simulation.kill(0), Fate.BLOCKS, *fates)
    until_the_next_group(simulation)
    is_there = [report.round for report in simulation.rounds if report.round == round_id]
    assert len(is_there) == (Fate.RECEIVES in fates)
    assert [one.round for one in simulation.events(HeaderReported)] == is_there
    succeeds(simulation)


def test_who_is_asked_for_the_rows_dies_too(simulate, short) -> None:
    """The next member that has the round is asked."""
    simulation = simulate(ranks(*THREE), sync_ms=20.0, build_ms=10.0)
    round_id = at_the_end_of_a_round(simulation, lambda: simulation.kill(0), Fate.BLOCKS, Fate.RECEIVES, Fate.RECEIVES)
    asked = asked_for_rows(simulation)
    simulation.kill(asked)
    until_the_next_group(simulation)
    assert [one.round for one in simulation.rounds if one.round == round_id]
    assert {one.rank for one in simulation.events(HeaderReported)} - {asked} == {1, 2} - {asked}
    succeeds(simulation)


def test_an_answer_that_comes_again_is_not_taken_for_the_one_with_the_rows(simulate, short) -> None:
    simulation = simulate(ranks(*THREE), sync_ms=20.0, build_ms=10.0)
    round_id = at_the_end_of_a_round(simulation, lambda: simulation.kill(0), Fate.BLOCKS, Fate.RECEIVES, Fate.FAILS)
    asked = asked_for_rows(simulation)
    simulation.handle(next(one for one in simulation.events(GenerationAbandoned) if one.rank == asked))
    until_the_next_group(simulation)
    assert [one.round for one in simulation.rounds if one.round == round_id]
    succeeds(simulation)


def test_a_death_of_another_needs_no_more_rows(simulate, short) -> None:
    """If each member sent the rows of all, a death would cost work that grows with the square of their number."""
    simulation = simulate(ranks(*THREE), sync_ms=20.0, build_ms=10.0)
    at_the_end_of_a_round(simulation, lambda: simulation.kill(2), Fate.RECEIVES, Fate.RECEIVES, Fate.BLOCKS)
    until_the_next_group(simulation)
    assert len(simulation.sent(SendAbandon)) == 2
    assert not list(simulation.events(HeaderReported))
    succeeds(simulation)


def test_rows_that_nobody_waits_for_change_nothing(simulate, short) -> None:
    simulation = simulate(ranks(25.0, 57.5))
    simulation.run_until(lambda: len(simulation.rounds) > 3)
    generation, address = simulation.generation.id, simulation.processes[1].address
    rows = (HeaderRow(weight=1, cut=1, local_step=1, compute_us=1),) * 2
    open_round = simulation.generation.rounds[0].id
    for round_id in (1, open_round):
        simulation.handle(HeaderReported(**address, generation=generation, round=round_id, header=rows))
        assert [one.trigger for one in simulation.core.last_refusals] == ["HeaderReported"]
    succeeds(simulation)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_die_at_random(simulate, short, seed) -> None:
    simulation = simulate(
        ranks(25.0, 30.0, 57.5, 40.0), build_ms=15.0, sync_ms=10.0, seed=seed, dataset_size=3000, epochs=2, **AT_RANDOM
    )
    simulation.start()
    deaths(simulation, seed, every_s=0.7)
    succeeds(simulation)


def test_random_runs(short) -> None:
    for seed in (*range(10_000, 10_005), *range(200_000, 200_005)):
        random_run(seed).run()


def test_the_digest_is_the_same_everywhere() -> None:
    """Ranks and coordinators of other releases compare it."""
    first = HeaderRow(weight=64, cut=128, local_step=2, compute_us=500_000, version=3)
    second = HeaderRow(weight=2**48, cut=1, local_step=1, compute_us=0, finite=False, unusual=True)
    assert header_digest([]) == 13020603013274838756
    assert header_digest([first, second]) == 3498114203542772775
    assert header_digest([second, first]) != header_digest([first, second])
    for field in ("weight", "cut", "local_step", "compute_us", "version"):
        assert header_digest([replace(first, **{field: 7}), second]) != header_digest([first, second]), field
    for field in ("finite", "unusual"):
        changed = replace(first, **{field: not getattr(first, field)})
        assert header_digest([changed, second]) != header_digest([first, second]), field

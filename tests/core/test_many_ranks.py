"""What an event costs the core does not grow with the number of ranks, counted in lines that run."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median

import pytest

from elche.extent import Extent
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.commands import Command
from elche_coordinator.core.messages.events import (
    AgentLost,
    BatchesTrained,
    Event,
    GenerationAbandoned,
    GroupFormed,
    RankReady,
    ResultReceived,
    RoundEntered,
)
from elche_coordinator.core.messages.ids import AgentId, Epoch, Rank
from elche_coordinator.core.messages.reports import MembershipReport
from elche_coordinator.core.pacing.policy import Pace
from elche_coordinator.core.rounds.arrivals import Arrivals
from elche_coordinator.core.rounds.scheduler import RoundScheduler
from elche_coordinator.core.work.ledger import Ledger
from elche_coordinator.simulator.simulation import RankModel, Simulation
from support.effort import lines_run
from support.watched import WatchedSimulation

SETTINGS = AgreedSettings(
    epochs=1, batch_size=64, dataset_size=10**9, averaging="overlapped", anchor=1, divergence_threshold=0
)
FEW, MANY = 16, 128


def lines_by_event(num_ranks: int, *, from_round: int, dies: bool = False) -> dict[type[Event], float]:
    """The lines that the core runs for an event of each kind, on average, until one more round is committed; if a rank
    `dies`, until it trains again.
    """
    spread_ms = 750 / (num_ranks - 1)
    ranks = [RankModel(batch_ms=250 + spread_ms * rank, jitter_fraction=0.05) for rank in range(num_ranks)]
    simulation = Simulation(settings=SETTINGS, ranks=ranks, check=False, sync_ms=50)
    simulation.run_until(lambda: len(simulation.rounds) >= from_round)
    counted: dict[type[Event], list[int]] = defaultdict(list)
    handle: Callable[..., list[Command]] = simulation.core.handle

    def counting(event: Event, *, now_s: float) -> list[Command]:
        commands: list[Command] = []
        counted[type(event)].append(lines_run(lambda: commands.extend(handle(event, now_s=now_s))))
        return commands

    simulation.core.handle = counting  # type: ignore[method-assign]
    if dies:
        simulation.kill(Rank(3))
        told = simulation.reports
        simulation.run_until(lambda: any(isinstance(one, MembershipReport) and one.is_back for one in told))
    else:
        simulation.run_until(lambda: len(simulation.rounds) > from_round)
    return {kind: fmean(counts) for kind, counts in counted.items()}


@pytest.mark.parametrize("from_round", [1, 3], ids=["before speeds are known", "between rounds"])
def test_what_a_rank_says_costs_as_much_among_many_as_among_few(from_round: int) -> None:
    """Each report had the arrivals of all ranks predicted anew, so that a thousand ranks never came to a round.

    The last result commits the round, of which every rank is told: that is work for each rank once a round, and is
    shared by their results here.
    """
    few, many = (lines_by_event(number, from_round=from_round) for number in (FEW, MANY))
    for kind in (BatchesTrained, RoundEntered, ResultReceived):
        assert many[kind] < 1.5 * few[kind], kind


def test_a_rank_that_is_ready_costs_as_much_among_many_as_among_few() -> None:
    """With each, slots were given anew, for which all slots and the ranks on them were counted."""
    few, many = (lines_by_event(number, from_round=0) for number in (FEW, MANY))
    assert many[RankReady] < 1.5 * few[RankReady]


def test_what_a_death_costs_the_others_does_not_grow_with_the_square_of_their_number() -> None:
    """With each answer of a rank to the end of its group, and each rank whose next group stood, all were counted."""
    few, many = (lines_by_event(number, from_round=3, dies=True) for number in (FEW, MANY))
    for kind in (GenerationAbandoned, GroupFormed):
        assert many[kind] < 1.5 * few[kind], kind


def test_with_each_rank_of_a_lost_host_the_others_are_counted_once() -> None:
    """They were looked at eleven times: a host's 500 of a thousand ranks took the event loop 1.8 s in one event."""
    ranks = [RankModel(batch_ms=250 + rank, jitter_fraction=0.05) for rank in range(MANY)]
    simulation = Simulation(settings=SETTINGS, ranks=ranks, check=False, sync_ms=50, num_hosts=2)
    simulation.run_until(lambda: len(simulation.rounds) >= 3)
    host = AgentId("host-2")
    num_lost = len(simulation.core.ranks_of(host))
    lines = lines_run(lambda: simulation.core.handle(AgentLost(agent_id=host), now_s=simulation.clock.now_s))
    assert lines < 7 * MANY * num_lost


def test_a_report_costs_no_more_while_a_generation_is_being_abandoned() -> None:
    """All ranks were counted with each: the deaths of ten of a thousand in a minute filled a core."""

    def lines(num_ranks: int) -> int:
        ranks = [RankModel(batch_ms=250 + rank, jitter_fraction=0.05) for rank in range(num_ranks)]
        simulation = Simulation(settings=SETTINGS, ranks=ranks, check=False, sync_ms=50)
        reports: list[BatchesTrained] = []
        handle: Callable[..., list[Command]] = simulation.core.handle

        def noting(event: Event, *, now_s: float) -> list[Command]:
            if isinstance(event, BatchesTrained) and event.rank == 0:
                reports.append(event)
            return handle(event, now_s=now_s)

        simulation.core.handle = noting  # type: ignore[method-assign]
        simulation.run_until(lambda: len(simulation.rounds) >= 3)
        simulation.kill(Rank(3))
        generation = simulation.job.run.generation
        assert generation is not None
        simulation.run_until(lambda: generation.abandoned is not None)
        return lines_run(lambda: handle(reports[-1], now_s=simulation.clock.now_s))

    assert lines(MANY) < 1.5 * lines(FEW)


def told_by(seed: int, num_looks: list[int]) -> list[Command]:
    """All that ranks whose speeds change are told, until some rounds are committed."""
    ranks = [RankModel(batch_ms=ms, jitter_fraction=0.1, changes=((3.0, 2.5 * ms),)) for ms in (50, 90, 140, 200, 75)]
    simulation = WatchedSimulation(settings=replace(SETTINGS, anchor=6), ranks=ranks, seed=seed, sync_ms=20)
    told: list[Command] = []
    handle: Callable[..., list[Command]] = simulation.core.handle

    def noting(event: Event, *, now_s: float) -> list[Command]:
        told.extend(commands := handle(event, now_s=now_s))
        return commands

    simulation.core.handle = noting  # type: ignore[method-assign]
    paces = RoundScheduler._paces

    def counted(scheduler: RoundScheduler, now_s: float) -> list[Pace]:
        num_looks.append(1)
        return paces(scheduler, now_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundScheduler, "_paces", counted)
        simulation.run_until(lambda: len(simulation.rounds) >= 12)
    return told


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_that_are_followed_lead_to_the_same_targets_as_looking_at_all_ranks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom: list[int] = []
    always: list[int] = []
    followed = told_by(seed, seldom)
    monkeypatch.setattr(Arrivals, "may_differ", lambda *arguments: True)
    assert told_by(seed, always) == followed
    assert len(seldom) < 0.75 * len(always), "some reports save the look"


def median_lines(num_ranks: int) -> dict[type[Event], float]:
    """The lines that the core runs for one of the next reports of each kind. A median leaves out the looks at all
    ranks, which come at times.
    """
    ranks = [RankModel(batch_ms=250 + 750 * rank / num_ranks, jitter_fraction=0.05) for rank in range(num_ranks)]
    simulation = Simulation(settings=SETTINGS, ranks=ranks, check=False, sync_ms=50)
    simulation.run_until(lambda: bool(simulation.rounds))
    counted: dict[type[Event], list[int]] = {BatchesTrained: [], RoundEntered: []}
    handle: Callable[..., list[Command]] = simulation.core.handle

    def counting(event: Event, *, now_s: float) -> list[Command]:
        commands: list[Command] = []
        if len(counts := counted.get(type(event), [0] * 25)) >= 25:
            return handle(event, now_s=now_s)
        counts.append(lines_run(lambda: commands.extend(handle(event, now_s=now_s))))
        return commands

    simulation.core.handle = counting  # type: ignore[method-assign]
    simulation.run_until(lambda: all(len(counts) == 25 for counts in counted.values()))
    return {kind: median(counts) for kind, counts in counted.items()}


def test_a_report_of_one_of_a_thousand_ranks_runs_as_many_lines_as_that_of_one_of_ten() -> None:
    few, many = median_lines(10), median_lines(1000)
    for kind, lines in many.items():
        assert lines <= 1.1 * few[kind], kind


@pytest.mark.parametrize("num_ranks", [10, 1000])
def test_whether_a_round_ends_the_epoch_is_known_without_a_look_at_all_leases(num_ranks: int) -> None:
    """All ranks' leases were gone through to announce each round, a third of what a commit of a thousand cost."""
    ledger = Ledger(Extent(dataset_size=10**9, batch_size=64, epochs=2))
    for rank in map(Rank, range(num_ranks)):
        ledger.grant(rank, Epoch(0), 640)
    counts = {Rank(rank): 10 for rank in range(num_ranks)}
    assert lines_run(lambda: ledger.ended_by(counts)) < 20

"""Ranks that stopped while no coordinator answered: a draft that one has left becomes a checkpoint (protocol P19.7)."""

import pytest

from elche_coordinator.core.messages.commands import SendOutcome, WriteCheckpoint
from elche_coordinator.core.messages.events import RankStopped
from elche_coordinator.core.messages.ids import Rank, RoundId
from elche_coordinator.core.messages.reports import MembershipReport, Outcome
from elche_coordinator.core.records.machine import JobPhase
from support.stories import UNEQUAL, in_mid_training
from support.watched import WatchedSimulation, ranks


def stop(simulation: WatchedSimulation, rank: int, round_id: int) -> None:
    simulation.handle(RankStopped(**simulation.processes[Rank(rank)].address, round=RoundId(round_id)))


def orders(simulation: WatchedSimulation) -> list[tuple[Rank, int, WriteCheckpoint]]:
    sent = simulation.sent(SendOutcome)
    return [(one.rank, one.version, one.checkpoint) for one in sent if one.checkpoint is not None]


@pytest.mark.parametrize(("policy", "averaging"), [("cadence", "blocking"), ("async", "overlapped")])
def test_the_draft_of_the_last_committed_round_becomes_a_checkpoint(simulate, policy, averaging):
    """Once all have stopped, and not before: until then others may train on, or tell of newer rounds."""
    simulation = simulate(ranks(*UNEQUAL), policy=policy, averaging=averaging, dataset_size=8000)
    in_mid_training(simulation)
    last, version = simulation.training.last_round, simulation.training.version
    for rank in range(len(UNEQUAL)):
        assert orders(simulation) == []
        stop(simulation, rank, last if rank == 0 else 0)
    ((writer, written, order),) = orders(simulation)
    assert (writer, written) == (0, version)
    assert f'"version": {version},' in order.training
    simulation.run_until(lambda: simulation.job.phase is JobPhase.QUEUED)
    (back,) = [report.text for report in simulation.reports if isinstance(report, MembershipReport)]
    assert back.endswith(f"the job goes back to checkpoint {simulation.job.resume_point}")
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.training.restored_version == version


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_draft_of_another_round_is_not_used(simulate, difference):
    """An older one, or one of a round that never was: a job that went on from it would train samples twice, or not."""
    simulation = simulate(ranks(*UNEQUAL), dataset_size=8000)
    in_mid_training(simulation)
    for rank in range(len(UNEQUAL)):
        stop(simulation, rank, simulation.training.last_round + difference)
    assert orders(simulation) == []


def test_a_draft_that_is_no_newer_than_the_newest_checkpoint_is_not_used(simulate):
    simulation = simulate(ranks(*UNEQUAL), dataset_size=8000)
    in_mid_training(simulation)
    simulation.job.save()
    simulation.run_until(lambda: bool(simulation.training.checkpoints.kept))
    assert simulation.training.checkpoints.newest_version == simulation.training.version
    before = orders(simulation)
    for rank in range(len(UNEQUAL)):
        stop(simulation, rank, simulation.training.last_round)
    assert orders(simulation) == before

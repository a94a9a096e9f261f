"""Ranks that stopped while no coordinator answered: a draft that one has left becomes a checkpoint (protocol P19.7)."""

import pytest

from elche_coordinator.core.messages.commands import SendOutcome, SendShutdown, WriteCheckpoint
from elche_coordinator.core.messages.events import AgentJoined, GenerationAbandoned, RankStopped
from elche_coordinator.core.messages.ids import AgentId, Rank, RoundId
from elche_coordinator.core.messages.reports import MembershipReport, Outcome
from elche_coordinator.core.messages.spec import Slot
from elche_coordinator.core.records.machine import JobPhase, RankPhase
from support.stories import UNEQUAL, in_mid_training
from support.watched import WatchedSimulation, ranks


def stop(simulation: WatchedSimulation, rank: int, round_id: int) -> None:
    simulation.handle(RankStopped(**simulation.processes[Rank(rank)].address, round=RoundId(round_id)))


def orders(simulation: WatchedSimulation) -> list[tuple[Rank, int, WriteCheckpoint]]:
    sent = simulation.sent(SendOutcome)
    return [(one.rank, one.version, one.checkpoint) for one in sent if one.checkpoint is not None]


def abandon(simulation: WatchedSimulation, rank: int, reason: str) -> None:
    """The rank has given its generation up: by itself, for this reason, or, without one, as it was ordered to."""
    generation = simulation.generation.id
    simulation.handle(
        GenerationAbandoned(**simulation.processes[Rank(rank)].address, generation=generation, reason=reason)
    )


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
    assert back.endswith(f"the job goes back to checkpoint {simulation.job.resumption.resume}")
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


def test_a_rank_with_the_draft_is_not_let_go_before_it_is_known_whether_others_train_on(simulate):
    """What the other host's rank had left to say may be that its group broke; that it has stopped comes after that."""
    simulation = simulate(ranks(*UNEQUAL), dataset_size=8000)
    in_mid_training(simulation)
    last, generation = simulation.training.last_round, simulation.generation
    simulation.freeze(1)  # it is no more, and its worker speaks for it
    stop(simulation, 0, last)
    abandon(simulation, 1, "the other end is gone")
    abandon(simulation, 1, "")
    simulation.run_until(lambda: generation.is_abandoned)
    assert simulation.sent(SendShutdown) == []
    stop(simulation, 1, 0)
    ((writer, _, _),) = orders(simulation)
    assert writer == 0
    assert simulation.sent(SendShutdown) == []


def test_a_draft_of_a_round_that_commits_after_all_have_stopped_becomes_a_checkpoint(simulate):
    """One has the round's result, and the other's collective broke: it commits once both have given the group up."""
    simulation = simulate(ranks(*UNEQUAL), dataset_size=8000, latency_ms=2.0)
    in_mid_training(simulation)
    rounds, version = simulation.generation.rounds, simulation.training.version
    simulation.run_until(lambda: bool(rounds) and len(rounds[0].results) == 1)
    (has,) = rounds[0].results
    simulation.cut_off(Rank(1 - has), 1e6)
    stop(simulation, has, rounds[0].id)
    stop(simulation, 1 - has, 0)
    assert orders(simulation) == []
    abandon(simulation, 1 - has, "it broke")
    abandon(simulation, 1 - has, "")
    simulation.run_until(lambda: simulation.training.version > version)
    ((writer, written, _),) = orders(simulation)
    assert (writer, written) == (has, simulation.training.version)


def test_a_draft_becomes_a_checkpoint_when_who_had_not_stopped_has_died(simulate):
    """As a rank that hung: it leaves nothing, and its worker's next one says at once that it is gone."""
    simulation = simulate(ranks(*UNEQUAL), dataset_size=8000)
    in_mid_training(simulation)
    stop(simulation, 0, simulation.training.last_round)
    simulation.kill(1)
    simulation.run_until(lambda: bool(simulation.job.roster.num_lost))
    ((writer, _, _),) = orders(simulation)
    assert writer == 0


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_only_a_rank_with_the_model_trains_on_without_those_that_have_stopped(simulate, is_newcomer):
    """These were given up for a newcomer, before a draft of theirs was a checkpoint."""
    simulation = simulate(ranks(*UNEQUAL, 40.0), dataset_size=8000)
    simulation.handle(AgentJoined(agent_id=AgentId("b"), host="b", slots=(Slot(device="cpu"),)))
    simulation.start()
    in_mid_training(simulation)
    other = next(one for one in simulation.job.ranks.values() if one.host == "b")
    if is_newcomer:
        simulation.kill(other.rank)
        simulation.run_until(lambda: simulation.job.ranks[other.rank].phase is RankPhase.STARTING)
    first, second = (rank for rank in simulation.job.ranks if rank != other.rank)
    stop(simulation, first, simulation.training.last_round)
    assert simulation.core.beside_stopped(AgentId("host")) == [], "one on its host trains on"
    stop(simulation, second, 0)
    trains_on = [] if is_newcomer else [other.address]
    assert simulation.core.beside_stopped(AgentId("host")) == [trains_on, trains_on]

"""Samples that kill whoever trains them: the job fails and names them, and nothing else is blamed."""

import subprocess
import sys

import pytest
from core.test_lost_ranks import POLICIES, succeeds

from elche.permutation import permutation_slice
from elche.settings import AgreedSettings
from elche_coordinator.core.jobs.deaths import Deaths
from elche_coordinator.core.messages.ids import AgentId, Epoch, Incarnation, JobId, Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.messages.spec import Lease
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.work.ledger import Ledger
from support.disasters import deaths
from support.stories import in_mid_training
from support.watched import AT_RANDOM, WatchedSimulation, ranks

DEADLY = 1234
"""A position of the second epoch's order."""


def fails_of(simulation: WatchedSimulation) -> str:
    result = simulation.run(limit_s=3_000)
    assert result.outcome is Outcome.FAILED
    return result.error


def has_deadly(lease: Lease) -> bool:
    return lease.epoch == 1 and lease.offset <= DEADLY < lease.offset + lease.size


TWO, THREE, UNLIKE = (25.0, 57.5), (25.0, 30.0, 57.5), (4.0, 9.0, 300.0)


@pytest.mark.parametrize(
    ("policy", "averaging", "batch_ms"),
    [(*way, TWO) for way in POLICIES] + [(*POLICIES[0], THREE), (*POLICIES[1], UNLIKE)],
)
def test_a_sample_that_kills_its_ranks_is_named(simulate, policy, averaging, batch_ms):
    simulation = simulate(
        ranks(*batch_ms), policy=policy, averaging=averaging, dataset_size=2000, epochs=3, is_deadly=has_deadly
    )
    error = fails_of(simulation)
    first, last = map(int, error.partition("while they trained samples ")[2].partition(" of epoch 2")[0].split(" to "))
    assert first <= DEADLY <= last
    assert last - first < 300
    assert " processes (of ranks " in error
    command = error.partition("`")[2].partition("`")[0].split()
    listed = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=True).stdout
    indices = permutation_slice(seed=simulation.settings.seed, epoch=1, length=2000, offset=DEADLY, size=1)
    assert str(indices[0]) in listed.split()


def test_it_is_found_too_where_everybody_dies_and_the_job_goes_back(simulate):
    simulation = simulate(ranks(25.0, 57.5), dataset_size=2000, epochs=3, is_deadly=has_deadly, build_ms=3000.0)
    simulation.run_until(lambda: simulation.job.roster.num_lost == 1)
    simulation.kill(1 - simulation.reports[-1].rank)
    assert "of epoch 2's order" in fails_of(simulation)
    assert simulation.job.attempt > 1


@pytest.mark.parametrize("seed", range(4))
def test_deaths_at_random_blame_no_samples(simulate, seed):
    simulation = simulate(ranks(25.0, 30.0, 57.5), dataset_size=20_000, seed=seed, build_ms=20.0, **AT_RANDOM)
    in_mid_training(simulation)
    deaths(simulation, seed, every_s=2.0)
    succeeds(simulation)


class Story:
    """Ranks that die in their first batch, and one that does not."""

    def __init__(self) -> None:
        self.settings = AgreedSettings(dataset_size=100, batch_size=10, epochs=1)
        self.ledger, self.deaths = Ledger(self.settings.extent), Deaths()
        self.now_s = 1000.0

    def dies(self, rank: int) -> str | None:
        self.now_s += 1.0
        self.ledger.grant(Rank(rank), Epoch(0), 20)
        record = RankRecord(
            job_id=JobId("job"),
            rank=Rank(rank),
            incarnation=Incarnation(rank),
            agent_id=AgentId("host"),
            slot=0,
            host="host",
            device="cpu",
        )
        said = self.deaths.blame(record, self.ledger, self.settings, self.now_s, trained=True)
        self.ledger.release(Rank(rank))
        return said

    def trains(self, rank: int, num_samples: int) -> None:
        self.ledger.grant(Rank(rank), Epoch(0), num_samples)
        self.ledger.commit(Rank(rank), num_samples)


def test_the_third_death_on_the_same_samples_is_one_too_many():
    story = Story()
    assert [story.dies(0), story.dies(1)] == [None, None]
    assert "3 processes (of ranks 0, 1, 3) have died while they trained samples 0 to 9 of epoch 1's" in story.dies(3)


def test_three_deaths_among_others_may_be_by_chance():
    story = Story()
    assert story.dies(4) is None
    story.trains(5, 10)
    assert [story.dies(rank) for rank in (0, 1, 3, 4)] == [None] * 4
    assert "5 processes (of ranks 0, 1, 3, 4) have died" in story.dies(4)


def test_samples_that_were_trained_since_are_innocent():
    story = Story()
    assert [story.dies(0), story.dies(1)] == [None, None]
    story.trains(2, 10)
    assert story.dies(3) is None


def test_a_rank_that_dies_again_and_again_says_nothing_of_its_samples():
    """Its memory may be too small: others can train the same."""
    story = Story()
    assert [story.dies(1) for _ in range(5)] == [None] * 5

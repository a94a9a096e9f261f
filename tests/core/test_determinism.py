"""The same events lead to the same commands: twice in one process, and whatever order Python's hashes give."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elche.policies import POLICIES
from elche.settings import AgreedSettings
from elche_coordinator.simulator.simulation import RankModel
from support.watched import LONG_ROUNDS, WatchedSimulation


def digest(policy: str, seed: int = 3) -> str:
    """Of every event and command of a run with jitter, in order, with their times."""
    models = [RankModel(batch_ms=ms, jitter_fraction=0.2) for ms in (10, 23, 17, 11)]
    options = {
        "dataset_size": 2_003,
        "batch_size": 10,
        "epochs": 2,
        "policy": policy,
        "has_evaluation": True,
    } | LONG_ROUNDS
    simulation = WatchedSimulation(settings=AgreedSettings(**options), ranks=models, seed=seed, check_every=10**9)
    simulation.run()
    simulation.assert_exactly_once()
    return hashlib.sha256("\n".join(map(repr, simulation.core.steps)).encode()).hexdigest()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_twice_in_one_process_is_the_same(policy):
    assert digest(policy) == digest(policy)


def test_another_seed_of_the_jitter_is_another_run():
    assert digest("cadence") != digest("cadence", seed=4)


def test_a_run_is_the_same_under_every_hash_seed():
    told = [told_under(hash_seed) for hash_seed in ("0", "1")]
    assert told[0] == told[1] == [digest(policy) for policy in POLICIES]


def told_under(hash_seed: str) -> list[str]:
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    script = f"from test_determinism import digest\nfor policy in {list(POLICIES)}: print(digest(policy))"
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()

"""The benchmark of many live ranks speaks the protocol as it is."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from elche.v1 import agent_pb2, rank_pb2

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_ranks_that_are_played_train_and_make_rounds() -> None:
    """Fields of messages were renamed, and every run of it waited for ranks that had ended by an error."""
    command = [sys.executable, "live_ranks_cost.py", "3", "--seconds", "4"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["rounds"] > 0
    assert row["work_fraction"] > 0.9


def test_a_played_rank_that_is_killed_trains_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on through its leases: the work of the dead counted as that of those who stay."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    played, settings = import_module("played_ranks"), import_module("live_ranks").settings_of(overlaps=True)
    course = played.Course(batch_s=[0.01], jitter=0.0, sync_s=0.0, batch_size=1, overlaps=True)
    trains = asyncio.Event()

    async def converse(*_: Any) -> AsyncIterator[rank_pb2.ConverseResponse]:
        yield rank_pb2.ConverseResponse(welcome=rank_pb2.Welcome())
        yield rank_pb2.ConverseResponse(start_epoch=rank_pb2.StartEpoch(partition_size=10**6))
        trains.set()
        await asyncio.Event().wait()

    async def story() -> None:
        world = played.World(course, settings)
        rank = played.PlayedRank(0, world, "secret")
        rank._version = 1
        running = asyncio.ensure_future(rank.run(converse, lambda: None))
        world.playing[0] = agent_pb2.StartRank(job_id="played"), running
        await trains.wait()
        world.kill(0)
        await asyncio.wait({running})
        assert rank._batch.cancelled()

    asyncio.run(story())

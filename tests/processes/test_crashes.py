"""The coordinator dies around its writes, one after the other, while a job trains: the same counts at the end."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from elche_client import Client
from elche_client.events import Checkpoint, EpochReport
from support.real_processes import Mark, agent, coordinator, eventually

pytestmark = pytest.mark.slow(reason="a coordinator is started many times")

JobFile = Callable[..., Path]
TESTS = Path(__file__).parents[1]
NUM_SAMPLES = 500  # of jobs/linear.py
EPOCHS = 60
FEW_EPOCHS = 6
"""Of a job that waits for what happens to it."""
DIE_AT = (2, 3, 5, 8)
"""At which of its writes each life ends."""


LONG = pytest.mark.long(reason="beside one in the gate that goes the same way")


@pytest.mark.gate
@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=LONG), pytest.param("shown", marks=LONG)])
def test_crash_every_persist(mark: Mark, tmp_path: Path, job_file: JobFile, when: str) -> None:
    """It dies before a write, after it before anybody knows, or after the first thing that waited for it was done; each
    life gets some writes further. No rank is started again, every sample is committed once, epochs are told in order.
    """
    with ExitStack() as stack:
        first = stack.enter_context(coordinator(mark, tmp_path))
        stack.enter_context(agent(mark, tmp_path, first.address))
        client = stack.enter_context(Client(first.address, reconnect_s=60))
        job = client.submit(job_file(), num_ranks=2, epochs=EPOCHS, checkpoint_every_epochs=4)
        watch = job.watch()
        told = [eventually(lambda: event if isinstance(event := next(watch), EpochReport) else None, "an epoch")]
        ranks = mark.living("elche rank")
        first.process.kill()
        first.process.wait()
        for number in DIE_AT:
            env = {"DIE": when, "DIE_AT": str(number), "PYTHONPATH": str(TESTS)}
            with coordinator(
                mark, tmp_path, data=first.data, listen=first.address, module="support.dying_coordinator", env=env
            ) as one:
                assert one.process.wait(400) == -signal.SIGKILL
        assert mark.living("elche rank") == ranks, "no rank was started again"
        last = stack.enter_context(coordinator(mark, tmp_path, data=first.data, listen=first.address))
        told += [event for event in watch if isinstance(event, EpochReport)]
        result = client.job(job.id).result()
        assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
        numbers = [event.epoch for event in told]
        assert numbers == sorted(set(numbers)), "a watcher may miss one that was told when nobody watched"
        assert last.new_errors() == []


def test_everything_is_killed_at_once(mark: Mark, tmp_path: Path, waiting: Callable[[Path], Path]) -> None:
    """Power fails: coordinator, agents and ranks are gone. Started again, they go on from the newest checkpoint."""
    is_over = tmp_path / "is over"
    with ExitStack() as stack:
        first = stack.enter_context(coordinator(mark, tmp_path))
        stack.enter_context(agent(mark, tmp_path, first.address))
        client = stack.enter_context(Client(first.address, reconnect_s=60))
        job = client.submit(waiting(is_over), num_ranks=2, epochs=FEW_EPOCHS, checkpoint_every_epochs=1)
        watch = job.watch()
        eventually(lambda: isinstance(next(watch), Checkpoint), "a checkpoint")
        for pid in mark.living():
            with suppress(ProcessLookupError):  # with its parent
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not mark.living(), "all are gone")
        is_over.touch()
        first.process.wait()  # one without an environment may hold its files, and the folder's lock, for a moment
        last = stack.enter_context(coordinator(mark, tmp_path, data=first.data, listen=first.address))
        stack.enter_context(agent(mark, tmp_path, first.address))
        result = client.job(job.id).result()
        assert "; the job goes back to checkpoint " in last.log.read_text()
        assert result.committed_samples == (NUM_SAMPLES,) * FEW_EPOCHS
        assert last.new_errors() == []

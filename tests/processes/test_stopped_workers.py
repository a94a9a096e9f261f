"""Workers that are told to stop while no coordinator answers: what was committed is not trained again."""

import json
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes.test_lost_ranks import NUM_SAMPLES, Story

from elche_client import Client
from elche_client.events import JobState, RoundReport
from support.real_processes import Mark, agent, coordinator, eventually

EPOCHS, BATCH = 4, 4
NUM_BATCHES = NUM_SAMPLES * EPOCHS // BATCH
HANDED_IN = re.compile(r"goes on from (\S+), which its ranks had left")
pytestmark = pytest.mark.slow(reason="a coordinator is killed, and a worker stopped")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_worker_stops_without_a_coordinator_and_its_work_is_handed_in(
    mark: Mark, tmp_path: Path, job_file: Callable[..., Path], num_ranks: int
) -> None:
    """As when a host is started again on which both run. The rounds that ranks make alone are committed, too."""
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        worker = stack.enter_context(agent(mark, tmp_path, one.address, devices="cpu,cpu"))
        client = stack.enter_context(Client(one.address, token="", reconnect_s=100))
        story = Story(
            client.submit(job_file("dying.py"), num_ranks=num_ranks, batch_size=BATCH, epochs=EPOCHS, max_anchor=8),
            tmp_path,
        )
        eventually(lambda: len(story.of(RoundReport)) > 1, "it trains")
        one.process.kill()
        one.process.wait()
        told = story.of(RoundReport)[-1].version
        made = [len(story.notes(rank)) for rank in range(num_ranks)]
        eventually(
            lambda: all(len(story.notes(rank)) > made[rank] + 4 for rank in range(num_ranks)), "ranks train on alone"
        )
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(100) == 0
        assert "no coordinator answers: ranks leave what they have here" in worker.log.read_text()
        (draft,) = tmp_path.glob("work/*/checkpoints/*/*")
        assert draft.name.startswith(".stopped.")
        assert not (draft / "manifest.json").exists(), "nobody takes it for whole"
        (tmp_path / "again").mkdir()
        two = stack.enter_context(coordinator(mark, tmp_path / "again", data=one.data, listen=one.address))
        after = stack.enter_context(agent(mark, tmp_path, one.address, devices="cpu,cpu"))
        path = eventually(lambda: HANDED_IN.search(after.log.read_text()), "it is handed in").group(1)
        training = json.loads((Path(path) / "manifest.json").read_text())["training"]
        story.hurry()
        result = story.end()
        assert result.state is JobState.SUCCEEDED, result
        assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
        assert training["version"] > told, "rounds that ranks made alone are committed, too"
        made = [len([what for what, *_ in story.notes(rank) if what == "batch"]) for rank in range(num_ranks)]
        num_before = training["samples"] // BATCH
        assert sum(made) - NUM_BATCHES < num_before // 4, "of what was committed nothing is trained again"
        assert two.new_errors() == []

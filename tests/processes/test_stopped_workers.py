"""Workers that are told to stop while no coordinator answers: what was committed is not trained again."""

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes.test_lost_ranks import NUM_SAMPLES, REPLACE, Story

from elche_client import Client
from elche_client.events import JobState, MembershipReport, RoundReport
from support.real_processes import Agent, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
EPOCHS, BATCH, MAX_ANCHOR = 4, 4, 8
NUM_BATCHES = NUM_SAMPLES * EPOCHS // BATCH
HANDED_IN = re.compile(r"goes on from (\S+), which its stopped ranks left|is not used|another host|stays in its folder")
LONG = pytest.mark.long(reason="two ranks of a worker go the same way")
pytestmark = pytest.mark.slow(reason="a coordinator is killed, and workers stopped")


def join(stack: ExitStack, mark: Mark, folder: Path, address: str, hosts: list[str], *more: str) -> list[Agent]:
    """Starts a worker for each host, with these devices, at the same time; each has its work folder."""
    for index in range(len(hosts)):
        (folder / str(index)).mkdir(exist_ok=True)
    with ThreadPoolExecutor() as pool:
        begun = [
            pool.submit(stack.enter_context, agent(mark, folder / str(index), address, *more, devices=devices))
            for index, devices in enumerate(hosts)
        ]
    return [one.result() for one in begun]


@pytest.mark.gate
@pytest.mark.parametrize("hosts", [pytest.param("cpu", marks=LONG), "cpu,cpu", "cpu cpu"])
def test_workers_stop_without_a_coordinator_and_their_work_is_handed_in(
    mark: Mark, tmp_path: Path, job_file: JobFile, hosts: str
) -> None:
    """As when hosts are started again, that of the coordinator too. Rounds that ranks make alone are committed, too.
    Who shuts a host down sends SIGTERM to all of its processes.
    """
    num_ranks, is_shut_down = hosts.count("cpu"), hosts == "cpu cpu"
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        workers = join(stack, mark, tmp_path, one.address, hosts.split())
        client = stack.enter_context(Client(one.address, token="", reconnect_s=100))
        path, settings = job_file("dying.py"), {"batch_size": BATCH, "epochs": EPOCHS, "max_anchor": MAX_ANCHOR}
        story = Story(client.submit(path, num_ranks=num_ranks, **settings), tmp_path)
        num_rounds = 5 if num_ranks > 1 else 2  # those of a rank alone are long; others need speeds to be granted any
        eventually(lambda: len(story.of(RoundReport)) >= num_rounds, "it trains")
        one.process.kill()
        one.process.wait()
        told = story.of(RoundReport)[-1].version
        before = [len(story.notes(rank)) for rank in range(num_ranks)]
        eventually(
            lambda: all(len(story.notes(rank)) > before[rank] + 4 for rank in range(num_ranks)), "ranks train on alone"
        )
        for pid in [story.pids(rank)[-1] for rank in range(num_ranks)] if is_shut_down else []:
            os.kill(pid, signal.SIGTERM)
        for worker in workers:
            worker.process.send_signal(signal.SIGTERM)
        for worker in workers:
            assert worker.process.wait(400) == 0
            is_asked = "no coordinator answers: ranks stop and leave their work here" in worker.log.read_text()
            assert is_asked or is_shut_down
        drafts = list(tmp_path.glob("*/work/*/checkpoints/*/*"))
        assert 1 <= len(drafts) <= len(workers), "at most one of each host"
        assert all(one.name.startswith(".stopped.") for one in drafts)
        assert not any((draft / "manifest.json").exists() for draft in drafts), "nobody takes it for whole"
        (tmp_path / "again").mkdir()
        two = stack.enter_context(coordinator(mark, tmp_path / "again", data=one.data, listen=one.address))
        workers = join(stack, mark, tmp_path, one.address, hosts.split())
        said = [eventually(lambda log=one.log: HANDED_IN.search(log.read_text()), "it is said") for one in workers]
        (kept,) = [match.group(1) for match in said if match.group(1)]
        training = json.loads((Path(kept) / "manifest.json").read_text())["training"]
        assert list(tmp_path.glob("*/work/*/checkpoints/*/.stopped.*")) == []
        assert list(tmp_path.glob("*/work/*/stopped")) == []
        story.hurry()
        result = story.end()
        assert result.state is JobState.SUCCEEDED, result
        assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
        assert training["version"] > told, "rounds that ranks made alone are committed, too"
        made = [len([what for what, *_ in story.notes(rank) if what == "batch"]) for rank in range(num_ranks)]
        num_before = training["samples"] // BATCH
        assert sum(made) - NUM_BATCHES < num_before // 4, "of what was committed nothing is trained again"
        assert two.new_errors() == []


def test_of_two_hosts_one_is_stopped_and_the_other_neither_waits_nor_is_taken_for_hung(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    """All waited 15 s for an order that its next worker does not get. Before that came the rank that was left could be
    ended as one that hangs: what it had trained meanwhile it had not said.
    """
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        _, stopped = join(stack, mark, tmp_path, one.address, ["cpu", "cpu"])
        client = stack.enter_context(Client(one.address, token="", reconnect_s=100))
        job = client.submit(job_file("dying.py"), num_ranks=2, batch_size=BATCH, epochs=EPOCHS, max_anchor=MAX_ANCHOR)
        story = Story(job, tmp_path)
        eventually(lambda: len(story.of(RoundReport)) >= 5, "it trains")
        one.process.kill()
        one.process.wait()
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.process.wait(400) == 0
        (tmp_path / "again").mkdir()
        stack.enter_context(coordinator(mark, tmp_path / "again", data=one.data, listen=one.address))
        stack.enter_context(agent(mark, tmp_path / "1", one.address, devices="cpu"))
        said = eventually(lambda: HANDED_IN.search(stopped.log.read_text()), "it is said").string
        assert "is not used: unknown rank: others train on without it" in said
        eventually(lambda: story.is_back(0) or story.is_back(1), "both train")
        story.hurry()
        result = story.end()
        assert result.state is JobState.SUCCEEDED, result
        assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
        assert sorted(len(story.pids(rank)) for rank in range(2)) == [1, 2]
        changes = [report.text for report in story.of(MembershipReport)]
        assert not any("left out" in text for text in changes), changes
        made = [len([what for what, *_ in story.notes(rank) if what == "batch"]) for rank in range(2)]
        # On a busy machine the two do not end their last round at the same time.
        assert sum(made) <= NUM_BATCHES + MAX_ANCHOR + 2, "no more than what was trained since it is trained again"


HANGS = """
def hangs(model, batch):
    while (FOLDER / "hang").exists():
        (FOLDER / "hangs").touch()
        time.sleep(0.05)
    return train_step(model, batch)
"""


def test_a_rank_that_hangs_leaves_nothing_and_its_worker_ends_in_its_grace(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path))
        (worker,) = join(stack, mark, tmp_path, one.address, ["cpu"], "--grace", "3")
        client = stack.enter_context(Client(one.address, token=""))
        job = client.submit(job_file("dying.py", HANGS, REPLACE.format("train_step=hangs")), num_ranks=1)
        story = Story(job, tmp_path)
        eventually(lambda: story.of(RoundReport), "it trains")
        (tmp_path / "hang").touch()
        eventually((tmp_path / "hangs").exists, "the rank hangs")
        one.process.kill()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(400) == 0
        assert "ranks stop and leave their work here" in worker.log.read_text()
        assert list(tmp_path.glob("*/work/*/checkpoints/*/*")) == []
        assert list(tmp_path.glob("*/work/*/stopped/*")) == []

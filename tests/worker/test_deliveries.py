"""How many files an agent sends at once, and in what chunks."""

import queue
import threading
from pathlib import Path

import pytest

from elche.v1 import agent_pb2
from elche_worker.agent import agent as module
from elche_worker.agent.agent import Agent, _chunks, _log_parts
from elche_worker.process.rank_files import RankFiles

MOST = 3


def test_an_agent_sends_so_many_files_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """560 that followed a log took 2,036 threads and all open files of a worker, which could start no rank any more."""
    monkeypatch.setattr(module, "MAX_DELIVERIES", MOST)
    begun, may_end, left = queue.SimpleQueue[str](), threading.Semaphore(0), threading.Semaphore(0)

    class Slow(Agent):
        def _deliver_log(self, order: agent_pb2.SendLog) -> None:
            begun.put(order.job_id)
            may_end.acquire()
            left.release()

    agent = Slow("127.0.0.1:1", [], tmp_path)

    def ask(job_id: str) -> None:
        agent._do(agent_pb2.AttendResponse(send_log=agent_pb2.SendLog(job_id=job_id)))

    for number in range(MOST):
        ask(str(number))
    assert sorted(begun.get(timeout=400) for _ in range(MOST)) == ["0", "1", "2"]
    ask("one too many")
    assert "job=one too many a file is not sent: 3 are being sent already" in caplog.text
    for _ in range(MOST):
        may_end.release()
        assert left.acquire(timeout=100)
    while begun.empty():  # the threads that have sent the others are about to say so
        ask("again")
    assert begun.get() == "again"
    may_end.release(1000)


def test_a_log_is_sent_in_small_chunks_whatever_its_lines_are(tmp_path: Path) -> None:
    """The coordinator holds some for each reader who takes none, and there may be a thousand."""
    (path := tmp_path / "rank-0.log").write_bytes(b"x" * (3 << 20))
    parts = [part.data for part in _log_parts(path, _chunks(path, 1 << 20, RankFiles()), None)]
    assert b"".join(parts) == b"x" * (1 << 20)
    assert max(map(len, parts)) == 64 << 10


def test_a_log_that_is_shortened_while_it_is_followed_goes_on_in_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had come of a line, and what the log begins with now, were one line."""
    agent, path = Agent("127.0.0.1:1", [], tmp_path), tmp_path / "rank-0.log"
    monkeypatch.setattr(agent._processes, "has", lambda *_: path.read_text() != "the end\n")
    path.write_text("one\nhalf of a li")
    followed = agent._followed(path, agent_pb2.SendLog(max_bytes=1000))
    assert next(followed) == (0, b"one\nhalf of a li")
    path.write_text("the end\n")
    assert [data for _, data in followed] == [b"\n", b"the end\n"]

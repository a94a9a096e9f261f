"""A worker on whose host a job has taken all processes that may be: it goes on, gets no more ranks, and says why."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elche.v1 import agent_pb2
from elche_worker.agent import agent as module
from elche_worker.agent import processes
from elche_worker.agent.agent import MAX_DELIVERIES, NO_THREAD, Agent
from elche_worker.agent.fitness import NO_THREADS, Fitness
from elche_worker.agent.processes import Processes

Taken = Callable[[int], None]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Lets so many more threads begin, and then none."""
    start, left = threading.Thread.start, [1 << 30]

    def begin(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError(NO_THREAD)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)

    def take(number: int) -> None:
        left[0] = number

    return take


def an_agent(folder: Path) -> Agent:
    return Agent("127.0.0.1:1", [agent_pb2.Slot(device="cpu")], folder / "work")


@pytest.mark.parametrize("number", [0, 10])
def test_a_host_that_starts_no_more_threads_gets_no_more_ranks(number: int, tmp_path: Path, taken: Taken) -> None:
    """Jobs that were placed there failed with `exit code 1`, for what another job had taken."""
    told: list[str] = []
    looks, before = Fitness(tmp_path / "work", told.append), threading.active_count()
    taken(number)
    assert looks.look() == f"it {NO_THREADS}"
    assert threading.active_count() <= before  # one of a former test may end meanwhile
    taken(1 << 30)
    assert looks.look() == ""
    assert told == [f"it {NO_THREADS}", ""]


def test_orders_that_need_a_thread_end_no_worker(tmp_path: Path, taken: Taken) -> None:
    """The first of them ended it, and with it the ranks of all jobs. An answer that needs no thread is given."""
    one = an_agent(tmp_path)
    taken(0)
    for order in (
        agent_pb2.AttendResponse(seq=1, send_stacks=agent_pb2.SendStacks(job_id="job")),
        agent_pb2.AttendResponse(open_link=agent_pb2.OpenLink()),
        agent_pb2.AttendResponse(try_link=agent_pb2.TryLink()),
        agent_pb2.AttendResponse(send_log=agent_pb2.SendLog()),
    ):
        one._do(order)
    (answer,) = one._outbound._kept
    assert answer.rank_stacks.text == f"its worker {NO_THREADS}"


def test_a_connection_for_which_there_is_no_thread_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise RuntimeError(NO_THREAD)

    monkeypatch.setattr(module, "open_channel", none_left)
    assert an_agent(tmp_path)._serve() == f"this worker {NO_THREADS}"


def test_other_errors_are_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(module, "open_channel", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        an_agent(tmp_path)._serve()


def test_files_that_were_not_sent_keep_no_others_back(tmp_path: Path, taken: Taken) -> None:
    one, sent = an_agent(tmp_path), threading.Event()
    taken(0)
    for _ in range(MAX_DELIVERIES + 1):
        one._begin_delivery(lambda order: sent.set(), agent_pb2.SendLog(job_id="job"))
    taken(1)
    one._begin_delivery(lambda order: sent.set(), agent_pb2.SendLog(job_id="job"))
    assert sent.wait(400)


def test_a_rank_is_ended_all_the_same(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    monkeypatch.setattr(Processes, "_signal_leader", lambda self, key, number: signals.append(int(number)))
    taken(0)
    Processes(lambda key, ended: None, 1).stop(("job", 0, 1), 100.0)
    assert signals == [9]


def test_a_spawner_that_nobody_listens_to_is_ended(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was left at each attempt."""
    made: list[object] = []

    class Spawner:
        def __init__(self, *_: object) -> None:
            made.append(self)

        def kill(self) -> None:
            made.remove(self)

    monkeypatch.setattr(processes, "SpawnerProcess", Spawner)
    taken(0)
    with pytest.raises(OSError, match=NO_THREAD):
        Processes(lambda key, ended: None, 1)._need_spawner()
    assert made == []

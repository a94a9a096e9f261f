"""A worker that hands in what stopped ranks have left, to a coordinator that a test plays."""

import fcntl
import json
import logging
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from elche.manifest import UNFINISHED
from elche.v1 import rank_pb2, rank_pb2_grpc
from elche_worker.agent import stopped_work as module
from elche_worker.agent.job_folders import JobFolders
from elche_worker.agent.stopped_work import LOCK, submit_stopped_work
from elche_worker.session.stopped import FOLDER, StoppedRank, claim, folder_of, stopped_ranks

Commands = list[rank_pb2.ConverseResponse]
ROUND, NAME = 7, "epoch-0001-step-00000010"
TRAINING = json.dumps({"version": ROUND})


class Coordinator(rank_pb2_grpc.RankServiceServicer):
    """Answers `Stopped` with commands, and remembers what it was told."""

    def __init__(self, commands: Commands, refusal: str) -> None:
        self.commands = commands
        self.refusal = refusal
        self.welcome = rank_pb2.Welcome(store="store")
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.port = 0

    def Converse(  # noqa: N802
        self, requests: Iterator[rank_pb2.ConverseRequest], context: grpc.ServicerContext
    ) -> Iterator[rank_pb2.ConverseResponse]:
        if self.refusal:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, self.refusal)
        yield rank_pb2.ConverseResponse(welcome=self.welcome)
        for request in requests:
            self.told.put(request.WhichOneof("message") or "")
            if request.HasField("stopped"):
                for number, command in enumerate(self.commands, 1):
                    command.seq = number
                    yield command
            yield rank_pb2.ConverseResponse(taken=rank_pb2.Taken(seq=request.seq))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def all_told(self) -> list[str]:
        """The kinds of all messages so far."""
        return [self.told.get() for _ in range(self.told.qsize())]


@contextmanager
def serving(commands: Commands, refusal: str = "") -> Iterator[Coordinator]:
    """A coordinator while the context is open."""
    server, coordinator = grpc.server(ThreadPoolExecutor(4)), Coordinator(commands, refusal)
    rank_pb2_grpc.add_RankServiceServicer_to_server(coordinator, server)
    coordinator.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield coordinator
    finally:
        server.stop(None).wait()


def order(name: str = NAME, round_id: int = ROUND) -> rank_pb2.ConverseResponse:
    """That the draft become a checkpoint."""
    checkpoint = rank_pb2.WriteCheckpoint(name=name, training=TRAINING)
    outcome = rank_pb2.RoundOutcome(round=round_id, version=ROUND, checkpoint=checkpoint)
    return rank_pb2.ConverseResponse(round_outcome=outcome)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of a job of which one rank has left a draft and its record."""
    job = tmp_path / "job"
    draft = job / "checkpoints" / ".stopped.abc"
    draft.mkdir(parents=True)
    (draft / UNFINISHED).write_text(json.dumps({"files": {}}))
    JobFolders(tmp_path).remember("job", job)
    StoppedRank(
        job_id="job",
        rank=0,
        incarnation=1,
        secret="secret",
        store="store",
        num_sent=0,
        num_heard=0,
        messages=[],
        round=ROUND,
        draft=str(draft),
    ).save(job)
    return job


Do = Callable[[Coordinator], str]


@pytest.fixture
def do(left: Path, caplog: pytest.LogCaptureFixture) -> Do:
    """Hands in; returns what was logged."""

    def run(coordinator: Coordinator) -> str:
        with caplog.at_level(logging.INFO):
            submit_stopped_work(coordinator.address, "", JobFolders(left.parent), threading.Event())
        return caplog.text

    return run


def test_a_draft_becomes_the_checkpoint_and_a_second_order_of_it_changes_nothing(left: Path, do: Do) -> None:
    """It said that it failed, since the draft was gone, and the checkpoint was not used."""
    with serving([order(), order()]) as coordinator:
        said = do(coordinator)
        assert f"goes on from {left}/checkpoints/{NAME}, which its stopped ranks left" in said
        assert coordinator.all_told() == ["stopped", "checkpoint_saved"]
    assert not (left / FOLDER).exists()


def test_why_a_draft_is_not_used_is_said_as_the_coordinator_says_it(
    left: Path, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = module._wait

    def wait_in_time(condition: Callable[[], bool], until_s: float, is_over: threading.Event) -> None:
        wait(condition, until_s, is_over)
        assert condition(), "it waits for an order that will not come"

    monkeypatch.setattr(module, "_wait", wait_in_time)
    shutdown = rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason="the job is cancelled"))
    with serving([shutdown]) as coordinator:
        assert "job=job the work that its stopped ranks left is not used: the job is cancelled\n" in do(coordinator)
    assert not any((left / "checkpoints").iterdir())


def test_of_a_job_that_has_ended_nobody_says_that_it_goes_on(left: Path, do: Do) -> None:
    with serving([], refusal="unknown rank: its job has ended") as coordinator:
        assert "job=job the work that its stopped ranks left is not used: unknown rank: its job has ended\n" in do(
            coordinator
        )
    assert not (left / FOLDER).exists()


def test_what_another_worker_hands_in_is_waited_for_and_not_handed_in_twice(
    left: Path, do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers with one work folder: who attended at once would say that the ranks, which still speak, are gone."""
    waited: list[bool] = []
    with serving([order()]) as coordinator, (folder_of(left, "job") / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def wait(condition: Callable[[], bool], until_s: float, is_over: threading.Event) -> None:
            waited.append(condition())

        monkeypatch.setattr(module, "_wait", wait)
        do(coordinator)
        assert waited == [True, True, False], "nothing of its own, and not the other's lock"
        assert coordinator.all_told() == []
    assert list(folder_of(left, "job").glob("*.json")), "its records are the other's"


def test_records_that_no_coordinator_takes_are_named(left: Path, do: Do, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.0)
    with serving([]) as coordinator:
        assert (
            f"stays in its folder: no coordinator has accepted it; remove {left}/stopped/job if none will accept it"
            in do(coordinator)
        )


def test_what_the_coordinator_has_heard_of_stays_if_the_worker_ends_before_its_order(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def is_done(job: module._Job) -> bool:
        if all(one.has_reported for one in job._ghosts):
            is_over.set()
        return False

    monkeypatch.setattr(module._Job, "is_done", property(is_done))
    with serving([]) as coordinator:
        submit_stopped_work(coordinator.address, "", JobFolders(left.parent), is_over)
        assert coordinator.all_told() == ["stopped"]
    assert list(folder_of(left, "job").glob("*.json")), "the next worker hands it in"


def test_a_round_that_is_given_up_is_given_up_by_ranks_that_have_stopped(left: Path, do: Do) -> None:
    abandon = rank_pb2.ConverseResponse(abandon=rank_pb2.Abandon(generation=3))
    with serving([abandon, order()]) as coordinator:
        do(coordinator)
        assert coordinator.all_told() == ["stopped", "abandoned", "checkpoint_saved"]


def test_a_checkpoint_is_written_beside_its_draft_whatever_name_is_ordered(left: Path, do: Do) -> None:
    with serving([order(f"../../{NAME}")]) as coordinator:
        assert f"goes on from {left}/checkpoints/{NAME}, which" in do(coordinator)


def test_a_draft_of_another_round_becomes_no_checkpoint(left: Path, do: Do) -> None:
    shutdown = rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason="it goes back"))
    with serving([order(round_id=ROUND + 1), shutdown]) as coordinator:
        assert "is not used: it goes back\n" in do(coordinator)
        assert coordinator.all_told() == ["stopped", "checkpoint_failed"]


def test_a_draft_that_cannot_be_read_is_told_to_the_coordinator(left: Path, do: Do) -> None:
    (left / "checkpoints" / ".stopped.abc" / UNFINISHED).write_text("{")
    shutdown = rank_pb2.ConverseResponse(shutdown=rank_pb2.Shutdown(reason="it goes back"))
    with serving([order(), shutdown]) as coordinator:
        assert "is not used: it goes back\n" in do(coordinator)
        assert coordinator.all_told() == ["stopped", "checkpoint_failed"]


def test_records_that_are_damaged_are_named_and_keep_no_worker_from_starting(left: Path, do: Do) -> None:
    (record,) = folder_of(left, "job").glob("*.json")
    record.write_text('{"job_id": "job"}')
    with serving([order()]) as coordinator:
        assert f"{left}: the work that stopped ranks left cannot be read: " in do(coordinator)
        assert coordinator.all_told() == []


def test_each_process_leaves_a_whole_record_that_nobody_else_may_read(left: Path) -> None:
    """It has the rank's secret."""
    (first,) = stopped_ranks(left, "job")
    again = replace(first, incarnation=2)
    again.save(left)
    with pytest.raises(TypeError):
        replace(first, incarnation=3, messages=[object()]).save(left)  # type: ignore[list-item]  # ends within it
    assert stopped_ranks(left, "job") == [first, again]
    assert not any(path.stat().st_mode & 0o077 for path in (left / FOLDER, *(left / FOLDER).rglob("*")))


def test_one_rank_of_a_folder_writes_the_result_of_a_round(tmp_path: Path) -> None:
    asked = [(1, 7), (1, 7), (1, 8), (2, 7), (2, 7)]
    assert [claim(tmp_path, "job", *one) for one in asked] == [True, False, True, True, False]


def left_by_another(left: Path) -> StoppedRank:
    """What the first rank of another job in this output folder has left, as an earlier version did."""
    (one,) = stopped_ranks(left, "job")
    other = replace(one, job_id="other", draft="")
    other.save(left)
    (record,) = folder_of(left, "other").glob("*.json")
    record.rename(left / FOLDER / record.name)
    folder_of(left, "other").rmdir()
    JobFolders(left.parent).remember("other", left)
    return other


def test_what_another_job_has_left_in_one_output_folder_stays(left: Path, do: Do) -> None:
    """The first job that was handed in removed the other's records, which had the same names."""
    other = left_by_another(left)
    assert claim(left, "job", 1, 7)
    assert claim(left, "other", 1, 7), "each job has its own result"
    shutil.rmtree(left.parent / "agents")
    JobFolders(left.parent).remember("job", left)
    with serving([order()]) as coordinator:
        assert "job=job goes on from" in do(coordinator)
    assert not folder_of(left, "job").exists()
    assert stopped_ranks(left, "other") == [other]


def test_two_jobs_of_one_output_folder_are_handed_in_at_once(left: Path, do: Do) -> None:
    """The second one waited for the lock that its own worker had for the first."""
    left_by_another(left)
    with serving([order()]) as coordinator:
        said = do(coordinator)
        assert sorted(coordinator.all_told()) == ["checkpoint_failed", "checkpoint_saved", "stopped", "stopped"]
    assert "job=job goes on from" in said
    assert "job=other" in said
    assert not (left / FOLDER).exists()


def test_a_coordinator_that_does_not_answer_is_named(left: Path, caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()
    with serving([]) as coordinator:
        pass  # nobody listens there any more
    waiting = threading.Thread(
        target=submit_stopped_work, args=(coordinator.address, "", JobFolders(left.parent), is_over)
    )
    waiting.start()
    try:
        while f"coordinator={coordinator.address} does not answer yet (" not in caplog.text:
            waiting.join(0.01)
            assert waiting.is_alive()
    finally:
        is_over.set()
        waiting.join()

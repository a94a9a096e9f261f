"""Hands in the work of ranks that stopped while no coordinator answered (protocol P19.7).

The agent continues each such rank's conversation in its name. It first sends the messages that the rank could not send,
so that the rounds which the ranks made alone commit; then it reports that the rank has stopped. Only the coordinator
has the training's books: it answers with an order to write a checkpoint, which has them, and the draft that one rank
has left becomes that checkpoint.

The agent attends only after that. Attending reports that the ranks' former agent is gone, and the ranks with it:
without the checkpoint the job would go back to an older one.
"""

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc

from elche.channel import HEALTH, NOBODY, open_channel
from elche.manifest import finish
from elche.status import explained
from elche.tls import BadCertificate
from elche.v1 import rank_pb2
from elche_worker.agent.job_folders import JobFolders
from elche_worker.session.outbound import LOG_EVERY_S, MAX_RETRY_S
from elche_worker.session.session import LOST, Session
from elche_worker.session.stopped import StoppedRank, folder_of, stopped_ranks

log = logging.getLogger(__name__)

LIMIT_S = 15.0
"""Seconds for which the coordinator may take to accept the work: ranks of other hosts may have to come back first."""
ANSWER_S = 5.0
"""Seconds for an answer to the question whether a coordinator is there."""
LOCK = ".lock"
"""File in a job's folder of records. The worker that hands them in holds its lock; several may have one work folder."""


def submit_stopped_work(coordinator: str, tls: str, folders: JobFolders, is_over: threading.Event) -> None:
    """Waits for the coordinator, hands in the records that stopped ranks have left in these folders, and removes the
    records. Returns at once if there are none, and when `is_over` is set.
    """
    found = {job: folder for job in folders.newest() if (folder := folders.find(job)) is not None}
    left = {job: folder for job, folder in found.items() if _left_by(job, folder)}
    if not left:
        return
    for job_id, folder in left.items():
        log.info("job=%s hands in the work that stopped ranks left in %s, once the coordinator answers", job_id, folder)
    try:
        with open_channel(coordinator, tls) as channel:
            if _answers(channel, coordinator, is_over):
                _submit_now(channel, left, is_over)
    except BadCertificate:
        return  # the agent reports the bad certificate when it attends


def _submit_now(channel: grpc.Channel, left: dict[str, Path], is_over: threading.Event) -> None:
    """Hands in the records of these folders, and waits for other workers that hand in those of the same folders."""
    until_s, others = time.monotonic() + LIMIT_S, []
    with ExitStack() as locks:
        jobs = []
        for job_id, folder in left.items():
            if not locks.enter_context(_locked(folder_of(folder, job_id))):
                others.append(folder_of(folder, job_id))
            elif ranks := _left_by(job_id, folder):  # another worker may have handed them in by now
                jobs.append(_Job(job_id, folder, [_Ghost(channel, rank) for rank in ranks]))
        _wait(lambda: all(one.has_sent_all for one in jobs), until_s, is_over)
        for one in jobs:
            one.report_stopped()
        _wait(lambda: all(one.is_done for one in jobs), until_s, is_over)
        for one in jobs:
            one.close(is_over=is_over.is_set())
    _wait(lambda: all(map(_is_free, others)), until_s, is_over)


@contextmanager
def _locked(records: Path) -> Iterator[bool]:
    """Context with the lock of a job's records: True unless another worker has it, or where there are no locks."""
    file, is_mine = None, True
    try:
        file = os.open(records / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_mine = not isinstance(error, BlockingIOError)
    try:
        yield is_mine
    finally:
        if file is not None:
            os.close(file)


def _is_free(records: Path) -> bool:
    if not (records / LOCK).exists():  # they have been handed in
        return True
    with _locked(records) as is_mine:
        return is_mine


def _left_by(job_id: str, folder: Path) -> list[StoppedRank]:
    try:
        return stopped_ranks(folder, job_id)
    except (OSError, ValueError) as error:
        log.warning("%s: the work that stopped ranks left cannot be read: %s", folder, error)
        return []


def _answers(channel: grpc.Channel, coordinator: str, is_over: threading.Event) -> bool:
    """Waits until a coordinator answers, even with an error; returns False when `is_over` is set first."""
    logged_s = -LOG_EVERY_S
    ask = channel.unary_unary(HEALTH, request_serializer=bytes, response_deserializer=bytes)
    while not is_over.is_set():
        try:
            ask(b"", timeout=ANSWER_S)
            return True
        except grpc.RpcError as error:
            if error.code() not in NOBODY:
                return True
            if time.monotonic() - logged_s >= LOG_EVERY_S:
                logged_s = time.monotonic()
                reason = explained(error.details() or error.code().name)
                log.warning("coordinator=%s does not answer yet (%s); trying again", coordinator, reason)
        is_over.wait(MAX_RETRY_S)
    return False


def _wait(condition: Callable[[], bool], until_s: float, is_over: threading.Event) -> None:
    while not condition() and time.monotonic() < until_s and not is_over.wait(0.02):
        pass


class _Ghost:
    """Speaks in the name of a rank that has stopped."""

    def __init__(self, channel: grpc.Channel, left: StoppedRank) -> None:
        self.left = left
        self.lost = ""
        """The reason for which the coordinator accepts no message of this rank; empty while it does."""
        self.path = ""
        """The checkpoint that the draft has become; empty: none."""
        self.released = ""
        """Reason with which the coordinator has told the rank to leave; empty before."""
        self._has_reported = False
        """True once `Stopped` was sent."""
        self.session = Session(
            channel, left.secret, on_command=self._take, on_lost=self._lose, store=left.store, pending=left.pending
        )

    @property
    def has_sent_all(self) -> bool:
        """True once all messages so far are durable at the coordinator, or it accepts none of them."""
        return bool(self.lost) or (self.session.is_connected and self.session.has_sent_all)

    @property
    def has_reported(self) -> bool:
        """True once the coordinator knows that the rank has stopped."""
        return self._has_reported and self.has_sent_all

    def report_stopped(self) -> None:
        """Sends `Stopped`."""
        if not self.lost:
            self.session.send(rank_pb2.ConverseRequest(stopped=rank_pb2.Stopped(round=self.left.round)))
            self._has_reported = True

    def _lose(self, reason: str) -> None:
        self.lost = reason.removeprefix(LOST)

    def _take(self, command: rank_pb2.ConverseResponse) -> None:
        """Carries out a command as the rank would: a shutdown, an abandoned generation, or a checkpoint."""
        if command.HasField("shutdown"):
            self.released = command.shutdown.reason or "the job is over"
        elif command.HasField("abandon"):
            # Other ranks wait until all members have answered.
            abandoned = rank_pb2.Abandoned(generation=command.abandon.generation)
            self.session.send(rank_pb2.ConverseRequest(abandoned=abandoned))
        # Once: when the order comes again, the draft has become the checkpoint, and none is left to finish.
        elif not self.path and command.HasField("round_outcome") and command.round_outcome.HasField("checkpoint"):
            answer = self._write(command.round_outcome)
            self.session.send(answer)
            self.path = answer.checkpoint_saved.path

    def _write(self, outcome: rank_pb2.RoundOutcome) -> rank_pb2.ConverseRequest:
        """Turns the draft into the checkpoint that is ordered, if it has that round's result; returns the answer."""
        began_s, draft = time.perf_counter(), Path(self.left.draft)
        try:
            if not self.left.draft or outcome.round != self.left.round:
                raise OSError("the rank was stopped before it was written")
            # The last part of its name alone: an order must not write outside of the job's folder.
            path = draft.with_name(Path(outcome.checkpoint.name).name)
            size_bytes = finish(draft, path, json.loads(outcome.checkpoint.training))
        except (OSError, ValueError, RecursionError) as error:
            failed = rank_pb2.CheckpointFailed(version=outcome.version, reason=str(error))
            return rank_pb2.ConverseRequest(checkpoint_failed=failed)
        saved = rank_pb2.CheckpointSaved(
            version=outcome.version, path=str(path), size_bytes=size_bytes, duration_s=time.perf_counter() - began_s
        )
        return rank_pb2.ConverseRequest(checkpoint_saved=saved)


class _Job:
    """The stopped ranks of one job."""

    def __init__(self, job_id: str, folder: Path, ghosts: list[_Ghost]) -> None:
        self._id = job_id
        self._folder = folder
        self._ghosts = ghosts

    @property
    def has_sent_all(self) -> bool:
        """True once all messages of the ranks so far are durable at the coordinator."""
        return all(one.has_sent_all for one in self._ghosts)

    @property
    def is_done(self) -> bool:
        """True once the draft is a checkpoint, or no order for one can come any more, and the coordinator knows of all
        ranks that they have stopped.
        """
        awaits_order = any(one.left.draft and not (one.lost or one.released) for one in self._ghosts)
        is_written = any(one.path for one in self._ghosts)
        return (is_written or not awaits_order) and all(one.lost or one.has_reported for one in self._ghosts)

    def report_stopped(self) -> None:
        """Sends `Stopped` for each rank."""
        for one in self._ghosts:
            one.report_stopped()

    def close(self, *, is_over: bool) -> None:
        """Ends the conversations, logs the outcome, and removes the records and drafts. These stay for another attempt
        if no checkpoint was written and the coordinator has not heard all ranks, or the agent ends now (`is_over`).
        """
        path = next((one.path for one in self._ghosts if one.path), "")
        why = next((one.released or one.lost for one in self._ghosts if one.released or one.lost), "")
        is_reported = all(one.lost or one.has_reported for one in self._ghosts)
        for one in self._ghosts:
            one.session.close()
        if not path and (is_over or not is_reported):
            left = folder_of(self._folder, self._id)
            what_to_do = (
                f"remove {left} if none will accept it: until then each start of a worker here waits {LIMIT_S:.0f} s"
            )
            log.warning(
                "job=%s the work that its stopped ranks left stays in its folder: no coordinator has accepted it; %s",
                self._id,
                what_to_do,
            )
            return
        for one in self._ghosts:
            if one.left.draft:
                shutil.rmtree(one.left.draft, ignore_errors=True)
        shutil.rmtree(folder_of(self._folder, self._id), ignore_errors=True)
        with suppress(OSError):  # another job's are in it
            folder_of(self._folder, self._id).parent.rmdir()
        if path:
            log.info("job=%s goes on from %s, which its stopped ranks left", self._id, path)
            return
        why = why or "the coordinator has something newer, or ranks of other hosts did not come back in time"
        log.warning("job=%s the work that its stopped ranks left is not used: %s", self._id, why)

"""Hands in what ranks have left that stopped while no coordinator answered (protocol P19.7).

In the name of each such rank the conversation goes on: what it had to say is said, so that the rounds which the ranks
made alone commit, then that it has stopped. The coordinator, which alone has the training's books, answers with them,
and so the draft that one rank has left becomes a checkpoint. Only then does the agent attend, and tell that the ranks'
own agent, and so the ranks, are gone: the job would go back to an older checkpoint.
"""

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from elche.channel import HEALTH, NOBODY, open_channel
from elche.manifest import finish
from elche.tls import BadCertificate
from elche.v1 import rank_pb2
from elche_worker.agent.job_folders import JobFolders
from elche_worker.session.outbound import MAX_RETRY_S
from elche_worker.session.session import Session
from elche_worker.session.stopped import FOLDER, StoppedRank, stopped_ranks

log = logging.getLogger(__name__)

LIMIT_S = 15.0
"""Seconds for the coordinator to take what was left: other hosts' ranks may have to come back first."""
ANSWER_S = 5.0


def hand_in(coordinator: str, tls: str, folders: JobFolders, is_over: threading.Event) -> None:
    """Waits for the coordinator, hands in what ranks have left in these folders, and removes it. Returns at once if
    there is nothing, and when `is_over` is set.
    """
    left = {job: ranks for job in folders.newest() if (ranks := _left_in(folders.find(job)))}
    if not left:
        return
    for job_id, ranks in left.items():
        log.info("job=%s hands in what %d stopped ranks have left, once the coordinator answers", job_id, len(ranks))
    try:
        with open_channel(coordinator, tls) as channel:
            if not _answers(channel, is_over):
                return
            jobs = [
                _Job(job_id, folders.find(job_id), [_Ghost(channel, rank) for rank in ranks])
                for job_id, ranks in left.items()
            ]
            until_s = time.monotonic() + LIMIT_S
            _wait(lambda: all(one.has_said_all for one in jobs), until_s, is_over)
            for one in jobs:
                one.tell_stopped()
            _wait(lambda: all(one.is_done for one in jobs), until_s, is_over)
            for one in jobs:
                one.close(is_over=is_over.is_set())
    except BadCertificate:
        return  # the agent says so when it attends


def _left_in(folder: Path | None) -> list[StoppedRank]:
    try:
        return stopped_ranks(folder) if folder is not None else []
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s: what stopped ranks have left cannot be read: %s", folder, error)
        return []


def _answers(channel: grpc.Channel, is_over: threading.Event) -> bool:
    """Waits until a coordinator answers, whatever it says; False when `is_over` is set first."""
    ask = channel.unary_unary(HEALTH, request_serializer=bytes, response_deserializer=bytes)
    while not is_over.is_set():
        try:
            ask(b"", timeout=ANSWER_S)
            return True
        except grpc.RpcError as error:
            if error.code() not in NOBODY:
                return True
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
        """Why the coordinator does not listen; empty: it does."""
        self.path = ""
        """The checkpoint that the draft has become; empty: none."""
        self.is_released = False
        """True once the coordinator wants nothing more of it: another rank's draft is used."""
        self._has_told = False
        self.session = Session(
            channel, left.secret, on_command=self._take, on_lost=self._lose, store=left.store, unsaid=left.unsaid
        )

    @property
    def has_said_all(self) -> bool:
        """True once the coordinator has all that it was told so far."""
        return bool(self.lost) or (self.session.is_connected and self.session.has_said_all)

    @property
    def has_told(self) -> bool:
        """True once the coordinator knows that the rank has stopped."""
        return self._has_told and self.has_said_all

    def tell_stopped(self) -> None:
        """Tells that the rank has stopped, unless the coordinator is of a release that does not know that."""
        if self.session.is_connected and not self.session.takes_stopped:
            self.lost = "the coordinator is of an earlier release"
        elif not self.lost:
            self.session.send(rank_pb2.ConverseRequest(stopped=rank_pb2.Stopped(round=self.left.round)))
            self._has_told = True

    def _lose(self, reason: str) -> None:
        self.lost = reason

    def _take(self, command: rank_pb2.ConverseResponse) -> None:
        if command.HasField("shutdown"):
            self.is_released = True
        elif command.HasField("abandon"):
            abandoned = rank_pb2.Abandoned(generation=command.abandon.generation)
            self.session.send(rank_pb2.ConverseRequest(abandoned=abandoned))
        elif command.HasField("round_outcome") and command.round_outcome.HasField("checkpoint"):
            answer = self._write(command.round_outcome)
            self.session.send(answer)
            self.path = answer.checkpoint_saved.path

    def _write(self, outcome: rank_pb2.RoundOutcome) -> rank_pb2.ConverseRequest:
        """Makes the draft the checkpoint that is ordered, if it is of that round; returns the answer."""
        began_s, draft = time.perf_counter(), Path(self.left.draft)
        try:
            if not self.left.draft or outcome.round != self.left.round:
                raise OSError("the rank was stopped before it was written")
            path = draft.with_name(Path(outcome.checkpoint.name).name)
            size_bytes = finish(draft, path, json.loads(outcome.checkpoint.training))
        except (OSError, ValueError) as error:
            failed = rank_pb2.CheckpointFailed(version=outcome.version, reason=str(error))
            return rank_pb2.ConverseRequest(checkpoint_failed=failed)
        saved = rank_pb2.CheckpointSaved(
            version=outcome.version, path=str(path), size_bytes=size_bytes, duration_s=time.perf_counter() - began_s
        )
        return rank_pb2.ConverseRequest(checkpoint_saved=saved)


class _Job:
    """The stopped ranks of one job."""

    def __init__(self, job_id: str, folder: Path | None, ghosts: list[_Ghost]) -> None:
        self._id = job_id
        self._folder = folder
        self._ghosts = ghosts

    @property
    def has_said_all(self) -> bool:
        """True once the coordinator has all that the ranks had to say."""
        return all(one.has_said_all for one in self._ghosts)

    @property
    def is_done(self) -> bool:
        """True once nothing more is to be expected."""
        awaits_order = any(one.left.draft and not (one.lost or one.is_released) for one in self._ghosts)
        is_written = any(one.path for one in self._ghosts)
        return (is_written or not awaits_order) and all(one.lost or one.has_told for one in self._ghosts)

    def tell_stopped(self) -> None:
        """Tells that the ranks have stopped."""
        for one in self._ghosts:
            one.tell_stopped()

    def close(self, *, is_over: bool) -> None:
        """Ends the conversations, says what came of them, and removes what was left. It stays for another time if the
        coordinator has not heard of these ranks, or if the agent ends now.
        """
        path = next((one.path for one in self._ghosts if one.path), "")
        lost = next((one.lost for one in self._ghosts if one.lost), "")
        is_heard = all(one.lost or one.has_told for one in self._ghosts)
        for one in self._ghosts:
            one.session.close()
        if not path and (is_over or not is_heard):
            log.warning("job=%s what its ranks had left stays in its folder: no coordinator takes it", self._id)
            return
        for one in self._ghosts:
            if one.left.draft:
                shutil.rmtree(one.left.draft, ignore_errors=True)
        if self._folder is not None:
            shutil.rmtree(self._folder / FOLDER, ignore_errors=True)
        if path:
            log.info("job=%s goes on from %s, which its ranks had left", self._id, path)
            return
        if any(one.is_released for one in self._ghosts):
            log.info("job=%s goes on from what its ranks on another host had left", self._id)
            return
        why = lost or "the coordinator has something newer, or ranks of other hosts did not come back in time"
        log.warning("job=%s what its ranks had left is not used (%s): it goes on from elsewhere", self._id, why)

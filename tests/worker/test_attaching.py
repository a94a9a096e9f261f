"""A loop that becomes a job of a coordinator which is slow to take connections, or is not there."""

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from elche.channel import open_channel
from elche.errors import PeerLost, Unreachable
from elche.v1 import rank_pb2, rank_pb2_grpc
from elche_worker.collectives.world import World
from elche_worker.trainer.attached import CoordinatorAttachment, _ask, attach
from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.together import Together
from support.cutter import Cutter


class Coordinator(rank_pb2_grpc.RankServiceServicer):
    def Attach(self, request: rank_pb2.AttachRequest, context: Any) -> rank_pb2.AttachResponse:  # noqa: N802
        return rank_pb2.AttachResponse(job_id=request.name, secrets=["secret"])

    def Converse(self, requests: Any, context: Any) -> Iterator[rank_pb2.ConverseResponse]:  # noqa: N802
        time.sleep(0.1)
        yield rank_pb2.ConverseResponse(welcome=rank_pb2.Welcome(store="one"))
        for request in requests:
            yield rank_pb2.ConverseResponse(taken=rank_pb2.Taken(seq=request.seq))


class Busy(Cutter):
    """Takes the first connection, says nothing until its peer has given up, and forwards all others."""

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
        super()._accept()


@contextmanager
def busy() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    rank_pb2_grpc.add_RankServiceServicer_to_server(Coordinator(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    way = Busy(f"127.0.0.1:{port}", [])
    try:
        yield way.address
    finally:
        way.close()
        server.stop(0)


def test_a_coordinator_that_is_slow_to_take_a_connection_is_asked_again() -> None:
    """A rank ended its script, since the first try to connect had a tenth of a second on a busy machine."""
    with busy() as address, open_channel(address, "") as channel:
        assert json.loads(_ask(address, channel, rank_pb2.AttachRequest(name="loop"))) == ["loop", ["secret"]]


def test_a_loop_that_ends_before_it_has_a_stream_does_not_say_that_nobody_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World(None, torch.device("cpu"))
    with busy() as address, open_channel(address, "") as channel:
        assert _ask(address, channel, rank_pb2.AttachRequest(name="loop"))
        CoordinatorAttachment("loop", channel, "secret", world, timeline=False, goes_on=False).leave(None)
    assert not capsys.readouterr().err


def test_a_loop_begins_once_the_coordinator_sees_the_end_of_its_ranks() -> None:
    """A rank that called os._exit(0) after `Trainer.setup` had no stream yet: the others waited for it for 99 s."""
    world = World(None, torch.device("cpu"))
    with busy() as address:
        attachment = attach(address, TrainerConfig(), world, policy="", checkpoint_dir="", resumed="")
        is_seen = attachment._session.is_connected
        attachment.leave(None)
    assert is_seen


@pytest.mark.parametrize("is_submitted", [False, True])
def test_a_script_that_has_closed_its_connections_is_told_so(
    is_submitted: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As os.closerange does. It heard that the coordinator is away, again and again, and failed without a reason."""
    world = World(None, torch.device("cpu"))
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with busy() as address, open_channel(address, "") as channel:
        one = CoordinatorAttachment(
            "loop", channel, "secret", world, timeline=False, goes_on=False, is_submitted=is_submitted
        )
        one._note_away()
        assert not one.lost
        os.close(one._open._number)
        one._note_away()
        assert bool(codes) == is_submitted
        assert bool(one.lost) != is_submitted
        one.leave(None)
    assert "closed file descriptors that others have opened" in capsys.readouterr().err


def test_nobody_waits_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    request = rank_pb2.AttachRequest(name="loop")
    with open_channel(address, "") as channel, pytest.raises(Unreachable, match="nothing listens there"):
        _ask(address, channel, request)


def test_a_rank_that_was_stopped_and_given_up_says_that_the_others_train_on_without_it() -> None:
    """It said that another rank has ended, whose own error says why."""

    def average() -> None:
        raise PeerLost("another rank of this loop has ended, or cannot be reached; its own error says why")

    calls = SimpleNamespace(begin=str, end=bool)
    world: Any = SimpleNamespace(
        calls=calls, check_calls=bool, is_given_up=False, can_regroup=True, generation=0, size=1
    )
    together = Together(world)
    together.attachment.lost = "unknown rank: others train on without it"
    with pytest.raises(PeerLost, match="this rank is alone: unknown rank: others train on without it"):
        together.run(average, "calls step()")

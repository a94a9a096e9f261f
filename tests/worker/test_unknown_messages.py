"""A message of a kind that a program does not know is an error, which says so, and never nothing."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

from elche.errors import UnknownMessage
from elche.v1 import agent_pb2, job_pb2, rank_pb2
from elche_client.transport.codec import decode_event
from elche_coordinator.codec import RANK_EVENTS, rank_event
from elche_coordinator.core.messages.ids import Incarnation, JobId, Rank
from elche_worker.agent.agent import Agent
from elche_worker.session.outbound import Outbound
from elche_worker.session.session import Session
from elche_worker.trainer.attached import CoordinatorAttachment
from elche_worker.trainer.attachment import OperatorRequests

ADDRESS: Any = {"job_id": JobId("job"), "rank": Rank(0), "incarnation": Incarnation(1)}
NEWER = b"\xaa\x3e\x00"
"""A field of number 997: what a newer version may send."""
OF_LOOPS = {"abandon", "form_group", "shutdown", "save_checkpoint", "pause_loop", "clock"}
"""What the coordinator says to a loop of the user's own."""


def newer(kind: type[Message]) -> Any:
    """A message of a newer version."""
    return kind.FromString(NEWER)


@pytest.mark.parametrize(
    "request_", [newer(rank_pb2.ConverseRequest), rank_pb2.ConverseRequest()], ids=["new", "empty"]
)
def test_the_coordinator_refuses_what_it_does_not_know_of_a_rank(request_: Any) -> None:
    with pytest.raises(UnknownMessage, match="a ConverseRequest came, and this program knows no such message"):
        rank_event(ADDRESS, request_)


def test_a_message_that_the_core_has_no_event_for_is_named() -> None:
    assert "spans" not in RANK_EVENTS
    with pytest.raises(UnknownMessage, match="no place for 'spans'"):
        rank_event(ADDRESS, rank_pb2.ConverseRequest(spans=rank_pb2.Spans()))


def test_an_agent_ends_with_words_for_what_it_does_not_know() -> None:
    order = newer(agent_pb2.AttendResponse)
    order.seq = 7
    with pytest.raises(UnknownMessage, match="AttendResponse"):
        object.__new__(Agent)._do(order)


def test_an_agent_passes_over_what_the_coordinator_will_not_send_again(caplog: pytest.LogCaptureFixture) -> None:
    object.__new__(Agent)._do(newer(agent_pb2.AttendResponse))
    assert "that only newer versions of elche know" in caplog.text


class Call:
    """A stream that says two things; whoever has heard enough cancels it."""

    def __init__(self) -> None:
        self.was_cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return iter([newer(rank_pb2.ConverseResponse), rank_pb2.ConverseResponse(clock=rank_pb2.Clock())])

    def cancel(self) -> None:
        self.was_cancelled = True


def attachment() -> Any:
    """One rank of a loop, without its session."""
    one: Any = object.__new__(CoordinatorAttachment)
    one.operator, one._clock, one._timeline = OperatorRequests(), None, None
    one.lost, one._is_leaving = "", False
    one._world = SimpleNamespace(rank=3, give_up=lambda generation: None)
    return one


def test_a_loop_loses_the_coordinator_that_it_does_not_understand(capsys: pytest.CaptureFixture[str]) -> None:
    session: Any = object.__new__(Session)
    loop, call = attachment(), Call()
    session._on_command, session._on_lost = loop._receive, loop._lose
    session._secret, session.store, session._outbound, session._closing = "", "", Outbound(), threading.Event()
    session._is_leaving = False
    session._stub = SimpleNamespace(Converse=lambda requests, metadata: call)
    session._run()
    assert (call.was_cancelled, bool(loop.lost), loop._clock) == (True, True, None)
    assert "rank 3: a ConverseResponse came, and this program knows no such message" in capsys.readouterr().err


@pytest.mark.parametrize(
    "field", rank_pb2.ConverseResponse.DESCRIPTOR.oneofs_by_name["message"].fields, ids=lambda one: one.name
)
def test_a_loop_hears_what_is_for_loops_and_refuses_the_rest(field: Any) -> None:
    command = rank_pb2.ConverseResponse(**{field.name: {}})
    if field.name in OF_LOOPS:
        attachment()._receive(command)
    else:
        with pytest.raises(UnknownMessage, match=f"no place for '{field.name}'"):
            attachment()._receive(command)


def test_a_client_passes_over_an_event_of_a_newer_coordinator() -> None:
    assert decode_event(newer(job_pb2.WatchJobResponse)) is None

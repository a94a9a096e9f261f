"""Which ranks can be reached from a process."""

import socket
import struct
import time
from collections.abc import Iterator
from functools import partial

import pytest

from elche.v1 import rank_pb2
from elche_worker.session import links
from elche_worker.session.links import Links, reachable
from support.real_processes import eventually


@pytest.fixture
def closed() -> Iterator[socket.socket]:
    """A port on loopback at which nobody listens yet."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one


def address_of(one: socket.socket) -> str:
    return f"127.0.0.1:{one.getsockname()[1]}"


def test_those_that_listen_are_reached_at_once() -> None:
    there = [Links("127.0.0.1:1") for _ in range(3)]
    began_s = time.monotonic()
    assert reachable({rank: one.address for rank, one in enumerate(there)}, limit_s=100.0) == [0, 1, 2]
    assert time.monotonic() - began_s < 100.0


def test_who_does_not_listen_is_not_reached_and_is_tried_to_the_end(closed: socket.socket) -> None:
    began_s = time.monotonic()
    assert reachable({0: Links("127.0.0.1:1").address, 1: address_of(closed)}, limit_s=0.6) == [0]
    assert time.monotonic() - began_s >= 0.6


def test_who_begins_to_listen_meanwhile_is_reached(closed: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was lost is begun anew."""
    tried: list[str] = []
    monkeypatch.setattr(links, "_begin", lambda address, begin=links._begin: (begin(address), tried.append(address))[0])
    told: list[rank_pb2.ConverseRequest] = []
    peers = [rank_pb2.Peer(rank=7, address=address_of(closed))]
    Links("127.0.0.1:1").answer(rank_pb2.Probe(peers=peers), told.append)
    eventually(lambda: tried, "it has been tried, and was refused")
    closed.listen()
    eventually(lambda: told, "it is told")
    assert list(told[0].probed.ranks) == [7]


def test_a_rank_whose_large_packets_are_lost_is_not_reached(
    closed: socket.socket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel accepts the connection, and acknowledges nothing more."""
    closed.listen()
    port = closed.getsockname()[1]
    monkeypatch.setattr(links.fcntl, "ioctl", lambda one, *_: struct.pack("i", int(one.getpeername()[1] == port)))
    there = {0: Links("127.0.0.1:1").address, 1: address_of(closed)}
    monkeypatch.setattr(links, "reachable", partial(reachable, limit_s=0.6, packet_limit_s=0.7))
    told: list[rank_pb2.ConverseRequest] = []
    peers = [rank_pb2.Peer(rank=rank, address=address) for rank, address in there.items()]
    Links("127.0.0.1:1").answer(rank_pb2.Probe(peers=peers), told.append)
    eventually(lambda: told, "it is told")
    assert list(told[0].probed.ranks) == [0]
    assert f"rank 1 accepts connections at {there[1]}, but large packets to it are lost" in capsys.readouterr().err


def test_a_rank_that_is_stopped_is_reached(closed: socket.socket) -> None:
    """Its kernel answers."""
    closed.listen()
    assert reachable({0: address_of(closed)}, 100.0, 100.0) == [0]


def test_a_full_packet_is_sent(closed: socket.socket) -> None:
    closed.listen()
    assert reachable({0: address_of(closed)}, 100.0, 100.0) == [0]
    with closed.accept()[0] as one:
        came = b"".join(iter(lambda: one.recv(1 << 16), b""))
        most = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    assert len(came) == min(most, links.MAX_PACKET_BYTES) > 1400


def test_more_probes_than_a_listener_holds_back() -> None:
    one = Links("127.0.0.1:1")
    for _ in range(300):
        assert reachable({0: one.address}) == [0]

"""Operations that wait for a rank which does not come can be ended, and nothing else is touched."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist

from elche.v1 import averaging_pb2, averaging_pb2_grpc
from elche_worker.collectives import sockets
from elche_worker.collectives.operations import CollectiveFailed, RoundAborted
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.collectives.relay import Relay
from elche_worker.collectives.sockets import ShutConnections, listening

CPU = torch.device("cpu")
LARGE = 1 << 20
"""Values of a tensor that does not fit into the sockets' buffers."""
ESTABLISHED = 1
"""State of a TCP connection, in Linux, of which neither side has ended what it sends."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


# gloo


class Pairs:
    """Groups whose members are all in this process."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __call__(self, generation: int, size: int = 2) -> list[ProcessGroupCollectives]:
        def one(position: int) -> ProcessGroupCollectives:
            store = dist.TCPStore("127.0.0.1", self.store.port)
            where: Any = {"attempt": 1, "generation": generation, "position": position, "size": size}
            return ProcessGroupCollectives(store, backend="gloo", peer="127.0.0.1:1", device=CPU, **where)

        return list(self._threads.map(one, range(size)))


@pytest.fixture
def pairs(threads: ThreadPoolExecutor) -> Pairs:
    return Pairs(threads)


def sums(threads: ThreadPoolExecutor, groups: list[ProcessGroupCollectives]) -> list[float]:
    """What an all-reduce gives on each member."""

    def one(group: ProcessGroupCollectives) -> float:
        values = torch.ones(LARGE)
        group.all_reduce(values)
        return float(values[-1])

    return list(threads.map(one, groups))


def test_an_abort_over_gloo_ends_the_own_operation_and_no_other(threads: ThreadPoolExecutor, pairs: Pairs) -> None:
    """Gloo decides which of two members accepts and which connects: each of both aborts once."""
    for position in range(2):
        abort_one(threads, pairs, position)


def abort_one(threads: ThreadPoolExecutor, pairs: Pairs, position: int) -> None:
    older, aborted, newer = (pairs(3 * position + generation) for generation in (1, 2, 3))
    assert sums(threads, aborted) == [2.0, 2.0]
    waiting = threads.submit(aborted[position].all_reduce, torch.ones(LARGE))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            listened = listening()
            aborted[position].abort()
            with pytest.raises(CollectiveFailed, match="a collective failed"):
                waiting.result(timeout=100)
            near.sendall(b"still here")
            assert far.recv(20) == b"still here"
            assert listening() == listened
    assert sums(threads, older) == sums(threads, newer) == [2.0, 2.0]
    pairs.store.set("key", "value")
    assert pairs.store.get("key") == b"value"
    with pytest.raises(CollectiveFailed):
        aborted[position].all_reduce(torch.ones(LARGE))


def test_groups_that_are_built_at_once_know_their_sockets_apart(threads: ThreadPoolExecutor, pairs: Pairs) -> None:
    with ThreadPoolExecutor(4) as builders:
        groups = list(builders.map(pairs, range(1, 5)))
    for group in groups[:-1]:
        group[0].abort()
        group[1].abort()
        with pytest.raises(CollectiveFailed):
            sums(threads, group)
        assert sums(threads, groups[-1]) == [2.0, 2.0]


@pytest.mark.parametrize("is_own", [True, False], ids=["accepted", "made here"])
def test_a_connection_that_is_shut_fails_for_nobody_who_writes(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of gloo whose first write fails waits forever."""
    monkeypatch.setattr(sockets, "HELD_S", 400.0)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted, _ = server.accept()
        address = accepted.getsockname()
        for one in (accepted, made):
            one.settimeout(100)
        here, there = (accepted, made) if is_own else (made, accepted)
        inherited = stack.enter_context(here.dup())  # as by a worker of a DataLoader
        shut = ShutConnections()
        for _ in range(2):  # an abort is repeated
            shut.add({address} if is_own else set(), set() if is_own else {address})
        assert here.recv(1) == b""
        for one in (here, there, here, there):
            one.sendall(b"x")
        here.close()  # as gloo does, when it has read of the end
        for _ in range(3):
            there.sendall(b"x")
        assert there.recv(2) == b"xx"
        assert inherited.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        shut._end()
        assert inherited.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED
        assert there.recv(1) == b"", "the other end is told then, whoever has it open"
        accepted.close()


def test_a_rank_that_nobody_tells_to_abort_hears_of_it_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HELD_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as made:
        made.settimeout(100)
        accepted, address = server.accept()
        with accepted:
            ShutConnections().add(set(), {address})
            assert made.recv(1) == b""


@pytest.mark.long(reason="random, and what it found is shown by the test before")
def test_no_operation_is_left_behind_where_ranks_are_busy(threads: ThreadPoolExecutor, pairs: Pairs) -> None:
    """Of 150 aborts beside a third rank that had left, 12 left one behind."""

    def busy(group: ProcessGroupCollectives, num_sums: int = 1 << 30) -> None:
        with suppress(CollectiveFailed):
            for _ in range(num_sums):
                group.all_gather(torch.zeros(16))
                group.all_reduce(torch.zeros(1000))

    for generation in range(1, 101):
        groups = pairs(generation, size=3)
        running = [threads.submit(busy, group) for group in groups[:2]]
        busy(groups[2], generation % 30)
        for group in groups[:2]:
            threads.submit(group.abort)
        assert not wait_for(running, timeout=100).not_done
        groups[2].abort()


# Through the coordinator


class Silent(averaging_pb2_grpc.AveragingServiceServicer):
    """A coordinator that answers no operation, and has decided how rounds ended."""

    def __init__(self) -> None:
        self.heard = threading.Semaphore(0)
        self.is_complete = False

    def Average(self, request_iterator: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        with suppress(grpc.RpcError):
            for request in request_iterator:
                if request.HasField("part"):
                    self.heard.release()
        yield from ()

    def GetVerdict(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return averaging_pb2.GetVerdictResponse(is_complete=self.is_complete)


@pytest.fixture
def silent(threads: ThreadPoolExecutor) -> Iterator[tuple[Silent, Relay]]:
    server, servicer = grpc.server(threads), Silent()
    averaging_pb2_grpc.add_AveragingServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, Relay(channel, "secret", attempt=1, generation=1, position=0, size=2)
    server.stop(None)


def aborted(silent: Silent, relay: Relay, act: Callable[[], Any]) -> Future[Any]:
    """What an operation comes to that is aborted when the coordinator has heard of it."""
    with ThreadPoolExecutor(1) as own:
        running = own.submit(act)
        assert silent.heard.acquire(timeout=100)
        relay.abort()
        assert wait_for([running], timeout=100).done
    return running


def test_an_operation_through_the_coordinator_is_ended_and_no_other_follows(silent: tuple[Silent, Relay]) -> None:
    coordinator, relay = silent
    relay.begin(1)
    with pytest.raises(RoundAborted):
        aborted(coordinator, relay, lambda: relay.all_reduce(torch.ones(LARGE))).result()
    relay.begin(2)
    with pytest.raises(RoundAborted):
        relay.all_gather(torch.ones(3))


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_rank_that_has_said_that_it_has_everything_goes_by_the_verdict(
    silent: tuple[Silent, Relay], is_complete: bool
) -> None:
    coordinator, relay = silent
    coordinator.is_complete = is_complete
    relay.begin(1)
    ended = aborted(coordinator, relay, relay.finish)
    assert (ended.exception() is None) == is_complete
    if not is_complete:
        with pytest.raises(RoundAborted):
            ended.result()

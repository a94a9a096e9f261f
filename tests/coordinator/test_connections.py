"""Connections on which nobody calls do not stay: each takes a file of the coordinator."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elche.logs import is_of_interest
from elche.network import SERVER_CONNECTIONS
from elche_coordinator.daemon import server_options
from elche_coordinator.limits.budgets import MAX_HEADER_BYTES, MAX_STREAMS_OF_CONNECTION
from elche_coordinator.limits.open_files import OTHER_FILES, max_connections
from elche_coordinator.services.health_service import health_handler

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client begins, with settings that are empty."""


class Slow(health_pb2_grpc.HealthServicer):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: object) -> health_pb2.HealthCheckResponse:  # noqa: N802
        await self.may_answer.wait()
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def connected(port: int, said: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(said)
        one.settimeout(30)
        yield one


def await_end(one: socket.socket) -> None:
    """Reads until the other side has closed."""
    with suppress(ConnectionResetError):
        while one.recv(4096):
            pass


async def crowd() -> None:
    server = grpc.aio.server(options=server_options(6))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with ExitStack() as stack:
        crowd = [stack.enter_context(connected(port, PREFACE)) for _ in range(5)]
        reading = [asyncio.ensure_future(asyncio.to_thread(await_end, one)) for one in crowd]
        for ended in islice(asyncio.as_completed(reading), 2):
            await ended
        assert [one.done() for one in reading].count(False) == 3
        await server.stop(None)
        await asyncio.wait(reading)


def test_connections_leave_files_for_the_rest_of_the_coordinator() -> None:
    asyncio.run(crowd())
    assert [max_connections(num_files) for num_files in (128, 1200, 65_536)] == [64, 600, 65_536 - OTHER_FILES]


async def story() -> None:
    soon = dict(SERVER_CONNECTIONS)
    options = [(name, value // 100 if name in soon else value) for name, value in server_options(OTHER_FILES + 100)]
    server = grpc.aio.server(options=options)
    health, port = Slow(), server.add_insecure_port("127.0.0.1:0")
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calling = asyncio.ensure_future(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()))
        for said in (b"", PREFACE):
            with connected(port, said) as one:
                await asyncio.to_thread(await_end, one)
        health.may_answer.set()
        assert (await calling).status == health_pb2.HealthCheckResponse.SERVING, "who waits for an answer stays"
    await server.stop(None)


def test_who_says_nothing_and_who_makes_no_call_is_disconnected() -> None:
    asyncio.run(story())


async def check_without_a_message() -> None:
    server, is_answered = grpc.aio.server(options=server_options(OTHER_FILES + 100)), asyncio.Event()
    server.add_generic_rpc_handlers((health_handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def sent() -> AsyncIterator[bytes]:
        await is_answered.wait()
        for message in ():
            yield message

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.stream_unary("/grpc.health.v1.Health/Check", None, health_pb2.HealthCheckResponse.FromString)
        assert (await check(sent(), timeout=20)).status == health_pb2.HealthCheckResponse.SERVING
        is_answered.set()
    await server.stop(None)


def test_what_strangers_send_with_a_health_check_is_not_received() -> None:
    """Their messages, which nobody had asked for, took 228 MB."""
    asyncio.run(check_without_a_message())


def header(name: bytes, value: bytes) -> bytes:
    """A header in HPACK, of which neither part is in a table; both have at most 126 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


async def call_with_a_header_that_is_no_text() -> bytes:
    """The first bytes after the server's settings."""
    server = grpc.aio.server(options=server_options(OTHER_FILES + 100))
    server.add_generic_rpc_handlers((health_handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    path = b"/grpc.health.v1.Health/Check"
    given = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x", b"te": b"trailers"}
    given |= {b"content-type": b"application/grpc", b"authorization": b"Bearer secret\xff"}
    block = b"".join(header(*one) for one in given.items())
    begun = struct.pack(">I", len(block))[1:] + b"\1\5\0\0\0\1" + block
    with connected(port, PREFACE + b"\0\0\0\4\1\0\0\0\0" + begun) as one:
        said = b""
        while b"grpc-status" not in said:
            said += await asyncio.to_thread(one.recv, 4096)
    await server.stop(None)
    return said


def test_a_strangers_header_that_is_no_text_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """8 kB of it filled 57 kB of the log, with two tracebacks, and it may be a token."""
    asyncio.run(asyncio.wait_for(call_with_a_header_that_is_no_text(), 60))
    about = [one for one in caplog.records if "secret" in one.getMessage()]
    assert about
    assert not any(map(is_of_interest, about))


async def settings_of_a_server() -> bytes:
    """What a server says first on a new connection."""
    server = grpc.aio.server(options=server_options(OTHER_FILES + 100))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with connected(port, PREFACE) as one:
        said = await asyncio.to_thread(one.recv, 4096)
    await server.stop(None)
    return said


def test_who_opens_calls_and_resets_them_has_no_more_than_so_many_on_a_connection() -> None:
    """Calls that are reset at once are over for gRPC before the coordinator has looked at them: 100,000 of them waited
    for the event loop, and nobody else was answered. With this limit those that wait count, too.
    """
    most_streams = struct.pack(">HI", 3, MAX_STREAMS_OF_CONNECTION)
    assert most_streams in asyncio.run(settings_of_a_server())


def test_who_calls_is_told_how_many_bytes_of_headers_are_taken() -> None:
    """Otherwise 16 KiB of each call, before anybody knows whose it is: strangers' filled a gigabyte."""
    assert struct.pack(">HI", 6, MAX_HEADER_BYTES) in asyncio.run(settings_of_a_server())


async def send_to_who_stops_reading() -> int:
    """How many bytes are taken of a stream after its reader has stopped, a while after it began."""
    server, stopped, num_sent = grpc.aio.server(options=server_options(OTHER_FILES + 100)), asyncio.Event(), 0

    async def take(sent: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for message in sent:
            if (num_bytes := num_bytes + len(message)) > 64 << 20:
                stopped.set()
                await asyncio.Event().wait()
        yield b""

    async def send() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            yield bytes(64 << 10)
            num_sent += 64 << 10

    methods = {"Take": grpc.stream_stream_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("any", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/any/Take")(send())
        await stopped.wait()
        before = num_sent
        await asyncio.sleep(1.0)
        call.cancel()
    await server.stop(None)
    return num_sent - before


def test_little_is_received_of_a_stream_that_nobody_reads() -> None:
    """gRPC's windows grew to MBs each: logs of 90 readers who took nothing were 4.6 GB in the coordinator."""
    assert asyncio.run(asyncio.wait_for(send_to_who_stops_reading(), 60)) < 3 << 19

"""A channel with several addresses goes to the coordinator that serves."""

import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from elche.channel import open_channel
from elche.network import CHANNEL_OPTIONS, KEEPALIVE, SERVER_KEEPALIVE, BadAddress
from elche_client.transport.connection import OPTIONS
from support.cutter import cutting

NAME = "/test/Name"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextmanager
def serving(name: str, port: int) -> Iterator[None]:
    """A server that tells its name, and counts down in a stream."""

    def tell(_: bytes, __: grpc.ServicerContext) -> bytes:
        return name.encode()

    def count(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        while context.is_active():
            yield name.encode()

    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    handlers = {"Name": grpc.unary_unary_rpc_method_handler(tell), "Count": grpc.unary_stream_rpc_method_handler(count)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    assert server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


def addresses(ports: tuple[int, int]) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in ports)


def named(channel: grpc.Channel) -> str:
    return str(channel.unary_unary(NAME)(b"", timeout=400).decode())


def test_the_one_that_serves_is_found(ports: tuple[int, int]) -> None:
    with serving("b", ports[1]), open_channel(addresses(ports), "") as channel:
        assert named(channel) == "b"


def test_a_call_that_nobody_has_heard_goes_to_the_next(ports: tuple[int, int]) -> None:
    """Without an error for who calls; and back again."""
    with open_channel(addresses(ports), "") as channel:
        for name, port in (("a", ports[0]), ("b", ports[1]), ("a", ports[0])):
            with serving(name, port):
                assert named(channel) == name
                assert named(channel) == name


def test_a_stream_that_ends_makes_the_next_one_choose(ports: tuple[int, int]) -> None:
    with open_channel(addresses(ports), "") as channel:
        with ExitStack() as first:
            first.enter_context(serving("a", ports[0]))
            stream = channel.unary_stream("/test/Count")(b"")
            assert next(stream) == b"a"
            first.close()
            with pytest.raises(grpc.RpcError):
                list(stream)
        with serving("b", ports[1]):
            assert next(channel.unary_stream("/test/Count")(b"")) == b"b"


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, OPTIONS], ids=["of ranks", "of clients"])
def test_a_proxy_for_the_web_is_not_used(
    ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch, options: Sequence[tuple[str, Any]]
) -> None:
    """gRPC takes it for loopback, too."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{ports[1]}")
    with serving("one", ports[0]), open_channel(f"127.0.0.1:{ports[0]}", "", options) as channel:
        assert named(channel) == "one"


def test_nobody_is_there(ports: tuple[int, int]) -> None:
    with open_channel(addresses(ports), "") as channel, pytest.raises(grpc.RpcError) as raised:
        named(channel)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert f"127.0.0.1:{ports[0]}" in str(raised.value.details())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("host", "is_looked_up"), [("no-such-host.invalid", True), ("localhost", True), ("127.0.0.1", False)]
)
def test_a_name_is_looked_up_after_each_failed_call(
    host: str, is_looked_up: bool, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After half a minute without DNS a channel found the coordinator's new address 15 s late, and ranks were lost."""
    opened, open_one = [], grpc.insecure_channel

    def noted(*args: Any, **more: Any) -> grpc.Channel:
        opened.append(args)
        return open_one(*args, **more)

    monkeypatch.setattr(grpc, "insecure_channel", noted)
    with open_channel(f"{host}:{ports[0]}", "") as channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                named(channel)
    assert (len(opened) > 2) == is_looked_up


@pytest.mark.parametrize("text", ["", "gpu1", "gpu1:7717,", "gpu1:7717,gpu2", "gpu1:99999", "http://gpu1:7717"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadAddress, match="is not HOST:PORT"):
        open_channel(text, "folder")


@pytest.mark.parametrize(
    ("of_client", "of_server"), [(KEEPALIVE, ()), ((), SERVER_KEEPALIVE)], ids=["the client", "the coordinator"]
)
def test_a_peer_that_takes_all_and_answers_nothing_is_noticed(
    of_client: Sequence[tuple[str, int]], of_server: Sequence[tuple[str, int]]
) -> None:
    """A kernel answers for a stopped process, and a proxy for a host that is lost. All times are a tenth."""
    has_ended = threading.Event()

    def wait(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if of_server:
            context.add_callback(has_ended.set)
        yield b"welcome"
        has_ended.wait(400)

    server = grpc.server(ThreadPoolExecutor(1), options=sooner(of_server))
    handlers = {"Wait": grpc.unary_stream_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with cutting(f"127.0.0.1:{port}") as way, grpc.insecure_channel(way.address, sooner(of_client)) as channel:
        call = channel.unary_stream("/test/Wait")(b"")
        if of_client:
            call.add_done_callback(lambda _: has_ended.set())
        assert next(call) == b"welcome"
        way.swallows = True
        assert has_ended.wait(400), "nobody has noticed"
    server.stop(0)


def sooner(options: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, value // 10 if name.endswith("_ms") else value) for name, value in options]

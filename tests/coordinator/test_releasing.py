"""What a refused call has sent is released at once, and not when the collector looks."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from elche.errors import NotAllowed
from elche.status import answering
from elche_coordinator.limits.releasing import ReleasingInterceptor
from elche_coordinator.services.validation import ValidationInterceptor


class Sent:
    """A message that can be watched."""

    def __init__(self, data: bytes) -> None:
        self.data = data


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def refuse(request: Any, context: Any) -> Any:
    async with answering(context):
        raise NotAllowed("you may not")


async def refuse_in_a_stream(request: Any, context: Any) -> AsyncIterator[Any]:
    async with answering(context):
        raise NotAllowed("you may not")
    yield b""


@pytest.mark.parametrize("is_stream", [False, True])
def test_nothing_of_a_refused_call_stays(no_collector: None, is_stream: bool) -> None:
    """A stranger's 300 calls with messages of 4 MiB, one after the other: +701 MB."""
    seen: list[weakref.ref[Sent]] = []

    def parse(data: bytes) -> Sent:
        sent = Sent(data)
        seen.append(weakref.ref(sent))
        return sent

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            if is_stream:
                return grpc.unary_stream_rpc_method_handler(refuse_in_a_stream, parse)
            return grpc.unary_unary_rpc_method_handler(refuse, parse)

    async def story() -> None:
        server = grpc.aio.server(interceptors=[ReleasingInterceptor(), ValidationInterceptor()])
        server.add_generic_rpc_handlers([Handlers()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(3):
                call = channel.unary_stream("/a/B")(b"x") if is_stream else channel.unary_unary("/a/B")(b"x")
                with pytest.raises(grpc.aio.AioRpcError, match="you may not") as refused:
                    await (call.read() if is_stream else call)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await server.stop(None)

    asyncio.run(asyncio.wait_for(story(), 60))
    assert [one() for one in seen] == [None] * 3

"""Releases what a refused call has sent.

gRPC keeps the exception that ends a call in the call's own state: a cycle of references, with the frames of the
handlers in it, and so with their requests. The collector looks seldom (`collector`), and a request may have 4 MiB.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

Context = grpc.aio.ServicerContext[Any, Any]
"""What gRPC tells a handler of its call."""


def kind_of(handler: Any) -> str:
    """The attribute of a method's handler that has its function."""
    return next(name for name in KINDS if getattr(handler, name))


class ReleasingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """The outermost interceptor: drops a refused call's request, and the frames that refer to it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler, which keeps nothing of a call that it has ended with an error."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = kind_of(handler)
        behave = getattr(handler, kind)
        releasing = _releasing_stream if inspect.isasyncgenfunction(behave) else _releasing
        return handler._replace(**{kind: partial(releasing, behave)})


async def _releasing(behave: Callable[..., Any], sent: Any, context: Context) -> Any:
    try:
        return await behave(sent, context)
    except grpc.aio.AbortError as error:
        del sent
        raise _bare(error) from None


async def _releasing_stream(behave: Callable[..., Any], sent: Any, context: Context) -> AsyncIterator[Any]:
    try:
        async with aclosing(behave(sent, context)) as responses:
            async for response in responses:
                yield response
    except grpc.aio.AbortError as error:
        del sent
        raise _bare(error) from None


def _bare(error: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """The error without the frames through which it has come, and without the error before it."""
    error.__context__ = None
    return error.with_traceback(None)

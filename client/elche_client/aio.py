"""`AsyncClient`: `Client` for asyncio."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from elche.errors import Unreachable
from elche_client.client import CLOSED, Client, JobHandle
from elche_client.events import JobResult

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate["AsyncClient", P], Coroutine[Any, Any, T]]:
    """The client's method as a coroutine: its call is waited for on a thread."""

    @wraps(method)
    async def call(self: "AsyncClient", /, *arguments: P.args, **options: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._client, *arguments, **options)

    return call


def _streamed(
    method: Callable[Concatenate[Client, P], Iterator[T]],
) -> Callable[Concatenate["AsyncClient", P], AsyncGenerator[T, None]]:
    """The client's method as an asynchronous generator."""

    @wraps(method)
    def call(self: "AsyncClient", /, *arguments: P.args, **options: P.kwargs) -> AsyncGenerator[T, None]:
        return _each(self._new, lambda client: method(client, *arguments, **options))

    return call


def _of_job(method: Callable[Concatenate["AsyncClient", str, P], T]) -> Callable[Concatenate["AsyncJobHandle", P], T]:
    """The client's method for the job of a handle."""

    @wraps(method)
    def call(self: "AsyncJobHandle", /, *arguments: P.args, **options: P.kwargs) -> T:
        return method(self.client, self.id, *arguments, **options)

    return call


class AsyncClient:
    """A connection to the coordinator, with the methods of `Client` as coroutines; `watch` and `logs` are asynchronous
    iterators, and end their call when they are closed. Arguments, results and errors are those of `Client`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls: str | None = None,
        reconnect_s: float | None = None,
    ) -> None:
        self._client = Client(address, token=token, tls=tls, reconnect_s=reconnect_s)
        self.address = self._client.address

        def new() -> Client:
            if self._client.is_closed:
                raise Unreachable(CLOSED)
            return Client(self.address, token=token, tls=tls, reconnect_s=reconnect_s)

        self._new = new

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await asyncio.to_thread(self._client.close)

    async def submit(self, path: str | os.PathLike[str] = "", **options: Any) -> "AsyncJobHandle":
        """Submits the job that a Python file defines. Options and settings are those of `Client.submit`."""
        return self.job((await asyncio.to_thread(self._client.submit, path, **options)).id)

    def job(self, job_id: str) -> "AsyncJobHandle":
        """A handle of an existing job."""
        return AsyncJobHandle(self, job_id)

    async def find(self, key: str) -> "AsyncJobHandle | None":
        """The job that you have submitted with a key; None if there is none."""
        found = await asyncio.to_thread(self._client.find, key)
        return None if found is None else self.job(found.id)

    async def resume(self, job_id: str, **settings: object) -> "AsyncJobHandle":
        """Resumes a job that has ended as a new job, from its newest checkpoint."""
        return self.job((await asyncio.to_thread(self._client.resume, job_id, **settings)).id)

    async def result(self, job_id: str, *, model: str | os.PathLike[str] | None = None) -> JobResult:
        """Waits for a job to end. Raises `JobFailed` unless it succeeded. Cancelling the coroutine leaves the job."""

        def wait(client: Client) -> Iterator[JobResult]:
            yield JobHandle(client, job_id).result(model=model)

        waiting = _each(self._new, wait)
        try:
            return await anext(waiting)
        finally:
            await waiting.aclose()

    jobs = _awaited(Client.jobs)
    hosts = _awaited(Client.hosts)
    get = _awaited(Client.get)
    checkpoints = _awaited(Client.checkpoints)
    cancel = _awaited(Client.cancel)
    checkpoint = _awaited(Client.checkpoint)
    pause = _awaited(Client.pause)
    scale = _awaited(Client.scale)
    drain = _awaited(Client.drain)
    inject = _awaited(Client.inject)
    download = _awaited(Client.download)
    timeline = _awaited(Client.timeline)
    journal = _awaited(Client.journal)
    watch = _streamed(Client.watch)
    metrics = _streamed(Client.metrics)
    logs = _streamed(Client.logs)
    measure_links = _streamed(Client.measure_links)


async def _each(new_client: Callable[[], Client], begin: Callable[[Client], Iterator[T]]) -> AsyncGenerator[T, None]:
    """Yields a call's stream, read on a thread, over a connection of its own; closing the generator closes the
    connection, which ends the call and the thread.
    """
    # A thread that waits in a gRPC call ends only when the channel is closed, which must not end the client's other
    # calls.
    client, loop = new_client(), asyncio.get_running_loop()
    room = threading.Semaphore(64)  # items that the thread may be ahead, so that a slow reader bounds memory
    received: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue()
    is_over = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> None:
        if not is_over.is_set():
            loop.call_soon_threadsafe(received.put_nowait, (item, error))

    def read() -> None:
        try:
            for item in begin(client):
                put(item)
                room.acquire()
                if is_over.is_set():
                    return
            put(None, StopAsyncIteration())
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=read, name="elche stream", daemon=True)
    thread.start()
    try:
        while True:
            item, error = await received.get()
            if isinstance(error, StopAsyncIteration):
                return
            if error is not None:
                raise error
            room.release()
            assert item is not None
            yield item
    finally:
        # First the flag: the thread then puts nothing more, and ends when the closed connection wakes it.
        is_over.set()
        room.release()
        client.close()


@dataclass(frozen=True, slots=True)
class AsyncJobHandle:
    """One job of a coordinator, with the methods of `JobHandle` as coroutines and asynchronous iterators."""

    client: AsyncClient
    id: str

    watch = _of_job(AsyncClient.watch)
    logs = _of_job(AsyncClient.logs)
    result = _of_job(AsyncClient.result)
    cancel = _of_job(AsyncClient.cancel)
    checkpoint = _of_job(AsyncClient.checkpoint)
    pause = _of_job(AsyncClient.pause)
    scale = _of_job(AsyncClient.scale)

    async def resume(self, **settings: object) -> "AsyncJobHandle":
        """Resumes the job, which must have ended, as a new job from its newest checkpoint."""
        return await self.client.resume(self.id, **settings)

"""`AsyncClient`: `Client` for asyncio."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from elche_client.client import Change, Client, JobHandle
from elche_client.events import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    Event,
    Fault,
    HostView,
    JobResult,
    JobView,
    LinkView,
    LogLine,
)

T = TypeVar("T")


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
        self._new = lambda: Client(self.address, token=token, tls=tls, reconnect_s=reconnect_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await asyncio.to_thread(self._client.close)

    async def submit(self, path: str | os.PathLike[str], **options: Any) -> "AsyncJobHandle":
        """Submits the job that a Python file defines. Options and settings are those of `Client.submit`."""
        return self.job((await asyncio.to_thread(self._client.submit, path, **options)).id)

    async def jobs(self) -> list[JobView]:
        """All jobs of the coordinator, oldest first."""
        return await asyncio.to_thread(self._client.jobs)

    async def hosts(self) -> list[HostView]:
        """The connected hosts, with the jobs on their devices."""
        return await asyncio.to_thread(self._client.hosts)

    def measure_links(self, hosts: Sequence[str] = ()) -> AsyncGenerator[LinkView, None]:
        """The link between each pair of the connected, or named, hosts, as each is measured."""
        return _each(self._new, lambda client: client.measure_links(hosts))

    def job(self, job_id: str) -> "AsyncJobHandle":
        """A handle of an existing job."""
        return AsyncJobHandle(self, job_id)

    async def find(self, key: str) -> "AsyncJobHandle | None":
        """The job that you have submitted with a key; None if there is none."""
        found = await asyncio.to_thread(self._client.find, key)
        return None if found is None else self.job(found.id)

    async def get(self, job_id: str) -> JobView:
        """A job as it is now."""
        return await asyncio.to_thread(self._client.get, job_id)

    async def checkpoints(self, job_id: str) -> tuple[Checkpoint, ...]:
        """The kept checkpoints of a job, oldest first."""
        return await asyncio.to_thread(self._client.checkpoints, job_id)

    def metrics(self, job_id: str) -> AsyncGenerator[EpochReport | EvaluationReport, None]:
        """Reports of the job's epochs and evaluations from now on, until it ends."""
        return _each(self._new, lambda client: client.metrics(job_id))

    async def cancel(self, job_id: str) -> Change:
        """Cancels a job. Nothing changes for one that has ended."""
        return await asyncio.to_thread(self._client.cancel, job_id)

    async def resume(self, job_id: str, **settings: object) -> "AsyncJobHandle":
        """Resumes a job that has ended as a new job, from its newest checkpoint."""
        return self.job((await asyncio.to_thread(self._client.resume, job_id, **settings)).id)

    async def checkpoint(self, job_id: str) -> None:
        """Requests a checkpoint of a job with its next round."""
        await asyncio.to_thread(self._client.checkpoint, job_id)

    async def pause(self, job_id: str, *, is_paused: bool = True) -> Change:
        """Pauses a training job after its open round, or lets it go on with `is_paused=False`."""
        return await asyncio.to_thread(self._client.pause, job_id, is_paused=is_paused)

    async def scale(self, job_id: str, num_ranks: int) -> int:
        """Sets a job's number of ranks; returns the previous one."""
        return await asyncio.to_thread(self._client.scale, job_id, num_ranks)

    async def drain(self, host: str, *, is_drained: bool = True) -> int:
        """Drains a host, or makes it available again; returns its number of ranks."""
        return await asyncio.to_thread(self._client.drain, host, is_drained=is_drained)

    async def inject(self, job_id: str, fault: Fault | None, *, rank: int = 0, seconds: float = 5.0) -> str:
        """Breaks a part of a running job on purpose; returns the name of the host on which that is."""
        return await asyncio.to_thread(self._client.inject, job_id, fault, rank=rank, seconds=seconds)

    async def download(self, job_id: str, path: str | os.PathLike[str], *, best: bool = False) -> Path:
        """Writes the final model of a job, or its best one, to a local file."""
        return await asyncio.to_thread(self._client.download, job_id, path, best=best)

    async def timeline(self, job_id: str) -> str:
        """The timeline so far of a job with `timeline=True`, as JSON lines."""
        return await asyncio.to_thread(self._client.timeline, job_id)

    async def journal(self, job_id: str, *, num_events: int | None = None) -> str:
        """A job's journal, or its newest events, as JSON lines."""
        return await asyncio.to_thread(self._client.journal, job_id, num_events=num_events)

    def watch(self, job_id: str) -> AsyncGenerator[Event, None]:
        """The events of a job: first a view of it as it is now, last its result."""
        return _each(self._new, lambda client: client.watch(job_id))

    def logs(self, job_id: str, **options: Any) -> AsyncGenerator[LogLine, None]:
        """The end of the logs of a job's ranks. Options are those of `Client.logs`."""
        return _each(self._new, lambda client: client.logs(job_id, **options))

    async def result(self, job_id: str, *, model: str | os.PathLike[str] | None = None) -> JobResult:
        """Waits for a job to end. Raises `JobFailed` unless it succeeded. Cancelling the coroutine leaves the job."""

        def wait(client: Client) -> Iterator[JobResult]:
            yield JobHandle(client, job_id).result(model=model)

        waiting = _each(self._new, wait)
        try:
            return await anext(waiting)
        finally:
            await waiting.aclose()


async def _each(new_client: Callable[[], Client], begin: Callable[[Client], Iterator[T]]) -> AsyncGenerator[T, None]:
    """Yields a call's stream, read on a thread, over a connection of its own; closing the generator closes the
    connection, which ends the call and the thread.
    """
    client, loop = new_client(), asyncio.get_running_loop()
    room = threading.Semaphore(64)  # items that the thread may be ahead, so that a slow reader bounds memory
    told: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue()
    is_over = threading.Event()

    def tell(item: T | None, error: BaseException | None = None) -> None:
        if not is_over.is_set():
            loop.call_soon_threadsafe(told.put_nowait, (item, error))

    def read() -> None:
        try:
            for item in begin(client):
                tell(item)
                room.acquire()
                if is_over.is_set():
                    return
            tell(None, StopAsyncIteration())
        except BaseException as error:
            tell(None, error)

    thread = threading.Thread(target=read, name="elche stream", daemon=True)
    thread.start()
    try:
        while True:
            item, error = await told.get()
            if isinstance(error, StopAsyncIteration):
                return
            if error is not None:
                raise error
            room.release()
            assert item is not None
            yield item
    finally:
        # First the flag: the thread then tells nothing more, and ends when the closed connection wakes it.
        is_over.set()
        room.release()
        client.close()


@dataclass(frozen=True, slots=True)
class AsyncJobHandle:
    """One job of a coordinator."""

    client: AsyncClient
    id: str

    def watch(self) -> AsyncGenerator[Event, None]:
        """The events of the job: first a view of it as it is now, last its result."""
        return self.client.watch(self.id)

    def logs(self, **options: Any) -> AsyncGenerator[LogLine, None]:
        """The end of the logs of its ranks."""
        return self.client.logs(self.id, **options)

    async def result(self, *, model: str | os.PathLike[str] | None = None) -> JobResult:
        """Waits for the job to end. Raises `JobFailed`, with the user's traceback, unless it succeeded."""
        return await self.client.result(self.id, model=model)

    async def cancel(self) -> Change:
        """Cancels the job."""
        return await self.client.cancel(self.id)

    async def checkpoint(self) -> None:
        """Requests a checkpoint with the next round."""
        await self.client.checkpoint(self.id)

    async def pause(self, *, is_paused: bool = True) -> Change:
        """Pauses training after the open round, or lets it go on with `is_paused=False`."""
        return await self.client.pause(self.id, is_paused=is_paused)

    async def scale(self, num_ranks: int) -> int:
        """Sets the job's number of ranks; returns the previous one."""
        return await self.client.scale(self.id, num_ranks)

    async def resume(self, **settings: object) -> "AsyncJobHandle":
        """Resumes the job, which must have ended, as a new job from its newest checkpoint."""
        return await self.client.resume(self.id, **settings)

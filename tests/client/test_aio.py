"""The client for asyncio, against a real gRPC server that plays a script."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest

from elche.errors import JobFailed, TooMuch, Unreachable
from elche_client import AsyncClient, AsyncJobHandle, Client, JobHandle, JobResult, JobState, JobView
from support.scripted import (
    CANCELLED,
    EPOCH,
    FAILURE,
    RESULT,
    SOURCE,
    UNTIL_CANCELLED,
    VIEW,
    ScriptedJobs,
    serving,
)

NOT_FOR_USERS = {"submit_options"}


def run(jobs: ScriptedJobs, story: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def within_20_s(address: str) -> None:
        async with AsyncClient(address, token="") as client:
            await asyncio.wait_for(story(client), 20)

    with serving(jobs) as address:
        asyncio.run(within_20_s(address))


async def comes(condition: Callable[[], bool | None]) -> None:
    """Waits until it holds; `run` says how long."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # nobody sets an event


def stream_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "elche stream"]


@pytest.mark.parametrize(("mine", "of"), [(AsyncClient, Client), (AsyncJobHandle, JobHandle)])
def test_it_has_the_same_methods(mine: type, of: type) -> None:
    def public(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

    assert public(of) - NOT_FOR_USERS <= public(mine)


def test_a_client_that_is_closed_watches_nothing() -> None:
    """Each stream has a connection of its own, and began one."""

    async def story(client: AsyncClient) -> None:
        await client.close()
        for call in (client.jobs, lambda: anext(client.watch("j-1")), lambda: client.result("j-1")):
            with pytest.raises(Unreachable, match="this client is closed"):
                await call()

    run(ScriptedJobs(VIEW, RESULT), story)


def test_what_a_job_is_and_brings() -> None:
    async def story(client: AsyncClient) -> None:
        assert (await client.get("j-1")).job_id == "j-1"
        assert await client.checkpoints("j-1") == ()
        assert [one.epoch async for one in client.metrics("j-1")] == [2]

    run(ScriptedJobs(VIEW, EPOCH, RESULT), story)
    with serving(ScriptedJobs(VIEW, EPOCH, RESULT)) as address, Client(address, token="") as client:
        assert client.get("j-1").job_id == "j-1"
        assert [one.epoch for one in client.metrics("j-1")] == [2]
        assert client.result("j-1").state is JobState.SUCCEEDED


def test_a_job_is_submitted_watched_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "digits.py"
    path.write_text(SOURCE, encoding="utf-8")

    async def story(client: AsyncClient) -> None:
        job = await client.submit(path, num_ranks=2, epochs=3)
        kinds = [type(event) async for event in job.watch()]
        assert kinds[0] is JobView
        assert kinds[-1] is JobResult
        assert (await job.result()).state is JobState.SUCCEEDED
        assert [view.job_id for view in await client.jobs()] == ["j-1"]

    jobs = ScriptedJobs(VIEW, EPOCH, RESULT)
    run(jobs, story)
    assert jobs.specs[0].settings == {"epochs": "3"}
    assert stream_threads() == []


def test_who_stops_watching_ends_the_call_and_not_the_job() -> None:
    jobs = ScriptedJobs(VIEW, UNTIL_CANCELLED, RESULT)

    async def story(client: AsyncClient) -> None:
        waiting = asyncio.ensure_future(client.job("j-1").result())
        await comes(lambda: bool(jobs.metadata))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(jobs.watcher_left.wait)
        events = client.watch("j-1")
        await anext(events)
        await events.aclose()

    run(jobs, story)
    assert not any(thread.is_alive() for thread in stream_threads() if thread.join(400) is None)


def test_what_is_not_read_is_not_sent_without_end() -> None:
    """A slow reader holds the stream up, not its events in memory."""

    async def story(client: AsyncClient) -> None:
        events = client.watch("j-1")
        await anext(events)
        mine = events.ag_frame.f_locals
        await comes(lambda: not mine["room"].acquire(blocking=False) or mine["room"].release())
        assert mine["received"].qsize() < 100
        await events.aclose()

    run(ScriptedJobs(VIEW, *[EPOCH] * 5000, RESULT), story)


def test_errors_are_those_of_the_client() -> None:
    async def fails(client: AsyncClient) -> None:
        with pytest.raises(JobFailed) as raised:
            await client.job("j-1").result()
        assert raised.value.traceback

    async def cancelled(client: AsyncClient) -> None:
        change = await client.job("j-1").cancel()
        assert change.is_made

    async def refused(client: AsyncClient) -> None:
        with pytest.raises(TooMuch, match="no room"):
            await client.jobs()
        with pytest.raises(TooMuch, match="no room"):
            await anext(client.watch("j-1"))

    run(ScriptedJobs(VIEW, FAILURE), fails)
    run(ScriptedJobs(VIEW, UNTIL_CANCELLED, CANCELLED), cancelled)
    run(ScriptedJobs(refusal=(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")), refused)

"""Who uses much of the coordinator's processor waits for it, and others do not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elche.errors import TooMuch
from elche.protocol import call_metadata
from elche.token import Role
from elche.v1 import job_pb2, job_pb2_grpc
from elche_coordinator.access.audit import Audit
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.limits.budgets import MAX_TURN_S, PROCESSOR_FRACTION, PROCESSOR_STORE_S
from elche_coordinator.limits.processor import STRANGERS, Processor
from elche_coordinator.roles import Caller
from elche_coordinator.services.interceptor import AccessInterceptor
from elche_coordinator.web.access import AccessControl

AT_ONCE_S = PROCESSOR_FRACTION * PROCESSOR_STORE_S
"""What a caller may use at once who has made no calls before."""


class Machine:
    """A clock, and a processor that does what it is told. Who sleeps lets the clock go on."""

    def __init__(self) -> None:
        self.now_s, self.used_s, self.slept_s = 1000.0, 0.0, 0.0
        self.processor = Processor(now=lambda: self.now_s, used=lambda: self.used_s, sleep=self.sleep)

    def work(self, work_s: float) -> None:
        self.used_s += work_s
        self.now_s += work_s

    async def sleep(self, sleep_s: float) -> None:
        self.slept_s += sleep_s
        self.now_s += sleep_s
        await asyncio.sleep(0)


def test_a_caller_has_a_part_of_the_processor_and_saves_up_some_of_it() -> None:
    one = Machine()
    one.processor.charge("eve", AT_ONCE_S)
    assert one.processor.wait_s("eve") == 0.0
    one.processor.charge("eve", 1.0)
    assert one.processor.wait_s("eve") == pytest.approx(1.0 / PROCESSOR_FRACTION)
    assert one.processor.wait_s("bob") == 0.0
    one.now_s += 1.0 / PROCESSOR_FRACTION
    assert one.processor.wait_s("eve") == 0.0
    one.now_s += 1e6
    one.processor.charge("eve", AT_ONCE_S + 1.0)
    assert one.processor.wait_s("eve") == pytest.approx(1.0 / PROCESSOR_FRACTION), "no more than so much is saved up"


def test_whom_no_token_names_has_no_limit() -> None:
    one = Machine()
    one.processor.charge("", 1e6)
    assert one.processor.wait_s("") == 0.0


def test_a_turn_that_is_far_is_refused_and_one_that_is_near_is_waited_for() -> None:
    async def story() -> None:
        one = Machine()
        one.processor.charge("eve", AT_ONCE_S + MAX_TURN_S * PROCESSOR_FRACTION)
        await one.processor.turn("eve")
        assert one.slept_s == pytest.approx(MAX_TURN_S)
        one.processor.charge("eve", (MAX_TURN_S + 8.0) * PROCESSOR_FRACTION)
        with pytest.raises(TooMuch, match=r"more than 25% of the coordinator's processor .*, and try again in 12 s"):
            await one.processor.turn("eve")
        await one.processor.pause("eve")
        assert one.slept_s == pytest.approx(2 * MAX_TURN_S + 8.0)

    asyncio.run(story())


def test_each_step_is_charged_and_what_is_done_between_them_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Machine()

    async def inner() -> str:
        one.work(1.0)
        await asyncio.sleep(0)
        try:
            one.work(2.0)
            await asyncio.sleep(60)
        finally:
            one.work(4.0)
        return "not reached"

    async def story() -> None:
        task = asyncio.ensure_future(one.processor.metered("eve", inner()))
        for _ in range(3):
            await asyncio.sleep(0)
            one.work(100.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    charged: list[tuple[str, float]] = []
    monkeypatch.setattr(one.processor, "charge", lambda *what: charged.append(what))
    asyncio.run(story())
    assert charged == [("eve", 1.0), ("eve", 2.0), ("eve", 4.0)]


def test_a_call_that_is_cancelled_learns_of_it() -> None:
    """Wherever it is: also where it waits for nothing that is cancelled with it."""

    async def inner() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    async def story() -> None:
        task = asyncio.ensure_future(Machine().processor.metered("eve", inner()))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())


class Work(job_pb2_grpc.JobServiceServicer):
    """Each call, and each part of a stream, takes so much of the processor."""

    def __init__(self, machine: Machine, work_s: float) -> None:
        self._machine, self._work_s = machine, work_s
        self.num_done = 0

    async def ListJobs(self, request: Any, context: Any) -> job_pb2.ListJobsResponse:  # noqa: N802
        self._machine.work(self._work_s)
        self.num_done += 1
        return job_pb2.ListJobsResponse(next_page_token="7")

    async def WatchJob(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        for _ in range(int(request.job_id)):
            self._machine.work(self._work_s)
            self.num_done += 1
            yield job_pb2.WatchJobResponse()


def known(name: str) -> Any:
    return SimpleNamespace(token=SimpleNamespace(caller=Caller(name, Role.VIEWER)), revoked=asyncio.Event())


TOKENS: Any = SimpleNamespace(find=known, left_s=lambda grant: 1e6)


def served(folder: Path, machine: Machine, work: Work, story: Callable[[Any], Any]) -> None:
    async def main() -> None:
        nobody: Any = None
        credentials = Credentials("the own one", TOKENS)
        access = AccessInterceptor(credentials, Audit(folder / "audit.jsonl"), nobody, processor=machine.processor)
        server = grpc.aio.server(interceptors=[access])
        job_pb2_grpc.add_JobServiceServicer_to_server(work, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await story(job_pb2_grpc.JobServiceStub(channel))
        await server.stop(None)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_calls_that_cost_much_are_refused_until_they_are_paid_for(tmp_path: Path) -> None:
    """A view of 10,000 ranks takes 20 ms: who asks for it without end has a quarter of the processor, not all of it."""
    one = Machine()
    work = Work(one, 0.02)  # type: ignore[abstract]  # the rest is not called

    async def story(stub: Any) -> None:
        def list_as(name: str) -> Any:
            return stub.ListJobs(job_pb2.ListJobsRequest(), metadata=call_metadata(name))

        began_s = one.now_s
        for _ in range(600):  # one after the other they wait for their turns, and none is refused
            assert (await list_as("eve")).next_page_token == "7"
        used_s = 0.02 * work.num_done
        assert used_s <= AT_ONCE_S + PROCESSOR_FRACTION * (one.now_s - began_s) + 0.1
        one.processor.charge("eve", 60.0)
        with pytest.raises(grpc.aio.AioRpcError, match="try again in 2") as refused:
            await list_as("eve")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        slept_s = one.slept_s
        await list_as("bob")
        await list_as("the own one")
        assert one.slept_s == slept_s, "others need not wait"

    served(tmp_path, one, work, story)


def test_a_stream_goes_on_when_it_is_its_callers_turn(tmp_path: Path) -> None:
    one = Machine()
    work = Work(one, 0.25)  # type: ignore[abstract]  # the rest is not called

    async def story(stub: Any) -> None:
        began_s = one.now_s
        call = stub.WatchJob(job_pb2.WatchJobRequest(job_id="100"), metadata=call_metadata("eve"))
        assert len([part async for part in call]) == 100
        assert one.now_s - began_s >= (25.0 - AT_ONCE_S) / PROCESSOR_FRACTION - 1.0

    served(tmp_path, one, work, story)


def test_the_page_has_such_a_budget_too_and_strangers_have_one_together(tmp_path: Path) -> None:
    one = Machine()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        one.work(1.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    credentials = Credentials("the own one", TOKENS)
    control = AccessControl(app, credentials, Audit(tmp_path / "audit.jsonl"), processor=one.processor)

    async def ask(path: str, name: str) -> int:
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        headers = [(b"authorization", f"Bearer {name}".encode())] if name else []
        scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
        await control(scope, None, send)  # type: ignore[arg-type]
        return int(told[0]["status"])

    async def story() -> None:
        for path, name, payer in (("/api/jobs", "eve", "eve"), ("/static/x.js", "", STRANGERS)):
            began_s, used_s = one.now_s, one.used_s
            assert [await ask(path, name) for _ in range(20)] == [200] * 20
            assert one.used_s - used_s == 20.0
            assert one.now_s - began_s >= (20.0 - AT_ONCE_S) / PROCESSOR_FRACTION - 4.0
            one.processor.charge(payer, 60.0)
            assert await ask(path, name) == 429
            slept_s = one.slept_s
            assert await ask("/healthz", "") == 200
            assert await ask("/api/jobs", "bob") == 200
            assert one.slept_s == slept_s, "others need not wait"

    asyncio.run(story())


def test_a_page_that_is_open_gets_its_parts_when_it_is_its_callers_turn(tmp_path: Path) -> None:
    one = Machine()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(20):
            one.work(1.0)
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"x", "more_body": number < 19})

    async def story() -> None:
        credentials = Credentials("the own one", TOKENS)
        control = AccessControl(app, credentials, Audit(tmp_path / "audit.jsonl"), processor=one.processor)

        async def send(message: Any) -> None:
            pass

        headers = [(b"authorization", b"Bearer eve")]
        scope = {"type": "http", "method": "GET", "path": "/api/stream", "headers": headers}
        began_s = one.now_s
        await control(scope, None, send)  # type: ignore[arg-type]
        assert one.now_s - began_s >= (20.0 - AT_ONCE_S) / PROCESSOR_FRACTION - 8.0

    asyncio.run(story())

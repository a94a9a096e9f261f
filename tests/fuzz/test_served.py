"""A coordinator's services, in this process: what ranks of a managed job say on their streams and to its relay."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from elche.errors import ElcheError
from elche.v1 import agent_pb2, averaging_pb2, rank_pb2
from elche_coordinator.collectives.averaging import RelayAborted
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.messages.events import JobSubmitted
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.services.averaging_service import AveragingServicer
from elche_coordinator.services.interceptor import SECRET
from elche_coordinator.services.rank_service import RankServicer
from elche_coordinator.services.sessions import attend
from elche_coordinator.services.validation import first_problem
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.telemetry.timelines import Timelines
from support.corpus import messages
from support.fakes import READY
from support.fuzzing import bounded_memory, fuzzed, message_bytes, tried

JOB = JobId("job")
ALLOWED = (ElcheError, RelayAborted)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a coordinator that has seen nothing."""
    path = tmp_path_factory.mktemp("served") / "elche.sqlite"
    SqlStore.in_file(path).close()
    return path


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """What is logged as an error: a bug."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield found
    logging.getLogger().removeHandler(handler)


class Rank:
    """One that becomes ready as ranks do, and then says what it is given."""

    def __init__(self, driver: Driver, number: int, said: Sequence[bytes], parts: Sequence[bytes]) -> None:
        address = driver.core.addresses(JOB)[number]
        self.caller: Any = SimpleNamespace(invocation_metadata=lambda: ((SECRET, driver.secrets.new(address)),))
        self._said, self._parts = said, parts
        self._outgoing: asyncio.Queue[rank_pb2.ConverseRequest | None] = asyncio.Queue()

    async def converse(self, servicer: RankServicer, averaging: AveragingServicer) -> None:
        with suppress(*ALLOWED):
            async for heard in servicer.Converse(self._requests(), self.caller):
                if heard.HasField("welcome"):
                    self._outgoing.put_nowait(rank_pb2.ConverseRequest(ready=rank_pb2.Ready(**READY)))
                if heard.HasField("form_group"):
                    ready = rank_pb2.GroupReady(generation=heard.form_group.generation)
                    self._outgoing.put_nowait(rank_pb2.ConverseRequest(group_ready=ready))
                if heard.HasField("sync_now"):
                    await self._average(averaging, heard.sync_now)
                    self._say()

    def _say(self) -> None:
        for data in self._said:
            with suppress(DecodeError):
                request = rank_pb2.ConverseRequest.FromString(data)
                if not first_problem(request):
                    self._outgoing.put_nowait(request)
        self._outgoing.put_nowait(None)

    async def _requests(self) -> AsyncIterator[rank_pb2.ConverseRequest]:
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def _average(self, servicer: AveragingServicer, opened: rank_pb2.SyncNow) -> None:
        async def parts() -> AsyncIterator[averaging_pb2.AverageRequest]:
            yield averaging_pb2.AverageRequest(
                join=averaging_pb2.JoinRound(generation=opened.generation, round=opened.round)
            )
            for data in self._parts:
                with suppress(DecodeError):
                    request = averaging_pb2.AverageRequest.FromString(data)
                    if not first_problem(request):
                        yield request

        with suppress(*ALLOWED, TimeoutError):
            async with asyncio.timeout(0.02):
                async for _ in servicer.Average(parts(), self.caller):
                    pass


async def story(path: Path, said: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]) -> None:
    store = SqlStore.in_file(path)
    driver = Driver(Coordinator(), store)
    try:
        slots = [agent_pb2.Slot(device="cpu")] * len(said)
        attend(driver, agent_pb2.AgentHello(host="host", slots=slots, identity="one"))
        spec = JobSpec(name="job", source_hash="", file_name="job.py", num_ranks=len(said))
        driver.handle(JobSubmitted(job_id=JOB, spec=spec, submitted_at=1.0))
        averaging = AveragingServicer(driver)
        servicer = RankServicer(driver, Timelines(path.parent / "timelines", driver, lambda _: ""))
        talks = [
            asyncio.ensure_future(Rank(driver, number, *words).converse(servicer, averaging))
            for number, words in enumerate(said)
        ]
        await asyncio.wait(talks, timeout=0.1)
        for talk in talks:
            talk.cancel()
        for ended in await asyncio.gather(*talks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        check_invariants(driver.core)
        driver.core.view(JOB, driver.now_s)
    finally:
        driver.stop()
        await asyncio.to_thread(driver.writer._thread.join, 100)
        store.close()


WORDS = st.tuples(
    st.lists(message_bytes(messages("RankService/Converse")), max_size=4),
    st.lists(message_bytes(messages("AveragingService/Average")), max_size=3),
)


@fuzzed(12)
@given(said=st.lists(WORDS, min_size=1, max_size=2))
def test_ranks_of_a_managed_job_may_say_anything(
    empty: Path, tmp_path: Path, errors: list[str], said: list[tuple[list[bytes], list[bytes]]]
) -> None:
    for old in tmp_path.glob("elche.sqlite*"):
        old.unlink()
    errors.clear()
    path = Path(shutil.copy(empty, tmp_path))
    with bounded_memory():
        tried(lambda: asyncio.run(story(path, said)))
    assert not errors

"""Messages of any content, within one process: the coordinator's core, what it averages, and what clients are told."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from elche.errors import UnknownMessage
from elche.v1 import rank_pb2
from elche_client.display.record import JobRecord, to_json
from elche_client.transport.codec import decode_event, decode_view
from elche_coordinator import codec
from elche_coordinator.collectives.averaging import RelayAborted, RelayRound, take_part
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.messages.events import DeadlinePassed, LoopAttached
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.journal import replaying
from elche_coordinator.services.validation import first_problem
from support.corpus import FOLDER, messages
from support.fuzzing import bounded_memory, changed_message, fuzzed, message_bytes, tried

OTHER = JobId("other")


@cache
def states() -> tuple[bytes, ...]:
    """The core of a real run, after each of its events, with a second job, which nobody says anything about."""
    about, entries = replaying.read((FOLDER / "journal.jsonl").read_text().splitlines())
    core = Coordinator()
    core.fleet = fleet = replaying.RecordedFleet()
    spec = JobSpec(name="other", source_hash="", file_name="other.py", num_ranks=1, is_loop=True)
    attached = LoopAttached(job_id=OTHER, spec=spec, ranks=(("host", "cpu"),), policy="shares", submitted_at=1.0)
    core.handle(attached, now_s=entries[0].at_s)
    found = []
    for entry in entries:
        if entry.found is not None:
            replaying._offer(core, entry.found)
        if (first := fleet.begin(entry)) is not None:
            core.begin_incarnations_at(first)
        replaying._handle(core, about["job"], entry)
        found.append(pickle.dumps((about["job"], core)))
    return tuple(found)


def hear(core: Coordinator, job_id: JobId, rank: int, sent: bytes) -> None:
    """What the coordinator does with the bytes of a rank's message: it refuses them, or the core takes the event."""
    try:
        request = rank_pb2.ConverseRequest.FromString(sent)
    except DecodeError:
        return
    addresses = core.addresses(job_id) if job_id in core.trainings else []
    if first_problem(request) or not addresses or request.HasField("spans"):
        return
    try:
        event = codec.rank_event(addresses[rank % len(addresses)], request)
    except UnknownMessage:
        return
    for one in (event, DeadlinePassed()):
        for command in core.handle(one, now_s=core.now_s + 0.01):
            if type(command) in codec.SESSION_MESSAGES:
                codec.rank_response(command)
    for asked in core.asked:
        core.handle(asked, now_s=core.now_s)


@fuzzed(100)
@given(
    at=st.integers(0, 10_000),
    said=st.lists(
        st.tuples(st.integers(0, 1), message_bytes(messages("RankService/Converse"))), min_size=1, max_size=4
    ),
)
def test_the_core_takes_or_refuses_whatever_a_rank_says(at: int, said: Sequence[tuple[int, bytes]]) -> None:
    job_id, core = pickle.loads(states()[at % len(states())])
    before = core.view(OTHER, core.now_s)

    def story() -> None:
        for rank, sent in said:
            hear(core, job_id, rank, sent)
            check_invariants(core)

    with bounded_memory():
        tried(story)
    assert core.view(OTHER, 0.0).state == before.state
    view = core.view(job_id, core.now_s)
    assert view is None or codec.view_message(view) is not None


PARTS = [one for one in messages("AveragingService/Average") if one.HasField("part")]  # type: ignore[misc]


async def average(told: Sequence[Sequence[Message]], pool: ThreadPoolExecutor) -> None:
    """A round of ranks that say these things, and end."""

    async def requests(rank: Sequence[Message]) -> AsyncIterator[Any]:
        for one in rank:
            yield one

    relay = RelayRound(len(told), 0.2, pool)

    async def part(position: int, rank: Sequence[Message]) -> None:
        try:
            async for data in take_part(relay, position, requests(rank)):
                assert len(data) <= 4 << 20
        except RelayAborted as error:
            said.append(str(error))

    said: list[str] = []
    await asyncio.gather(*(part(position, rank) for position, rank in enumerate(told)))
    assert all(said)


@fuzzed(75)
@given(
    told=st.lists(st.lists(changed_message(PARTS), max_size=3), min_size=2, max_size=3),
    same=st.lists(changed_message(PARTS), max_size=3),
)
def test_a_round_through_the_coordinator_ends_whatever_ranks_send(
    told: list[list[Message]], same: list[Message]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        tried(lambda: asyncio.run(average(told, pool)))
        tried(lambda: asyncio.run(average([same] * 2, pool)))


@fuzzed(100)
@given(message=changed_message(messages("JobService/WatchJob", "response")))
def test_a_client_shows_whatever_a_watch_says(message: Any) -> None:
    def show() -> None:
        event = decode_event(message)
        if event is not None:
            JobRecord().add(event)
            to_json(asdict(event))

    tried(show)


@fuzzed(100)
@given(message=changed_message(messages("JobService/ListJobs", "response")))
def test_a_client_lists_whatever_jobs_there_are(message: Any) -> None:
    for view in message.jobs:
        tried(partial(decode_view, view))

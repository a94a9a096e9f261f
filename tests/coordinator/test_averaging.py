"""Meetings of ranks in the coordinator: what each gets, and that a round ends for all of them alike."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy
import pytest

from elche.v1 import averaging_pb2 as pb
from elche_coordinator.collectives.averaging import MAX_PART_BYTES, Averager, RelayAborted, RelayRound, take_part
from elche_coordinator.core.messages.ids import JobId, RoundId

JOB, ROUND = JobId("job"), RoundId(7)
FINISH = pb.Part(operation=pb.OPERATION_FINISH)
SILENCE = None
"""In a script: the stream stays open and says nothing more."""

Script = list[pb.Part | None]


def part(operation: Any, data: bytes, source: int = 0) -> pb.Part:
    return pb.Part(operation=operation, data=data, source=source)


async def spoken(script: Script) -> AsyncIterator[pb.AverageRequest]:
    for one in script:
        if one is SILENCE:
            await asyncio.Event().wait()
        yield pb.AverageRequest(part=one)


async def heard(relay: RelayRound, position: int, script: Script) -> list[bytes] | str:
    """The answers that a member gets, or why the round was given up."""
    answers: list[bytes] = []
    try:
        async for answer in take_part(relay, position, spoken(script)):
            answers.append(answer)
    except RelayAborted as error:
        return str(error)
    return answers


def meet(*scripts: Script, stall_s: float = 5.0) -> list[Any]:
    """What each member of a round hears when it says what its script has."""

    async def together() -> list[Any]:
        averager = Averager(stall_s=stall_s)
        relay = averager.relay(JOB, ROUND, len(scripts))
        heard_by_all = await asyncio.gather(*(heard(relay, at, script) for at, script in enumerate(scripts)))
        assert await averager.is_complete(JOB, ROUND) is all(isinstance(one, list) for one in heard_by_all)
        return heard_by_all

    return asyncio.run(asyncio.wait_for(together(), 20))


def test_gathered_data_come_in_the_order_of_the_ranks() -> None:
    answers = meet(*([part(pb.OPERATION_GATHER, letter), FINISH] for letter in (b"a", b"b", b"c")))
    assert answers == [[b"abc", b""]] * 3


def test_each_member_gets_its_row_of_all() -> None:
    scripts = [[part(pb.OPERATION_SCATTER, data), FINISH] for data in (b"AaBb", b"CcDd")]
    assert meet(*scripts) == [[b"AaCc", b""], [b"BbDd", b""]]


def test_a_broadcast_reaches_all_but_its_source() -> None:
    scripts = [[part(pb.OPERATION_BROADCAST, data, source=1), FINISH] for data in (b"", b"news", b"")]
    assert meet(*scripts) == [[b"news", b""], [b"", b""], [b"news", b""]]


@pytest.mark.parametrize(("operation", "kind"), [(pb.OPERATION_SUM_FLOAT32, "f4"), (pb.OPERATION_SUM_FLOAT64, "f8")])
@pytest.mark.parametrize("length", [5, 100_000])
def test_sums_are_made_in_the_order_of_the_ranks(operation: Any, kind: str, length: int) -> None:
    values = [numpy.random.default_rng(rank).normal(size=length).astype(kind) for rank in range(4)]
    answers = meet(*([part(operation, one.tobytes()), FINISH] for one in values))
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    assert answers == [[expected.tobytes(), b""]] * 4


def test_what_is_not_finite_goes_through() -> None:
    values = numpy.array([numpy.inf, numpy.nan, 3e38], dtype="f4")
    ((answer, _), *_) = meet(*([part(pb.OPERATION_SUM_FLOAT32, values.tobytes()), FINISH] for _ in range(2)))
    assert [str(one) for one in numpy.frombuffer(answer, "f4")] == ["inf", "nan", "inf"]


@pytest.mark.parametrize(
    ("scripts", "reason"),
    [
        ([[FINISH], [part(pb.OPERATION_GATHER, b"x")]], "ranks 0 and 1 have sent different operations"),
        ([[part(pb.OPERATION_GATHER, b"xy")], [part(pb.OPERATION_GATHER, b"x")]], "have sent 2 and 1 bytes"),
        ([[part(pb.OPERATION_SUM_FLOAT32, b"xyz")]] * 2, "3 bytes are not a whole number of float32 values"),
        ([[part(pb.OPERATION_BROADCAST, b"", source=9)]] * 2, "different operations"),
        ([[part(77, b"")]] * 2, "operation 77 is not known"),
        ([[part(pb.OPERATION_GATHER, bytes(MAX_PART_BYTES + 1))], [SILENCE]], "rank 0 has sent a part of 1048577"),
        ([[part(pb.OPERATION_GATHER, b"x"), FINISH], [part(pb.OPERATION_GATHER, b"x")]], "rank 1 left the averaging"),
        ([[], [FINISH]], "rank 0 left the averaging"),
    ],
)
def test_what_breaks_a_round_ends_it_for_all_with_the_same_reason(scripts: list[Script], reason: str) -> None:
    answers = meet(*scripts)
    assert all(isinstance(one, str) and reason in one for one in answers), answers


def test_a_member_that_falls_silent_ends_the_round() -> None:
    answers = meet([FINISH], [part(pb.OPERATION_GATHER, b"x"), SILENCE][1:], stall_s=0.05)
    assert answers == ["rank 1 has sent nothing for 0 s"] * 2


def running(story: Callable[[Averager], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(Averager(stall_s=5.0)), 20))


def test_nobody_waits_for_long_before_all_have_met() -> None:
    async def story(averager: Averager) -> None:
        relay = Averager(stall_s=0.01).relay(JOB, ROUND, 2)
        first = asyncio.ensure_future(heard(relay, 0, [FINISH]))
        await asyncio.sleep(0.1)  # ten times the limit, which does not run yet
        assert not first.done()
        assert await heard(relay, 1, [FINISH]) == await first == [b""]

    running(story)


def test_a_member_that_is_lost_before_all_have_met_ends_the_round() -> None:
    """It does not come again, so the others would wait for it without end."""

    async def story(averager: Averager) -> None:
        relay = averager.relay(JOB, ROUND, 3)
        waiting = asyncio.ensure_future(heard(relay, 1, [FINISH, SILENCE]))
        lost = asyncio.ensure_future(heard(relay, 0, [FINISH, SILENCE]))
        await asyncio.sleep(0)
        lost.cancel()
        assert await waiting == await heard(relay, 2, [FINISH]) == "rank 0 left the averaging"

    running(story)


def test_a_stream_that_breaks_after_its_finish_does_not_break_the_round() -> None:
    async def story(averager: Averager) -> None:
        relay = averager.relay(JOB, ROUND, 2)
        first = asyncio.ensure_future(heard(relay, 0, [FINISH, SILENCE]))
        second = asyncio.ensure_future(heard(relay, 1, [SILENCE]))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.wait({first})
        assert not relay.ended.is_set()
        second.cancel()
        await asyncio.wait({second})
        assert await averager.is_complete(JOB, ROUND) is False

        relay = averager.relay(JOB, RoundId(8), 2)
        first = asyncio.ensure_future(heard(relay, 0, [FINISH, SILENCE]))
        gathering = asyncio.Event()

        async def late() -> AsyncIterator[pb.AverageRequest]:
            await gathering.wait()
            yield pb.AverageRequest(part=FINISH)

        second_answers = asyncio.ensure_future(anext(take_part(relay, 1, late())))
        await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.wait({first})
        gathering.set()
        assert await second_answers == b""
        assert await averager.is_complete(JOB, RoundId(8)) is True

    running(story)


def test_the_end_of_a_job_ends_its_rounds() -> None:
    async def story(averager: Averager) -> None:
        waiting = asyncio.ensure_future(heard(averager.relay(JOB, ROUND, 2), 0, [SILENCE]))
        await asyncio.sleep(0)
        averager.drop(JOB)
        assert await waiting == "the job has ended"
        assert await averager.is_complete(JOB, ROUND) is False

    running(story)


def test_a_rank_cannot_join_a_round_twice() -> None:
    async def story(averager: Averager) -> None:
        relay = averager.relay(JOB, ROUND, 1)
        assert await heard(relay, 0, [FINISH]) == [b""]
        assert await heard(relay, 0, [FINISH]) == "this rank has joined the round before"

    running(story)


def test_memory_is_some_chunks_for_each_member() -> None:
    """Sixteen members that send as fast as they can: what waits is bounded, whatever the model's size."""
    chunk = bytes(MAX_PART_BYTES)
    sent = 0

    async def endless(count: int) -> AsyncIterator[pb.AverageRequest]:
        nonlocal sent
        for _ in range(count):
            sent += 1
            yield pb.AverageRequest(part=part(pb.OPERATION_SUM_FLOAT32, chunk))

    async def story(averager: Averager) -> None:
        relay = averager.relay(JOB, ROUND, 2)
        eager = take_part(relay, 0, endless(1000))
        slow = take_part(relay, 1, spoken([part(pb.OPERATION_SUM_FLOAT32, chunk), SILENCE]))
        await asyncio.gather(anext(eager), anext(slow))
        await asyncio.sleep(0.05)
        assert sent <= 8
        await eager.aclose()
        await slow.aclose()

    running(story)


def test_what_is_gathered_is_no_longer_than_a_part() -> None:
    """Each of 32 ranks got 32 parts of 1 MiB joined: 73 -> 2,862 MB."""
    fits, too_long = bytes(MAX_PART_BYTES // 2), bytes(MAX_PART_BYTES // 2 + 1)
    answers = meet(*([part(pb.OPERATION_GATHER, fits), FINISH] for _ in range(2)))
    assert [len(answer) for answer in answers[0]] == [MAX_PART_BYTES, 0]
    answers = meet(*([part(pb.OPERATION_GATHER, too_long), SILENCE] for _ in range(2)))
    assert answers == [f"rank 0 has sent a part of {len(too_long)} bytes, which is too long"] * 2


def test_of_a_ranks_streams_the_newest_takes_part_and_the_others_hold_nothing() -> None:
    """100 streams of one rank, while the other had not joined: 4 parts of 1 MiB of each, +638 MB."""

    async def scenario() -> None:
        averager = Averager()
        relay = averager.relay(JOB, ROUND, 2)
        sums = [part(pb.OPERATION_SUM_FLOAT32, bytes(4)), FINISH]
        before = asyncio.ensure_future(heard(relay, 0, [part(pb.OPERATION_GATHER, b"x")] * 9 + [SILENCE]))
        await asyncio.sleep(0)
        newest = asyncio.ensure_future(heard(relay, 0, sums))
        assert await before == "another call of this rank has joined the round"
        assert await heard(relay, 1, sums) == await newest == [bytes(4), b""]
        assert await averager.is_complete(JOB, ROUND)

    asyncio.run(asyncio.wait_for(scenario(), 20))

"""A rank that need not send the rows of a header sends its digest, and the rows when it is asked for them."""

from collections.abc import Callable

import pytest

from elche.header import header_digest
from elche.v1 import rank_pb2
from support.told import Rank

Start = Callable[..., Rank]


def form(rank: Rank, generation: int) -> None:
    """The rank is in a generation in which another sends the rows."""
    group = rank_pb2.FormGroup(
        attempt=1, generation=generation, position=0, world_size=1, backend="gloo", sends_digest=True
    )
    rank.tell(form_group=group)
    rank.said.wait("group_ready", 2)
    rank.group.generation = generation
    rank.loop._replica.generations.in_use = rank.group


def until_acknowledged(rank: Rank, round_id: int, count: int) -> rank_pb2.SyncAck:
    rank.sync(round_id, after_step=rank.loop.local_step + 1, generation=2)
    rank.lease(1)
    rank.said.wait("round_entered", count)
    rank.group.may_finish.release()
    ack: rank_pb2.SyncAck = rank.said.wait("sync_ack", count)[-1]
    return ack


@pytest.fixture
def rank(start: Start) -> Rank:
    made = start(averaging="blocking")
    assert made.said.all("sync_ack")[0].header, "of a generation that says nothing of digests"
    form(made, 2)
    return made


def test_the_digest_is_sent_in_place_of_the_rows(rank: Rank) -> None:
    ack = until_acknowledged(rank, 2, 2)
    assert not ack.header
    assert ack.header_digest


def test_the_rows_are_said_before_the_generation_is_over(rank: Rank) -> None:
    ack = until_acknowledged(rank, 2, 2)
    rank.abandon(2)
    rank.said.wait("abandoned")
    assert rank.said.of_rounds()[-3:] == ["sync_ack 2", "header_reported 2", "abandoned 2"]
    reported = rank.said.all("header_reported")[0]
    assert (reported.round, reported.generation) == (2, 2)
    assert header_digest(reported.header) == ack.header_digest
    assert reported.header[0].local_step == 1


def test_rows_are_kept_until_they_are_asked_for(rank: Rank) -> None:
    until_acknowledged(rank, 2, 2)
    rank.abandon(2, keeps_headers=True)
    rank.said.wait("abandoned")
    assert not rank.said.all("header_reported")
    rank.abandon(2)
    rank.said.wait("abandoned", 2)
    assert rank.said.of_rounds()[-3:] == ["abandoned 2", "header_reported 2", "abandoned 2"]


def test_the_rows_of_a_committed_round_are_not_kept(rank: Rank) -> None:
    until_acknowledged(rank, 2, 2)
    rank.tell(round_outcome=rank_pb2.RoundOutcome(round=2, version=2))
    until_acknowledged(rank, 3, 3)
    rank.abandon(2)
    rank.said.wait("abandoned")
    assert [reported.round for reported in rank.said.all("header_reported")] == [3]

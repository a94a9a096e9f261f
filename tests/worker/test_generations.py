"""Generations that are given up, formed anew and switched to while a rank trains: what it does, and what it says."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche_worker.collectives.operations import CollectiveFailed, Collectives, OperationStuck
from elche_worker.rank import connect, replica
from elche_worker.rank.acts import JoinGeneration
from support.real_processes import eventually
from support.solo import BATCH_SIZE
from support.told import Rank, Slow

Start = Callable[..., Rank]
WAYS = ["blocking", "overlapped"]


def parameters(rank: Rank) -> torch.Tensor:
    return nn.utils.parameters_to_vector(rank.loop._replica.model.parameters()).detach().clone()


# Giving up


@pytest.mark.parametrize("averaging", WAYS)
def test_what_runs_is_ended_and_said_before_the_generation_is_over(start: Start, averaging: str) -> None:
    rank = start(averaging=averaging)
    rank.sync(2, after_step=2)
    rank.lease(2)
    rank.said.wait("round_entered", 2)
    before = parameters(rank)
    rank.abandon(1)
    assert rank.said.wait("abandoned")[0].reason == ""
    assert rank.said.of_rounds()[-3:] == ["round_entered 2", "round_failed 2", "abandoned 1"]
    assert torch.equal(parameters(rank), before)
    rank.lease(3)
    rank.until_step(5)
    rank.form(2)
    rank.said.wait("group_ready", 2)
    rank.sync(3, after_step=5, generation=2)
    row = rank.said.wait("sync_ack", 2)[-1].header[0]
    assert (row.weight, row.cut, row.version) == (5 * BATCH_SIZE, 5 * BATCH_SIZE, 1), "with the work put back"


@pytest.mark.parametrize("averaging", WAYS)
def test_a_result_that_comes_as_the_generation_is_given_up_is_held(start: Start, averaging: str) -> None:
    rank = start(averaging=averaging)
    rank.group.survives_abort = True
    rank.sync(2, after_step=2)
    rank.lease(2)
    rank.said.wait("round_entered", 2)
    rank.abandon(1)
    rank.said.wait("abandoned")
    assert rank.said.of_rounds()[-3:] == ["round_entered 2", "sync_ack 2", "abandoned 1"]


def test_a_result_that_waits_for_a_later_batch_is_applied_at_once(start: Start) -> None:
    """A replay applies results where the recorded run has applied them; a generation's end does not wait for that."""
    rank = start(averaging="overlapped")
    rank.sync(2, after_step=2, newer_batches=3)
    rank.lease(2)
    rank.said.wait("round_entered", 2)
    rank.group.may_finish.release()
    with rank.control.wake:
        assert rank.control.wake.wait_for(lambda: rank.loop._averaging.is_done, timeout=100)
    rank.abandon(1)
    rank.said.wait("abandoned")
    assert rank.said.of_rounds()[-3:] == ["round_entered 2", "sync_ack 2", "abandoned 1"]


def test_between_rounds_there_is_nothing_to_end_and_each_question_is_answered(start: Start) -> None:
    rank = start()
    for count, generation in enumerate([1, 1, 9], 1):
        rank.abandon(generation)
        assert rank.said.wait("abandoned", count)[-1].generation == generation
    rank.lease(3)
    rank.until_step(3)


def test_a_rank_that_loses_a_peer_says_so_unasked_and_trains_on(start: Start) -> None:
    rank = start()
    rank.sync(2, after_step=2)
    rank.lease(2)
    rank.said.wait("round_entered", 2)
    rank.group.abort()  # as another rank's end does
    assert rank.said.wait("abandoned")[0].reason == "the sockets were shut"
    assert rank.said.wait("round_failed")[0].reason == "the sockets were shut"
    rank.lease(2)
    rank.until_step(4)
    rank.abandon(1)
    assert rank.said.wait("abandoned", 2)[-1].reason == ""
    assert rank.said.of_rounds()[-3:] == ["round_failed 2", "abandoned 1", "abandoned 1"]


def test_announced_rounds_of_a_generation_that_is_given_up_are_not_entered(start: Start) -> None:
    rank = start()
    rank.sync(2, after_step=3, stop_after=True)
    rank.lease(6)
    rank.until_step(3)
    rank.abandon(1)
    rank.said.wait("abandoned")
    rank.sync(3, after_step=4)  # sent before the coordinator had heard that
    rank.form(2)
    rank.said.wait("group_ready", 2)
    rank.sync(4, after_step=6, generation=2)
    rank.said.wait("sync_ack", 2)
    assert [one.round for one in rank.said.all("round_entered") if one.generation == 1] in ([1], [1, 2])
    assert rank.said.all("round_entered")[-1].round == 4


def test_an_operation_that_does_not_return_ends_the_rank(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "STUCK_S", 0.1)
    rank = start()
    rank.ends_with = OperationStuck
    monkeypatch.setattr(rank.group, "abort", lambda: None)
    rank.sync(2, after_step=0)
    rank.said.wait("round_entered", 2)
    rank.abandon(1)
    rank._thread.join(400)
    assert "round 2 was aborted, and its collective has not returned" in str(rank.ended[0])
    assert not rank.said.all("abandoned")


@pytest.mark.parametrize("is_early", [False, True])
def test_a_loop_that_is_blocked_until_the_collective_ends_is_freed(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """CUDA does not load a kernel while another runs, such as a collective's that waits for a lost rank. The order may
    come just before the round begins, and just after the loop has looked for orders.
    """
    rank = start(averaging="overlapped")
    one, is_blocked = rank.loop._replica, threading.Event()
    train, enter = one.train, one.enter_round

    def wait_until_none_runs() -> None:
        while rank.loop._averaging.is_running and not rank.loop._averaging.is_done:
            is_blocked.set()
            time.sleep(0.001)

    def train_late(*given: Any) -> Any:
        wait_until_none_runs()
        return train(*given)

    def enter_late(*given: Any) -> None:
        if is_early:
            rank.abandon(1)
        enter(*given)
        if is_early:
            wait_until_none_runs()

    monkeypatch.setattr(one, "train", train_late)
    monkeypatch.setattr(one, "enter_round", enter_late)
    rank.sync(2, after_step=2)
    rank.lease(3)
    if not is_early:
        assert is_blocked.wait(400)
        rank.abandon(1)
    assert rank.said.wait("abandoned")[0].generation == 1
    assert rank.said.of_rounds()[-3:] == ["round_entered 2", "round_failed 2", "abandoned 1"]
    rank.until_step(3)


def test_an_operation_that_an_abort_has_missed_is_aborted_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = start()
    aborts = iter((lambda: None, [].pop, rank.group.abort))  # nothing, an error, the real one

    def abort() -> None:
        next(aborts)()

    monkeypatch.setattr(rank.group, "abort", abort)
    rank.sync(2, after_step=0)
    rank.said.wait("round_entered", 2)
    rank.abandon(1)
    rank.said.wait("abandoned")
    assert rank.said.of_rounds()[-2:] == ["round_failed 2", "abandoned 1"]


# Building and switching


class Builds:
    """Groups that stand when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_end: dict[int, threading.Event] = {}
        self.failing: set[int] = set()
        monkeypatch.setattr(replica, "connect", lambda act, *_: self._connect(act))

    def _connect(self, act: JoinGeneration) -> Collectives:
        assert self.of(act.generation).wait(400)
        if act.generation in self.failing:
            raise CollectiveFailed("the ranks could not meet: no route")
        group = Slow(act.generation)
        group.may_finish.release(100)
        return group

    def of(self, generation: int) -> threading.Event:
        return self._may_end.setdefault(generation, threading.Event())


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    builds = Builds(monkeypatch)
    builds.of(1).set()
    return builds


def test_training_and_rounds_go_on_while_a_group_is_built_and_the_switch_is_at_a_round(
    builds: Builds, start: Start
) -> None:
    rank = start(lr_scale_ratio=1.0)
    rank.group.may_finish.release(100)
    rank.form(2, size=3)
    rank.lease(60)
    rank.sync(2, after_step=20)
    rank.said.wait("sync_ack", 2)
    rank.until_step(60)
    assert len(rank.said.all("group_ready")) == 1, "the second group is still being built, and no batch waits for it"
    rates = rank.loop._replica.rates
    builds.of(2).set()
    assert rank.said.wait("group_ready", 2)[-1].generation == 2
    rank.lease(10)
    rank.until_step(70)
    assert (rates.scale, rank.loop._replica.checkpoints.writer.num_ranks) == (1.0, 1), "until a round is entered in it"
    rank.sync(3, after_step=70, generation=2)
    ack = rank.said.wait("sync_ack", 3)[-1]
    assert (ack.generation, rates.scale, rank.loop._replica.checkpoints.writer.num_ranks) == (2, 3.0, 3)
    assert [one.generation for one in rank.said.all("round_entered")] == [1, 1, 2]


def test_a_newer_group_is_not_kept_waiting_by_an_older_build(builds: Builds, start: Start) -> None:
    rank = start()
    rank.form(2, size=2)
    rank.form(3, size=2)
    builds.of(3).set()
    assert rank.said.wait("group_ready", 2)[-1].generation == 3
    builds.of(2).set()
    rank.sync(2, after_step=0, generation=3)
    rank.said.wait("sync_ack", 2)
    rank.abandon(2)
    rank.said.wait("abandoned")
    assert rank.said.of_rounds()[-4:] == ["group_ready 3", "round_entered 2", "sync_ack 2", "abandoned 2"]


def test_a_group_that_stands_can_be_used_while_a_newer_one_is_built(builds: Builds, start: Start) -> None:
    rank = start()
    rank.form(2, size=2)
    builds.of(2).set()
    rank.said.wait("group_ready", 2)
    rank.form(3, size=2)
    rank.sync(2, after_step=0, generation=2)
    assert rank.said.wait("sync_ack", 2)[-1].generation == 2
    builds.of(3).set()
    rank.said.wait("group_ready", 3)


def test_a_group_that_cannot_be_built_is_given_up_and_the_old_one_goes_on(builds: Builds, start: Start) -> None:
    rank = start()
    builds.failing.add(2)
    builds.of(2).set()
    rank.form(2, size=2)
    told = rank.said.wait("abandoned")[0]
    assert (told.generation, told.reason) == (2, "the ranks could not meet: no route")
    rank.group.may_finish.release()
    rank.sync(2, after_step=0)
    assert rank.said.wait("sync_ack", 2)[-1].generation == 1


def test_a_build_that_is_given_up_says_nothing_more_and_the_old_generation_goes_on(
    builds: Builds, start: Start
) -> None:
    rank = start()
    rank.form(2, size=2)
    rank.abandon(2)
    rank.said.wait("abandoned")
    builds.of(2).set()
    rank.group.may_finish.release()
    rank.sync(2, after_step=0)
    rank.said.wait("sync_ack", 2)
    assert rank.said.of_rounds()[-3:] == ["abandoned 2", "round_entered 2", "sync_ack 2"]


def test_a_first_group_that_cannot_be_built_is_said_and_another_may_follow(builds: Builds, tmp_path: Path) -> None:
    builds.failing.add(1)
    with ExitStack() as stack:
        rank = Rank(tmp_path, stack)
        rank.form(1, size=2)
        assert rank.said.wait("abandoned")[0].reason == "the ranks could not meet: no route"
        builds.of(7).set()
        rank.form(7, size=2)
        rank.said.wait("group_ready")
        rank.sync(1, after_step=0, generation=7)
        rank.said.wait("sync_ack")


# Real groups


class Team:
    """Ranks of one job that meet over gloo, through a store of the test's own."""

    def __init__(self, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self.store.port
        monkeypatch.setattr(connect, "CoordinatorStore", lambda channel, secret: dist.TCPStore("127.0.0.1", port))
        self._folder, self._stack = folder, stack

    def rank(self, rank: int, **changes: Any) -> Rank:
        return Rank(self._folder, self._stack, rank=rank, **changes)

    def process(self, position: int, size: int, how: str) -> subprocess.Popen[bytes]:
        """A member of generation 1 that ends in its second round."""
        script = [sys.executable, str(Path(__file__).parents[1] / "support" / "member.py")]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        started = subprocess.Popen([*script, str(self.store.port), str(position), str(size), how], env=env)
        self._stack.callback(started.wait)
        self._stack.callback(started.kill)
        return started

    def form(self, generation: int, *ranks: Rank, more: int = 0) -> None:
        """All meet; `more` of them are other processes."""
        for position, rank in enumerate(ranks):
            rank.form(generation, position, len(ranks) + more)
        for rank in ranks:
            rank.said.until(lambda said: any(one.generation == generation for one in said.all("group_ready")))

    def round(self, round_id: int, generation: int, *ranks: Rank) -> list[Any]:
        """A round of all, after what they have trained; their acknowledgements."""
        for rank in ranks:
            rank.sync(round_id, after_step=rank.loop.local_step, generation=generation)
        for rank in ranks:
            rank.said.until(lambda said: any(one.round == round_id for one in said.all("sync_ack")))
        return [rank.said.all("sync_ack")[-1] for rank in ranks]


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    with ExitStack() as stack:
        yield Team(tmp_path, stack, monkeypatch)


@pytest.mark.parametrize(
    ("how", "averaging"),
    [
        ("stop", "overlapped"),
        pytest.param("kill", "blocking", marks=pytest.mark.long(reason="processes/test_lost_ranks.py kills")),
    ],
)
def test_survivors_of_a_round_that_a_rank_did_not_end_go_on_without_it(team: Team, how: str, averaging: str) -> None:
    way = {"averaging": averaging, "merge": "mean"}
    ranks = [team.rank(0, **way), team.rank(1, **way)]
    gone = team.process(2, 3, how)
    team.form(1, *ranks, more=1)
    team.round(1, 1, *ranks)
    for rank, num_batches in zip(ranks, (1, 3), strict=True):
        rank.lease(num_batches)
        rank.until_step(num_batches)
    before = [parameters(rank) for rank in ranks]
    for rank in ranks:
        rank.sync(2, after_step=0)
    for rank in ranks:
        rank.said.wait("round_entered", 2)
    until_ended(gone, how)
    for rank in ranks:
        rank.abandon(1)
    for rank in ranks:
        rank.said.until(lambda said: any(not one.reason for one in said.all("abandoned")))
    for rank, values in zip(ranks, before, strict=True):
        assert rank.said.of_rounds()[-1] == "abandoned 1"
        assert rank.said.all("round_failed")[0].round == 2
        assert torch.equal(parameters(rank), values)
    if how == "stop":
        # The other one may be told by the first one's closed connection before.
        reasons = [rank.said.all("round_failed")[0].reason for rank in ranks]
        assert "generation 1 was given up" in reasons, "nothing else has ended it"
    team.form(2, *ranks)
    acks = team.round(3, 2, *ranks)
    assert [[row.weight for row in ack.header] for ack in acks] == [[4, 12], [4, 12]]
    expected = (before[0] * 4 + before[1] * 12) / 16
    for rank in ranks:
        assert torch.equal(parameters(rank), expected), "nothing of the rank that is gone is in it"
        assert rank.loop.progress.samples == 16


def until_ended(process: subprocess.Popen[bytes], how: str) -> None:
    """Until the process has stopped or killed itself."""
    if how == "kill":
        process.wait()
        return
    status = Path(f"/proc/{process.pid}/stat")
    eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "it has stopped")


def test_a_newcomer_gets_what_the_others_have(team: Team) -> None:
    outer = {"outer_optimizer": "nesterov"}
    ranks = [team.rank(0, **outer), team.rank(1, **outer)]
    team.form(1, *ranks)
    team.round(1, 1, *ranks)
    for round_id in (2, 3):
        for rank in ranks:
            rank.lease(round_id)
            rank.until_step(rank.loop.local_step + round_id if round_id == 2 else 5)
        team.round(round_id, 1, *ranks)
    newcomer = team.rank(2, **outer)
    with torch.no_grad():
        next(newcomer.loop._replica.model.parameters()).fill_(float("nan"))
    everybody = [*ranks, newcomer]
    team.form(9, *everybody)
    ranks[1].lease(2)
    ranks[1].until_step(7)
    acks = team.round(4, 9, *everybody)
    assert [row.version for row in acks[2].header] == [3, 3, 0]
    first = parameters(ranks[0])
    memory = ranks[0].loop._replica.averaging.reduction._memories["float32"]
    for rank in everybody:
        assert torch.equal(parameters(rank), first)
        assert torch.isfinite(first).all()
        assert rank.loop.progress.samples == (5 + 7) * BATCH_SIZE
        own = rank.loop._replica.averaging.reduction._memories["float32"]
        assert torch.equal(own.last, memory.last)
        assert torch.equal(own.moments[0], memory.moments[0])
        assert int(own.num_steps) == 3
    newcomer.lease(3)
    newcomer.until_step(3)
    assert newcomer.loop.progress.samples == 15 * BATCH_SIZE
    team.round(5, 9, *everybody)
    assert [rank.loop.progress.samples for rank in everybody] == [15 * BATCH_SIZE] * 3
    assert all(torch.equal(parameters(rank), parameters(newcomer)) for rank in ranks)

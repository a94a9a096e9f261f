"""Loops of the user's own: they decide by themselves, and the coordinator sees, shows, pauses and cancels them."""

import pickle
from typing import Any

import pytest

from elche_coordinator import codec
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.describe import JobView, describe_loop
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.life.job import STOP_GRACE_S
from elche_coordinator.core.loops.attached import JOIN_GRACE_S
from elche_coordinator.core.messages.commands import (
    Command,
    Publish,
    SendAbandon,
    SendFormGroup,
    SendPauseLoop,
    SendSaveCheckpoint,
    SendShutdown,
)
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    CheckpointFailed,
    CheckpointRequested,
    CheckpointSaved,
    DeadlinePassed,
    EvaluationDone,
    GenerationAbandoned,
    JobCancelled,
    LoopAttached,
    LoopEpochEnded,
    LoopLeft,
    LoopProgressed,
    PauseRequested,
    RankFailed,
    SessionLost,
    SessionOpened,
)
from elche_coordinator.core.messages.ids import GenerationId, JobId, Rank, Version
from elche_coordinator.core.messages.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    JobResult,
    MembershipReport,
    Outcome,
    UserEvent,
)
from elche_coordinator.core.messages.spec import EpochWork, JobSpec

JOB = JobId("loop")


class Attached:
    """A coordinator with one loop of some ranks; every event is followed by a check of the rules."""

    def __init__(self, num_ranks: int = 2, *, can_regroup: bool = False) -> None:
        self.core = Coordinator()
        self.now_s = 100.0
        spec = JobSpec(name="loop", source_hash="", file_name="loop.py", num_ranks=num_ranks, is_loop=True)
        ranks = tuple((f"host{rank}", "cpu") for rank in range(num_ranks))
        event = LoopAttached(
            job_id=JOB, spec=spec, ranks=ranks, policy="El Che", submitted_at=0.0, can_regroup=can_regroup
        )
        self.first = self.core.handle(event, now_s=self.now_s)

    def handle(self, event: Any) -> list[Command]:
        self.now_s += 1.0
        commands = self.core.handle(event, now_s=self.now_s)
        check_invariants(self.core)
        return commands

    def of(self, rank: int) -> dict[str, Any]:
        return self.core.jobs[JOB].ranks[Rank(rank)].address

    def batches(self, rank: int, step: int, samples: int, **more: Any) -> list[Command]:
        event = BatchesTrained(**self.of(rank), local_step=step, num_processed=samples, batch_ms=(20.0,), **more)
        return self.handle(event)

    def progress(self, num_steps: int, **more: Any) -> list[Command]:
        values = {"epoch": 0, "num_epochs": 2, "epoch_size": 100, "epoch_done": 50, "batch_size": 10, "anchor": 4}
        event = LoopProgressed(**self.of(0), num_steps=num_steps, averaging_ms=5.0, **{**values, **more})
        return self.handle(event)

    def abandoned(self, rank: int, generation: int, reason: str = "") -> list[Command]:
        event = GenerationAbandoned(**self.of(rank), generation=GenerationId(generation), reason=reason)
        return self.handle(event)

    def lose(self, rank: int) -> list[Command]:
        return self.handle(SessionLost(**self.of(rank)))

    def ended_epoch(
        self, rank: int, epoch: int, samples: int, *, has_loss: bool = True, num_done: int = 0
    ) -> list[Command]:
        work = EpochWork(
            epoch=epoch,
            num_batches=5,
            num_samples=samples,
            loss_sum=2.5 if has_loss else 0.0,
            has_loss=has_loss,
            scalars={"a": (1.0, 2)},
        )
        return self.handle(LoopEpochEnded(**self.of(rank), work=work, duration_s=3.0, num_done=num_done))

    @property
    def view(self) -> JobView:
        return describe_loop(self.core.jobs[JOB], self.now_s)

    @property
    def result(self) -> JobResult | None:
        return self.core.jobs[JOB].result


def reports(commands: list[Command], kind: type) -> list[Any]:
    return [one.report for one in commands if isinstance(one, Publish) and isinstance(one.report, kind)]


def test_a_loss_that_a_rank_does_not_tell_is_no_zero() -> None:
    loop = Attached()
    loop.ended_epoch(0, 0, 60, has_loss=False)
    (report,) = reports(loop.ended_epoch(1, 0, 40), EpochReport)
    assert report.loss == 0.5
    loop.ended_epoch(0, 1, 60, has_loss=False)
    (report,) = reports(loop.ended_epoch(1, 1, 40, has_loss=False), EpochReport)
    assert report.loss is None


def test_a_loop_trains_from_its_first_moment_and_takes_no_slot() -> None:
    loop = Attached()
    assert loop.view.state == "training"
    assert [rank.state for rank in loop.view.ranks] == ["training", "training"]
    assert [rank.host for rank in loop.view.ranks] == ["host0", "host1"]
    assert loop.core.fleet.taken == {}
    assert (
        loop.core.handle(
            LoopAttached(job_id=JOB, spec=loop.core.jobs[JOB].spec, ranks=(), policy="", submitted_at=0.0), now_s=200.0
        )
        == []
    )


def test_what_ranks_say_is_shown() -> None:
    loop = Attached()
    loop.batches(0, 4, 40, loss_sum=2.0, loss_count=4, data_wait_ms=7.0, waited_ms=500.0)
    loop.batches(1, 1, 10, loss_sum=1.0, loss_count=1)
    loop.progress(1)
    view = loop.view
    assert (view.num_samples, view.num_rounds, view.anchor, view.num_epochs) == (50, 1, 4, 2)
    assert view.loss == pytest.approx(0.75)
    assert view.progress_fraction == pytest.approx(0.25)
    assert view.samples_per_s == pytest.approx(50 / 2)
    assert view.eta_s == pytest.approx(150 / 25)
    assert [rank.share_fraction for rank in view.ranks] == [0.8, 0.2]
    assert view.ranks[0].waited_s == 0.5
    assert view.ranks[0].ms_per_batch == pytest.approx(20.0)


def test_shares_of_a_loop_are_of_its_samples_where_ranks_have_batches_of_unequal_size() -> None:
    loop = Attached()
    loop.batches(0, 5, 75)
    loop.batches(1, 5, 25)
    assert [rank.share_fraction for rank in loop.view.ranks] == [0.75, 0.25]
    for rank in (0, 1):
        loop.handle(LoopLeft(**loop.of(rank)))
    assert loop.result is not None
    assert [rank.samples for rank in loop.result.ranks] == [75, 25]


def test_shares_of_a_loop_that_does_not_say_its_samples_are_of_its_batches() -> None:
    loop = Attached()
    assert [rank.share_fraction for rank in loop.view.ranks] == [0.0, 0.0]
    loop.batches(0, 3, 0)
    loop.batches(1, 1, 0)
    assert [rank.share_fraction for rank in loop.view.ranks] == [0.75, 0.25]


def test_the_speed_of_a_loop_that_trains_one_sample_a_batch_is_its_batches() -> None:
    loop = Attached()
    loop.batches(0, 5, 5)
    loop.batches(1, 5, 10)
    assert [rank.samples_per_s for rank in loop.view.ranks] == [50.0, 100.0]


def test_old_news_changes_nothing() -> None:
    loop = Attached()
    loop.progress(5, epoch_done=60)
    loop.progress(4, epoch_done=50)
    loop.batches(0, 6, 60)
    loop.batches(0, 5, 50)
    assert loop.view.epoch_committed == 60
    assert loop.view.ranks[0].num_samples == 60


def test_an_epoch_is_told_once_when_all_ranks_have_ended_it() -> None:
    loop = Attached()
    assert reports(loop.ended_epoch(0, 0, 60), EpochReport) == []
    assert reports(loop.ended_epoch(0, 0, 60), EpochReport) == []
    told = loop.ended_epoch(1, 0, 40)
    (report,) = reports(told, EpochReport)
    assert (report.epoch, report.committed, report.loss, report.rank_batches) == (0, 100, 0.5, (5, 5))
    assert report.scalars == {"a": 0.5}
    assert reports(loop.ended_epoch(1, 0, 40), EpochReport) == []


def test_epochs_are_told_in_order_even_if_a_rank_never_says_that_it_ended_them() -> None:
    loop, told = Attached(), []
    for epoch in range(8):
        told += reports(loop.ended_epoch(0, epoch, 60), EpochReport)
    assert [report.epoch for report in told] == [0, 1, 2, 3]


def test_an_epoch_that_was_told_without_a_rank_is_not_told_again_when_the_rank_is_heard() -> None:
    """After an absence of the coordinator one rank is heard of all its epochs before the other is."""
    loop, told = Attached(), []
    for rank in (0, 1):
        for epoch in range(8):
            told += reports(loop.ended_epoch(rank, epoch, 60, num_done=120), EpochReport)
    assert [report.epoch for report in told] == list(range(8))
    for rank in (0, 1):
        loop.handle(LoopLeft(**loop.of(rank)))
    assert loop.result is not None
    assert (loop.result.epochs, loop.result.committed_samples) == (8, (120,) * 8)


def test_the_epochs_of_a_resumed_loop_are_those_of_the_whole_training() -> None:
    """The summary of a loop that was resumed in epoch 5 of 12 said 7 epochs, beside the rounds of all twelve."""
    loop = Attached(1)
    for epoch in range(5, 12):
        loop.ended_epoch(0, epoch, 100)
    loop.progress(72, num_epochs=12)
    loop.handle(LoopLeft(**loop.of(0)))
    assert loop.result is not None
    assert (loop.result.epochs, loop.result.committed_samples) == (12, (100,) * 7)


@pytest.mark.parametrize("num_epochs", [0, 3])
def test_the_epochs_of_a_loop_that_numbers_them_from_1_are_as_many_as_there_were(num_epochs: int) -> None:
    """The summary of `for epoch in range(1, 4)` said 4 epochs."""
    loop = Attached(1)
    for epoch in range(1, 4):
        loop.ended_epoch(0, epoch, 100)
    loop.progress(30, num_epochs=num_epochs)
    loop.handle(LoopLeft(**loop.of(0)))
    assert loop.result is not None
    assert loop.result.epochs == 3


def test_a_loop_whose_epochs_have_the_highest_number_has_a_result_that_can_be_told() -> None:
    loop = Attached(1)
    loop.progress(1, num_epochs=2**32 - 1)
    for _ in range(2):
        loop.ended_epoch(0, 2**32 - 1, 100)
    loop.handle(LoopLeft(**loop.of(0)))
    assert loop.result is not None
    assert codec.watch_message(loop.result).result.epochs == 2**32 - 1


def test_what_one_rank_says_of_epoch_after_epoch_is_not_kept_for_each_of_the_others() -> None:
    """In a loop of 10,000 ranks each message of 20 bytes took 500 kB."""
    loop, sizes = Attached(30), []
    for epoch in range(120):
        loop.ended_epoch(7, epoch, 1)
        if epoch in (19, 119):
            sizes.append(len(pickle.dumps(loop.core)))
    assert sizes[1] - sizes[0] < 3_000


def test_a_rank_that_left_an_epoch_out_is_heard_of_later_ones() -> None:
    loop, told = Attached(), []
    for epoch in range(6):
        told += reports(loop.ended_epoch(0, epoch, 60), EpochReport)
    for epoch in (0, 2, 3):
        told += reports(loop.ended_epoch(1, epoch, 40), EpochReport)
    assert [(report.epoch, report.committed) for report in told] == [(0, 60), (1, 60), (2, 100), (3, 100)]
    assert reports(loop.ended_epoch(1, 0, 40), EpochReport) == [], "it begins anew"
    assert reports(loop.ended_epoch(0, 0, 60), EpochReport)[0].committed == 100


def test_evaluations_and_checkpoints_are_told() -> None:
    loop = Attached()
    done = EvaluationDone(**loop.of(0), epoch=1, sums={"accuracy": (0.9, 1)}, duration_ms=50.0)
    assert reports(loop.handle(done), EvaluationReport)[0].metrics == {"accuracy": 0.9}
    asked = loop.handle(CheckpointRequested(job_id=JOB))
    assert [type(one) for one in asked] == [SendSaveCheckpoint]
    saved = CheckpointSaved(**loop.of(0), version=Version(7), path="/c/step-7", size_bytes=10, duration_s=0.5)
    assert reports(loop.handle(saved), Checkpoint)[0].name == "step-7"
    failed = [CheckpointFailed(**loop.of(0), version=Version(number), reason="no space") for number in (8, 9)]
    assert [one.text.partition(",")[0] for one in reports(loop.handle(failed[0]), UserEvent)] == ["no space"]
    assert reports(loop.handle(failed[1]), UserEvent) == [], "the others are only counted"
    assert [one.path for one in loop.view.checkpoints] == ["/c/step-7"]
    assert loop.view.num_checkpoint_failures == 2
    assert loop.view.metrics == {"accuracy": 0.9}


def test_a_pause_reaches_every_rank_and_is_shown() -> None:
    loop = Attached()
    asked = loop.handle(PauseRequested(job_id=JOB, is_paused=True))
    assert [(one.rank, one.is_paused) for one in asked if isinstance(one, SendPauseLoop)] == [(0, True), (1, True)]
    assert loop.view.state == "paused"
    loop.handle(PauseRequested(job_id=JOB, is_paused=False))
    assert loop.view.state == "training"


def test_a_loop_succeeds_when_all_its_ranks_have_left() -> None:
    loop = Attached()
    loop.progress(9)
    loop.ended_epoch(0, 0, 60)
    loop.ended_epoch(1, 0, 40)
    assert not reports(loop.handle(LoopLeft(**loop.of(0))), JobResult)
    loop.handle(SessionLost(**loop.of(0)))
    assert loop.view.state == "training", "the other rank is not asked to leave"
    told = loop.handle(LoopLeft(**loop.of(1)))
    (result,) = reports(told, JobResult)
    assert result.outcome is Outcome.SUCCEEDED
    assert (result.rounds, result.committed_samples, result.epochs) == (9, (100,), 1)


def test_a_rank_that_is_gone_without_a_word_fails_the_job_and_the_others_are_told() -> None:
    loop = Attached()
    loop.batches(1, 7, 70)
    told = loop.handle(SessionLost(**loop.of(1)))
    assert [one.rank for one in told if isinstance(one, SendShutdown)] == [0]
    loop.handle(LoopLeft(**loop.of(0)))
    assert loop.result is not None
    assert loop.result.outcome is Outcome.FAILED
    assert loop.result.error == "rank 1 on host1 (cpu) disconnected without reporting an exit, at batch 7"


def test_a_rank_that_never_comes_is_gone_after_a_while() -> None:
    loop = Attached()
    loop.handle(SessionOpened(**loop.of(0)))
    loop.now_s += JOIN_GRACE_S
    told = loop.handle(DeadlinePassed())
    assert [one.rank for one in told if isinstance(one, SendShutdown)] == [0]
    loop.handle(LoopLeft(**loop.of(0)))
    assert loop.result is not None
    assert "rank 1 on host1 never connected" in loop.result.error


def test_ranks_that_have_come_are_left_alone() -> None:
    loop = Attached()
    for rank in range(2):
        loop.handle(SessionOpened(**loop.of(rank)))
    loop.now_s += JOIN_GRACE_S
    assert loop.handle(DeadlinePassed()) == []
    assert loop.view.state == "training"


def test_what_a_rank_raises_fails_the_job() -> None:
    loop = Attached()
    loop.handle(RankFailed(**loop.of(0), error="ValueError: on purpose", traceback="where"))
    for rank in range(2):
        loop.handle(SessionLost(**loop.of(rank)))
    assert loop.result is not None
    assert (loop.result.outcome, loop.result.traceback) == (Outcome.FAILED, "where")


def test_a_cancelled_loop_ends_with_its_ranks_or_after_the_grace_time() -> None:
    for leaves in (True, False):
        loop = Attached()
        loop.batches(0, 4, 40)
        loop.progress(1)
        told = loop.handle(JobCancelled(job_id=JOB))
        assert [one.rank for one in told if isinstance(one, SendShutdown)] == [0, 1]
        assert loop.view.eta_s == 0.0, "it trains no more"
        loop.handle(LoopLeft(**loop.of(0)))
        assert loop.result is None
        if leaves:
            loop.handle(LoopLeft(**loop.of(1)))
        else:
            loop.now_s += STOP_GRACE_S
            loop.handle(DeadlinePassed())
        assert loop.result is not None
        assert loop.result.outcome is Outcome.CANCELLED
        assert loop.view.eta_s == 0.0


def test_ranks_of_a_cancelled_loop_have_all_of_the_grace_time_to_leave() -> None:
    """A time that was set before, for them to come, is none at which they must have left."""
    loop = Attached()
    for rank in range(2):
        loop.handle(SessionOpened(**loop.of(rank)))
    loop.now_s += JOIN_GRACE_S - STOP_GRACE_S
    loop.handle(JobCancelled(job_id=JOB))
    loop.now_s += STOP_GRACE_S - 2
    loop.handle(DeadlinePassed())
    assert loop.result is None
    loop.handle(DeadlinePassed())
    assert loop.result is not None


def asked(commands: list[Command], generation: int) -> list[int]:
    """The ranks that are to give the generation up."""
    return [one.rank for one in commands if isinstance(one, SendAbandon) and one.generation == generation]


def formed(commands: list[Command]) -> list[tuple[int, int, int, int]]:
    """(rank, generation, position, size) of a group that is to be formed."""
    orders = [one for one in commands if isinstance(one, SendFormGroup)]
    return [(one.rank, one.generation, one.position, one.world_size) for one in orders]


def test_the_others_go_on_without_a_rank_that_has_died() -> None:
    loop = Attached(3, can_regroup=True)
    commands = loop.lose(0)
    assert asked(commands, 0) == [1, 2]
    (report,) = reports(commands, MembershipReport)
    assert (report.rank, report.num_ranks) == (0, 2)
    assert "rank 0 on host0 (cpu) disconnected without reporting an exit" in report.text
    assert formed(loop.abandoned(2, 0)) == []
    assert formed(loop.abandoned(1, 0)) == [(1, 1, 0, 2), (2, 1, 1, 2)]
    assert loop.view.state == "training"
    assert loop.view.counts.regroups == 1
    loop.handle(LoopLeft(**loop.of(1)))
    loop.handle(LoopLeft(**loop.of(2)))
    assert loop.result is not None
    assert loop.result.outcome is Outcome.SUCCEEDED


def test_a_rank_whose_collective_has_failed_says_so_before_the_death_is_known() -> None:
    loop = Attached(3, can_regroup=True)
    assert asked(loop.abandoned(1, 0, "closed by peer"), 0) == [0, 1, 2]
    assert loop.abandoned(0, 0, "closed by peer") == []
    commands = loop.lose(2)
    assert asked(commands, 0) == []
    assert formed(commands) == [(0, 1, 0, 2), (1, 1, 1, 2)]


def test_another_dies_while_the_group_is_formed() -> None:
    loop = Attached(4, can_regroup=True)
    loop.lose(3)
    loop.abandoned(0, 0)
    loop.abandoned(1, 0)
    assert len(formed(loop.abandoned(2, 0))) == 3
    assert asked(loop.lose(2), 1) == [0, 1]
    assert loop.abandoned(1, 0) == []  # old news
    loop.abandoned(1, 1)
    assert formed(loop.abandoned(0, 1)) == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert formed(loop.lose(1)) == []
    assert formed(loop.abandoned(0, 2)) == [(0, 3, 0, 1)]


def test_a_group_that_breaks_without_a_death_is_formed_again_but_not_for_ever() -> None:
    loop = Attached(2, can_regroup=True)
    for generation in range(8):
        loop.batches(0, generation + 1, 10)
        loop.abandoned(0, generation, "timed out")
        assert len(formed(loop.abandoned(1, generation, "timed out"))) == 2
    for generation in range(8, 12):
        loop.abandoned(0, generation, "timed out")
        assert len(formed(loop.abandoned(1, generation, "timed out"))) == 2
    loop.abandoned(0, 12, "timed out")
    commands = loop.abandoned(1, 12, "timed out")
    assert formed(commands) == []
    assert loop.core.jobs[JOB].reason == "5 groups in a row have trained no batch: timed out"


def test_the_last_rank_and_a_loop_that_cannot_regroup_fail_the_job() -> None:
    alone = Attached(2, can_regroup=True)
    alone.lose(0)
    alone.lose(1)
    assert alone.result is not None
    assert alone.result.outcome is Outcome.FAILED
    fixed = Attached(2)
    fixed.lose(0)
    assert not fixed.core.jobs[JOB].is_open
    assert formed(fixed.abandoned(1, 0)) == []


def test_an_epoch_is_told_when_all_that_are_left_have_ended_it() -> None:
    loop = Attached(3, can_regroup=True)
    loop.ended_epoch(0, 0, 40, num_done=120)
    loop.ended_epoch(1, 0, 40, num_done=120)
    (report,) = reports(loop.lose(2), EpochReport)
    assert report.committed == 120
    asks = loop.handle(CheckpointRequested(job_id=JOB))
    assert [one.rank for one in asks if isinstance(one, SendSaveCheckpoint)] == [0]
    loop.lose(0)
    asks = loop.handle(CheckpointRequested(job_id=JOB))
    assert [one.rank for one in asks if isinstance(one, SendSaveCheckpoint)] == [1]


def test_a_rank_that_ends_its_loop_while_others_wait_for_it_fails_the_job() -> None:
    loop = Attached(3, can_regroup=True)
    loop.batches(0, 7, 70)
    loop.handle(LoopLeft(**loop.of(0)))
    loop.abandoned(1, 0, "closed by peer")
    assert loop.core.jobs[JOB].is_open
    loop.abandoned(2, 0, "closed by peer")
    reason = loop.core.jobs[JOB].reason
    assert reason.startswith(
        "rank 0 has come to the end of its loop after 7 batches, and others wait for it: every rank"
    )
    assert "trainer.mean(" in reason


def test_a_rank_dies_in_the_last_step_which_another_has_ended() -> None:
    loop = Attached(3, can_regroup=True)
    loop.abandoned(1, 0, "closed by peer")
    loop.handle(LoopLeft(**loop.of(0)))
    assert formed(loop.lose(2)) == [(1, 1, 0, 1)]
    other = Attached(3, can_regroup=True)
    other.lose(2)
    other.abandoned(1, 0)
    assert formed(other.handle(LoopLeft(**other.of(0)))) == [(1, 1, 0, 1)]

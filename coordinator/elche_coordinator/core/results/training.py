"""Commits a job's rounds: books samples, learns speeds, closes epochs, assigns evaluations and checkpoints.

A training continues over the generations of its ranks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elche.partition import throughput_sizes
from elche.settings import AgreedSettings
from elche_coordinator.core.messages.commands import Evaluate, SendMakeMetrics, SendOutcome, WriteCheckpoint
from elche_coordinator.core.messages.events import (
    CheckpointFailed,
    CheckpointSaved,
    EpochMetricsTaken,
    EvaluationDone,
    ResultReceived,
)
from elche_coordinator.core.messages.ids import Attempt, Epoch, Rank, RoundId, Version, by_rank
from elche_coordinator.core.messages.reports import Checkpoint, EvaluationReport, UserEvent
from elche_coordinator.core.messages.spec import RankPart, RecordedRound, Slice, whole_number
from elche_coordinator.core.pacing.divergence import DivergenceGuard
from elche_coordinator.core.pacing.likeness import likenesses
from elche_coordinator.core.pacing.policies import new_policy
from elche_coordinator.core.pacing.policy import Policy
from elche_coordinator.core.records.failure import Failure
from elche_coordinator.core.records.machine import Hold, Model
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords, fastest, present
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.checkpoints import Checkpoints, failure_report
from elche_coordinator.core.results.epochs import Epochs
from elche_coordinator.core.results.evaluations import Evaluation, Evaluations
from elche_coordinator.core.results.fair_shares import FairShares
from elche_coordinator.core.results.round_report import round_report
from elche_coordinator.core.results.tally import Mark, bound_samples_per_s, mark_of, samples_per_s
from elche_coordinator.core.work.ledger import Ledger
from elche_coordinator.core.work.replay import Replay
from elche_coordinator.core.work.shards import ShardOrder

OVERLAP_DECAY = 0.8
"""Factor per round on the longest recent averaging. Work is leased for that time, so that it must decay slowly."""
MAX_DISCARDED = 3
"""The job fails when a rank is left out of this many averages in a row."""


class Training:
    """Commits rounds, and assigns the evaluation and writing of their results. The constructor raises `ValueError` for
    unsupported settings, a checkpoint of another training, or a recording that does not fit.
    """

    def __init__(
        self,
        settings: AgreedSettings,
        members: RankRecords,
        outbox: Outbox,
        *,
        attempt: Attempt,
        resumed: Mapping[str, Any] | None = None,
        replay: tuple[RecordedRound, ...] = (),
        verifies: bool = False,
    ) -> None:
        """`verifies`: True to fail the job when ranks have different results."""
        self._verifies = verifies
        self._reported_unequal: dict[Rank, RoundId] = {}
        """The first round in which each rank's result differed from the others'; it is reported once."""
        self.settings = settings
        self.ranks = members
        """All ranks of the job, including lost ones."""
        self.members = dict(members)
        """The ranks that train now, in the order of a header's rows."""
        self.ledger = Ledger(
            settings.extent,
            {rank: record.batch_size for rank, record in members.items()},
            ShardOrder(settings.shard_sizes, settings.seed) if settings.shard_sizes else None,
        )
        self.policy: Policy = new_policy(settings, list(members))
        self.evaluations = Evaluations(settings)
        self.checkpoints = Checkpoints(settings, attempt)
        self.epochs = Epochs(
            outbox, attempt, has_callback=settings.wants_metrics, awaits_evaluation=settings.has_evaluation
        )
        self.version = Version(0)
        """Version of the last committed result; 0 before the first round."""
        self.last_round = RoundId(0)
        """The last committed round."""
        self.next_round = RoundId(1)
        """The id of the next round to be opened. It is never lowered, so that a late message names no later round."""
        self.granted_through = RoundId(0)
        """The last round granted for an absence of the coordinator; ranks may have entered it."""
        self.ride_out_s = 0.0
        """Seconds of the coordinator's absence for which rounds are granted; 0: none are."""
        self.global_step = 0
        """Batches of all ranks that are committed."""
        self.holds: set[Hold] = set()
        """Reasons for which ranks stop at the last announced round, and no other is announced."""
        self.discarded_samples = 0
        """Committed samples of ranks whose part was left out of the average, as it was not finite or an outlier."""
        self.loss: float | None = None
        """Mean loss of the last batches that any rank has reported."""
        self.ended_early = ""
        """Reason for which training ends early, so that no more work is leased; empty: none."""
        self.started: Mark | None = None
        """Mark of the first commit, before which nothing is trained; None before it."""
        self.committed: Mark | None = None
        """Mark of the last commit."""
        self.calibrated: Mark | None = None
        """Mark of the first calibrated commit."""
        self.restored_samples, self.restored_version = 0, Version(0)
        """Samples committed in the checkpoint that training resumes, and its version."""
        self.num_made = self.num_given_up = 0
        """Samples that ranks have trained, and rounds that were given up, including lost work."""
        self.sent_bytes = 0
        """Payload in bytes that ranks have sent for averaging."""
        self.last_round_s = 0.0
        """Seconds between the last two commits."""
        self.averaging_ms = 0.0
        """Duration in ms of the averaging itself in the last round."""
        self.longest_averaging_ms = 0.0
        """Longest recent averaging in ms; it decays by `OVERLAP_DECAY` per round."""
        self.round_trip_ms = 0.0
        """Round trip of a message in ms: from the first announcement to the last rank's entry, before any trains."""
        self.samples_read: list[list[Any]] = []
        """Some samples, by which a training that resumes finds out that its data set has changed."""
        self._outbox = outbox
        self._shares = FairShares()
        self._guard = DivergenceGuard(settings.divergence_threshold)
        self._devices_then: list[str] = []
        """Devices of the ranks whose learned speeds are in the checkpoint that training resumes."""
        self._owed: list[Epoch] = []
        """Complete epochs to evaluate with the next result: their evaluation was not complete in the checkpoint that
        training resumes, or a rank with a part of it was lost.
        """
        self.saver: Rank | None = None
        """The rank that is to write the final state; None until training is complete."""
        if resumed is not None:
            try:
                self._restore(resumed)
            except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
                raise ValueError(f"the checkpoint's training state is not whole ({error!r})") from None
        self.replay = Replay(replay, list(members), self.ledger) if replay else None
        """The rest of a recording that is repeated; None: none."""

    def set_members(self, members: RankRecords, like: Sequence[Sequence[int]]) -> None:
        """Sets the ranks that train now. `like` has for each the earlier ranks whose learned speed it takes over, if
        any (row E10).
        """
        # Before the members change: a lone rank learns nothing, so its checkpoints keep the speeds learned so far, with
        # the devices that had them.
        learned = self.policy.to_json()
        if learned.get("el_che"):
            self._devices_then = self._devices
        self.members = members
        self.policy = new_policy(self.settings, list(members))
        self.policy.restore(learned, like)
        for rank, record in members.items():
            self.ledger.set_batch_size(rank, record.batch_size)

    def has_model(self, record: RankRecord) -> bool:
        """True if the rank has the job's model. Before the first round that is the attempt's initial one."""
        return record.has_model or (self.started is None and record.model is Model.START)

    def is_waited_for(self, rank: Rank) -> bool:
        """True if the rank evaluates, or calls user code with a finished epoch: it does not train meanwhile."""
        return self.evaluations.has(rank) or self.epochs.is_waited_for(rank)

    @property
    def is_complete(self) -> bool:
        """True if every sample of every epoch is committed."""
        return self.ledger.is_complete

    @property
    def is_over(self) -> bool:
        """True if the final model is committed. A training that ends early while its ranks have no work is complete
        before that: the next round makes the final model.
        """
        return self.saver is not None

    @property
    def is_idle(self) -> bool:
        """True if no evaluation, checkpoint or callback is pending."""
        return self.evaluations.is_idle and self.checkpoints.is_idle and not self.epochs.unhandled

    @property
    def is_paused(self) -> bool:
        """True if ranks stop at the last announced round, and no other is announced."""
        return bool(self.holds)

    def stop_if_decided(self) -> None:
        """Stops leasing once an early end is decided, but not while training is held."""
        if self.ended_early and not self.is_paused and not self.ledger.is_stopped and not self.is_complete:
            self.ledger.stop()

    # Ranks' reports on results

    def on_evaluated(self, record: RankRecord, event: EvaluationDone, now_s: float) -> Failure | None:
        """Takes in a rank's part of an evaluation; the rank trains from now on."""
        if not self.evaluations.has(record.rank):
            self._outbox.refuse(
                event, f"rank {record.rank} has nothing to evaluate", "it was not asked, or has answered already"
            )
            return None
        record.reported_at_s = now_s
        if not event.is_made:
            record.evaluation_ms = event.duration_ms
            record.evaluated_ms += event.duration_ms
        complete = self.evaluations.take_part(event)
        self._ask_for_metrics()
        return self._judge(complete)

    def _ask_for_metrics(self, without: RankRecord | None = None) -> None:
        """Asks a rank to make metrics of summed tensors, which needs the job's code."""
        if not self.evaluations.lack_metrics:
            return  # before all ranks are looked at
        there = {rank: record for rank, record in present(self.members).items() if record is not without}
        if not there:
            return  # the job goes back, or ends
        maker = there[fastest(there)]
        for one in self.evaluations.ask(maker.rank):
            address, names = maker.address, tuple(one.metrics)
            self._outbox.add(SendMakeMetrics(**address, epoch=one.epochs[-1], tensors=one.tensors, names=names))

    def _judge(self, complete: list[Evaluation]) -> Failure | None:
        """Reports complete evaluations, adds their metrics to checkpoints and ends training if patience is lost."""
        for done in complete:
            if failure := self.evaluations.judge(done):
                return failure
            self.checkpoints.set_metrics(done.version, done.metrics)
            for epoch in done.epochs:
                is_final = self.is_complete and done.version == self.version
                seconds, attempt = done.duration_ms / 1000, self.checkpoints.attempt
                report = EvaluationReport(
                    epoch=epoch, attempt=attempt, metrics=done.metrics, duration_s=seconds, is_final=is_final
                )
                self._outbox.publish(report)
            self._report_epochs(through=done.epochs[-1])
        reason = self.evaluations.lost_patience
        if reason is not None and not self.ledger.is_stopped and not self.is_complete:
            self.ended_early = reason
            self.stop_if_decided()
        return None

    def on_checkpoint_saved(self, record: RankRecord, event: CheckpointSaved, now_s: float) -> None:
        """Records a complete checkpoint."""
        saved = self.checkpoints.take_saved(
            record.rank,
            event,
            self.evaluations.best_version,
            now_s,
            host=record.host,
            work_folder=record.folder if record.is_in_job_folder(event.path) else "",
        )
        if saved is not None:
            self._outbox.publish(saved)
        else:
            self._refuse_checkpoint(event)

    def on_checkpoint_failed(self, record: RankRecord, event: CheckpointFailed) -> None:
        """Records that a checkpoint cannot be written; training goes on."""
        was_failing = self.checkpoints.is_failing
        if not self.checkpoints.take_failed(record.rank, event):
            self._refuse_checkpoint(event)
        elif self.checkpoints.is_failing and not was_failing:
            self._outbox.publish(failure_report(event, record.host))

    def _refuse_checkpoint(self, event: CheckpointSaved | CheckpointFailed) -> None:
        self._outbox.refuse(
            event,
            f"version {event.version} is not being written as a checkpoint",
            f"rank {event.rank} was not asked to write it",
        )

    def on_metrics_taken(self, record: RankRecord, event: EpochMetricsTaken) -> None:
        """Records that the job's callback for a finished epoch has returned."""
        record.callback_errors = max(record.callback_errors, event.callback_errors)
        self.epochs.unhandled.pop(event.epoch, None)

    # Committing a round

    def impossible_cut(self, received: Round) -> Failure | None:
        """A failure that names the rank whose row of the header cannot be committed; None if all can."""
        for rank, row in received.rows.items():
            committed, end = self.ledger.bounds(rank)
            if not committed <= row.cut <= end or row.local_step < self.members[rank].base_step:
                return Failure(
                    f"rank {rank} says that round {received.id} contains its first {row.cut} samples and "
                    f"{row.local_step} batches; {committed} of its samples are committed and {end} leased"
                )
        return None

    def unequal_results(self, received: Round) -> Failure | None:
        """A failure that names ranks whose result differs from the others', if the job verifies rounds. Otherwise each
        such rank is reported once, and the round commits.
        """
        differing = received.differing
        if differing and self._verifies:
            return Failure(received.difference_of(differing))
        for rank in differing:
            if self._reported_unequal.setdefault(rank, received.id) == received.id:
                text = (
                    f"{received.difference_of(differing)}: a memory or a device may be faulty, or the job changes on "
                    "one rank what is averaged; --verify fails the job then"
                )
                self._outbox.publish(UserEvent(rank=rank, text=text))
        return None

    def discarded_too_often(self, received: Round) -> Failure | None:
        """A failure that names a rank that was left out of too many rounds in a row; None if there is none."""
        for rank, why in received.discarded(self.settings).items():
            if self.members[rank].discarded_in_a_row + 1 >= MAX_DISCARDED:
                return Failure(
                    f"rank {rank} was left out of {MAX_DISCARDED} averages in a row, the last time {why}", rank=rank
                )
        return None

    def commit(self, received: Round, now_s: float) -> None:
        """Commits a round whose result every member has, and sends them the outcome."""
        self.version, self.last_round = Version(self.version + 1), received.id
        before = self.committed
        elapsed_s = now_s - before.at_s if before else 0.0
        self.last_round_s, self.averaging_ms = elapsed_s, received.sync_ms
        parts = self._book(received, now_s)
        num_samples = sum(piece.size for part in parts.values() for piece in part.slices)
        self.committed = mark_of(self.ranks, now_s, (before.samples if before else 0) + num_samples)
        if self.started is not None:
            self.epochs.share_time(parts, now_s)
        report = round_report(
            received, parts, list(self.ranks), version=self.version, anchor=self.policy.anchor, duration_s=elapsed_s
        )
        self._outbox.publish(report)
        if self.started is None:
            self.started = self.committed
            self.epochs.start_clock(now_s)
        elif self.calibrated is None and self.policy.is_calibrated:
            self.calibrated = self.committed
        self._send_outcomes(received, self._close_epochs(), now_s)

    def _book(self, received: Round, now_s: float) -> dict[Rank, RankPart]:
        """Commits exactly the header's cuts and learns from its times; returns each rank's contribution."""
        parts, wall_ms, are_out = {}, {}, received.discarded(self.settings)
        for rank, row in received.rows.items():
            record, result = self.members[rank], received.results.get(rank)
            # The rank's report of these batches may be lost with it; the header has them in any case.
            self.num_made += record.note_made(row.cut)
            booked = self.ledger.commit(rank, row.cut)
            record.num_samples += sum(piece.size for piece in booked)
            if row.weight:
                self._note_discarded(record, are_out.get(rank), sum(piece.size for piece in booked))
            # The first round, before which nobody trains, keeps nobody from training.
            waited_ms = received.stalled_ms(rank) if self.started else 0.0
            parts[rank] = RankPart(
                slices=tuple(Slice(epoch=one.epoch, offset=one.offset, size=one.size) for one in booked),
                num_batches=record.on_committed(row, waited_ms, now_s),
                newer_batches=result.newer_batches if result else 0,
            )
            wall_ms[rank] = row.compute_us / 1000 + record.take_data_wait_ms()
            if self.ranks[rank] is not record:  # restarted meanwhile: the new process has other work
                self.ranks[rank].take_over(record)
            if result is None:
                self.epochs.add_silent(rank, booked, record.batch_size)
            else:
                self._take_in_result(record, result)
        num_batches = {rank: part.num_batches for rank, part in parts.items()}
        drift = self._guard.judge([one.divergence for one in received.results.values() if one.divergence is not None])
        self.policy.learn(wall_ms, num_batches, received.cost_ms, drift)
        self.global_step += sum(num_batches.values())
        slowest_ms = max(record.ms_per_batch or 0.0 for record in self.members.values())
        # longer waits were for a rank that evaluates, which work leased ahead does not shorten
        longest_ms = min(received.longest_ms, received.sync_ms + slowest_ms)
        self.longest_averaging_ms = max(longest_ms, OVERLAP_DECAY * self.longest_averaging_ms)
        return parts

    def _note_discarded(self, record: RankRecord, why: str | None, num_samples: int) -> None:
        """Counts samples that were left out of the result, and reports a rank at the first of consecutive times."""
        if why is None:
            record.discarded_in_a_row = 0
            return
        self.discarded_samples += num_samples
        record.discarded_in_a_row += 1
        if record.discarded_in_a_row == 1:
            text = f"left out of the average {why}"
            self._outbox.publish(UserEvent(rank=record.rank, text=text))

    def _take_in_result(self, record: RankRecord, result: ResultReceived) -> None:
        """Records the rank's report on its part of the round."""
        record.divergence = result.divergence
        record.callback_errors = max(record.callback_errors, result.callback_errors)
        self.sent_bytes += result.sent_bytes
        for work in result.work:
            self.epochs.add(record.rank, work)
            if work.num_batches and record.reports_losses_at_rounds:
                self.loss = record.loss = work.loss_sum / work.num_batches

    def _close_epochs(self) -> list[Epoch]:
        """Reports the epochs that the round has completed, and returns them."""
        closed = self.ledger.close_epochs()
        for epoch in closed:
            report = self.epochs.close(
                epoch, list(self.ranks), committed=self.ledger.size(epoch), dropped=self.ledger.dropped_size
            )
            for rank, text in self._shares.close(report, self.ranks, self.members).items():
                self._outbox.publish(UserEvent(rank=rank, text=text))
            if self.loss is None:  # it was over before any rank has reported one
                self.loss = report.loss
        return closed

    def _send_outcomes(self, received: Round, closed: list[Epoch], now_s: float) -> None:
        """Sends every member the outcome, with orders to evaluate and write the result."""
        quickest = fastest(self.members)
        saver = self._choose_saver(quickest)
        owed, self._owed = [*self._owed, *closed], []
        # with a monitored metric each evaluated version may be the best, and needs a checkpoint to go back to
        judged = owed if self.settings.monitor is not None else closed
        if self.is_complete and not owed:  # training ended within an epoch: the saved model was not evaluated yet
            owed = [Epoch(min(self.ledger.epoch, self.ledger.num_epochs - 1))]
        there = present(self.members)
        parts = self._begin_evaluation(owed, there or self.members) if owed and self.settings.has_evaluation else {}
        is_foreseen = received.checkpoint_writer in there
        writer = received.checkpoint_writer if received.checkpoint_writer in there else self.choose_writer()
        assert writer is not None
        checkpoint = self._begin_checkpoint(writer, judged, now_s, is_foreseen=is_foreseen)
        self.saver = saver if self.is_complete else None
        for rank in there:
            written = checkpoint if rank == writer else None
            self._send_outcome(rank, evaluate=parts.get(rank), checkpoint=written, save_final=rank == self.saver)
        if not parts and not self.settings.has_evaluation:
            self._report_epochs(through=self.ledger.num_epochs)

    def _send_outcome(
        self,
        rank: Rank,
        *,
        evaluate: Evaluate | None = None,
        checkpoint: WriteCheckpoint | None = None,
        save_final: bool = False,
    ) -> None:
        """Sends a member the outcome of the newest round, or a further order on its result."""
        self._outbox.add(
            SendOutcome(
                **self.members[rank].address,
                round=self.last_round,
                version=self.version,
                global_step=self.global_step,
                evaluate=evaluate,
                checkpoint=checkpoint,
                save_final=save_final,
            )
        )

    def choose_writer(self) -> Rank:
        """Chooses the writer of a checkpoint: the fastest rank; for a job with its own state the lowest one, on which
        the callbacks for finished epochs run.
        """
        if not self.settings.keeps_state:
            return fastest(self.members)
        return min(present(self.members) or self.members)

    def _choose_saver(self, quickest: Rank) -> Rank:
        """Chooses the writer of the final state: the fastest rank; but if the best checkpoint is on another host, its
        writer, which can store that checkpoint as the best model.
        """
        writer = self.checkpoints.writer_of(self.evaluations.best_version)
        record = self.members.get(writer) if writer is not None else None
        if record is None or not record.is_present or record.agent_id == self.members[quickest].agent_id:
            return quickest
        return record.rank

    # Lost ranks

    def lose(self, lost: RankRecord) -> Failure | None:
        """Reassigns evaluations, checkpoints and callbacks of a rank that is lost or replaced.

        `Ledger.release` frees its leases, once it is decided which rounds contain its work.
        """
        self.checkpoints.lose_writer(lost.rank)
        # Looks at all ranks only where the others get something to do: a host's thousand may be lost at once.
        if self.epochs.is_waited_for(lost.rank):
            self.epochs.lose(lost.rank, self._others(lost))
        self._owed += [epoch for epoch in self.evaluations.lose(lost.rank) if epoch not in self._owed]
        self._ask_for_metrics(without=lost)
        failure = self._judge(self.evaluations.take_complete())
        if failure is not None or not self.is_over or not (there := self._others(lost)):
            return failure
        if self._owed and self.settings.has_evaluation:  # no later result will come
            owed, self._owed = self._owed, []
            for rank, part in self._begin_evaluation(owed, there).items():
                self._send_outcome(rank, evaluate=part)
        if lost.rank == self.saver:
            self.saver = self._choose_saver(fastest(there))
            self._send_outcome(self.saver, save_final=True)
        return None

    def _others(self, lost: RankRecord) -> RankRecords:
        """The members that are present, without this one, which may be if it is let go."""
        return {rank: record for rank, record in present(self.members).items() if record is not lost}

    def _begin_evaluation(self, closed: list[Epoch], there: RankRecords) -> dict[Rank, Evaluate]:
        """Assigns the evaluation: all to the fastest rank, or an `eval_dataset` to all in proportion to speed."""
        epoch, size = closed[-1], self.settings.eval_size
        if not size:
            parts = {fastest(there): Evaluate(epoch=epoch)}
        else:
            times = [record.ms_per_batch or 0.0 for record in there.values()]
            parts, offset = {}, 0
            for rank, part in by_rank(there, throughput_sizes(times, size)).items():
                if part:
                    parts[rank] = Evaluate(epoch=epoch, offset=offset, size=part)
                offset += part
        self.evaluations.begin(closed, self.version, list(parts), self.ledger.epoch)
        return parts

    def _begin_checkpoint(
        self, writer: Rank, closed: list[Epoch], now_s: float, *, is_foreseen: bool
    ) -> WriteCheckpoint | None:
        """The order to write a checkpoint of the committed round; None if it becomes none.

        A round that ends an epoch unexpectedly, because ranks had overshot their targets, becomes a checkpoint with the
        writer's present moments. Any other checkpoint for which the round was not announced waits for the next round.
        """
        is_wanted = self.checkpoints.wants(now_s, closed) if is_foreseen else self.checkpoints.wants_end_of(closed)
        # The end, so that a short training can be resumed with more epochs. Nobody trains: it needs no announcement.
        is_wanted |= self.is_complete and self.checkpoints.is_regular
        if self.started is None or not is_wanted:
            return None
        return self._order_checkpoint(writer, now_s)

    def _order_checkpoint(self, writer: Rank, now_s: float) -> WriteCheckpoint | None:
        """The order to write a checkpoint of the committed round; None if the rank has too many to write."""
        name = self.checkpoints.name(self.version, self.ledger.epoch, self.global_step)
        begun = Checkpoint(
            version=self.version, name=name, path="", epoch=self.ledger.epoch, global_step=self.global_step
        )
        keep = self.checkpoints.names_to_keep(self.evaluations.best_version)
        if not self.checkpoints.begin(begun, writer, now_s):
            return None
        return WriteCheckpoint(name=name, training=json.dumps(self.snapshot()), keep=keep)

    def save_stopped(self, now_s: float) -> None:
        """Orders a stopped rank's draft of the last committed round to become a checkpoint. Does nothing without such a
        draft, or if a checkpoint of that version exists or is being written.
        """
        for rank in self.members:
            self.checkpoints.lose_writer(rank)  # nobody writes any more
        holders = [rank for rank, one in present(self.members).items() if one.stopped_round == self.last_round]
        if holders and self.version > self.checkpoints.newest_version:
            self._send_outcome(holders[0], checkpoint=self._order_checkpoint(holders[0], now_s))

    def _report_epochs(self, *, through: int) -> None:
        self.epochs.send_due(present(self.members), self.evaluations.metrics, through=through)

    # Figures and state

    def throughput(self) -> tuple[float, float, float]:
        """Samples per second, their bound without waits, and the fraction of the bound since calibration."""
        if self.started is None or self.committed is None:
            return 0.0, 0.0, 0.0
        late = self.calibrated if self.calibrated and self.calibrated.at_s < self.committed.at_s else self.started
        # No batch has more samples than an epoch.
        sizes = {rank: min(record.batch_size, self.ledger.extent.kept_size) for rank, record in self.ranks.items()}
        late_bound = bound_samples_per_s(late, self.committed, sizes)
        return (
            samples_per_s(self.started, self.committed),
            bound_samples_per_s(self.started, self.committed, sizes),
            samples_per_s(late, self.committed) / late_bound if late_bound else 0.0,
        )

    def snapshot(self) -> dict[str, object]:
        """State for a checkpoint, as plain values."""
        policy = self.policy.to_json()
        return {
            "attempt": self.checkpoints.attempt,
            "version": self.version,
            "global_step": self.global_step,
            "samples": self.ledger.total_committed(),
            "dataset_size": self.settings.dataset_size,
            "epoch_size": self.ledger.extent.kept_size,
            "seed": self.settings.seed,
            "samples_read": self.samples_read,
            "ledger": self.ledger.to_json(),
            "policy": policy,
            "devices": self._devices if policy.get("el_che") else self._devices_then,
            "tallies": self.epochs.to_json(),
            "untold": self.epochs.unhandled_reports(),
            "evaluations": self.evaluations.to_json(),
            "best_checkpoint": asdict(best) if (best := self.checkpoints.of(self.evaluations.best_version)) else None,
            "divergences": self._guard.to_json(),
        }

    @property
    def _devices(self) -> list[str]:
        return [record.device for record in self.members.values()]

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restores a checkpoint's `snapshot`. Raises `ValueError` if it is of another training."""
        size, kept_size = self.settings.dataset_size, self.ledger.extent.kept_size
        now = {"dataset_size": size, "epoch_size": kept_size, "seed": self.settings.seed}
        for name, value in now.items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint is of a training whose {name} is {state[name]}, and the job's is {value}; "
                    "they must be equal, so that every sample is trained once"
                )
        self.version = self.restored_version = Version(whole_number(state["version"], "version"))
        self.global_step = whole_number(state["global_step"], "global_step")
        self.ledger.restore(state["ledger"])
        self.restored_samples = self.ledger.total_committed()
        self._devices_then = state.get("devices", [])
        like = likenesses(self._devices_then, self._devices) if self._devices_then else None
        self.policy.restore(state["policy"], like)
        self._guard.restore(state.get("divergences", ()))  # older checkpoints have none
        self.evaluations.restore(state["evaluations"])
        self.checkpoints.restore_best(state.get("best_checkpoint"))
        # Not of an epoch that `max_steps` had cut short, and that goes on with more of them.
        self._owed = [Epoch(epoch) for epoch in state["evaluations"]["owed_epochs"] if epoch < self.ledger.epoch]
        self.epochs.restore(state["tallies"], state.get("untold", ()))  # older checkpoints have none

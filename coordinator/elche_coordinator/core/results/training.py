"""The training of one job: its books, its rounds and its epochs, while its ranks stand."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elche.partition import throughput_sizes
from elche_coordinator.core.messages.commands import (
    Evaluate,
    Publish,
    SendEpochMetrics,
    SendOutcome,
    WriteCheckpoint,
)
from elche_coordinator.core.messages.events import (
    BatchesTrained,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    RoundEntered,
    RoundFailed,
    RoundHeld,
)
from elche_coordinator.core.messages.ids import Attempt, Epoch, Generation, JobId, Rank, Version
from elche_coordinator.core.messages.reports import Checkpoint, EpochReport, EvaluationReport, RoundReport
from elche_coordinator.core.messages.spec import RankPart, RecordedRound, Settings, Slice, whole_number
from elche_coordinator.core.pacing.divergence import DivergenceGuard
from elche_coordinator.core.pacing.policies import likenesses
from elche_coordinator.core.records.machine import RankPhase, RankTrigger
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.tally import EpochTally, Mark, bound_samples_per_s, mean_loss, samples_per_s
from elche_coordinator.core.rounds.scheduler import Announcer
from elche_coordinator.core.work.replay import Replay

OVERLAP_DECAY = 0.8
"""How fast the longest averaging is forgotten: leases reach that far, so that no rank runs dry while it lasts."""

MAX_GIVEN_UP = 5
"""Rounds that may be given up one after the other; then the job fails."""


class Training(Announcer):
    """What ranks that stand in one group have done and are to do. Raises `ValueError` for settings that it cannot
    follow, a checkpoint of another training, or a recording that does not fit.
    """

    def __init__(
        self,
        job_id: JobId,
        settings: Settings,
        ranks: dict[Rank, RankRecord],
        generation: Generation,
        outbox: Outbox,
        *,
        attempt: Attempt,
        resumed: Mapping[str, Any] | None = None,
        replay: tuple[RecordedRound, ...] = (),
    ) -> None:
        super().__init__(job_id, settings, ranks, generation, outbox, attempt=attempt)
        self.global_step = 0
        self.discarded_samples = 0
        """Committed samples whose values were not finite and were left out of the average."""
        self.loss: float | None = None
        self.ended_early = ""
        """Why no more work is leased, although there is some."""
        self.calibrated: Mark | None = None
        """Where training stood at its first calibrated commit."""
        self.restored_samples = 0
        """Committed in the checkpoint that training goes on from."""
        self.num_given_up = 0
        """Rounds that were given up."""
        self.sent_bytes = 0
        """Payload that ranks have sent for averaging."""
        self.last_round_s = 0.0
        """From the last commit but one to the last."""
        self.averaging_ms = 0.0
        """The averaging itself, in the last round."""
        self._tallies: dict[int, EpochTally] = {}
        self._shared_until_s = 0.0
        """Until when epochs have got their parts of the time."""
        self._given_up_in_a_row = 0
        self._devices_then: list[str] = []
        """Of the ranks whose speeds were learned last, in the checkpoint that training goes on from."""
        self._guard = DivergenceGuard(settings.divergence_threshold)
        self._owed: list[Epoch] = []
        """Epochs that were complete and not evaluated in the checkpoint that training goes on from."""
        self.metrics_untaken: dict[int, None] = {}
        """Finished epochs that rank 0 has been told of, and whose callback has not returned."""
        self._metrics_due: dict[int, EpochReport] = {}
        """Finished epochs that rank 0 has not been told of, because their evaluation is not there."""
        if resumed is not None:
            try:
                self._restore(resumed)
            except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
                raise ValueError(f"the checkpoint's training state is not whole ({error!r})") from None
        self._replay = Replay(replay, len(ranks), self.ledger) if replay else None

    @property
    def is_complete(self) -> bool:
        """Whether every sample of every epoch is committed."""
        return self.ledger.is_complete

    @property
    def is_idle(self) -> bool:
        """Whether nothing is owed beside training: evaluations, checkpoints, callbacks."""
        return self.evaluations.is_idle and self.checkpoints.is_idle and not self.metrics_untaken

    def should_work(self, record: RankRecord) -> bool:
        """Whether the rank has a batch to make now: it has work, and waits for nobody."""
        if self.is_paused or record.phase is not RankPhase.TRAINING or self.evaluations.has(record.rank):
            return False
        if record.rank == 0 and self.metrics_untaken:  # a callback of the user's runs
            return False
        if self.policy.stops_ranks and (not self.rounds or record.rank in self.rounds[-1].acks):
            return False
        is_limited = record.limit_step != 0 and record.local_step >= record.limit_step
        return not is_limited and self.ledger.has_work(record.rank)

    def is_averaging(self, record: RankRecord) -> bool:
        """Whether the rank is in a round that every member has entered, so that it waits for nobody any more."""
        return self.started is not None and any(
            record.rank in opened.entered
            and record.rank not in opened.acks
            and len(opened.entered) == len(opened.targets)
            for opened in self.rounds
        )

    @property
    def longest_averaging_s(self) -> float:
        """How long averagings lately lasted, at most."""
        return self._overlap_ms / 1000

    # What ranks say

    def note_batches(self, record: RankRecord, event: BatchesTrained, now_s: float) -> None:
        """Takes in progress; revises the open round's targets when a rank has become faster or slower."""
        is_news = event.local_step > record.local_step
        record.note_batches(event.local_step, event.batch_ms, now_s)
        if event.gauges is not None and event.local_step >= record.local_step:
            record.gauges = event.gauges
        record.data_wait_ms = max(record.data_wait_ms, event.data_wait_ms)
        if event.loss_count and is_news:
            self.loss = record.loss = event.loss_sum / event.loss_count
        self.ledger.note_processed(record.rank, event.num_processed)
        self.follow_progress(now_s)

    def note_entered(self, record: RankRecord, event: RoundEntered) -> None:
        """The rank has taken its snapshot for an open round."""
        opened = self.open_round(event.round, event.generation)
        if opened is not None and record.rank not in opened.entered:
            record.life.advance(RankTrigger.ENTERED_ROUND)
            opened.entered[record.rank] = None
            self._raise_limits()

    def note_held(self, record: RankRecord, event: RoundHeld, now_s: float) -> str | None:
        """The rank holds a round's result; commits what all members hold. Returns why it must not, if so."""
        opened = self.open_round(event.round, event.generation)
        if opened is None or record.rank in opened.acks:
            return None
        if opened.failures:
            return f"round {opened.id} is held by rank {record.rank}, but was given up on others"
        if record.phase is RankPhase.AVERAGING:
            record.life.advance(RankTrigger.HELD_RESULT)
        opened.entered[record.rank] = None
        opened.acks[record.rank] = event
        while self.rounds and self.rounds[0].is_held_by_all:
            first = self.rounds[0]
            problem = first.problem(allows_nonfinite=self.settings.nonfinite != "fail") or self._bad_cut(first)
            if problem is not None:
                return problem
            self._commit(self.rounds.pop(0), now_s)
        return None

    def note_failed(self, record: RankRecord, event: RoundFailed, now_s: float) -> str | None:
        """The rank will not hold a round. When none will, its work goes into the next one.

        Returns why the job cannot go on, if so.
        """
        opened = self.open_round(event.round, event.generation)
        if opened is None or record.rank in opened.acks or record.rank in opened.failures:
            return None
        if record.phase is RankPhase.AVERAGING:
            record.life.advance(RankTrigger.GAVE_ROUND_UP)
        opened.entered[record.rank] = None
        opened.failures[record.rank] = event.reason
        if opened.acks:
            return f"round {opened.id} was given up on rank {record.rank}, but others hold it: {event.reason}"
        if not opened.is_given_up:
            return None
        self.num_given_up += 1
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row >= MAX_GIVEN_UP:
            return f"{MAX_GIVEN_UP} averagings in a row were given up, the last one because {event.reason}"
        self.rounds.remove(opened)
        self._outbox.change()
        if self.started:
            self.plan_next(now_s)
            self.pacing = f"again, because the last averaging was given up: {event.reason}"
        else:
            self.begin(now_s)
        return None

    def unpause(self, now_s: float) -> None:
        """Training goes on; an end that was decided meanwhile comes after the next round is planned, which ends it."""
        super().unpause(now_s)
        if self.ended_early and not self.ledger.is_stopped and not self.is_complete:
            self.ledger.stop()

    def note_evaluated(self, record: RankRecord, event: EvaluationDone) -> str | None:
        """A rank's part of an evaluation is there. Returns why the job cannot go on, if so."""
        record.evaluation_ms = event.duration_ms
        for done in self.evaluations.take_part(record.rank, event.epoch, event.sums, event.duration_ms):
            self._outbox.change()
            problem = self.evaluations.judge(done)
            if problem is not None:
                return problem
            self.checkpoints.note_evaluated(done.version, done.metrics)
            for epoch in done.epochs:
                is_final = self.is_complete and done.version == self.version
                report = EvaluationReport(
                    epoch=epoch, metrics=done.metrics, duration_s=done.duration_ms / 1000, is_final=is_final
                )
                self._outbox.add(Publish(job_id=self._job_id, report=report))
            self._tell_metrics(through=done.epochs[-1])
        reason = self.evaluations.lost_patience
        if reason is not None and not self.ledger.is_stopped and not self.is_complete:
            self.ended_early = reason
            if not self.is_paused:
                self.ledger.stop()
        return None

    def note_checkpoint_saved(self, record: RankRecord, event: CheckpointSaved, now_s: float) -> None:
        """A checkpoint is whole."""
        saved = self.checkpoints.take_saved(record.rank, event, self.evaluations.best_version, now_s)
        if saved is not None:
            self._outbox.change()
            self._outbox.add(Publish(job_id=self._job_id, report=saved))

    def note_checkpoint_failed(self, record: RankRecord, event: CheckpointFailed) -> None:
        """A checkpoint cannot be written; training goes on."""
        if self.checkpoints.take_failed(record.rank, event):
            self._outbox.change()

    def _bad_cut(self, held: Round) -> str | None:
        """Which rank's row of the header cannot be booked, and why; None when all can."""
        for rank, row in zip(held.targets, held.header, strict=True):
            committed, end = self.ledger.bounds(rank)
            if not committed <= row.cut <= end or row.local_step < self._ranks[rank].base_step:
                return (
                    f"rank {rank} says that round {held.id} has {row.cut} samples and {row.local_step} batches of it; "
                    f"{committed} samples are committed and {end} leased"
                )
        return None

    # Committing a round

    def _commit(self, held: Round, now_s: float) -> None:
        """Books a round that every member holds, tells its outcome, and goes on."""
        self.version = Version(self.version + 1)
        self._given_up_in_a_row = 0
        self._outbox.change()
        before = self.committed
        self.last_round_s = now_s - before.at_s if before else 0.0
        self.averaging_ms = held.sync_ms
        parts = self._book(held, now_s)
        num_samples = sum(piece.size for part in parts for piece in part.slices)
        self.committed = self._mark(now_s, (before.samples if before else 0) + num_samples)
        self._share_time(parts, num_samples, now_s)
        self._report_round(held, parts, num_samples, now_s - (before.at_s if before else now_s))
        if self.started is None:
            self.started, self._shared_until_s = self.committed, now_s
        elif self.calibrated is None and self.policy.is_calibrated:
            self.calibrated = self.committed
        self._tell_outcome(held, self._close_epochs(now_s), now_s)
        if not self.is_complete:
            self.plan_next(now_s)

    def _book(self, held: Round, now_s: float) -> list[RankPart]:
        """Commits exactly the header's cuts and learns from its times; returns what each rank brought."""
        parts, wall_ms = [], []
        for rank, row in zip(held.targets, held.header, strict=True):
            record, ack = self._ranks[rank], held.acks[rank]
            booked = self.ledger.commit(rank, row.cut)
            record.num_samples += sum(piece.size for piece in booked)
            if not row.finite and self.settings.nonfinite == "skip":
                self.discarded_samples += sum(piece.size for piece in booked)
            waited_ms = held.stalled_ms(rank) if self.started else 0.0
            parts.append(
                RankPart(
                    slices=tuple(Slice(epoch=one.epoch, offset=one.offset, size=one.size) for one in booked),
                    num_batches=record.note_committed(row, waited_ms, now_s),
                    newer_batches=ack.newer_batches,
                )
            )
            wall_ms.append(row.compute_us / 1000 + record.take_data_wait_ms())
            record.divergence = ack.divergence
            record.callback_errors = max(record.callback_errors, ack.callback_errors)
            self.sent_bytes += ack.sent_bytes
            for work in ack.work:
                self._tallies.setdefault(work.epoch, EpochTally()).add(rank, work)
                if work.num_batches and record.tells_losses_at_rounds:
                    self.loss = record.loss = work.loss_sum / work.num_batches
        num_batches = [part.num_batches for part in parts]
        drift = self._guard.judge([ack.divergence for ack in held.acks.values() if ack.divergence is not None])
        self.policy.learn(wall_ms, num_batches, held.cost_ms, drift)
        self.global_step += sum(num_batches)
        self._overlap_ms = max(held.longest_ms, OVERLAP_DECAY * self._overlap_ms)
        return parts

    def _report_round(self, held: Round, parts: list[RankPart], num_samples: int, duration_s: float) -> None:
        report = RoundReport(
            round=held.id,
            version=self.version,
            rank_batches=tuple(part.num_batches for part in parts),
            rank_compute_ms=tuple(row.compute_us / 1000 for row in held.header),
            rank_waited_ms=tuple(held.stalled_ms(rank) for rank in held.targets),
            sync_ms=held.sync_ms,
            anchor=self.policy.anchor,
            duration_s=duration_s,
            samples=num_samples,
            rank_sent_bytes=tuple(held.acks[rank].sent_bytes for rank in held.targets),
            recorded=RecordedRound(parts=tuple(parts)),
            rank_losses=tuple(mean_loss(held.acks[rank].work) for rank in held.targets),
            rank_samples=tuple(sum(piece.size for piece in part.slices) for part in parts),
        )
        self._outbox.add(Publish(job_id=self._job_id, report=report))

    def _share_time(self, parts: list[RankPart], num_samples: int, now_s: float) -> None:
        """Gives the epochs of a round their parts of the time since the last one, by samples: short ones may begin and
        end within it.
        """
        if self.started is None or not num_samples:
            return
        elapsed_s, self._shared_until_s = now_s - self._shared_until_s, now_s
        for piece in (piece for part in parts for piece in part.slices):
            tally = self._tallies.setdefault(piece.epoch, EpochTally())
            tally.duration_s += elapsed_s * piece.size / num_samples

    def _close_epochs(self, now_s: float) -> list[Epoch]:
        """Reports the epochs that the round has completed, and returns them."""
        closed = self.ledger.close_epochs()
        for epoch in closed:
            report = self._tallies.pop(epoch, EpochTally()).report(
                epoch=epoch,
                ranks=list(self._ranks),
                committed=self.ledger.size(epoch),
                dropped=self.ledger.dropped_size,
            )
            self._outbox.add(Publish(job_id=self._job_id, report=report))
            if self.loss is None:  # it was over before any rank has reported one
                self.loss = report.loss
            if self.settings.wants_metrics:
                self._metrics_due[epoch] = report
        return closed

    def _tell_outcome(self, held: Round, closed: list[Epoch], now_s: float) -> None:
        """Tells every member; who writes what, and evaluates what, of the result."""
        fastest = self._fastest
        saver = self._saver(fastest)
        owed, self._owed = [*self._owed, *closed], []
        judged = owed if self.settings.monitor is not None else closed  # it may be the best: it needs a checkpoint
        if self.is_complete and not owed:  # it ended within an epoch, and what is saved has been evaluated by nobody
            owed = [Epoch(min(self.ledger.epoch, self.ledger.num_epochs - 1))]
        parts = self._begin_evaluation(owed, fastest) if owed and self.settings.has_evaluation else {}
        writer = fastest if held.keeper is None else held.keeper
        checkpoint = self._begin_checkpoint(writer, judged, now_s, is_kept=held.keeper is not None)
        for rank in held.targets:
            self._outbox.add(
                SendOutcome(
                    **self._ranks[rank].address(self._job_id),
                    round=held.id,
                    version=self.version,
                    global_step=self.global_step,
                    evaluate=parts.get(rank),
                    checkpoint=checkpoint if rank == writer else None,
                    save_final=self.is_complete and rank == saver,
                )
            )
        if closed and not parts:
            self._tell_metrics(through=closed[-1])

    def _saver(self, fastest: Rank) -> Rank:
        """Who writes the final state: the fastest rank, unless the best checkpoint so far is on another host."""
        writer = self.checkpoints.writer_of(self.evaluations.best_version)
        if writer is None or self._ranks[writer].agent_id == self._ranks[fastest].agent_id:
            return fastest
        return writer

    def _begin_evaluation(self, closed: list[Epoch], fastest: Rank) -> dict[Rank, Evaluate]:
        """Who evaluates what: the fastest rank everything, or each rank as much of it as it is fast."""
        epoch, size = closed[-1], self.settings.eval_size
        if not size:
            parts = {fastest: Evaluate(epoch=epoch)}
        else:
            times = [record.ms_per_batch or 1.0 for record in self._ranks.values()]
            sizes = throughput_sizes(times, size)
            parts, offset = {}, 0
            for rank, part in zip(self._ranks, sizes, strict=True):
                if part:
                    parts[rank] = Evaluate(epoch=epoch, offset=offset, size=part)
                offset += part
        self.evaluations.begin(closed, self.version, list(parts), self.ledger.epoch)
        return parts

    def _begin_checkpoint(
        self, writer: Rank, closed: list[Epoch], now_s: float, *, is_kept: bool
    ) -> WriteCheckpoint | None:
        """A round that ends an epoch and was not foreseen to, because ranks had overshot their targets, becomes one all
        the same: its result is there, with the writer's moments as they are now. Any other one can wait for the next.
        """
        is_wanted = self.checkpoints.wants(now_s, closed) if is_kept else self.checkpoints.wants_end_of(closed)
        if self.started is None or not is_wanted:
            return None
        name = self.checkpoints.name(self.version, self.ledger.epoch, self.global_step)
        begun = Checkpoint(
            version=self.version,
            name=name,
            path="",
            epoch=self.ledger.epoch,
            global_step=self.global_step,
        )
        keep = self.checkpoints.names_to_keep(self.evaluations.best_version)
        if not self.checkpoints.begin(begun, writer, now_s):
            return None
        return WriteCheckpoint(name=name, training=json.dumps(self.snapshot()), keep=keep)

    def _tell_metrics(self, *, through: int) -> None:
        """Tells rank 0 of finished epochs, each with its evaluation, in order."""
        for epoch in [epoch for epoch in self._metrics_due if epoch <= through]:
            report = self._metrics_due.pop(epoch)
            self.metrics_untaken[epoch] = None
            metrics = self.evaluations.metrics if self.settings.has_evaluation else {}
            address = self._ranks[Rank(0)].address(self._job_id)
            self._outbox.add(SendEpochMetrics(**address, report=report, metrics=metrics))

    def _mark(self, now_s: float, samples: int) -> Mark:
        return Mark(
            at_s=now_s,
            samples=samples,
            rank_batches={rank: record.base_step for rank, record in self._ranks.items()},
            rank_compute_ms={rank: record.compute_ms for rank, record in self._ranks.items()},
        )

    # What it has come to

    def throughput(self) -> tuple[float, float, float]:
        """Samples per second, their bound without communication, and the part of the bound after calibration."""
        if self.started is None or self.committed is None:
            return 0.0, 0.0, 0.0
        late = self.calibrated if self.calibrated and self.calibrated.at_s < self.committed.at_s else self.started
        sizes = {rank: record.batch_size for rank, record in self._ranks.items()}
        late_bound = bound_samples_per_s(late, self.committed, sizes)
        return (
            samples_per_s(self.started, self.committed),
            bound_samples_per_s(self.started, self.committed, sizes),
            samples_per_s(late, self.committed) / late_bound if late_bound else 0.0,
        )

    def to_json(self) -> dict[str, object]:
        """The durable record, as plain values."""
        return {
            **self.snapshot(),
            "generation": self.generation,
            "next_round": self._next_round,
            "open_rounds": [opened.id for opened in self.rounds],
            "checkpoints": [asdict(one) for one in self.checkpoints.shown(self.evaluations.best_version)],
        }

    def snapshot(self) -> dict[str, object]:
        """What a checkpoint keeps of the training, as plain values."""
        policy = self.policy.to_json()
        return {
            "attempt": self.checkpoints.attempt,
            "version": self.version,
            "global_step": self.global_step,
            "samples": self.ledger.total_committed(),
            "dataset_size": self.settings.dataset_size,
            "epoch_size": self.ledger.extent.kept_size,
            "seed": self.settings.seed,
            "ledger": self.ledger.to_json(),
            "policy": policy,
            "devices": self._devices if policy.get("el_che") else self._devices_then,
            "tallies": {str(epoch): tally.to_json() for epoch, tally in self._tallies.items()},
            "evaluations": self.evaluations.to_json(),
            "best_checkpoint": asdict(best) if (best := self.checkpoints.of(self.evaluations.best_version)) else None,
            "divergences": self._guard.to_json(),
        }

    @property
    def _devices(self) -> list[str]:
        return [record.device for record in self._ranks.values()]

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's `snapshot`."""
        now = {
            "dataset_size": self.settings.dataset_size,
            "epoch_size": self.ledger.extent.kept_size,
            "seed": self.settings.seed,
        }
        for name, value in now.items():
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint is of a training whose {name} is {state[name]}, and the job's is {value}; "
                    "they must be equal, so that every sample is trained once"
                )
        self.version = Version(whole_number(state["version"], "version"))
        self.global_step = whole_number(state["global_step"], "global_step")
        self.ledger.restore(state["ledger"])
        self.restored_samples = self.ledger.total_committed()
        self._devices_then = state.get("devices", [])
        like = likenesses(self._devices_then, self._devices) if self._devices_then else None
        self.policy.restore(state["policy"], like)
        self._guard.restore(state.get("divergences", ()))  # older checkpoints have none
        self.evaluations.restore(state["evaluations"])
        self.checkpoints.restore_best(state.get("best_checkpoint"))
        self._owed = [Epoch(epoch) for epoch in state["evaluations"]["owed_epochs"]]
        self._tallies = {int(epoch): EpochTally.from_json(tally) for epoch, tally in state["tallies"].items()}

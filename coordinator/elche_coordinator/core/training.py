"""The training of one job: its books, its rounds and its epochs, while its ranks stand."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elche.partition import throughput_sizes
from elche_coordinator.core.checkpoints import Checkpoints
from elche_coordinator.core.commands import (
    Evaluate,
    Publish,
    SendEpochMetrics,
    SendLease,
    SendOutcome,
    SendSyncNow,
    SendThrottle,
    WriteCheckpoint,
)
from elche_coordinator.core.divergence import DivergenceGuard
from elche_coordinator.core.evaluations import Evaluations
from elche_coordinator.core.events import (
    BatchesTrained,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    RoundEntered,
    RoundFailed,
    RoundHeld,
)
from elche_coordinator.core.ids import Attempt, Epoch, Generation, JobId, Rank, RoundId, Version
from elche_coordinator.core.ledger import Lease, Ledger
from elche_coordinator.core.machine import RankPhase, RankTrigger
from elche_coordinator.core.outbox import Outbox
from elche_coordinator.core.pacing import Pace, Policy, Work, ahead_batches, arrivals_ms, new_policy
from elche_coordinator.core.ranks import RankRecord
from elche_coordinator.core.replay import Replay
from elche_coordinator.core.reports import Checkpoint, EpochReport, EvaluationReport, RoundReport
from elche_coordinator.core.rounds import Round
from elche_coordinator.core.shards import Shards
from elche_coordinator.core.spec import RankPart, RecordedRound, Settings, Slice
from elche_coordinator.core.tally import EpochTally, Mark, bound_samples_per_s, samples_per_s

REVISE_EVERY_S = 0.05
REVISE_BATCHES = 0.5
"""Announced targets stay while the predicted arrivals differ by less than this many of the slowest batches."""

OVERLAP_DECAY = 0.8
"""How fast the longest averaging is forgotten: leases reach that far, so that no rank runs dry while it lasts."""

MAX_GIVEN_UP = 5
"""Rounds that may be given up one after the other; then the job fails."""


class Training:
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
        self.settings = settings
        self.ledger = Ledger(
            settings.extent,
            {rank: record.batch_size for rank, record in ranks.items()},
            Shards(settings.shard_sizes, settings.seed) if settings.shard_sizes else None,
        )
        self.policy: Policy = new_policy(settings, len(ranks))
        self.generation = generation
        self.version = Version(0)
        self.rounds: list[Round] = []
        """Announced and not committed, in order."""
        self.global_step = 0
        self.discarded_samples = 0
        """Committed samples whose values were not finite and were left out of the average."""
        self.pacing = "no round yet"
        self.loss: float | None = None
        self.evaluations = Evaluations(settings)
        self.checkpoints = Checkpoints(settings, attempt)
        self.ended_early = ""
        """Why no more work is leased, although there is some."""
        self.started: Mark | None = None
        self.calibrated: Mark | None = None
        self.committed: Mark | None = None
        """Where training stood at its first, first calibrated, and last commit."""
        self._job_id = job_id
        self._ranks = ranks
        self._outbox = outbox
        self._tallies: dict[int, EpochTally] = {}
        self._epoch_started_s = 0.0
        self._next_round = RoundId(1)
        self.num_given_up = 0
        """Rounds that were given up."""
        self._given_up_in_a_row = 0
        self._overlap_ms = 0.0
        self._guard = DivergenceGuard(settings.divergence_threshold)
        self._owed: list[Epoch] = []
        """Epochs that were complete and not evaluated in the checkpoint that training goes on from."""
        self._metrics_due: dict[int, EpochReport] = {}
        """Finished epochs that rank 0 has not been told of, because their evaluation is not there."""
        if resumed is not None:
            try:
                self._restore(resumed)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"the checkpoint's training state is not whole ({error!r})") from None
        self._replay = Replay(replay, len(ranks), self.ledger) if replay else None

    @property
    def is_complete(self) -> bool:
        """Whether every sample of every epoch is committed."""
        return self.ledger.is_complete

    def begin(self, now_s: float) -> None:
        """Announces the first round, at once: it has weight at its source only and spreads the start state."""
        self.checkpoints.start(now_s)
        self._announce(dict.fromkeys(self._ranks, 0), now_s)
        if self.settings.max_batch_diff is not None and not self.policy.stops_ranks:
            for record in self._ranks.values():
                self._raise_limit(record, self.settings.max_batch_diff)

    # What ranks say

    def note_batches(self, record: RankRecord, event: BatchesTrained, now_s: float) -> None:
        """Takes in progress; revises the open round's targets when a rank has become faster or slower."""
        is_news = event.local_step > record.local_step
        record.note_batches(event.local_step, event.batch_ms, now_s)
        record.peak_memory_bytes = max(record.peak_memory_bytes, event.peak_memory_bytes)
        record.data_wait_ms = max(record.data_wait_ms, event.data_wait_ms)
        if event.loss_count and is_news:
            self.loss = event.loss_sum / event.loss_count
        self.ledger.note_processed(record.rank, event.num_processed)
        if self._is_replayed:
            pass  # all is decided
        elif self.rounds:
            self._revise_targets(now_s)
            self._lease_for_overlap(now_s)
        elif self.started:
            self._announce_if_due(now_s)
        self._raise_limits()

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
            self._plan_next(now_s)
            self.pacing = f"again, because the last averaging was given up: {event.reason}"
        else:
            self.begin(now_s)
        return None

    def note_evaluated(self, record: RankRecord, event: EvaluationDone) -> str | None:
        """A rank's part of an evaluation is there. Returns why the job cannot go on, if so."""
        record.evaluation_ms = event.duration_ms
        for done in self.evaluations.take_part(record.rank, event.epoch, event.sums, event.duration_ms):
            self._outbox.change()
            problem = self.evaluations.judge(done)
            if problem is not None:
                return problem
            for epoch in done.epochs:
                report = EvaluationReport(epoch=epoch, metrics=done.metrics, duration_s=done.duration_ms / 1000)
                self._outbox.add(Publish(job_id=self._job_id, report=report))
            self._tell_metrics(through=done.epochs[-1])
        reason = self.evaluations.lost_patience
        if reason is not None and not self.ledger.is_stopped and not self.is_complete:
            self.ended_early = reason
            self.ledger.stop()
        return None

    def note_checkpoint_saved(self, record: RankRecord, event: CheckpointSaved) -> None:
        """A checkpoint is whole."""
        saved = self.checkpoints.take_saved(record.rank, event, self.evaluations.best_version)
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

    def open_round(self, round_id: RoundId, generation: Generation) -> Round | None:
        """The announced round that is not committed; None when there is no such."""
        if generation != self.generation:
            return None
        return next((opened for opened in self.rounds if opened.id == round_id), None)

    # Deciding the next round

    def _plan_next(self, now_s: float) -> None:
        """Leases work and announces the next rounds, unless enough are open."""
        if self._replay is not None and not self._replay.is_over:
            self._replay_next(self._replay, now_s)
            return
        self._replay = None
        plan = self.policy.plan(self._paces(now_s), self._work())
        if plan is None:
            return
        self.pacing = plan.reason
        for rank, num_samples in plan.lease_samples.items():
            self._lease(rank, self.ledger.epoch, num_samples)
        for rank, num_samples in plan.lease_ahead.items():
            self._lease(rank, Epoch(self.ledger.epoch + 1), num_samples)
        if plan.is_announced:
            after_steps = {rank: self._ranks[rank].base_step + count for rank, count in self._held(plan.counts).items()}
            self._announce(after_steps, now_s, count=plan.num_rounds, is_fixed=plan.is_fixed)
        else:
            self._announce_if_due(now_s)
        self._raise_limits()

    @property
    def _is_replayed(self) -> bool:
        return self._replay is not None

    def _held(self, counts: dict[Rank, int]) -> dict[Rank, int]:
        """The counts, but no more than ranks hold: an epoch's tail may be fewer of a rank's batches than planned."""
        if self.policy.stops_ranks:
            return counts
        return {rank: min(count, self.ledger.uncommitted_batches(rank)[1]) for rank, count in counts.items()}

    def _replay_next(self, replay: Replay, now_s: float) -> None:
        """Announces the next recorded round, and only then leases what ranks train beyond it."""
        if self.rounds:
            return
        recorded = replay.begin()
        self._send_leases(replay.lease(self.ledger, ahead=0))
        parts = dict(zip(self._ranks, recorded.parts, strict=True))
        self.pacing = "as it was recorded"
        self._announce(
            {rank: self._ranks[rank].base_step + part.num_batches for rank, part in parts.items()},
            now_s,
            is_fixed=True,
            newer_batches={rank: part.newer_batches for rank, part in parts.items()},
        )
        self._send_leases(replay.lease(self.ledger, ahead=1))

    def _announce_if_due(self, now_s: float) -> None:
        """Announces a planned round when its time has come; until then no rank runs out of work."""
        paces, work = self._paces(now_s), self._work()
        if self.policy.due(paces, work):
            self._announce({rank: record.local_step for rank, record in self._ranks.items()}, now_s)
            return
        for pace in paces:
            missing = pace.made + self.policy.spare(pace, work) - pace.held
            if missing > 0:
                self._lease(pace.rank, self.ledger.epoch, missing * pace.batch_size)

    def _announce(
        self,
        after_steps: dict[Rank, int],
        now_s: float,
        *,
        count: int = 1,
        is_fixed: bool = False,
        newer_batches: dict[Rank, int] | None = None,
    ) -> None:
        first = self._next_round
        keeper, kept_round = self._fastest, None
        for index in range(count):
            targets = {rank: step + index for rank, step in after_steps.items()}
            is_kept = kept_round is None and self.started is not None and self._is_checkpoint(targets, now_s)
            kept_round = RoundId(first + index) if is_kept else kept_round
            self.rounds.append(
                Round(
                    id=RoundId(first + index),
                    generation=self.generation,
                    targets=targets,
                    at_s=now_s,
                    is_fixed=is_fixed,
                    keeper=keeper if is_kept else None,
                )
            )
        self._next_round = RoundId(first + count)
        self._outbox.change()
        for rank, step in after_steps.items():
            newer = newer_batches[rank] if newer_batches and self.settings.averaging == "overlapped" else None
            self._send_sync_now(rank, first, step, count, kept_round if rank == keeper else None, newer)

    @property
    def _fastest(self) -> Rank:
        return min(self._ranks.values(), key=lambda record: (record.ms_per_batch or 0.0, record.rank)).rank

    def _is_checkpoint(self, targets: dict[Rank, int], now_s: float) -> bool:
        """Whether a round with these targets is to become a checkpoint, as far as that can be foreseen."""
        ledger = self.ledger
        ends_epoch = not ledger.free_samples(ledger.epoch) and all(
            target - self._ranks[rank].base_step >= ledger.uncommitted_batches(rank)[0]
            for rank, target in targets.items()
        )
        counts = {rank: target - self._ranks[rank].base_step for rank, target in targets.items()}
        ends_at_s = now_s + max(arrivals_ms(self._paces(now_s), counts)) / 1000
        return self.checkpoints.wants(ends_at_s, [ledger.epoch] if ends_epoch else [])

    def _send_sync_now(
        self,
        rank: Rank,
        first: RoundId,
        after_step: int,
        count: int = 1,
        kept_round: RoundId | None = None,
        newer_batches: int | None = None,
    ) -> None:
        self._outbox.add(
            SendSyncNow(
                **self._ranks[rank].address(self._job_id),
                round=first,
                generation=self.generation,
                after_step=after_step,
                count=count,
                stop_after=self.policy.stops_ranks,
                kept_round=kept_round,
                newer_batches=newer_batches,
            )
        )

    def _lease(self, rank: Rank, epoch: Epoch, num_samples: int) -> None:
        self._send_leases([(rank, lease) for lease in self.ledger.grant(rank, epoch, num_samples)])

    def _send_leases(self, leases: list[tuple[Rank, Lease]]) -> None:
        for rank, lease in leases:
            self._outbox.change()
            self._outbox.add(SendLease(**self._ranks[rank].address(self._job_id), lease=lease))

    def _raise_limits(self) -> None:
        """Lets ranks go as far as `max_batch_diff` allows beyond the slowest one that has work and waits for nobody."""
        max_batch_diff = self.settings.max_batch_diff
        if max_batch_diff is None or self.policy.stops_ranks:
            return
        waits = self.rounds[0].entered if self.rounds and self.settings.averaging == "blocking" else {}
        training = [
            record
            for rank, record in self._ranks.items()
            if rank not in waits and self.ledger.uncommitted_batches(rank)[1] > record.round_batches
        ]
        slowest = min((record.round_batches for record in training), default=0)
        for record in training:
            self._raise_limit(record, record.base_step + slowest + max_batch_diff)

    def _raise_limit(self, record: RankRecord, limit_step: int) -> None:
        if limit_step > record.limit_step:
            record.limit_step = limit_step
            self._outbox.add(SendThrottle(**record.address(self._job_id), limit_step=limit_step))

    def _paces(self, now_s: float) -> list[Pace]:
        return [
            self._pace(record, now_s, is_evaluating=self.evaluations.has(rank)) for rank, record in self._ranks.items()
        ]

    def _pace(self, record: RankRecord, now_s: float, *, is_evaluating: bool) -> Pace:
        """Its position is that of its last report; since then it has trained on, or evaluates first."""
        leased, held = self.ledger.uncommitted_batches(record.rank)
        idle_after_ms = (held - record.round_batches) * (record.ms_per_batch or 0.0)
        since_ms = (now_s - record.reported_at_s) * 1000
        return Pace(
            rank=record.rank,
            ms_per_batch=record.ms_per_batch,
            batch_size=record.batch_size,
            ratio=record.batch_size / self.settings.batch_size,
            made=record.round_batches,
            leased=leased,
            held=held,
            delay_ms=max(0.0, record.evaluation_ms - since_ms) if is_evaluating else -min(since_ms, idle_after_ms),
        )

    def _work(self) -> Work:
        ledger, epoch = self.ledger, self.ledger.epoch
        slowest_ms = max(record.ms_per_batch or 0.0 for record in self._ranks.values())
        return Work(
            epoch_batches=ledger.num_batches(ledger.extent.kept_size),
            free_batches=ledger.free_batches(epoch),
            free_samples=ledger.free_samples(epoch),
            free_ahead=ledger.free_batches(Epoch(epoch + 1)),
            open_rounds=len(self.rounds),
            granted=self._granted,
            overlap_ms=self._overlap_ms + slowest_ms if self.settings.averaging == "overlapped" else 0.0,
        )

    @property
    def _granted(self) -> int:
        """Batches from the last committed round to the last announced one."""
        last = self.rounds[-1].targets if self.rounds else {}
        return max((target - self._ranks[rank].base_step for rank, target in last.items()), default=0)

    def _lease_for_overlap(self, now_s: float) -> None:
        """In the first round, which was planned before speeds were known: work for the time of its averaging."""
        if self.settings.averaging != "overlapped" or not self.started or self.policy.is_calibrated:
            return
        work = self._work()
        for pace in self._paces(now_s):
            if pace.ms_per_batch is not None:
                target = self.rounds[0].targets[pace.rank] - self._ranks[pace.rank].base_step
                missing = target + ahead_batches(pace.ms_per_batch, work) - pace.held
                if missing > 0:
                    self._lease(pace.rank, self.ledger.epoch, missing * pace.batch_size)

    def _revise_targets(self, now_s: float) -> None:
        """Gives the open round other targets when its ranks would arrive apart, and nobody has entered it."""
        if not self.policy.can_revise or len(self.rounds) != 1 or self.committed is None:
            return
        opened = self.rounds[0]
        if opened.entered or opened.is_fixed or now_s - opened.at_s < REVISE_EVERY_S:
            return
        paces = self._paces(now_s)
        slowest_ms = max(pace.ms_per_batch or 0.0 for pace in paces)
        if any(pace.ms_per_batch is None for pace in paces):
            return
        counts = {rank: target - self._ranks[rank].base_step for rank, target in opened.targets.items()}
        arrivals = arrivals_ms(paces, counts)
        if max(arrivals) - min(arrivals) < REVISE_BATCHES * slowest_ms:
            return
        opened.at_s = now_s
        elapsed_ms = (now_s - self.committed.at_s) * 1000
        counts, work = self.policy.revise(paces, elapsed_ms), self._work()
        for pace in paces:
            target = self._ranks[pace.rank].base_step + counts[pace.rank]
            self._retarget(opened, pace.rank, target, self.policy.spare(pace, work))

    def _retarget(self, opened: Round, rank: Rank, target: int, spare: int) -> None:
        record = self._ranks[rank]
        target = min(target, opened.first_targets[rank] + self.policy.anchor)
        missing = target + spare - record.base_step - self.ledger.uncommitted_batches(rank)[1]
        if missing > 0:
            self._lease(rank, self.ledger.epoch, missing * record.batch_size)
        target = min(target, record.base_step + self.ledger.uncommitted_batches(rank)[1])
        if target != opened.targets[rank]:
            opened.targets[rank] = target
            self._send_sync_now(rank, opened.id, target, 1, opened.id if opened.keeper == rank else None)

    # Committing a round

    def _commit(self, held: Round, now_s: float) -> None:
        """Books a round that every member holds, tells its outcome, and goes on."""
        self.version = Version(self.version + 1)
        self._given_up_in_a_row = 0
        self._outbox.change()
        before = self.committed
        parts = self._book(held, now_s)
        num_samples = sum(piece.size for part in parts for piece in part.slices)
        self.committed = self._mark(now_s, (before.samples if before else 0) + num_samples)
        self._report_round(held, parts, num_samples, now_s - (before.at_s if before else now_s))
        if self.started is None:
            self.started, self._epoch_started_s = self.committed, now_s
        elif self.calibrated is None and self.policy.is_calibrated:
            self.calibrated = self.committed
        self._tell_outcome(held, self._close_epochs(now_s), now_s)
        if not self.is_complete:
            self._plan_next(now_s)

    def _book(self, held: Round, now_s: float) -> list[RankPart]:
        """Commits exactly the header's cuts and learns from its times; returns what each rank brought."""
        parts, wall_ms = [], []
        for rank, row in zip(held.targets, held.header, strict=True):
            record, ack = self._ranks[rank], held.acks[rank]
            booked = self.ledger.commit(rank, row.cut)
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
            record.divergence = ack.divergence or 0.0
            for work in ack.work:
                self._tallies.setdefault(work.epoch, EpochTally()).add(rank, work)
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
        )
        self._outbox.add(Publish(job_id=self._job_id, report=report))

    def _close_epochs(self, now_s: float) -> list[Epoch]:
        """Reports the epochs that the round has completed, and returns them."""
        closed = self.ledger.close_epochs()
        for epoch in closed:
            report = self._tallies.pop(epoch, EpochTally()).report(
                epoch=epoch,
                ranks=list(self._ranks),
                committed=self.ledger.size(epoch),
                dropped=self.ledger.dropped_size,
                duration_s=now_s - self._epoch_started_s,
            )
            self._outbox.add(Publish(job_id=self._job_id, report=report))
            self._epoch_started_s = now_s
            if self.settings.wants_metrics:
                self._metrics_due[epoch] = report
        return closed

    def _tell_outcome(self, held: Round, closed: list[Epoch], now_s: float) -> None:
        """Tells every member; who writes what, and evaluates what, of the result."""
        fastest = self._fastest
        owed, self._owed = [*self._owed, *closed], []
        parts = self._begin_evaluation(owed, fastest) if owed and self.settings.has_evaluation else {}
        checkpoint = self._begin_checkpoint(held, closed, now_s)
        for rank in held.targets:
            self._outbox.add(
                SendOutcome(
                    **self._ranks[rank].address(self._job_id),
                    round=held.id,
                    version=self.version,
                    global_step=self.global_step,
                    evaluate=parts.get(rank),
                    checkpoint=checkpoint if rank == held.keeper else None,
                    save_final=self.is_complete and rank == fastest,
                )
            )
        if closed and not parts:
            self._tell_metrics(through=closed[-1])

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
        self.evaluations.begin(closed, self.version, list(parts))
        return parts

    def _begin_checkpoint(self, held: Round, closed: list[Epoch], now_s: float) -> WriteCheckpoint | None:
        if self.started is None or not self.checkpoints.wants(now_s, closed):
            return None
        if held.keeper is None:
            self.checkpoints.miss()
            return None
        name = self.checkpoints.name(self.version)
        begun = Checkpoint(
            version=self.version,
            name=name,
            path="",
            epoch=self.ledger.epoch,
            global_step=self.global_step,
            metrics=self.evaluations.metrics,
        )
        keep = self.checkpoints.names_to_keep(self.evaluations.best_version)
        if not self.checkpoints.begin(begun, held.keeper, now_s):
            return None
        return WriteCheckpoint(name=name, training=json.dumps(self.snapshot()), keep=keep)

    def _tell_metrics(self, *, through: int) -> None:
        """Tells rank 0 of finished epochs, each with its evaluation, in order."""
        for epoch in [epoch for epoch in self._metrics_due if epoch <= through]:
            report = self._metrics_due.pop(epoch)
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
        return {
            "attempt": self.checkpoints.attempt,
            "version": self.version,
            "global_step": self.global_step,
            "samples": self.ledger.total_committed(),
            "dataset_size": self.settings.dataset_size,
            "epoch_size": self.ledger.extent.kept_size,
            "seed": self.settings.seed,
            "ledger": self.ledger.to_json(),
            "policy": self.policy.to_json(),
            "tallies": {str(epoch): tally.to_json() for epoch, tally in self._tallies.items()},
            "evaluations": self.evaluations.to_json(),
        }

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
        self.version = Version(state["version"])
        self.global_step = state["global_step"]
        self.ledger.restore(state["ledger"])
        self.policy.restore(state["policy"])
        self.evaluations.restore(state["evaluations"])
        self._owed = [Epoch(epoch) for epoch in state["evaluations"]["owed_epochs"]]
        self._tallies = {int(epoch): EpochTally.from_json(tally) for epoch, tally in state["tallies"].items()}

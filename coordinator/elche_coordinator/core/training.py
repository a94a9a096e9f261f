"""The training of one job: its books, its rounds and its epochs, while its ranks stand."""

from elche_coordinator.core.commands import Publish, SendLease, SendOutcome, SendSyncNow, SendThrottle
from elche_coordinator.core.divergence import DivergenceGuard
from elche_coordinator.core.events import BatchesTrained, EvaluationDone, RoundEntered, RoundFailed, RoundHeld
from elche_coordinator.core.ids import Epoch, Generation, JobId, Rank, RoundId, Version
from elche_coordinator.core.ledger import Ledger
from elche_coordinator.core.machine import RankPhase, RankTrigger
from elche_coordinator.core.outbox import Outbox
from elche_coordinator.core.pacing import Pace, Policy, Work, ahead_batches, arrivals_ms, new_policy
from elche_coordinator.core.ranks import RankRecord
from elche_coordinator.core.reports import EvaluationReport, RoundReport
from elche_coordinator.core.rounds import Round
from elche_coordinator.core.spec import Settings
from elche_coordinator.core.tally import EpochTally, Mark, bound_samples_per_s, samples_per_s

REVISE_EVERY_S = 0.05
REVISE_BATCHES = 0.5
"""Announced targets stay while the predicted arrivals differ by less than this many of the slowest batches."""

OVERLAP_DECAY = 0.8
"""How fast the longest averaging is forgotten: leases reach that far, so that no rank runs dry while it lasts."""

MAX_GIVEN_UP = 5
"""Rounds that may be given up one after the other; then the job fails."""


class Training:
    """What ranks that stand in one group have done and are to do. Raises `ValueError` for an unknown policy."""

    def __init__(
        self,
        job_id: JobId,
        settings: Settings,
        ranks: dict[Rank, RankRecord],
        generation: Generation,
        outbox: Outbox,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger(
            dataset_size=settings.dataset_size,
            num_epochs=settings.num_epochs,
            batch_size=settings.batch_size,
            drop_last=settings.drop_last,
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
        self.metrics: dict[str, float] = {}
        self.owed_evaluations: dict[int, Rank] = {}
        """Epochs whose evaluation is under way, and where; one evaluation serves all that a round has completed."""
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

    @property
    def is_complete(self) -> bool:
        """Whether every sample of every epoch is committed."""
        return self.ledger.is_complete

    def begin(self, now_s: float) -> None:
        """Announces the first round, at once: it has weight at its source only and spreads the start state."""
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
        if self.rounds:
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
        if self.version:
            self._plan_next(now_s)
            self.pacing = f"again, because the last averaging was given up: {event.reason}"
        else:
            self.begin(now_s)
        return None

    def note_evaluated(self, record: RankRecord, event: EvaluationDone) -> None:
        """The evaluation that was asked for is there."""
        if self.owed_evaluations.get(event.epoch) != record.rank:
            return
        record.evaluation_ms = event.duration_ms
        self.metrics = event.metrics
        self._outbox.change()
        for epoch in [epoch for epoch in self.owed_evaluations if epoch <= event.epoch]:
            del self.owed_evaluations[epoch]
            report = EvaluationReport(epoch=epoch, metrics=event.metrics, duration_s=event.duration_ms / 1000)
            self._outbox.add(Publish(job_id=self._job_id, report=report))

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
        plan = self.policy.plan(self._paces(now_s), self._work())
        if plan is None:
            return
        self.pacing = plan.reason
        for rank, num_samples in plan.lease_samples.items():
            self._lease(rank, self.ledger.epoch, num_samples)
        for rank, num_batches in plan.lease_ahead.items():
            self._lease(rank, Epoch(self.ledger.epoch + 1), num_batches * self.settings.batch_size)
        if plan.is_announced:
            after_steps = {rank: self._ranks[rank].base_step + count for rank, count in plan.counts.items()}
            self._announce(after_steps, now_s, count=plan.num_rounds, is_fixed=plan.is_fixed)
        else:
            self._announce_if_due(now_s)
        self._raise_limits()

    def _announce_if_due(self, now_s: float) -> None:
        """Announces a planned round when its time has come; until then no rank runs out of work."""
        paces, work = self._paces(now_s), self._work()
        if self.policy.due(paces, work):
            self._announce({rank: record.local_step for rank, record in self._ranks.items()}, now_s)
            return
        for pace in paces:
            missing = pace.made + self.policy.spare(pace, work) - pace.held
            if missing > 0:
                self._lease(pace.rank, self.ledger.epoch, missing * self.settings.batch_size)

    def _announce(
        self,
        after_steps: dict[Rank, int],
        now_s: float,
        *,
        count: int = 1,
        is_fixed: bool = False,
    ) -> None:
        first = self._next_round
        for index in range(count):
            targets = {rank: step + index for rank, step in after_steps.items()}
            self.rounds.append(
                Round(
                    id=RoundId(first + index),
                    generation=self.generation,
                    targets=targets,
                    at_s=now_s,
                    is_fixed=is_fixed,
                )
            )
        self._next_round = RoundId(first + count)
        self._outbox.change()
        for rank, step in after_steps.items():
            self._send_sync_now(rank, first, step, count)

    def _send_sync_now(self, rank: Rank, first: RoundId, after_step: int, count: int = 1) -> None:
        self._outbox.add(
            SendSyncNow(
                **self._ranks[rank].address(self._job_id),
                round=first,
                generation=self.generation,
                after_step=after_step,
                count=count,
                stop_after=self.policy.stops_ranks,
            )
        )

    def _lease(self, rank: Rank, epoch: Epoch, num_samples: int) -> None:
        for lease in self.ledger.grant(rank, epoch, num_samples):
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
        evaluating = set(self.owed_evaluations.values())
        return [self._pace(record, now_s, is_evaluating=rank in evaluating) for rank, record in self._ranks.items()]

    def _pace(self, record: RankRecord, now_s: float, *, is_evaluating: bool) -> Pace:
        """Its position is that of its last report; since then it has trained on, or evaluates first."""
        leased, held = self.ledger.uncommitted_batches(record.rank)
        idle_after_ms = (held - record.round_batches) * (record.ms_per_batch or 0.0)
        since_ms = (now_s - record.reported_at_s) * 1000
        return Pace(
            rank=record.rank,
            ms_per_batch=record.ms_per_batch,
            made=record.round_batches,
            leased=leased,
            held=held,
            delay_ms=max(0.0, record.evaluation_ms - since_ms) if is_evaluating else -min(since_ms, idle_after_ms),
        )

    def _work(self) -> Work:
        ledger, epoch = self.ledger, self.ledger.epoch
        slowest_ms = max(record.ms_per_batch or 0.0 for record in self._ranks.values())
        return Work(
            epoch_batches=ledger.num_batches(ledger.kept_size),
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
                    self._lease(pace.rank, self.ledger.epoch, missing * self.settings.batch_size)

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
            self._lease(rank, self.ledger.epoch, missing * self.settings.batch_size)
        target = min(target, record.base_step + self.ledger.uncommitted_batches(rank)[1])
        if target != opened.targets[rank]:
            opened.targets[rank] = target
            self._send_sync_now(rank, opened.id, target)

    # Committing a round

    def _commit(self, held: Round, now_s: float) -> None:
        """Books a round that every member holds, tells its outcome, and goes on."""
        self.version = Version(self.version + 1)
        self._given_up_in_a_row = 0
        self._outbox.change()
        before = self.committed
        num_batches, num_samples = self._book(held, now_s)
        self.committed = self._mark(now_s, (before.samples if before else 0) + num_samples)
        self._report_round(held, num_batches, num_samples, now_s - (before.at_s if before else now_s))
        if self.started is None:
            self.started, self._epoch_started_s = self.committed, now_s
        elif self.calibrated is None and self.policy.is_calibrated:
            self.calibrated = self.committed
        self._tell_outcome(held, self._close_epochs(now_s))
        if not self.is_complete:
            self._plan_next(now_s)

    def _book(self, held: Round, now_s: float) -> tuple[list[int], int]:
        """Commits exactly the header's cuts and learns from its times; returns batches by rank, and samples."""
        num_samples, num_batches, wall_ms = 0, [], []
        for rank, row in zip(held.targets, held.header, strict=True):
            record, ack = self._ranks[rank], held.acks[rank]
            booked = sum(self.ledger.commit(rank, row.cut).values())
            num_samples += booked
            if not row.finite and self.settings.nonfinite == "skip":
                self.discarded_samples += booked
            waited_ms = held.stalled_ms(rank) if self.started else 0.0
            num_batches.append(record.note_committed(row, waited_ms, now_s))
            wall_ms.append(row.compute_us / 1000 + record.take_data_wait_ms())
            record.divergence = ack.divergence or 0.0
            for work in ack.work:
                self._tallies.setdefault(work.epoch, EpochTally()).add(rank, work)
        drift = self._guard.judge([ack.divergence for ack in held.acks.values() if ack.divergence is not None])
        self.policy.learn(wall_ms, num_batches, held.cost_ms, drift)
        self.global_step += sum(num_batches)
        longest_ms = held.longest_ms
        self._overlap_ms = max(longest_ms, OVERLAP_DECAY * self._overlap_ms)
        return num_batches, num_samples

    def _report_round(self, held: Round, num_batches: list[int], num_samples: int, duration_s: float) -> None:
        report = RoundReport(
            round=held.id,
            version=self.version,
            rank_batches=tuple(num_batches),
            rank_compute_ms=tuple(row.compute_us / 1000 for row in held.header),
            rank_waited_ms=tuple(held.stalled_ms(rank) for rank in held.targets),
            sync_ms=held.sync_ms,
            anchor=self.policy.anchor,
            duration_s=duration_s,
            samples=num_samples,
            rank_sent_bytes=tuple(held.acks[rank].sent_bytes for rank in held.targets),
        )
        self._outbox.add(Publish(job_id=self._job_id, report=report))

    def _close_epochs(self, now_s: float) -> list[Epoch]:
        """Reports the epochs that the round has completed, and returns them."""
        closed = self.ledger.close_epochs()
        for epoch in closed:
            report = self._tallies.pop(epoch, EpochTally()).report(
                epoch=epoch,
                ranks=list(self._ranks),
                committed=self.ledger.kept_size,
                dropped=self.ledger.dropped_size,
                duration_s=now_s - self._epoch_started_s,
            )
            self._outbox.add(Publish(job_id=self._job_id, report=report))
            self._epoch_started_s = now_s
        return closed

    def _tell_outcome(self, held: Round, closed: list[Epoch]) -> None:
        """Tells every member; the fastest evaluates a finished epoch and writes the final state."""
        chosen = min(self._ranks.values(), key=lambda record: (record.ms_per_batch or 0.0, record.rank)).rank
        evaluated = closed[-1] if closed and self.settings.has_evaluation else None
        if evaluated is not None:
            self.owed_evaluations |= dict.fromkeys(closed, chosen)
        for rank in held.targets:
            self._outbox.add(
                SendOutcome(
                    **self._ranks[rank].address(self._job_id),
                    round=held.id,
                    version=self.version,
                    global_step=self.global_step,
                    evaluate_epoch=evaluated if rank == chosen else None,
                    save_final=self.is_complete and rank == chosen,
                )
            )

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
        late_bound = bound_samples_per_s(late, self.committed, self.settings.batch_size)
        return (
            samples_per_s(self.started, self.committed),
            bound_samples_per_s(self.started, self.committed, self.settings.batch_size),
            samples_per_s(late, self.committed) / late_bound if late_bound else 0.0,
        )

    def to_json(self) -> dict[str, object]:
        """The durable record, as plain values."""
        return {
            "generation": self.generation,
            "version": self.version,
            "next_round": self._next_round,
            "open_rounds": [opened.id for opened in self.rounds],
            "global_step": self.global_step,
            "ledger": self.ledger.to_json(),
            "policy": self.policy.to_json(),
            "metrics": self.metrics,
        }

"""Which rounds are announced, and what work ranks get for them; pure decisions are the policy's (`pacing`)."""

from elche_coordinator.core.messages.commands import SendLease, SendSyncNow, SendThrottle
from elche_coordinator.core.messages.ids import Attempt, Epoch, Generation, JobId, Rank, RoundId, Version
from elche_coordinator.core.messages.spec import Lease, Settings
from elche_coordinator.core.pacing.policies import Pace, Policy, Work, ahead_batches, arrivals_ms, new_policy
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.checkpoints import Checkpoints
from elche_coordinator.core.results.evaluations import Evaluations
from elche_coordinator.core.results.tally import Mark
from elche_coordinator.core.work.ledger import Ledger
from elche_coordinator.core.work.replay import Replay
from elche_coordinator.core.work.shards import Shards

NO_LIMIT = 2**62
REVISE_EVERY_S = 0.05
REVISE_BATCHES = 0.5
"""Announced targets stay while the predicted arrivals differ by less than this many of the slowest batches."""


class Announcer:
    """The open rounds of one generation, and the leases that they need. `Training` commits what comes of them."""

    def __init__(
        self,
        job_id: JobId,
        settings: Settings,
        ranks: dict[Rank, RankRecord],
        generation: Generation,
        outbox: Outbox,
        *,
        attempt: Attempt,
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
        self.pacing = "no round yet"
        self.evaluations = Evaluations(settings)
        self.checkpoints = Checkpoints(settings, attempt)
        self.started: Mark | None = None
        self.committed: Mark | None = None
        """Where training stood at its first, and its last, commit."""
        self._job_id = job_id
        self._ranks = ranks
        self._outbox = outbox
        self._next_round = RoundId(1)
        self._overlap_ms = 0.0
        """How long averagings lately lasted."""
        self._replay: Replay | None = None
        """What is left of a recording that is repeated."""
        self.is_paused = False
        """Whether ranks stop at the last announced round, and no other is announced."""
        self._stops: dict[Rank, int] = {}
        """Where they stop then."""

    def begin(self, now_s: float) -> None:
        """Announces the first round, at once: it has weight at its source only and spreads the start state."""
        self.checkpoints.start(now_s)
        self._announce(dict.fromkeys(self._ranks, 0), now_s)
        if self.settings.max_batch_diff is not None and self._limits_ranks:
            for record in self._ranks.values():
                self._raise_limit(record, max(1, self.settings.max_batch_diff))

    def pause(self) -> None:
        """Every rank goes on to the last announced round, so that none waits in it for another, and stops there."""
        if self.is_paused:
            return
        self.is_paused = True
        self._outbox.change()
        last = self.rounds[-1].targets if self.rounds else {}
        self._stops = {rank: last.get(rank, record.local_step) for rank, record in self._ranks.items()}
        for rank, record in self._ranks.items():
            stop = self._stops[rank]
            self._send_throttle(record, min(stop, record.limit_step) if self._limits_ranks else stop)

    def unpause(self, now_s: float) -> None:
        """Training goes on."""
        if not self.is_paused:
            return
        self.is_paused = False
        self._outbox.change()
        for record in self._ranks.values():
            record.limit_step = 0
            if not self._limits_ranks:
                self._send_throttle(record, NO_LIMIT)
        if not self.rounds:
            self.plan_next(now_s)
        self._raise_limits()

    def open_round(self, round_id: RoundId, generation: Generation) -> Round | None:
        """The announced round that is not committed; None when there is no such."""
        if generation != self.generation:
            return None
        return next((opened for opened in self.rounds if opened.id == round_id), None)

    def follow_progress(self, now_s: float) -> None:
        """A rank has made batches: revises targets, tops up work, announces what is due. A replay has decided all."""
        if self.is_paused:
            self._raise_limits()
            return
        if self._replay is None and self.rounds:
            self._revise_targets(now_s)
            self._lease_for_overlap(now_s)
        elif self._replay is None and self.started:
            self._announce_if_due(now_s)
        self._raise_limits()

    def plan_next(self, now_s: float) -> None:
        """Leases work and announces the next rounds, unless enough are open."""
        if self.is_paused:
            self.pacing = "paused"
            return
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
        if max_batch_diff is None or not self._limits_ranks:
            return
        waits = self.rounds[0].entered if self.rounds and self.settings.averaging == "blocking" else {}
        training = [
            record
            for rank, record in self._ranks.items()
            if rank not in waits and self.ledger.uncommitted_batches(rank)[1] > record.round_batches
        ]
        slowest = min((record.round_batches for record in training), default=0)
        for record in training:
            limit_step = record.base_step + slowest + max(1, max_batch_diff)  # in lockstep one at a time, side by side
            self._raise_limit(record, min(limit_step, self._stops[record.rank]) if self.is_paused else limit_step)

    @property
    def _limits_ranks(self) -> bool:
        """Whether ranks get steps granted, so that none leads by more than `max_batch_diff`."""
        return self.settings.max_batch_diff is not None and not self.policy.stops_ranks

    def _raise_limit(self, record: RankRecord, limit_step: int) -> None:
        if limit_step > record.limit_step:
            record.limit_step = limit_step
            self._send_throttle(record, limit_step)

    def _send_throttle(self, record: RankRecord, limit_step: int) -> None:
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

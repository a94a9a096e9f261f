"""Announces rounds and leases the work for them as the policy plans it, and revises them when speeds change."""

from collections.abc import Collection, Sequence
from math import inf

from elche.sums import added
from elche_coordinator.core.messages.commands import SendLease, SendPermit, SendSyncNow
from elche_coordinator.core.messages.ids import Epoch, GenerationId, Rank, RoundId
from elche_coordinator.core.messages.spec import Lease
from elche_coordinator.core.pacing.counts import arrivals_ms, finish_ms, fitting, lead_ms, spare_batches
from elche_coordinator.core.pacing.policy import Pace, Policy, Work
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, RankRecords
from elche_coordinator.core.records.round import Round
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.arrivals import Arrivals
from elche_coordinator.core.rounds.limits import Limits
from elche_coordinator.core.rounds.reserve import Reserve
from elche_coordinator.core.work.replay import Replay

REVISE_EVERY_S = 0.05
"""Least time between two revisions of a round."""
FEW, LOOK_S = 100, 0.0005
"""With more than `FEW` members, at least `LOOK_S` seconds per member lie between two looks at all of them: so looking
takes the same part of the coordinator's time however many there are."""
REVISE_BATCHES = 0.5
"""Announced targets stay while the predicted arrivals differ by less than this many of the slowest batches."""
END_BATCHES = 1.5
"""A target of a round that ends an epoch is moved by more than this many of the slowest batches, or not at all: one of
them the round may be longer by plan (`counts.whole_span_ms`).
"""

FIRST_EVALUATION_MS = 150.0
"""Assumed duration of a rank's first evaluation, or that of an epoch if that is shorter."""
OVERDUE_FRACTION, OVERDUE_MS, OVERDUE_BATCHES = 0.5, 100.0, 5
"""An evaluation that is overdue is assumed to take this fraction of the overdue time longer; at least `OVERDUE_MS`, or
`OVERDUE_BATCHES` batches of the slowest rank if that is shorter. By then a report leads to new targets."""
LATE_MS = 30.0
"""A rank is late if it should have reported its target's batch this many ms ago, plus half a batch and the time of a
message to a rank and back."""
MAX_ROUND_TRIP_MS = 300.0
"""Upper limit of the measured time of a message to a rank and back: the first answer may include a slow start."""
LATE_BATCHES, MOST_LATE_MS = 20, 1000.0
"""The others train on for a late rank until it is late by `LATE_BATCHES` of its batches, at most `MOST_LATE_MS`. After
that they wait: every pause of a busy host would make averagings rarer.
"""


class RoundScheduler:
    """Announces the rounds of one generation, revises them, and leases the work that they need."""

    def __init__(self, generation: GenerationId, members: RankRecords, training: Training, outbox: Outbox) -> None:
        self.rounds: list[Round] = []
        """Open rounds, in order: announced, or entered by grant, and not committed."""
        self.reason = "no round yet"
        """Reason for the next round's targets, for people."""
        self.has_committed = False
        """True once the generation's first round, which spreads the start state, is committed."""
        self._goes_on = False
        """True if its members continue the training of an earlier generation."""
        self._generation = generation
        self._members = members
        self._training = training
        self._ledger = training.ledger
        self._settings = training.settings
        self._outbox = outbox
        self._limits = Limits(members, training, outbox)
        self._arrivals = Arrivals()
        self._looked_s = -inf
        """Time at which `_train_on` last looked for members that evaluate or are late."""
        self._topped_up: tuple[float, Work] | None = None
        """Time at which all members last got leases for the first measured round, and the work that was left."""
        self.reserve = Reserve(members, training, outbox)
        """Grants rounds and work for the coordinator's absence."""

    @property
    def _policy(self) -> Policy:
        return self._training.policy

    def begin(self, now_s: float) -> None:
        """Announces the first round, at once: it has weight at its source only and spreads the start state."""
        self._training.checkpoints.start(now_s)
        self._announce(dict.fromkeys(self._members, 0), now_s)
        self._limits.start()

    def go_on(self, now_s: float) -> None:
        """Continues the training of an earlier generation with other members. Newcomers get the model in a round that
        is announced at once.
        """
        self.has_committed = self._goes_on = True
        self._limits.start()
        if self._training.is_paused:
            self._limits.stop_at({})
        elif all(record.has_model for record in self._members.values()):
            self.plan_next(now_s)
        else:
            self._announce({rank: record.local_step for rank, record in self._members.items()}, now_s, is_fixed=True)
            self.reason = "at once, to give the model to ranks that have joined"

    def pause(self) -> None:
        """Has every rank stop at the step of the last announced round, so that all of them still enter it."""
        self._limits.stop_at(self.rounds[-1].targets if self.rounds else {})

    def unpause(self, now_s: float, *, may_plan: bool = True) -> None:
        """Lets training go on after a pause; without `may_plan` another generation makes the next rounds."""
        self._limits.lift_stops()
        if not self.rounds and may_plan:
            self.plan_next(now_s)
        self._limits.update(self.rounds)

    def on_entered(self, now_s: float) -> None:
        """Called when a rank has entered a round: raises the limits of the others. In the first round, before which no
        rank trains, the time since the announcement is that of a message to a rank and back.
        """
        if not self.has_committed and self.rounds:
            round_trip_ms = min((now_s - self.rounds[0].at_s) * 1000, MAX_ROUND_TRIP_MS)
            self._training.round_trip_ms = max(self._training.round_trip_ms, round_trip_ms)
        self._limits.update(self.rounds)

    def open_granted(self, round_id: RoundId, now_s: float, *, is_announced: bool) -> bool:
        """Opens the rounds up to this one, which a member has entered while the coordinator was away. Returns False if
        it was not granted. `is_announced`: the others are told to enter them too.
        """
        if not self._training.next_round <= round_id <= self._training.granted_through or not self.reserve.every:
            return False
        steps = self.rounds[-1].targets if self.rounds else {r: one.base_step for r, one in self._members.items()}
        while (next_round := self._training.next_round) <= round_id:
            steps = {rank: step + self.reserve.every[rank] for rank, step in steps.items()}
            opened = Round(id=next_round, generation=self._generation, targets=steps, at_s=now_s, is_granted=True)
            self.rounds.append(opened)
            self._training.next_round = RoundId(next_round + 1)
            for rank, step in steps.items() if is_announced else ():
                self._send_sync_now(rank, next_round, step, count_away=self._training.granted_through - next_round)
        if self._training.is_paused:
            self.pause()  # ranks were told to stop at an earlier round, and would never enter this one
        return True

    def on_recalled(self, now_s: float) -> None:
        """Called when a rank has given its reserve back: plans the round, or grants the rounds, that waited for it."""
        if not self.rounds and self.has_committed:
            self.plan_next(now_s)
        elif self.has_committed and not self.reserve.is_awaited and not self._ledger.is_stopped:
            opened = self.rounds[-1]
            self.reserve.grant(opened)
            for rank, step in opened.targets.items() if self.reserve.count else ():
                self._send_sync_now(rank, opened.id, step)

    def follow_progress(self, record: RankRecord, now_s: float) -> None:
        """Called when a rank has made batches: revises targets, leases more work, and announces what is due; in a
        replay it only raises limits.
        """
        if self._training.is_paused:
            self._limits.update(self.rounds)
            return
        if self._training.replay is None and self.rounds:
            self._revise_targets(record, now_s)
            self._lease_for_overlap(record, now_s)
            self._train_on(now_s)
        elif self._training.replay is None and self.has_committed:
            self._announce_if_due(now_s)
        self._limits.update(self.rounds)

    def plan_next(self, now_s: float) -> None:
        """Leases work and announces the next rounds, unless enough are open, or the final model is committed."""
        if self._training.is_over:
            return
        if self._training.is_paused:
            self.reason = "paused"
            return
        if self._ledger.is_stopped:  # the last rounds are planned once it is known what work ranks have kept
            self.reserve.recall()
            if not self.reserve.revoke() or self._ledger.has_reserve:
                return
        if self._training.replay is not None and not self._training.replay.is_over:
            self._replay_next(self._training.replay, now_s)
            return
        # The recording is over, and the job goes on as any other (protocol P8.7).
        self._training.replay = None
        plan = self._policy.plan(self._paces(now_s), self._work())
        if plan is None:
            if self._training.is_complete and not self.rounds:
                self._announce({rank: record.base_step for rank, record in self._members.items()}, now_s)
            return
        self.reason = plan.reason
        # Leases go before the round: a rank without work would enter it at once, whatever its target (protocol P2.5).
        for rank, num_samples in plan.lease_samples.items():
            self._lease(rank, self._ledger.epoch, num_samples)
        for rank, num_samples in plan.lease_later.items():
            self._lease_later(rank, num_samples)
        if plan.is_announced:
            counts = self._capped(plan.counts)
            after_steps = {rank: record.base_step + counts.get(rank, 0) for rank, record in self._members.items()}
            self._announce(
                after_steps, now_s, count=plan.num_rounds, is_fixed=plan.is_fixed, ends_epoch=plan.ends_epoch
            )
        else:
            self._announce_if_due(now_s)
        self._limits.update(self.rounds)

    def _capped(self, counts: dict[Rank, int]) -> dict[Rank, int]:
        """The counts, but no more than ranks have leased: an epoch's tail may be fewer batches than planned."""
        if self._policy.stops_ranks:
            return counts
        return {rank: min(count, self._ledger.uncommitted_batches(rank)[1]) for rank, count in counts.items()}

    def _replay_next(self, replay: Replay, now_s: float) -> None:
        """Announces the next recorded round, and only then leases the one after: no rank passes a step unannounced.

        The last result waits for no newer batches: where a recording was cut short, the round that leased them was
        not recorded.
        """
        if self.rounds:
            return
        parts = replay.begin()
        self._send_leases(replay.lease(self._ledger, num_more=0))
        self.reason = "as it was recorded"
        self._announce(
            {rank: self._members[rank].base_step + part.num_batches for rank, part in parts.items()},
            now_s,
            is_fixed=True,
            newer_batches={rank: part.newer_batches for rank, part in parts.items()} if not replay.is_over else None,
        )
        self._send_leases(replay.lease(self._ledger, num_more=1))

    def _announce_if_due(self, now_s: float) -> None:
        """Announces the planned round when it is due; until then leases more, so that no rank runs out of work."""
        paces, work = self._paces(now_s), self._work()
        if self._policy.due(paces, work):
            self._announce({rank: record.local_step for rank, record in self._members.items()}, now_s)
            return
        for pace in paces:
            missing = pace.made + self._policy.spare(pace, work) - pace.leased_total
            if missing > 0:
                self._lease(pace.rank, self._ledger.epoch, missing * pace.batch_size)

    def _announce(
        self,
        after_steps: dict[Rank, int],
        now_s: float,
        *,
        count: int = 1,
        is_fixed: bool = False,
        ends_epoch: bool = False,
        newer_batches: dict[Rank, int] | None = None,
    ) -> None:
        """Opens `count` rounds, the first at `after_steps`, each other one a batch later, in one message."""
        first = self._training.next_round
        writer, checkpoint_round = self._training.choose_writer(), None
        for index in range(count):
            targets = {rank: step + index for rank, step in after_steps.items()}
            is_checkpoint = checkpoint_round is None and self.has_committed and self._is_checkpoint(targets, now_s)
            checkpoint_round = RoundId(first + index) if is_checkpoint else checkpoint_round
            self.rounds.append(
                Round(
                    id=RoundId(first + index),
                    generation=self._generation,
                    targets=targets,
                    at_s=now_s,
                    is_fixed=is_fixed,
                    ends_epoch=ends_epoch,
                    checkpoint_writer=writer if is_checkpoint else None,
                )
            )
        self._training.next_round = RoundId(first + count)
        if self.has_committed:
            # Before the messages, which say how many rounds are granted, and how far apart.
            self.reserve.grant(self.rounds[-1])
        for rank, step in after_steps.items():
            newer = newer_batches[rank] if newer_batches and self._overlaps else None
            self._send_sync_now(rank, first, step, count, checkpoint_round if rank == writer else None, newer)

    def _is_checkpoint(self, targets: dict[Rank, int], now_s: float) -> bool:
        """True if a round with these targets will become a checkpoint, as far as can be foreseen."""
        counts = {rank: target - self._members[rank].base_step for rank, target in targets.items()}
        ends_at_s = now_s + max(arrivals_ms(self._paces(now_s), counts)) / 1000
        return self._training.checkpoints.wants(ends_at_s, self._ledger.ended_by(counts))

    def _send_sync_now(
        self,
        rank: Rank,
        first: RoundId,
        after_step: int,
        count: int = 1,
        checkpoint_round: RoundId | None = None,
        newer_batches: int | None = None,
        count_away: int | None = None,
    ) -> None:
        count_away = self.reserve.count if count_away is None else count_away
        count_away = 0 if self.reserve.is_awaited else count_away
        self._outbox.add(
            SendSyncNow(
                **self._members[rank].address,
                round=first,
                generation=self._generation,
                after_step=after_step,
                count=count,
                stop_after=self._policy.stops_ranks,
                checkpoint_round=checkpoint_round,
                newer_batches=newer_batches,
                every=self.reserve.every.get(rank, 1) if count_away else 1,
                count_away=count_away,
            )
        )

    def _lease(self, rank: Rank, epoch: Epoch, num_samples: int) -> None:
        """Has the rank train `num_samples` more samples: of its reserve first, then of those that are free."""
        # A rank that is asked for its reserve might drop a lease that comes before it answers.
        if self._ledger.is_recalled(rank):
            return
        permitted = self._ledger.permit(rank, num_samples)
        if permitted:
            position = self._ledger.rank_leases[rank].permitted
            self._outbox.add(SendPermit(**self._members[rank].address, num_samples=position))
        self._send_leases([(rank, lease) for lease in self._ledger.grant(rank, epoch, num_samples - permitted)])

    def _lease_later(self, rank: Rank, num_samples: int) -> None:
        """Has the rank train `num_samples` samples of later epochs, those of the next one first."""
        ledger, size = self._ledger, self._members[rank].batch_size
        for epoch in range(ledger.epoch + 1, ledger.num_epochs):
            if num_samples <= 0 or ledger.is_recalled(rank) or not ledger.free_later():
                return
            before = ledger.uncommitted_batches(rank)[1]
            self._lease(rank, Epoch(epoch), num_samples)
            num_samples -= (ledger.uncommitted_batches(rank)[1] - before) * size

    def _send_leases(self, leases: list[tuple[Rank, Lease]]) -> None:
        for rank, lease in leases:
            self._outbox.add(SendLease(**self._members[rank].address, lease=lease))

    def _paces(self, now_s: float) -> list[Pace]:
        return self._paces_of(self._members.values(), now_s)

    def _paces_of(self, records: Collection[RankRecord], now_s: float) -> list[Pace]:
        first_ms = overdue_ms = 0.0
        if any(self._is_evaluating(record.rank) for record in records):  # used for evaluating ranks only
            first_ms, overdue_ms = self._first_evaluation_ms(), self._least_overdue_ms()
        return [self._pace(record, now_s, first_ms, overdue_ms) for record in records if record.has_model]

    def _pace(self, record: RankRecord, now_s: float, first_ms: float, overdue_ms: float) -> Pace:
        """Estimates a rank's pace from its last report: since then it has trained on, or it evaluates before its next
        batch. `first_ms`: assumed duration of a first evaluation; `overdue_ms`: least further time of one that takes
        longer than the last.
        """
        is_evaluating = self._is_evaluating(record.rank)
        leased, leased_total = self._ledger.uncommitted_batches(record.rank)
        ms_per_batch = record.ms_per_batch
        if ms_per_batch is None and self._goes_on:  # a newcomer counts as the slowest until its first batches
            ms_per_batch = max(one.ms_per_batch or 0.0 for one in self._members.values()) or None
        idle_after_ms = (leased_total - record.round_batches) * (ms_per_batch or 0.0)
        since_ms = (now_s - record.reported_at_s) * 1000
        return Pace(
            rank=record.rank,
            ms_per_batch=ms_per_batch,
            batch_size=record.batch_size,
            ratio=record.batch_size / self._settings.batch_size,
            made=record.round_batches,
            leased=leased,
            leased_total=leased_total,
            delay_ms=_left_ms(record.evaluation_ms or first_ms, since_ms, overdue_ms)
            if is_evaluating
            else -min(since_ms, idle_after_ms),
        )

    def _first_evaluation_ms(self) -> float:
        """Assumed duration of a first evaluation in ms: an epoch at most, so that no epoch ends during it."""
        speed = added(1 / record.ms_per_batch for record in self._members.values() if record.ms_per_batch)
        epoch_batches = self._ledger.num_batches(self._ledger.extent.kept_size)
        return min(FIRST_EVALUATION_MS, epoch_batches / speed) if speed else FIRST_EVALUATION_MS

    @property
    def _slowest_ms(self) -> float:
        """Ms per batch of the slowest member; 0 if no speed is known."""
        return max(record.ms_per_batch or 0.0 for record in self._members.values())

    @property
    def _longest_batch_ms(self) -> float:
        """Longest recent batch of any member in ms, at most `MOST_LATE_MS`; or one of the slowest member, if that is
        longer. So much later than the others a rank may enter a round (long sequences, garbage collection).
        """
        longest_ms = max(record.longest_ms for record in self._members.values())
        return max(self._slowest_ms, min(longest_ms, MOST_LATE_MS))

    def _least_overdue_ms(self) -> float:
        return min(OVERDUE_MS, OVERDUE_BATCHES * self._slowest_ms or OVERDUE_MS)

    def _is_evaluating(self, rank: Rank) -> bool:
        return self._training.evaluations.has(rank)

    def _work(self) -> Work:
        ledger, epoch = self._ledger, self._ledger.epoch
        return Work(
            epoch_batches=ledger.num_batches(ledger.extent.kept_size),
            free_batches=ledger.free_batches(epoch),
            free_samples=ledger.free_samples(epoch),
            free_later=ledger.free_later(),
            open_rounds=len(self.rounds),
            granted=self._granted,
            round_trip_ms=self._training.round_trip_ms,
            overlap_ms=self._training.longest_averaging_ms + self._longest_batch_ms if self._overlaps else 0.0,
        )

    @property
    def _granted(self) -> int:
        """Batches from the last committed round to the last open one, of the rank that makes most."""
        last = self.rounds[-1].targets if self.rounds else {}
        return max((target - self._members[rank].base_step for rank, target in last.items()), default=0)

    @property
    def _overlaps(self) -> bool:
        """True if ranks train on during an averaging."""
        return self._settings.averaging == "overlapped"

    def _lease_for_overlap(self, record: RankRecord, now_s: float) -> None:
        """Leases work to train during the first measured round's averaging, which was planned before speeds were known.

        A rank that ran out of work there would wait, and the averaging would seem to cost more than it does.
        """
        if not self._overlaps or not self.has_committed or self._policy.is_calibrated:
            return
        everybody = self._topped_up is None or now_s - self._topped_up[0] >= self._look_every_s
        if self._topped_up is None or everybody:
            self._topped_up = now_s, self._work()
        work = self._topped_up[1]
        for pace in self._paces(now_s) if everybody else self._paces_of([record], now_s):
            if pace.ms_per_batch is not None:
                target = self.rounds[0].targets[pace.rank] - self._members[pace.rank].base_step
                missing = target + spare_batches(pace.ms_per_batch, work) - pace.leased_total
                if missing > 0:
                    self._lease(pace.rank, self._ledger.epoch, missing * pace.batch_size)

    def _train_on(self, now_s: float) -> None:
        """While a rank evaluates or is late, gives the others work until it is back, of this epoch and then of later
        ones, and moves their targets. A rank that has entered the round already gets work only.
        """
        if self._policy.stops_ranks or self._settings.max_batch_diff is not None or len(self.rounds) != 1:
            return
        opened = self.rounds[0]
        if opened.is_granted or self._training.committed is None or now_s - opened.at_s < REVISE_EVERY_S:
            return
        if now_s - self._looked_s < self._look_every_s:
            return
        self._looked_s = now_s
        paces = {pace.rank: pace for pace in self._paces(now_s)}
        away = {rank: self._away_ms(pace, opened, now_s) for rank, pace in paces.items() if rank not in opened.entered}
        until_ms, work = max(away.values(), default=0.0), self._work()
        is_for_late = not any(map(self._is_evaluating, away))
        longest_ms = self._policy.anchor * self._slowest_ms + min(LATE_BATCHES * self._slowest_ms, MOST_LATE_MS)
        for rank, pace in paces.items() if until_ms > 0 else ():
            has_entered = rank in opened.entered
            if away.get(rank) or pace.ms_per_batch is None or (has_entered and not self._overlaps):
                continue
            count = pace.made + max(0, int((until_ms - pace.delay_ms) / pace.ms_per_batch))
            if is_for_late:
                count = min(count, int(longest_ms / pace.ms_per_batch))
            # a rank that has entered gets no spare while another is late: hangs are found only while ranks wait, so it
            # must run out of work
            spare = 0 if has_entered and is_for_late else self._policy.spare(pace, work)
            self._train_beyond(opened, pace, count, spare, now_s)

    def _away_ms(self, pace: Pace, opened: Round, now_s: float) -> float:
        """Estimated time in ms until a rank has evaluated, or a late one reports; 0 for any other."""
        record, ms = self._members[pace.rank], pace.ms_per_batch or 0.0
        if self._is_evaluating(pace.rank):
            return pace.delay_ms
        late_ms = (now_s - _due_s(record, opened, ms)) * 1000
        most_ms = min(LATE_BATCHES * ms, MOST_LATE_MS)
        is_late = LATE_MS + ms / 2 + self._training.round_trip_ms < late_ms < most_ms and ms > 0
        return min(max(OVERDUE_FRACTION * late_ms, self._least_overdue_ms()), most_ms - late_ms) if is_late else 0.0

    def due_s(self) -> dict[Rank, float]:
        """Time at which each member for which the only open round waits should have reported its target's batch."""
        opened = self.rounds[0] if len(self.rounds) == 1 and not self._policy.stops_ranks else None
        if opened is None or opened.is_granted or self._training.committed is None or self._training.is_paused:
            return {}
        return {
            rank: _due_s(record, opened, record.ms_per_batch)
            for rank, record in self._members.items()
            if record.ms_per_batch and rank not in opened.entered and not self._is_evaluating(rank)
        }

    def _lease_on(self, rank: Rank, num_batches: int) -> None:
        """Has the rank train `num_batches` more batches, of this epoch and then of later ones."""
        if num_batches > 0:
            before, size = self._ledger.uncommitted_batches(rank)[1], self._members[rank].batch_size
            self._lease(rank, self._ledger.epoch, num_batches * size)
            self._lease_later(rank, (num_batches + before - self._ledger.uncommitted_batches(rank)[1]) * size)

    def hurry(self, now_s: float) -> None:
        """Moves the open round forward to within about a batch of the slowest rank, if none has entered it. Called when
        ranks wait for its end, to join or to leave.
        """
        paces = self._paces(now_s) if self._can_revise() else []
        if not paces or not _are_timed(paces):
            return
        opened = self.rounds[0]
        # Fixed: otherwise the next report would make the round as long as it was.
        opened.at_s, opened.is_fixed = now_s, True
        slowest_ms = max(pace.ms_per_batch or 0.0 for pace in paces)
        for pace in paces:
            soon = pace.made + max(1, round(slowest_ms / (pace.ms_per_batch or slowest_ms)))
            target = min(opened.targets[pace.rank], self._members[pace.rank].base_step + soon)
            self._retarget(opened, pace.rank, target, spare=0)

    def _can_revise(self) -> bool:
        """True if the open round may get other targets: no rank has entered it, and its policy allows that."""
        if not self._policy.can_revise or len(self.rounds) != 1 or self._training.replay is not None:
            return False
        opened, has_begun = self.rounds[0], self._training.committed is not None
        return has_begun and not (opened.entered or opened.is_fixed or opened.is_granted or self._training.is_paused)

    def _revise_targets(self, record: RankRecord, now_s: float) -> None:
        """Gives the open round new targets when its ranks would arrive at different times, unless a rank has entered
        it.
        """
        opened = self.rounds[0]
        if now_s - opened.at_s < REVISE_EVERY_S or self._training.committed is None:
            return
        if opened.ends_epoch:
            self._follow_end(opened, now_s)
        if not self._can_revise() or not self._may_differ(opened, record, now_s):
            return
        paces = self._paces(now_s)
        if not _are_timed(paces):
            self._arrivals.looked_s = now_s
            return
        slowest_ms = max(pace.ms_per_batch or 0.0 for pace in paces)
        counts = {rank: target - self._members[rank].base_step for rank, target in opened.targets.items()}
        arrivals = arrivals_ms(paces, counts)
        self._arrivals.look(opened.id, self._members, arrivals, now_s)
        if max(arrivals) - min(arrivals) < REVISE_BATCHES * slowest_ms:
            return
        self._arrivals.forget()
        opened.at_s = now_s
        elapsed_ms = (now_s - self._training.committed.at_s) * 1000
        counts, work = self._policy.revise(paces, elapsed_ms), self._work()
        for pace in paces:
            target = self._members[pace.rank].base_step + counts[pace.rank]
            self._retarget(opened, pace.rank, target, self._policy.spare(pace, work))

    def _follow_end(self, opened: Round, now_s: float) -> None:
        """Moves the targets of a round that ends an epoch to when its batches of that epoch are expected. Ranks that
        have made theirs train those of later epochs meanwhile, at most `lead_ms` ahead: a rank that was slow when the
        round was planned may soon be as fast as before, and would have nothing to train while they hold so many.
        """
        may = self._policy.can_revise and self._settings.max_batch_diff is None and len(self.rounds) == 1
        may = may and self._training.evaluations.is_idle  # while a rank evaluates, `_train_on` moves targets
        look_every_s = max(REVISE_EVERY_S, self._look_every_s)
        if not may or opened.is_granted or now_s - self._arrivals.looked_s < look_every_s:
            return
        self._arrivals.looked_s = now_s
        paces = self._paces(now_s)
        awaited = [pace for pace in paces if pace.rank not in opened.entered]
        if not awaited or not _are_timed(paces):
            return
        needed_ms = max(finish_ms(pace, max(pace.made, pace.leased)) for pace in awaited)
        horizon_ms, apart_ms = min(needed_ms, lead_ms(paces)), END_BATCHES * self._slowest_ms
        for pace in paces:
            rank, base_step = pace.rank, self._members[pace.rank].base_step
            count, has_entered = max(pace.leased, fitting(pace, horizon_ms)), rank in opened.entered
            old = pace.leased_total if has_entered else opened.targets[rank] - base_step
            old_ms = finish_ms(pace, old)
            if old_ms > needed_ms + apart_ms and not has_entered:
                opened.at_s = now_s
                self._retarget(opened, rank, base_step + count, spare=0)
            elif old_ms < min(needed_ms - apart_ms, horizon_ms / 2) and (self._overlaps or not has_entered):
                spare = 0 if has_entered else self._policy.spare(pace, self._work())
                self._train_beyond(opened, pace, count, spare, now_s)

    def _train_beyond(self, opened: Round, pace: Pace, count: int, spare: int, now_s: float) -> None:
        """Has a rank make `count` batches until the round, and leases `spare` more. Once it has entered it only gets
        work.
        """
        rank, record = pace.rank, self._members[pace.rank]
        self._lease_on(rank, count + spare - pace.leased_total)
        target = record.base_step + min(count, self._ledger.uncommitted_batches(rank)[1])
        if rank not in opened.entered and target > opened.targets[rank]:
            opened.at_s, opened.targets[rank] = now_s, target
            self._arrivals.forget()
            self._send_sync_now(rank, opened.id, target, 1, opened.id if opened.checkpoint_writer == rank else None)

    def _may_differ(self, opened: Round, record: RankRecord, now_s: float) -> bool:
        """True if members may come to the round at different times, now that this one has reported; False soon after
        all were looked at.
        """
        if not self._training.evaluations.is_idle:  # an evaluating rank comes later than its last report says
            self._arrivals.forget()
        target = opened.targets.get(record.rank, 0)
        if not self._arrivals.may_differ(record, opened.id, target, REVISE_BATCHES, now_s):
            return False
        return now_s - self._arrivals.looked_s >= self._look_every_s

    @property
    def _look_every_s(self) -> float:
        """Least time in seconds between two looks at all members because of reports (`FEW`, `LOOK_S`)."""
        return LOOK_S * len(self._members) if len(self._members) > FEW else 0.0

    def _retarget(self, opened: Round, rank: Rank, target: int, spare: int) -> None:
        """Moves a rank's target, at most an anchor beyond its first one, and leases what it needs and its spare."""
        record = self._members[rank]
        target = min(target, opened.first_targets[rank] + self._policy.anchor)
        missing = target + spare - record.base_step - self._ledger.uncommitted_batches(rank)[1]
        if missing > 0:
            self._lease(rank, self._ledger.epoch, missing * record.batch_size)
        target = min(target, record.base_step + self._ledger.uncommitted_batches(rank)[1])
        if target != opened.targets[rank]:
            opened.targets[rank] = target
            self._send_sync_now(rank, opened.id, target, 1, opened.id if opened.checkpoint_writer == rank else None)


def _are_timed(paces: Sequence[Pace]) -> bool:
    """True if the speeds of all are known."""
    return all(pace.ms_per_batch is not None for pace in paces)


def _due_s(record: RankRecord, opened: Round, ms_per_batch: float) -> float:
    """Time at which a rank should have reported its target's batch, by its speed."""
    return record.reported_at_s + ms_per_batch * max(1, opened.targets[record.rank] - record.local_step) / 1000


def _left_ms(expected_ms: float, since_ms: float, least_ms: float) -> float:
    """Estimated rest in ms of an evaluation that began `since_ms` ago; at least `least_ms` if it is overdue."""
    overdue_ms = since_ms - expected_ms
    return -overdue_ms if overdue_ms < 0 else max(OVERDUE_FRACTION * overdue_ms, least_ms)

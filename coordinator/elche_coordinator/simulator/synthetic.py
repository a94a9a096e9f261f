"""A synthetic rank: it trains by letting time pass, and its parameters are the set of samples that reached them.

Adding a sample to parameters that have it raises, and the final parameters must have all: exactly-once is seen in the
model itself, not only in the coordinator's books.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, assert_never

from elche.header import header_digest
from elche_coordinator.core.messages import commands, events
from elche_coordinator.core.messages.ids import AgentId, Attempt, GenerationId, Rank, RoundId
from elche_coordinator.core.messages.spec import EpochWork, HeaderRow, Lease, TensorSum
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.simulator.clock import ProcessClock, VirtualClock
from elche_coordinator.simulator.collective import Collective, Parameters, RoundEntry

JOB_FOLDER = "simulated"
FOLDER = f"{JOB_FOLDER}/checkpoints"
REPORT_EVERY_S = 0.05
"""Seconds between two reports of progress, as of a real rank."""
PROBE_S = 3.0
"""Seconds for which a rank tries to reach another."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint."""

    name: str
    parameters: Parameters
    training: str


def work_of(pieces: list[Lease]) -> tuple[EpochWork, ...]:
    """The reports on these slices, epoch by epoch; the loss of a batch is its epoch."""
    epochs = sorted({piece.epoch for piece in pieces})
    sizes = {epoch: [piece.size for piece in pieces if piece.epoch == epoch] for epoch in epochs}
    return tuple(
        EpochWork(epoch=epoch, num_batches=len(sizes[epoch]), num_samples=sum(sizes[epoch]), loss_sum=float(epoch))
        for epoch in epochs
    )


class SyntheticRank:
    """One rank process. `send` sends an event to the coordinator; `batch_s` is its time per batch, by the clock."""

    def __init__(
        self,
        address: Address,
        *,
        agent_id: AgentId,
        clock: VirtualClock,
        send: Callable[[events.Event], None],
        collective: Collective,
        batch_size: int,
        batch_s: Callable[[float], float],
        evaluation_s: float,
        overlaps: bool,
        saved: dict[int, Saved],
        checkpoint_s: float = 0.0,
        resumed: Saved | None = None,
        evaluate: Callable[[int], Mapping[str, float | TensorSum]] | None = None,
        is_alone: Callable[[], bool] = lambda: False,
        is_deadly: Callable[[Lease], bool] = lambda _: False,
    ) -> None:
        """`is_alone` returns True while the coordinator is away; `is_deadly` if a batch of these samples ends the
        process.
        """
        self._is_deadly = is_deadly
        self._is_alone = is_alone
        self.address = address
        self.parameters = resumed.parameters if resumed else Parameters()
        self.attempt = Attempt(1)
        self.local_step = 0
        self.is_alive, self.was_killed = True, False
        self.files: dict[str, Parameters] = {}
        """Models that it has written beside checkpoints, by file name."""
        self.agent_id = agent_id
        self.clock = ProcessClock(clock)
        self._send = send
        self._collective = collective
        self._batch_size = batch_size
        self._batch_s = batch_s
        self._evaluation_s = evaluation_s
        self._overlaps = overlaps
        self._saved = saved
        self._checkpoint_s = checkpoint_s
        self._evaluate = evaluate
        self._kept: dict[RoundId, Parameters] = {}
        """Results that it keeps for checkpoints, by round."""
        self._checkpoint_rounds, self._newer_batches = dict[RoundId, None](), dict[RoundId, int]()
        """Batches after which each result is to be applied, where that is said."""
        self._result: Callable[[], None] | None = None
        """Applies the result of the present round, which is there."""
        self._forming = GenerationId(0)
        self._abandoned = GenerationId(0)
        """The newest generation that was abandoned; announced rounds of it, and of those before it, never come."""
        self._entry: tuple[RoundId, RoundEntry] | None = None
        """Its contribution to the round that runs; None between rounds."""
        self._generations: dict[RoundId, GenerationId] = {}
        """Of each announced round."""
        self.positions: dict[GenerationId, int] = {}
        self._sends_digest: dict[GenerationId, bool] = {}
        self._unreported: dict[RoundId, events.HeaderReported] = {}
        """Headers of which the digest was sent, and whose rounds are not said to be committed."""
        self._leases: deque[Lease] = deque()
        self._reserve: deque[Lease] = deque()
        """To be trained when that is permitted, or while the coordinator is away."""
        self._permitted = self._processed = self._weight = 0
        """Samples that it may train and has trained since it began, and those since the last average."""
        self._away: commands.SendSyncNow | None = None
        """The newest announcement, with what it grants for when the coordinator is away."""
        self._pieces: list[Lease] = []
        """Trained since the last average."""
        self._compute_s = 0.0
        self._rounds: dict[RoundId, int] = {}
        """Announced and not entered: the step after which each is joined."""
        self._last_entered, self._last_announced, self._entered_step = RoundId(0), RoundId(0), 0
        self._last_step, self._alone_step, self._throttle_step = inf, -inf, inf
        """Of the last round of a window that no batch may follow, of one announced to itself since, of Throttle."""
        self._chores: deque[commands.SendOutcome | commands.SendMakeMetrics] = deque()
        self._is_busy = False
        """Trains, does a chore, or waits for a round."""
        self._is_averaging = False
        self._stalled_s = 0.0
        """Time that the present round has kept it from training."""
        self._idle_since_s: float | None = None
        self.trained_s = self.evaluated_s = 0.0
        """Time that it has trained, and evaluated, in all."""
        self._unreported_ms, self._reported_s = list[float](), -1.0

    @property
    def is_frozen(self) -> bool:
        """True if the process is stopped."""
        return self.is_alive and self.clock.is_frozen

    def is_in(self, entry: RoundEntry) -> bool:
        """True if it waits for the result of what it brought."""
        return self._entry is not None and self._entry[1] is entry

    def receive(self, command: commands.SessionCommand) -> None:
        """A command has arrived; a stopped process takes it when it continues."""
        self.clock.do(partial(self._take, command))

    def _take(self, command: commands.SessionCommand) -> None:
        if not self.is_alive:
            return
        match command:
            case commands.SendPing():
                self._send(events.PingAnswered(**self.address))
            case commands.SendProbe():
                self._try_links([peer.rank for peer in command.peers])
            case commands.SendSyncNow():
                self._learn_rounds(command)
            case commands.SendThrottle():
                self._throttle_step = command.limit_step
            case commands.SendLease():
                self._reserve.append(command.lease)
                if not command.is_reserve:
                    self._permit(sum(lease.size for lease in self._reserve))
            case commands.SendPermit():
                self._permit(command.num_samples - self._permitted)
            case commands.SendRecall():
                self._give_grants_back()
            case commands.SendOutcome():
                self._unreported = {one: reported for one, reported in self._unreported.items() if one > command.round}
                if command.checkpoint is not None:
                    self._write_checkpoint(command)
                if command.evaluate is not None or command.save_final:
                    self._chores.append(command)
            case commands.SendFormGroup():
                self.attempt, self._forming = command.attempt, command.generation
                self.positions[command.generation] = command.position
                self._sends_digest[command.generation] = command.sends_digest
                self._collective.join(command.generation, self, command.world_size, is_relayed=command.backend == "cpu")
            case commands.SendAbandon():
                self._abandon(command.generation)
                if not command.keeps_headers:
                    self._report_headers(command.generation)
                self._send(
                    events.GenerationAbandoned(
                        **self.address, generation=command.generation, keeps_headers=command.keeps_headers
                    )
                )
            case commands.SendEpochMetrics():
                self._send(events.EpochMetricsTaken(**self.address, epoch=command.report.epoch))
            case commands.SendKeepBest():
                self._keep_best(command)
            case commands.SendMakeMetrics():
                self._chores.append(command)
            case commands.SendShutdown():
                self.exit(0)
            case commands.SendSaveCheckpoint() | commands.SendPauseLoop():
                raise TypeError(f"{type(command).__name__} is for a loop of the user's own, which is not simulated")
            case _:
                assert_never(command)
        self._go_on()

    def _permit(self, num_samples: int) -> None:
        while self._reserve and num_samples > 0:
            lease = self._reserve.popleft()
            size = min(lease.size, num_samples)
            self._leases.append(replace(lease, size=size))
            if size < lease.size:
                self._reserve.appendleft(replace(lease, offset=lease.offset + size, size=lease.size - size))
            num_samples -= size
            self._permitted += size

    def on_alone(self) -> None:
        """The coordinator is away."""
        self.clock.do(self._go_on)

    def _ride_out(self) -> None:
        """Announces the next granted round to itself, when no other is, and begins the reserve that it needs."""
        away = self._away
        if away is None or (not away.count_away and not self._rounds):
            return
        if not self._rounds and away.round + away.count > self._last_entered:
            round_id, step = RoundId(away.round + away.count), away.after_step + away.count - 1 + away.every
            self._rounds[round_id], self._generations[round_id], self._alone_step = step, away.generation, step
            self._away = replace(away, round=round_id, after_step=step, count=1, count_away=away.count_away - 1)
        left = sum(lease.size for lease in self._leases) // self._batch_size
        self._permit((away.every - left) * self._batch_size)

    def _give_grants_back(self) -> None:
        self._away, self._alone_step = None, -inf
        self._rounds = {one: step for one, step in self._rounds.items() if one <= self._last_announced}
        self._reserve.clear()
        self._send(events.ReserveRecalled(**self.address, num_samples=self._permitted))

    def on_formed(self, generation: GenerationId) -> None:
        """The process group of a generation stands."""
        if self.is_alive and generation == self._forming:
            self._send(events.GroupFormed(**self.address, generation=generation))

    def on_apart(self, generation: GenerationId) -> None:
        """Handles a generation whose members cannot reach each other: its process group cannot be built."""
        if self.is_alive and generation == self._forming:
            self._send(
                events.GenerationAbandoned(**self.address, generation=generation, reason="the ranks could not meet")
            )

    def _try_links(self, ranks: list[Rank]) -> None:
        reached = self._collective.reached(self.address["rank"], ranks)
        event = events.LinksProbed(**self.address, ranks=reached)
        self.clock.after(0.0 if len(reached) == len(ranks) else PROBE_S, partial(self._send_if_alive, event))

    def _send_if_alive(self, event: events.Event) -> None:
        if self.is_alive:
            self._send(event)

    def _abandon(self, generation: GenerationId) -> None:
        """Nothing of the generation runs any more afterwards; a result that is there is taken first."""
        self._abandoned = max(self._abandoned, generation)
        if self._away is not None and self._away.generation <= generation:
            self._away = None
        for round_id, of in list(self._generations.items()):
            if of <= self._abandoned:
                del self._generations[round_id]
                self._rounds.pop(round_id, None)
        if self._entry is None or self._entry[1].generation > generation:
            return
        if self._result is not None:
            apply, self._result = self._result, None
            apply()
        else:
            self.give_up(*self._entry)

    def fail(self, round_id: RoundId, entry: RoundEntry) -> None:
        """The collective has failed here, since a member is gone."""
        if self.is_alive and self.is_in(entry):
            self.give_up(round_id, entry)
            self._abandon(entry.generation)
            reason = "a collective failed"
            self._send(events.GenerationAbandoned(**self.address, generation=entry.generation, reason=reason))

    def _report_headers(self, generation: GenerationId) -> None:
        for reported in self._unreported.values():
            if reported.generation <= generation:
                self._send(reported)
        self._unreported = {
            one: reported for one, reported in self._unreported.items() if reported.generation > generation
        }

    def exit(self, code: int, **more: Any) -> None:
        """The process ends, or, of a replica group, all of them; `more` is what its agent says of that."""
        self.is_alive, self.was_killed = False, code < 0
        self._send(events.RankExited(**self.address, agent_id=self.agent_id, exit_code=code, **more))

    def receive_result(
        self, round_id: RoundId, header: tuple[HeaderRow, ...], result: Parameters, entry: RoundEntry
    ) -> None:
        """The collective has finished: the result replaces the parameters, between two batches as in a real rank. The
        batch that is under way ends first, with the gradient at the parameters with which it has begun.
        """
        if not self.is_alive or not self.is_in(entry):
            return
        collective_s = self.clock.now_s - entry.entered_s
        self._result = partial(self._apply, round_id, header, result, entry, collective_s)
        if not self._overlaps:
            self._is_busy = False  # it has waited for this alone
        self._go_on()

    def _apply(
        self,
        round_id: RoundId,
        header: tuple[HeaderRow, ...],
        result: Parameters,
        entry: RoundEntry,
        collective_s: float,
    ) -> None:
        self.parameters = result
        if self._checkpoint_rounds.pop(round_id, 0) is None:
            self._kept[round_id] = result
        sends_digest = self._sends_digest.get(entry.generation, False)
        if sends_digest:
            self._unreported[round_id] = events.HeaderReported(
                **self.address, generation=entry.generation, round=round_id, header=header
            )
        self._send(
            events.ResultReceived(
                **self.address,
                generation=entry.generation,
                round=round_id,
                header=() if sends_digest else header,
                header_digest=header_digest(header) if sends_digest else None,
                collective_ms=collective_s * 1000,
                stalled_ms=self._take_stall_s(entry) * 1000,
                digest=result.version,
                newer_batches=self.local_step - entry.row.local_step,
                work=work_of(entry.pieces),
            )
        )
        self._end_round()

    def give_up(self, round_id: RoundId, entry: RoundEntry) -> None:
        """The round is given up: its work goes into the next one."""
        if not self.is_alive or not self.is_in(entry):
            return
        self._pieces = entry.pieces + self._pieces
        self._weight += entry.row.weight
        self._compute_s += entry.compute_s
        self._send(events.RoundFailed(**self.address, generation=entry.generation, round=round_id, reason="it broke"))
        self._end_round()

    def _take_stall_s(self, entry: RoundEntry) -> float:
        if not self._overlaps:
            return self.clock.now_s - entry.entered_s
        self._end_idling()
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return stalled_s

    def _end_idling(self) -> None:
        if self._idle_since_s is not None and self._is_averaging:
            self._stalled_s += self.clock.now_s - self._idle_since_s
        self._idle_since_s = None

    def _end_round(self) -> None:
        self._is_averaging, self._entry = False, None
        if not self._overlaps:
            self._is_busy = False
        self._go_on()

    def _learn_rounds(self, command: commands.SendSyncNow) -> None:
        """New rounds, or another target for one that is not entered; a target that comes too late changes nothing."""
        for index in range(command.count):
            round_id, step = RoundId(command.round + index), command.after_step + index
            if round_id > self._last_entered and command.generation > self._abandoned:
                self._rounds[round_id], self._generations[round_id] = step, command.generation
                if command.newer_batches is not None:
                    self._newer_batches[round_id] = command.newer_batches
        self._last_announced = max(self._last_announced, RoundId(command.round + command.count - 1))
        if command.generation > self._abandoned:
            self._away = command
        if command.checkpoint_round is not None:
            self._checkpoint_rounds[command.checkpoint_round] = None
        last = command.after_step + command.count - 1 if command.stop_after else inf
        self._last_step, self._alone_step = last, -inf

    def _go_on(self) -> None:
        if self._is_busy or not self.is_alive:
            return
        if self._result is not None and self._may_apply:
            apply, self._result = self._result, None
            apply()
            return
        self._end_idling()
        if self._is_alone():
            self._ride_out()
        if self._chores:
            self._do_chore(self._chores.popleft())
        elif self._is_round_due() and not self._is_averaging:
            self._enter(min(self._rounds))
        elif self._leases and self.parameters.version and not self._is_at_limit():
            self._start_batch()
        else:
            self._idle_since_s = self.clock.now_s
            if self._unreported_ms:
                self._report()

    def _is_round_due(self) -> bool:
        return bool(self._rounds) and (self.local_step >= self._rounds[min(self._rounds)] or not self._leases)

    @property
    def _may_apply(self) -> bool:
        wanted = self._newer_batches.get(self._last_entered)
        return wanted is None or self.local_step >= self._entered_step + wanted

    def _is_at_limit(self) -> bool:
        wanted = self._newer_batches.get(self._last_entered) if self._is_averaging else None
        replayed = inf if wanted is None else self._entered_step + wanted
        return self.local_step >= min(max(self._last_step, self._alone_step), self._throttle_step, replayed)

    def _write_checkpoint(self, outcome: commands.SendOutcome) -> None:
        order = outcome.checkpoint
        assert order is not None
        if outcome.round not in self._kept and outcome.round != self._last_entered:
            self._send(events.CheckpointFailed(**self.address, version=outcome.version, reason="late", is_late=True))
            return
        parameters = self._kept.pop(outcome.round, self.parameters)
        self.clock.after(self._checkpoint_s, partial(self._finish_checkpoint, outcome, order, parameters))

    def _finish_checkpoint(
        self, outcome: commands.SendOutcome, order: commands.WriteCheckpoint, parameters: Parameters
    ) -> None:
        if not self.is_alive:
            return
        self._saved.pop(outcome.version, None)  # of an attempt before
        self._saved[outcome.version] = Saved(order.name, parameters, order.training)
        for version in [version for version, one in self._saved.items() if one.name not in (*order.keep, order.name)]:
            del self._saved[version]
        self._send(
            events.CheckpointSaved(
                **self.address,
                version=outcome.version,
                path=f"{FOLDER}/{order.name}",
                size_bytes=1,
                duration_s=self._checkpoint_s,
            )
        )

    def _start_batch(self) -> None:
        duration_s = self._batch_s(self.clock.now_s)
        self._is_busy = True
        self.clock.after(duration_s, partial(self._finish_batch, duration_s))

    def _finish_batch(self, duration_s: float) -> None:
        if self.is_alive and self._is_deadly(
            replace(self._leases[0], size=min(self._batch_size, self._leases[0].size))
        ):
            self.exit(-9)
        if not self.is_alive:
            return
        self._is_busy = False
        lease = self._leases.popleft()
        size = min(self._batch_size, lease.size)
        self._pieces.append(Lease(id=lease.id, epoch=lease.epoch, offset=lease.offset, size=size))
        if size < lease.size:
            rest = Lease(id=lease.id, epoch=lease.epoch, offset=lease.offset + size, size=lease.size - size)
            self._leases.appendleft(rest)
        self.local_step += 1
        self._processed += size
        self._weight += size
        self._compute_s += duration_s
        self.trained_s += duration_s
        self._unreported_ms.append(duration_s * 1000)
        if self.clock.now_s - self._reported_s >= REPORT_EVERY_S:
            self._report()
        self._go_on()

    def _report(self) -> None:
        self._reported_s = self.clock.now_s
        batch_ms, self._unreported_ms = tuple(self._unreported_ms), []
        self._send(
            events.BatchesTrained(
                **self.address, local_step=self.local_step, num_processed=self._processed, batch_ms=batch_ms
            )
        )

    def _enter(self, round_id: RoundId) -> None:
        self._is_busy = not self._overlaps
        self._is_averaging = True
        self._last_entered = round_id
        self._entered_step = self.local_step
        del self._rounds[round_id]
        generation = self._generations.pop(round_id)
        self._report()
        self._send(events.RoundEntered(**self.address, generation=generation, round=round_id))
        row = HeaderRow(
            weight=self._weight,
            cut=self._processed,
            local_step=self.local_step,
            compute_us=round(self._compute_s * 1e6),
            version=self.parameters.version,
        )
        entry = RoundEntry(self, generation, row, self._pieces, self._compute_s, self.clock.now_s)
        self._entry = (round_id, entry)
        self._pieces, self._weight, self._compute_s = [], 0, 0.0
        self._collective.enter(round_id, entry)
        self._go_on()

    def _do_chore(self, chore: commands.SendOutcome | commands.SendMakeMetrics) -> None:
        self._is_busy = True
        if isinstance(chore, commands.SendMakeMetrics):
            self.clock.after(self._evaluation_s, partial(self._make_metrics, chore))
            return
        evaluation_s = self._evaluation_s if chore.evaluate is not None else 0.0
        self.clock.after(evaluation_s, partial(self._finish_chore, chore))

    def _finish_chore(self, outcome: commands.SendOutcome) -> None:
        if not self.is_alive:
            return
        self._is_busy = False
        if outcome.evaluate is not None:
            part = outcome.evaluate
            self.evaluated_s += self._evaluation_s
            given = self._evaluate(part.epoch) if self._evaluate else {"version": float(self.parameters.version)}
            count = part.size or 1
            self._send(
                events.EvaluationDone(
                    **self.address,
                    epoch=part.epoch,
                    sums={name: (one * count, count) for name, one in given.items() if not isinstance(one, TensorSum)},
                    duration_ms=self._evaluation_s * 1000,
                    tensors={name: one for name, one in given.items() if isinstance(one, TensorSum)},
                )
            )
        if outcome.save_final:
            self.files["model"] = self.parameters
            self._send(events.FinalStateSaved(**self.address, path="model.safetensors"))
        self._go_on()

    def _make_metrics(self, command: commands.SendMakeMetrics) -> None:
        """The first number of each sum."""
        if not self.is_alive:
            return
        self._is_busy = False
        made = {
            f"sum of {name}": (float(int.from_bytes(one.data[:8], "little", signed=True)), 1)
            for name, one in command.tensors.items()
        }
        self._send(events.EvaluationDone(**self.address, epoch=command.epoch, sums=made, duration_ms=1.0, is_made=True))
        self._go_on()

    def _keep_best(self, command: commands.SendKeepBest) -> None:
        best = {f"{FOLDER}/{one.name}": one.parameters for one in self._saved.values()} | {"": self.files["model"]}
        if command.checkpoint not in best:
            self._send(events.BestKept(**self.address, error=f"{command.checkpoint} cannot be read"))
            return
        self.files["best"] = best[command.checkpoint]
        if command.checkpoint and command.restores:
            self.files["last"], self.files["model"] = self.files["model"], self.files["best"]
        self._send(events.BestKept(**self.address))

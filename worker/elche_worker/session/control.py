"""The coordinator's commands and announced rounds on which the loop has not acted yet."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from elche.errors import ElcheError
from elche.v1 import rank_pb2

MAX_ANNOUNCED = 1 << 16
"""Most rounds that are announced at once."""


@dataclass(slots=True)
class Control:
    """State that the session's thread and the loop share. `wake` is notified of every change."""

    wake: threading.Condition = field(default_factory=threading.Condition)
    has_news: bool = False
    """True if `inbox` or `leaving` has changed, the build of a group has ended, or the coordinator is away. The loop
    reads it without the lock before every batch.
    """
    inbox: deque[rank_pb2.ConverseResponse] = field(default_factory=deque)
    leaving: str | None = None
    """Reason for which the rank has to leave; None if it stays."""
    outcome: str = ""
    """The job's outcome if it is decided, as the coordinator has said it; empty while the job goes on."""
    is_told_to_stop: bool = False
    """True once the process is to end (SIGTERM), and the coordinator has been away for more than a moment."""
    abandoned: set[int] = field(default_factory=set)
    """Generations that the coordinator has ordered to abandon."""
    clock: tuple[float, float] | None = None
    """(sent, received): times of the coordinator's last clock message, by its clock and by this host's, in seconds."""
    on_abandon: Callable[[int], None] | None = None
    """Called on the session's thread with an abandoned generation: the loop may be blocked in its collective."""

    def put(self, command: rank_pb2.ConverseResponse) -> None:
        """Adds a command (on the session's thread)."""
        with self._changing():
            self.inbox.append(command)
            if command.HasField("abandon"):
                self.abandoned.add(command.abandon.generation)
            if command.HasField("shutdown"):
                self.leaving = self.leaving or command.shutdown.reason or "the job is over"
                self.outcome = command.shutdown.outcome
        # without the lock, which the loop needs to end its round
        if command.HasField("abandon") and self.on_abandon is not None:
            self.on_abandon(command.abandon.generation)

    def leave(self, reason: str) -> None:
        """Has the rank leave, since the session is lost."""
        with self._changing():
            self.leaving = self.leaving or reason

    def stop(self) -> None:
        """Has the rank stop by itself, should no coordinator answer."""
        with self._changing():
            self.is_told_to_stop = True

    def notify(self) -> None:
        """Wakes the loop without a command."""
        with self.wake:
            self.wake.notify_all()

    def note_news(self) -> None:
        """Has the loop check whether the build of a group has ended, or the coordinator is away."""
        with self._changing():
            pass

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self.wake:
            yield
            self.has_news = True
            self.wake.notify_all()

    def take(self) -> list[rank_pb2.ConverseResponse]:
        """Removes and returns the commands since the last call, in order."""
        with self.wake:
            commands = list(self.inbox)
            self.inbox.clear()
            self.has_news = False
            return commands


class RoundTarget(NamedTuple):
    """The step at which, and the generation in which, an announced round is entered."""

    step: int
    """Local step after which it is entered."""
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """Rounds granted for the time in which the coordinator is away (protocol P16.1)."""

    round: int
    """The next one."""
    generation: int
    step: int
    """Local step after which the first one is entered."""
    every: int
    """Batches between two of them."""
    count: int
    """Number of rounds left."""


@dataclass(slots=True)
class Rounds:
    """Announced rounds that are not entered yet, and the limit of batches."""

    targets: dict[int, RoundTarget] = field(default_factory=dict)
    """By round."""
    abandoned: set[int] = field(default_factory=set)
    """Generations whose rounds are not entered any more."""
    throttle_step: float = inf
    """Limit of the last `Throttle`: the local step at which the rank stops."""
    last_step: float = inf
    """Local step of the last announced round, if no batch may follow it."""
    alone_step: float = -inf
    """Local step of the granted round that the rank has announced to itself since the last `SyncNow`; -inf: none."""
    last_entered: int = 0
    last_announced: int = 0
    """The newest round that the coordinator has announced; later ones are granted ones."""
    checkpoint_rounds: dict[int, None] = field(default_factory=dict)
    """Rounds whose result may become a checkpoint written here."""
    newer_batches: dict[int, int] = field(default_factory=dict)
    """Batches after the snapshot at which a round's result is applied, if the coordinator fixes that."""
    apply_step: float = -inf
    """Local step at which the entered round's result is applied; the rank waits for it there."""

    away: Away | None = None
    """The grants that follow the last announced round."""

    @property
    def limit_step(self) -> float:
        """The local step at which the rank stops."""
        # While the coordinator is away, a granted round takes the place of the last announced one.
        return min(self.throttle_step, max(self.last_step, self.alone_step))

    def learn(self, command: rank_pb2.SyncNow) -> None:
        """Adds announced rounds, one batch apart, or changes their targets. Ignores entered rounds and abandoned
        generations. Raises `ElcheError` for more than `MAX_ANNOUNCED` rounds.
        """
        if command.generation in self.abandoned:
            return
        if command.count > MAX_ANNOUNCED:
            raise ElcheError(
                f"the coordinator announces {command.count} rounds at once, over {MAX_ANNOUNCED}: restart it"
            )
        for index in range(command.count):
            if command.round + index > self.last_entered:
                step = command.after_step + index
                self.targets[command.round + index] = RoundTarget(step, command.generation)
        self.last_announced = max(self.last_announced, command.round + command.count - 1)
        last = command.after_step + command.count - 1
        self.away = Away(
            round=command.round + command.count,
            generation=command.generation,
            step=last + command.every,
            every=command.every,
            count=command.count_away,
        )
        if command.checkpoint_round > self.last_entered:
            self.checkpoint_rounds[command.checkpoint_round] = None
        if command.HasField("newer_batches"):
            self.newer_batches[command.round] = command.newer_batches
        self.last_step, self.alone_step = last if command.stop_after else inf, -inf

    def go_on_alone(self) -> int:
        """While the coordinator is away: announces the next granted round, unless a round is announced already. Returns
        the number of batches between granted rounds; 0 if none are left.
        """
        away = self.away
        if away is None or (not away.count and not self.targets):
            return 0
        if not self.targets and away.round > self.last_entered:
            self.targets[away.round] = RoundTarget(away.step, away.generation)
            self.alone_step = away.step
            self.away = replace(away, round=away.round + 1, step=away.step + away.every, count=away.count - 1)
        return away.every

    def last_alone(self) -> int | None:
        """The round that a rank which stops without a coordinator enters at once; None if there is none. All ranks
        choose the same one, however many batches each has trained.
        """
        self.go_on_alone()
        return min(self.targets, default=None)

    def give_grants_back(self) -> None:
        """Drops the grants, and granted rounds that this rank has announced to itself and not entered."""
        self.away, self.alone_step = None, -inf
        self.targets = {one: target for one, target in self.targets.items() if one <= self.last_announced}

    def abandon(self, generation: int) -> None:
        """Drops the rounds of a generation. The limit stays until other rounds are announced."""
        self.abandoned.add(generation)
        if self.away is not None and self.away.generation == generation:
            self.away = None
        self.targets = {one: target for one, target in self.targets.items() if target.generation != generation}

    def due(self, local_step: int, *, is_out_of_work: bool) -> int | None:
        """The round to enter now, if any."""
        first = min(self.targets, default=None)
        if first is None or (local_step < self.targets[first].step and not is_out_of_work):
            return None
        return first

    def enter(self, round_id: int, local_step: int) -> bool:
        """Marks the round as entered at a step; returns True if its result may become a checkpoint."""
        del self.targets[round_id]
        self.last_entered = round_id
        newer = self.newer_batches.pop(round_id, None)
        self.apply_step = -inf if newer is None else local_step + newer
        # the values of this dict, used as an ordered set, are None; 0 means that the round is not in it
        return self.checkpoint_rounds.pop(round_id, 0) is None

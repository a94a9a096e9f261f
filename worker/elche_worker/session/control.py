"""The coordinator's commands and announced rounds that the loop has not yet acted upon."""

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from elche.v1 import rank_pb2


@dataclass(slots=True)
class Control:
    """Shared between the session's thread and the loop. `wake` is notified of every change."""

    wake: threading.Condition = field(default_factory=threading.Condition)
    has_news: bool = False
    """True if `inbox` or `leaving` has changed, a group is built, or the coordinator is away. The loop reads it without
    the lock before every batch.
    """
    inbox: deque[rank_pb2.ConverseResponse] = field(default_factory=deque)
    leaving: str | None = None
    """Why the rank is to leave; None while it is not."""
    abandoned: set[int] = field(default_factory=set)
    """Generations that the coordinator has given up."""
    clock: tuple[float, float] | None = None
    """(sent, received): the coordinator's last clock by its own time and by this host's."""

    def put(self, command: rank_pb2.ConverseResponse) -> None:
        """Takes in a command."""
        with self.wake:
            self.inbox.append(command)
            if command.HasField("abandon"):
                self.abandoned.add(command.abandon.generation)
            if command.HasField("shutdown"):
                self.leaving = self.leaving or command.shutdown.reason or "the job is over"
            self.has_news = True
            self.wake.notify_all()

    def leave(self, reason: str) -> None:
        """The session is lost: the rank is to leave."""
        with self.wake:
            self.leaving = self.leaving or reason
            self.has_news = True
            self.wake.notify_all()

    def notify(self) -> None:
        """Wakes the loop for another reason than a command."""
        with self.wake:
            self.wake.notify_all()

    def note_news(self) -> None:
        """A group is built, or cannot be, or the coordinator is away: the loop is to look."""
        with self.wake:
            self.has_news = True
            self.wake.notify_all()

    def take(self) -> list[rank_pb2.ConverseResponse]:
        """The commands since the last call, in order."""
        with self.wake:
            commands = list(self.inbox)
            self.inbox.clear()
            self.has_news = False
            return commands


class Target(NamedTuple):
    """When an announced round is entered, and in which generation."""

    step: int
    """Local step after which it is entered."""
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """Rounds that are entered while the coordinator is away (protocol P16.1)."""

    round: int
    """The next one."""
    generation: int
    step: int
    """Local step after which that is entered."""
    every: int
    """Batches between it and the one after it."""
    count: int
    """How many there are."""


@dataclass(slots=True)
class Rounds:
    """Announced rounds that are not entered yet, and the limit of batches."""

    targets: dict[int, Target] = field(default_factory=dict)
    """By round."""
    abandoned: set[int] = field(default_factory=set)
    """Generations of which no round is entered any more."""
    throttle_step: float = inf
    """Limit of Throttle: how many batches the rank may make in all."""
    last_step: float = inf
    """Local step of the last announced round, when no batch may follow it."""
    alone_step: float = -inf
    """Local step of the last round that the rank has announced to itself since."""
    last_entered: int = 0
    last_announced: int = 0
    """The newest round that the coordinator has announced: those after it are granted ones."""
    checkpoint_rounds: dict[int, None] = field(default_factory=dict)
    """Rounds whose result may become a checkpoint written here."""
    newer_batches: dict[int, int] = field(default_factory=dict)
    """How many batches beyond the snapshot a round's result is applied, where the coordinator fixes that."""
    apply_step: float = -inf
    """Local step at which the entered round's result is applied; it waits until then."""

    away: Away | None = None
    """What is granted for when the coordinator is away, after the last announced round."""

    @property
    def limit_step(self) -> float:
        """How many batches the rank may make in all."""
        return min(self.throttle_step, max(self.last_step, self.alone_step))

    def learn(self, command: rank_pb2.SyncNow) -> None:
        """Takes in new rounds, or new targets of announced ones. A target of an entered round is ignored, and so are
        the rounds of a generation that is given up.
        """
        if command.generation in self.abandoned:
            return
        for index in range(command.count):
            if command.round + index > self.last_entered:
                step = command.after_step + index
                self.targets[command.round + index] = Target(step, command.generation)
        self.last_announced = max(self.last_announced, command.round + command.count - 1)
        self.away = Away(
            round=command.round + command.count,
            generation=command.generation,
            step=command.after_step + command.count - 1 + command.every,
            every=command.every,
            count=command.count_away,
        )
        if command.checkpoint_round > self.last_entered:
            self.checkpoint_rounds[command.checkpoint_round] = None
        if command.HasField("newer_batches"):
            self.newer_batches[command.round] = command.newer_batches
        last = command.after_step + (command.count - 1) * command.every
        self.last_step, self.alone_step = last if command.stop_after else inf, -inf

    def go_on_alone(self) -> int:
        """The coordinator is away: the next granted round is announced, when no other is. Returns the batches between
        granted rounds; 0 when none are left.
        """
        away = self.away
        if away is None or (not away.count and not self.targets):
            return 0
        if not self.targets and away.round > self.last_entered:
            self.targets[away.round] = Target(away.step, away.generation)
            self.alone_step = away.step
            self.away = replace(away, round=away.round + 1, step=away.step + away.every, count=away.count - 1)
        return away.every

    def give_grants_back(self) -> None:
        """No granted round is entered any more, nor one that this rank has announced to itself before."""
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
        """Marks the round as entered at a step; returns whether its result may become a checkpoint."""
        del self.targets[round_id]
        self.last_entered = round_id
        newer = self.newer_batches.pop(round_id, None)
        self.apply_step = -inf if newer is None else local_step + newer
        return self.checkpoint_rounds.pop(round_id, 0) is None

"""A simulation that is watched: every event is checked for what must hold before, during and after it."""

import pickle
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from elche_coordinator.core.continuation import continuation
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.life.job import Job
from elche_coordinator.core.messages.commands import (
    Command,
    RankCommand,
    StartRank,
    StopRank,
)
from elche_coordinator.core.messages.events import Event
from elche_coordinator.core.messages.ids import Epoch, Rank
from elche_coordinator.core.messages.reports import EpochReport, EvaluationReport, JobResult
from elche_coordinator.simulator.collective import Parameters
from elche_coordinator.simulator.simulation import RankModel, Simulation

AT_RANDOM: dict[str, Any] = {"check_every": 10}
"""Of long stories in which anything happens at any time."""
LONG_ROUNDS: dict[str, Any] = {"anchor": 10, "overhead_target": 0.1}
"""Rounds of ten batches, as many tests are told with: longer than by default, so that much happens within each."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One event and what it led to."""

    at_s: float
    event: Event
    commands: tuple[Command, ...]


class WatchedCoordinator(Coordinator):
    """The core, with every step written down."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __getstate__(self) -> dict[str, Any]:
        """What a coordinator that starts again goes on with: not what was written down for tests."""
        return {**self.__dict__, "steps": []}

    def handle(self, event: Event, *, now_s: float) -> list[Command]:
        """As the core does, and writes it down."""
        commands = super().handle(event, now_s=now_s)
        self.steps.append(Step(at_s=now_s, event=event, commands=tuple(commands)))
        return commands


def state_of(job: Job) -> object:
    """What of a job old news must not change, as plain values."""
    run = job.run if isinstance(job, ManagedJob) else None
    training, generation = (run.training, run.generation) if run is not None else (None, None)
    ranks = [(one.rank, one.incarnation, one.phase, one.local_step, one.base_step) for one in job.ranks.values()]
    open_rounds = (
        [(opened.id, dict(opened.targets), list(opened.results)) for opened in generation.rounds] if generation else []
    )
    snapshot = deepcopy(training.snapshot()) if training is not None else None
    return continuation(job), job.phase, job.reason, ranks, open_rounds, snapshot


SAVES_EVERY = 40
"""Events between two saved states of a coordinator that may crash."""


@dataclass(kw_only=True)
class WatchedSimulation(Simulation):
    """A simulation over a watched core; `send_twice` gives the core every event a second time."""

    send_twice: bool = False
    check_every: int = 1
    """Check every invariant after every so many events: of many ranks, or of many events, the checks cost much."""
    crashes: bool = False
    """True if the coordinator keeps what it goes on with after `crash`."""
    core: WatchedCoordinator = field(default_factory=WatchedCoordinator)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._saved_state, self._num_saved, self._saves_every = b"", 0, SAVES_EVERY

    def handle(self, event: Event) -> None:
        """Gives an event to the core and does what it says."""
        self.check = self.num_events % self.check_every == 0
        super().handle(event)
        if self.send_twice:
            super().handle(event)
        if self.crashes and len(self.core.steps) - self._num_saved >= self._saves_every:
            self._saved_state, self._num_saved = pickle.dumps(self.core), len(self.core.steps)

    def crash(self, duration_s: float, *, saves_every: int = SAVES_EVERY) -> None:
        """Ends the coordinator for a while. It goes on from a saved state and the events since, up to `saves_every` of
        them; what ranks say meanwhile reaches it later, and what it had decided was durable (protocol P22). The steps
        before stay known.

        Raises `AssertionError` when those events lead to other commands than before.
        """
        if self._asleep is not None:
            return  # it is away, and what waits for it must not be forgotten
        before = self.core
        if self._saved_state:
            self.core = pickle.loads(self._saved_state)
            for step in before.steps[self._num_saved :]:
                commands = self.core.handle(step.event, now_s=step.at_s)
                assert tuple(commands) == step.commands, f"{step.event} leads elsewhere"
            assert self.core.next_deadline_s() == before.next_deadline_s()
        self.core.steps = before.steps
        self._saves_every = saves_every
        self.sleep(duration_s)

    @property
    def is_awake(self) -> bool:
        """True while the coordinator handles events."""
        return self._asleep is None

    def freeze(self, rank: int) -> None:
        """Stops the rank's process, as SIGSTOP does."""
        self.processes[Rank(rank)].clock.freeze()

    def thaw(self, rank: int) -> None:
        """Has a stopped process continue."""
        self.processes[Rank(rank)].clock.thaw()

    def part(self, *pairs: tuple[int, int]) -> None:
        """These pairs of ranks cannot reach each other any more, and all others can."""
        self.collective.broken = {frozenset(pair) for pair in pairs}

    def assert_exactly_once(self) -> None:
        """Every kept sample of every epoch has reached the final parameters once. Raises `AssertionError` if not."""
        ledger = self.job.run.training.ledger if self.job.run.training else None
        assert ledger is not None
        assert ledger.is_complete
        # those of attempts before may have later versions, after which the job has gone back to a checkpoint
        attempt = {rank: one for rank, one in self.processes.items() if one.attempt == self.job.attempt}
        final = dict[Rank, Parameters]()
        for rank, process in attempt.items():
            record = self.job.ranks.get(rank)
            if record is None or record.is_done_without or not record.has_model:
                continue  # it has left, was left out, perhaps with a result of its own, or was not ready
            if self.job.roster.num_lost and (process.was_killed or process.parameters.version < self.training.version):
                continue  # it has died, perhaps with the only result of a round
            final[rank] = process.parameters
        for rank, process in attempt.items() if not final else ():  # all have died after one had written it
            if "model" in process.files and process.agent_id == self.job.result.model_agent_id:
                final[rank] = process.files.get("last", process.files["model"])
        assert final, "no rank has the final parameters"
        for rank, parameters in final.items():
            for epoch in range(ledger.num_epochs):
                seen = list(parameters.seen.get(Epoch(epoch), ()))
                if not ledger.is_stopped:
                    assert seen == [(0, ledger.size(Epoch(epoch)))], f"rank {rank}, epoch {epoch}: {seen}"
                num_seen = sum(end - start for start, end in seen)
                assert num_seen == ledger.committed_samples(Epoch(epoch)), f"rank {rank}, epoch {epoch}: {seen}"

    def sent(self, kind: type, *, rank: int | None = None) -> list[RankCommand]:
        """All commands of a kind so far, in order; of one rank or of all."""
        return [command for _, command in self.sent_at(kind, rank=rank)]

    def sent_at(self, kind: type, *, rank: int | None = None) -> Iterator[tuple[float, RankCommand]]:
        """As `sent`, with the time of each."""
        for step in self.core.steps:
            for command in step.commands:
                if isinstance(command, kind) and rank in (None, getattr(command, "rank", None)):
                    yield step.at_s, command

    def events(self, kind: type) -> list[Event]:
        """All events of a kind so far, in order."""
        return [step.event for step in self.core.steps if isinstance(step.event, kind)]

    @property
    def epochs(self) -> list[EpochReport]:
        """The finished epochs, as watchers were told."""
        return [report for report in self.reports if isinstance(report, EpochReport)]

    @property
    def evaluations(self) -> list[EvaluationReport]:
        """The evaluations, as watchers were told."""
        return [report for report in self.reports if isinstance(report, EvaluationReport)]

    @property
    def results(self) -> list[JobResult]:
        """The results, as watchers were told."""
        return [report for report in self.reports if isinstance(report, JobResult)]

    def says_nothing(self, event: Event) -> None:
        """The event is old news: it leads to no command and leaves the job's record as it was."""
        before = list(map(state_of, self.core.jobs.values()))
        commands = self.core.handle(event, now_s=self.clock.now_s)
        assert commands == [], f"{event} -> {commands}"
        assert list(map(state_of, self.core.jobs.values())) == before, event

    def assert_ended_cleanly(self) -> None:
        """Nothing is left of a job that has ended: no slot, no process, no deadline that leads to anything."""
        assert self.core.fleet.taken == {}
        assert not any(process.is_alive for process in self.processes.values())
        assert len(self.results) == 1


def ranks(*batch_ms: float, jitter: float = 0.0) -> list[RankModel]:
    """One rank per time per batch."""
    return [RankModel(batch_ms=ms, jitter_fraction=jitter) for ms in batch_ms]


def from_another_time(event: Event, **changes: object) -> Event:
    """The same event with other ids."""
    return replace(event, **changes)  # type: ignore[type-var]


__all__ = ["StartRank", "Step", "StopRank", "WatchedCoordinator", "WatchedSimulation", "from_another_time", "ranks"]

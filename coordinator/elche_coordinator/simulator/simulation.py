"""The core, its ranks, and a network between them, in virtual time."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import assert_never

from elche.errors import MISSING
from elche.settings import AgreedSettings
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.messages import events
from elche_coordinator.core.messages.commands import (
    AskStacks,
    Command,
    Publish,
    RankCommand,
    SendPing,
    SessionCommand,
    StartRank,
    StopRank,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import JobResult, Report, RoundReport
from elche_coordinator.core.messages.spec import JobSpec, Lease, RecordedRound, Slot, TensorSum
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.core.results.training import Training
from elche_coordinator.core.rounds.generation import Generation
from elche_coordinator.simulator.clock import VirtualClock
from elche_coordinator.simulator.collective import Collective, Fate
from elche_coordinator.simulator.synthetic import FOLDER, JOB_FOLDER, Saved, SyntheticRank

NO_CHECKPOINT = json.dumps({MISSING: f"there is no checkpoint {FOLDER}"})
JOB = JobId("job")
"""The only simulated job; commands for others are dropped."""


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """The behaviour of one synthetic rank."""

    batch_ms: float
    jitter_fraction: float = 0.0
    """Standard deviation of the time per batch, relative to it."""
    batch_size: int | None = None
    """Samples in its batches; None: as the job's."""
    changes: tuple[tuple[float, float], ...] = ()
    """(from this time in s, ms per batch), in order."""
    first_ms: tuple[float, ...] = ()
    """Times of a process's first batches, such as those that compile."""
    tail: tuple[float, float] = (0.0, 1.0)
    """(fraction of its batches, factor by which these take longer)."""
    evaluation_ms: float | None = None
    """Duration of an evaluation on this rank; None: as the simulation's."""

    def ms_at(self, now_s: float) -> float:
        """Mean time per batch at a time."""
        return [self.batch_ms, *(ms for since_s, ms in self.changes if since_s <= now_s)][-1]


@dataclass(kw_only=True)
class Simulation:
    """One job on one host. Runs the real core; only ranks, network, disk and time are synthetic."""

    settings: AgreedSettings
    ranks: list[RankModel]
    group_size: int = 1
    """Slots that each rank takes; with more than one it is a replica group."""
    num_hosts: int = 1
    seed: int = 0
    """Seed of the jitter of batch times."""
    latency_ms: float = 0.5
    """Time of a message, in one direction."""
    persist_ms: float = 1.0
    """Time of one write to the disk, before which nothing leaves the coordinator."""
    sync_ms: float = 5.0
    """Duration of an averaging, once all have entered it."""
    build_ms: float = 0.0
    """Time in which a process group is built."""
    start_ms: float = 0.0
    """Time from the start of a process until it is ready."""
    evaluation_ms: float = 20.0
    """Duration of a part of an evaluation."""
    broken_rounds: frozenset[int] = frozenset()
    """Ids of rounds that are given up by all, as those through the coordinator can be."""
    checkpoint_ms: float = 50.0
    """Time in which a checkpoint is written, while training goes on."""
    resumed: Saved | None = None
    """The checkpoint that every rank loads."""
    replay: tuple[RecordedRound, ...] = ()
    evaluate: Callable[[int], Mapping[str, float | TensorSum]] | None = None
    """The metrics of an epoch's model."""
    saved: dict[int, Saved] = field(default_factory=dict)
    """Complete checkpoints, by version."""
    disks: dict[AgentId, dict[int, Saved]] | None = None
    """Those of each host, where hosts have disks of their own; None: all have `saved`."""
    is_deadly: Callable[[Lease], bool] = lambda _: False
    """True if a batch of these samples kills whoever trains it."""
    check: bool = True
    """Check every invariant after every event."""
    verifies: bool = True
    """True if the job fails when ranks have different results."""
    new_rank: Callable[..., SyntheticRank] = SyntheticRank
    """Constructor of a rank's process."""
    clock: VirtualClock = field(default_factory=VirtualClock)
    core: Coordinator = field(default_factory=Coordinator)
    reports: list[Report] = field(default_factory=list)
    report_times_s: list[float] = field(default_factory=list)
    processes: dict[Rank, SyntheticRank] = field(default_factory=dict)
    num_events: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._durable_s = 0.0
        """Time at which the last event that had commands is on disk; later messages leave no sooner."""
        self._write_ends_s, self._is_more_to_write = 0.0, False
        self._asleep: list[events.Event] | None = None
        self._cut_off: dict[Rank, list[Callable[[], None]]] = {}
        """For each rank whose session is broken, the messages that wait, in both directions."""
        self._arrivals_s: dict[str, float] = {}
        self._losses, self._known_losses = Counter[AgentId](), Counter[AgentId]()
        """How often each host was lost, and of how many of these losses the coordinator knows. What it sends before it
        knows is lost, too.
        """
        self.collective = Collective(
            self.clock,
            lambda: self.sync_ms / 1000,
            breaks=lambda round_id: round_id in self.broken_rounds,
            build_s=self.build_ms / 1000,
            fate=lambda: self._random.choice(list(Fate)),
        )

    @property
    def job(self) -> ManagedJob:
        """The job, as the core has it."""
        return self.core.trainings[JOB]

    @property
    def training(self) -> Training:
        """The job's training; only once its ranks have agreed."""
        assert self.job.run.training is not None
        return self.job.run.training

    @property
    def generation(self) -> Generation:
        """The ranks that train together; only once they have agreed."""
        assert self.job.run.generation is not None
        return self.job.run.generation

    @property
    def rounds(self) -> list[RoundReport]:
        """The committed rounds, in order."""
        return [report for report in self.reports if isinstance(report, RoundReport)]

    def start(self) -> None:
        """Hosts with a slot for each rank join, and the job is submitted."""
        num_slots = len(self.ranks) * self.group_size
        for number, host in enumerate(("host", *(f"host-{number}" for number in range(2, self.num_hosts + 1)))):
            slots = (Slot(device="cpu"),) * len(range(number, num_slots, self.num_hosts))
            folder = "" if self.disks is None else host
            self.handle(events.AgentJoined(agent_id=AgentId(host), host=host, slots=slots, folder=folder))
        spec = JobSpec(
            name="simulated",
            source_hash="",
            file_name="",
            num_ranks=len(self.ranks),
            settings={"group_size": str(self.group_size), "on_rank_loss": json.dumps(self.settings.on_rank_loss)},
            replay=self.replay,
            verify_rounds=self.verifies,
        )
        self.handle(events.JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0))

    def run(self, *, limit_s: float = 1e6) -> JobResult:
        """Runs the job to its end and returns its result. Raises `TimeoutError` when it does not end."""
        if not self.num_events:
            self.start()
        self.clock.run(until=lambda: self.job.result is not None, limit_s=limit_s)
        assert self.job.result is not None
        return self.job.result

    def run_until(self, condition: Callable[[], bool], *, limit_s: float = 1e6) -> None:
        """Lets time pass until the condition is true. Raises `TimeoutError` when it never is."""
        if not self.num_events:
            self.start()
        self.clock.run(until=condition, limit_s=limit_s)

    def kill(self, rank: int, group_position: int = 0) -> None:
        """Kills the rank's process now; of a replica group the process at that position, with which the others end."""
        self.processes[Rank(rank)].exit(-9, group_position=group_position)

    def lose_host(self, agent_id: AgentId) -> None:
        """The host is gone, with its processes and with what was on its way to it."""
        self._losses[agent_id] += 1
        for process in self.processes.values():
            if process.agent_id == agent_id and process.is_alive:
                process.is_alive, process.was_killed = False, True
        self.handle(events.AgentLost(agent_id=agent_id))

    def sleep(self, duration_s: float) -> None:
        """Stops the coordinator for a while: events wait, and a deadline that has passed comes before them."""
        self._asleep = []
        self.clock.after(duration_s, self._wake)
        for process in self.processes.values():
            process.on_alone()

    def cut_off(self, rank: Rank, duration_s: float) -> None:
        """Breaks the rank's session for a while; what is said meanwhile arrives later."""
        if rank not in self._cut_off:
            self._cut_off[rank] = []
            self.clock.after(duration_s, lambda: self._reconnect(rank))
            self.processes[rank].on_alone()

    def _reconnect(self, rank: Rank) -> None:
        for action in self._cut_off.pop(rank):
            action()
        if self.core.owes_answer(address := self.processes[rank].address):
            self._perform(SendPing(**address))

    def _unless_cut_off(self, rank: Rank, action: Callable[[], None]) -> None:
        if rank in self._cut_off:
            self._cut_off[rank].append(action)
        else:
            action()

    def _wake(self) -> None:
        waiting, self._asleep = self._asleep or [], None
        self._pass_deadline()
        for event in waiting:
            self.handle(event)

    def handle(self, event: events.Event) -> None:
        """Gives an event to the core and does what it says."""
        if self._asleep is not None:
            if not isinstance(event, events.DeadlinePassed):
                self._asleep.append(event)
            return
        self.num_events += 1
        if isinstance(event, events.AgentLost):
            known = self._known_losses[event.agent_id] + 1  # later losses of the host may wait in `_asleep`
            self._known_losses[event.agent_id] = min(known, self._losses[event.agent_id])
        commands = self.core.handle(event, now_s=self.clock.now_s)
        if self.check:
            check_invariants(self.core)
        if commands:
            self._durable_s = self._write()
        for command in commands:
            self._perform(command)
        for asked in self.core.asked:
            self.handle(asked)
        self._arm()

    def _write(self) -> float:
        """Returns the time at which the present event is on disk. Events that come during a write are written together
        after it.
        """
        now_s, write_s = self.clock.now_s, self.persist_ms / 1000
        if self._is_more_to_write and now_s >= self._write_ends_s:
            self._write_ends_s, self._is_more_to_write = self._write_ends_s + write_s, False
        if now_s >= self._write_ends_s:
            self._write_ends_s = now_s + write_s
            return self._write_ends_s
        self._is_more_to_write = True
        return self._write_ends_s + write_s

    def _arm(self) -> None:
        next_s = self.core.next_deadline_s()
        if next_s is not None:
            # Those that were armed before stay in the queue; `_pass_deadline` asks again what is due.
            self.clock.at(next_s, self._pass_deadline)

    def _pass_deadline(self) -> None:
        next_s = self.core.next_deadline_s()
        if next_s is not None and next_s <= self.clock.now_s:
            self.handle(events.DeadlinePassed())

    def _perform(self, command: Command) -> None:
        """Carries out a command: a message leaves once the event before it is on disk, in order. Commands for other
        jobs than the simulated one are dropped.
        """
        if command.job_id != JOB:
            return
        match command:
            case Publish():
                self.reports.append(command.report)
                self.report_times_s.append(self.clock.now_s)
            case StartRank():
                before = self._known_losses[command.agent_id]
                self._send(
                    f"rank {command.rank}",
                    lambda: self._start_rank(command) if self._losses[command.agent_id] == before else None,
                )
            case StopRank():
                self._send(f"rank {command.rank}", lambda: self._stop_rank(command))
            case AskStacks():
                self._send(f"rank {command.rank}", lambda: None)  # its agent tells them when a test wants it
            case SendPing():
                sent = events.PingSent(job_id=command.job_id, rank=command.rank, incarnation=command.incarnation)
                self.clock.at(self._durable_s, lambda: self.handle(sent))
                self._send(f"rank {command.rank}", lambda: self._ping(command))
            case RankCommand():
                deliver = partial(self._unless_cut_off, command.rank, lambda: self._deliver(command))
                self._send(f"rank {command.rank}", deliver)
            case _:
                assert_never(command)

    def _send(self, receiver: str, action: Callable[[], None]) -> None:
        self._let_arrive(receiver, action, max(self._durable_s, self.clock.now_s))

    def _let_arrive(self, way: str, action: Callable[[], None], sent_s: float) -> None:
        delay_s = self.latency_ms / 1000 * self._random.uniform(0.5, 1.5)
        arrival_s = max(sent_s + delay_s, self._arrivals_s.get(way, 0.0))  # in order, and many are on their way
        self._arrivals_s[way] = arrival_s
        self.clock.at(arrival_s, action)

    def _deliver(self, command: SessionCommand) -> None:
        process = self.processes[command.rank]
        if process.address["incarnation"] == command.incarnation:
            process.receive(command)

    def _ping(self, command: SendPing) -> None:
        """A question is not kept for who cannot hear it."""
        if command.rank not in self._cut_off:
            self._deliver(command)

    def _receive(self, rank: Rank, event: events.Event) -> None:
        arrive = partial(self.handle, event)
        if not isinstance(event, events.RankExited | events.RankStarted):  # its agent says that
            arrive = partial(self._unless_cut_off, rank, arrive)
        self._let_arrive(f"from {rank}", arrive, self.clock.now_s)

    def _start_rank(self, command: StartRank) -> None:
        saved = self.saved if self.disks is None else self.disks.setdefault(command.agent_id, {})
        model = self.ranks[command.rank % len(self.ranks)]
        resumed = _saved_at(command.spec.resume, saved) or self.resumed
        address: Address = {"job_id": command.job_id, "rank": command.rank, "incarnation": command.incarnation}
        self.processes[command.rank] = self.new_rank(
            address,
            agent_id=command.agent_id,
            clock=self.clock,
            send=lambda event: self._receive(command.rank, event),
            collective=self.collective,
            batch_size=model.batch_size or self.settings.batch_size,
            batch_s=self._new_batch_s(model),
            evaluation_s=(self.evaluation_ms if model.evaluation_ms is None else model.evaluation_ms) / 1000,
            overlaps=self.settings.averaging == "overlapped",
            saved=saved,
            checkpoint_s=self.checkpoint_ms / 1000,
            resumed=resumed,
            evaluate=self.evaluate,
            is_alone=lambda: self._asleep is not None or command.rank in self._cut_off,
            is_deadly=self.is_deadly,
        )
        log_path = f"{JOB_FOLDER}/rank.log"
        self._receive(command.rank, events.RankStarted(**address, agent_id=command.agent_id, log_path=log_path))
        ready = events.RankReady(
            **address,
            settings=self.settings,
            device="cpu" if self.group_size == 1 else f"{self.group_size}x cpu",
            batch_size=model.batch_size,
            resumed=resumed.training if resumed else command.spec.resume and NO_CHECKPOINT,
            links_address="simulated:1",
        )
        if self.start_ms:
            self.clock.after(self.start_ms / 1000, lambda: self._receive(command.rank, ready))
        else:
            self._receive(command.rank, ready)

    def _stop_rank(self, command: StopRank) -> None:
        process = self.processes.get(command.rank)
        is_meant = process is not None and process.address["incarnation"] == command.incarnation
        if process is not None and is_meant and process.is_alive:
            if command.waits_while_stopped:
                was_stopped = process.is_frozen
                process.clock.do(lambda: process.exit(-15, was_stopped=was_stopped))
            else:
                process.exit(-15)

    def _new_batch_s(self, model: RankModel) -> Callable[[float], float]:
        """A function that returns the seconds that a process's next batch takes, if it begins at the given time."""
        first = iter(model.first_ms)
        fraction, factor = model.tail

        def batch_s(now_s: float) -> float:
            noise = max(0.2, self._random.gauss(1.0, model.jitter_fraction)) if model.jitter_fraction else 1.0
            noise *= factor if fraction and self._random.random() < fraction else 1.0
            return next(first, model.ms_at(now_s) * noise) / 1000

        return batch_s


def _saved_at(path: str, saved: Mapping[int, Saved]) -> Saved | None:
    """The checkpoint at a path, or the newest in the folder."""
    named = [one for one in saved.values() if path in (FOLDER, f"{FOLDER}/{one.name}")]
    return named[-1] if named else None

"""A job small enough that all of it can be looked at: the real core and synthetic ranks, in which anything comes next.

Messages of one stream keep their order; whatever else is under way may come next, whenever it does. A fault may befall
the job at any moment. Time stands still while anything can happen without it, unless it passes too early.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from elche.settings import AgreedSettings
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import Broken, check_invariants
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.messages.commands import AskStacks, Command, Publish, SendPing, StartRank, StopRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    CheckpointRequested,
    DeadlinePassed,
    DrainRequested,
    Event,
    JobCancelled,
    JobSubmitted,
    LeaveRequested,
    PauseRequested,
    PingSent,
    RankExited,
    RankReady,
    RankStarted,
    ScaleRequested,
    SessionLost,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.reports import JobResult, Outcome
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.simulator.collective import Collective, Fate
from elche_coordinator.simulator.synthetic import Saved, SyntheticRank

JOB, HOST = JobId("job"), AgentId("host")
BATCH_S, SYNC_S = 0.01, 0.001
FAULTS = ("kill", "stop", "cut", "crash")
ACTS = ("leave", "scale", "pause", "drain", "save", "cancel")
"""What people do: as a fault it may befall the job at any moment. A pause and a drain end, at any moment too; every
second `scale` takes the first one back.
"""

Step = tuple[str, *tuple[Any, ...]]
"""What happens next: its kind, and of what."""


class Anytime:
    """A clock on which what is begun may end at any moment."""

    def __init__(self, world: "SmallWorld") -> None:
        self._world = world
        self.pending: list[tuple[float, Any]] = []

    @property
    def now_s(self) -> float:
        """The time of the world."""
        return self._world.now_s

    def after(self, delay_s: float, action: Any) -> None:
        """The action may be done from now on."""
        self.pending.append((delay_s, action))


@dataclass(eq=False)
class Stream:
    """The messages between one process of a rank and the coordinator that are under way, each way in order."""

    up: list[Event] = field(default_factory=list)
    down: list[Command] = field(default_factory=list)
    is_cut: bool = False


class SmallWorld:
    """A coordinator, one host, and the ranks of one job. `steps` says what may come next, `do` does one of these.

    `faults`: how often each kind of fault may befall the job; `early`: how often the time of a deadline may come while
    something else is under way.
    """

    def __init__(self, settings: AgreedSettings, num_ranks: int, faults: Mapping[str, int], early: int) -> None:
        self.now_s = 0.0
        self.core = Coordinator()
        self.settings = settings
        self.is_away = False
        """True while there is no coordinator."""
        self.left = dict(faults)
        self.early = early
        self.num_ranks = self.wanted_ranks = num_ranks
        self.is_paused = self.is_drained = False
        self.from_agent: list[Event] = []
        self.to_agent: list[Command] = []
        self.streams: dict[int, Stream] = {}
        """By incarnation; none of one whose end is known."""
        self.standing: list[tuple[int, int]] = []
        """Attempts and generations whose groups stand."""
        self.processes: dict[Rank, SyntheticRank] = {}
        self.clocks: dict[Rank, Anytime] = {}
        self.saved: dict[int, Saved] = {}
        self.groups = Anytime(self)
        self.collective = Collective(self.groups, self._sync_s, breaks=self._breaks, fate=self._fate)  # type: ignore[arg-type]
        self.fates: list[Fate] = []
        self.result: JobResult | None = None
        self.handled: list[tuple[Event, list[Command], float]] = []
        """What the coordinator handled in the last step, with what it ordered, and when."""
        slots = (Slot(device="cpu"),) * num_ranks
        spec = JobSpec(
            name="small",
            source_hash="",
            file_name="",
            num_ranks=num_ranks,
            settings={"on_rank_loss": json.dumps(settings.on_rank_loss)},
            verify_rounds=True,
        )
        self._handle(AgentJoined(agent_id=HOST, host="host", slots=slots))
        self._handle(JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0))

    @property
    def job(self) -> ManagedJob:
        """The job, as the core has it."""
        return self.core.trainings[JOB]

    # What may come next

    def steps(self) -> list[Step]:
        """What may come next; the first of these when all are equally quick and nothing goes wrong. Empty: nothing.

        Where the order of two steps cannot matter to anyone, only one order is there: a rank that is told something,
        and waits for nobody, goes first.
        """
        if self.to_agent and isinstance(self.to_agent[0], StartRank):
            return [("order agent",)]
        if not self.early:
            for rank, process in self.processes.items():
                key = process.address["incarnation"]
                if self._hears(key) and self.streams[key].down and self._waits_for_nobody(process):
                    here = [("tell", key), *self._moves_of(rank), *self._faults_of(rank)]
                    return [*here, ("crash",)] if self._may_crash else here
        return self._moves() + self._faults()

    def _moves(self) -> list[Step]:
        steps: list[Step] = []
        if not self.is_away:
            steps += [("hear agent",)] if self.from_agent else []
            steps += [("hear", key) for key, one in self.streams.items() if one.up and not one.is_cut]
        steps += [("order agent",)] if self.to_agent else []
        steps += [("tell", key) for key, one in self.streams.items() if one.down and self._hears(key)]
        steps += self._ends_of_rounds()
        for process in sorted(self.processes.values(), key=lambda one: (one.local_step, one.address["rank"])):
            steps += self._moves_of(process.address["rank"])
        steps += [("reconnect", key) for key, one in self.streams.items() if one.is_cut]
        steps += [("return",)] if self.is_away else []
        steps += [("go on",)] if self.is_paused and not self.is_away else []
        steps += [("allow",)] if self.is_drained and not self.is_away else []
        if not self.is_away and self.core.next_deadline_s() is not None and (not steps or self.early):
            steps.append(("wait",))
        return steps

    def _moves_of(self, rank: Rank) -> list[Step]:
        process = self.processes[rank]
        is_running = process.is_alive and not process.is_frozen
        return [("go on", rank, index) for index in range(len(self.clocks[rank].pending) if is_running else 0)]

    def _faults(self) -> list[Step]:
        steps = [fault for rank in self.processes for fault in self._faults_of(rank)]
        steps += [("crash",)] if self._may_crash else []
        return [*steps, *((act,) for act in ACTS[1:] if self.left.get(act) and not self.is_away)]

    @property
    def _may_crash(self) -> bool:
        return bool(self.left.get("crash")) and not self.is_away

    def _faults_of(self, rank: Rank) -> list[Step]:
        """What may befall a rank now, and what may end a stop or come of a lost stream."""
        process = self.processes[rank]
        if not process.is_alive:
            return []
        key = process.address["incarnation"]
        is_frozen, is_cut = process.is_frozen, self.streams[key].is_cut
        steps: list[Step] = [(kind, rank) for kind in ("kill", "stop") if self.left.get(kind) and not is_frozen]
        steps += [("continue", rank)] if is_frozen else []
        steps += [("leave", rank)] if self.left.get("leave") and not is_frozen else []
        steps += [("cut", key)] if self.left.get("cut") and not is_cut else []
        steps += [("give up", key)] if is_cut and not self.is_away else []
        steps += [("break off", rank)] if self._may_break_off(process) else []
        return steps

    def _waits_for_nobody(self, process: SyntheticRank) -> bool:
        is_grouped = not process._forming or (process.attempt, process._forming) in self.standing
        return process._entry is None and is_grouped and not self._is_alone(process.address["incarnation"])

    def _hears(self, key: int) -> bool:
        process = next((one for one in self.processes.values() if one.address["incarnation"] == key), None)
        is_there = process is not None and key in self.streams
        return is_there and not process.is_frozen and not self.streams[key].is_cut

    def _ends_of_rounds(self) -> list[Step]:
        steps: list[Step] = []
        for index, (_, action) in enumerate(self.groups.pending):
            entries = action.args[1] if action.func.__name__ == "_finish" else []
            group = (
                self.collective._groups[entries[0].rank.attempt, entries[0].generation] if entries else action.args[1]
            )
            if any(member.is_frozen for member in group):
                continue
            if all(one.rank.is_alive for one in entries):
                steps.append(("end", index))
            else:
                alive = [
                    (Fate.FAILS, Fate.RECEIVES, Fate.BLOCKS) if one.rank.is_alive else (Fate.FAILS,) for one in entries
                ]
                steps += [("end", index, *fates) for fates in product(*alive)]
        return steps

    def _may_break_off(self, process: SyntheticRank) -> bool:
        """True if it waits in a round with one whose process has ended."""
        entry = process._entry
        if not process.is_alive or process.is_frozen or entry is None:
            return False
        members = self.collective._groups[process.attempt, entry[1].generation]
        return process._result is None and not all(member.is_alive for member in members)

    # What comes

    def do(self, step: Step) -> None:
        """Does one of the steps. Raises `AssertionError` when it breaks a rule."""
        self.handled = []
        match step:
            case ("hear agent",):
                event = self.from_agent.pop(0)
                if isinstance(event, RankExited):
                    self.streams.pop(event.incarnation, None)
                self._handle(event)
            case ("hear", key):
                self._handle(self.streams[key].up.pop(0))
            case ("order agent",):
                self._order(self.to_agent.pop(0))
            case ("tell", key):
                command: Any = self.streams[key].down.pop(0)
                self.processes[command.rank].receive(command)
                for one in (*self.collective._groups.values(), *self.collective._entries.values()):
                    one.sort(key=_rank_of)
            case ("end", index, *fates):
                self._end_of_round(index, list(fates))
            case ("go on", rank, index):
                _, action = self.clocks[rank].pending.pop(index)
                action()
                for entries in self.collective._entries.values():
                    entries.sort(key=_rank_of)
            case ("reconnect", key):
                self.streams[key].is_cut = False
            case ("return",):
                self.is_away = False
            case ("wait",):
                self.early -= bool(self.early and len(self._moves()) > 1)
                self.now_s = max(self.now_s, self.core.next_deadline_s() or 0.0)
                self._handle(DeadlinePassed())
            case _:
                self._befall(step)

    def _befall(self, step: Step) -> None:
        kind, *of = step
        if kind in (*FAULTS, *ACTS):
            self.left[kind] -= 1
        match kind:
            case "kill":
                self.processes[of[0]].exit(-9)
            case "stop":
                self.processes[of[0]].clock.freeze()
            case "continue":
                self.processes[of[0]].clock.thaw()
            case "cut":
                self.streams[of[0]].is_cut = True
                next(one for one in self.processes.values() if one.address["incarnation"] == of[0]).on_alone()
            case "give up":
                self._handle(SessionLost(**self._address(of[0])))
            case "crash":
                self.is_away = True
                for process in self.processes.values():
                    process.on_alone()
            case "break off":
                process = self.processes[of[0]]
                assert process._entry is not None
                process.fail(*process._entry)
            case "leave":
                self._tell(
                    self.processes[of[0]].address["incarnation"], LeaveRequested(**self.processes[of[0]].address)
                )
            case _:
                self._act(kind)

    def _act(self, kind: str) -> None:
        match kind:
            case "pause" | "go on":
                self.is_paused = kind == "pause"
                self._handle(PauseRequested(job_id=JOB, is_paused=self.is_paused))
            case "drain" | "allow":
                self.is_drained = kind == "drain"
                self._handle(DrainRequested(agent_id=HOST, is_drained=self.is_drained))
            case "scale":
                self.wanted_ranks = self.num_ranks - (self.wanted_ranks == self.num_ranks)
                self._handle(ScaleRequested(job_id=JOB, num_ranks=self.wanted_ranks))
            case "save":
                self._handle(CheckpointRequested(job_id=JOB))
            case "cancel":
                self._handle(JobCancelled(job_id=JOB))

    def _end_of_round(self, index: int, fates: list[Fate]) -> None:
        self.fates = fates
        _, action = self.groups.pending.pop(index)
        action()
        if action.func.__name__ == "_finish":
            round_id, entries = action.args
            del self.collective._entries[entries[0].rank.attempt, entries[0].generation, round_id]
        else:
            self.standing.append((action.args[1][0].attempt, action.args[0]))

    def _address(self, key: int) -> Address:
        return next(one.address for one in self.processes.values() if one.address["incarnation"] == key)

    def _handle(self, event: Event) -> None:
        """The coordinator handles an event, and does what it says."""
        version = self._version
        commands = self.core.handle(event, now_s=self.now_s)
        self.handled.append((event, commands, self.now_s))
        check_invariants(self.core)
        if self._version != version:
            self._check_commit()
        for command in commands:
            self._perform(command)
        for asked in self.core.asked:
            self._handle(asked)
        if self.result is not None:
            self._check_end()

    def _perform(self, command: Command) -> None:
        match command:
            case Publish():
                if isinstance(command.report, JobResult):
                    assert self.result is None, "the job ends twice"
                    self.result = command.report
            case StartRank() | StopRank():
                self.to_agent.append(command)
            case _ if isinstance(command, AskStacks) or command.incarnation not in self.streams:
                pass
            case SendPing():
                if not self.streams[command.incarnation].is_cut:
                    self.streams[command.incarnation].down.append(command)
                self._handle(PingSent(job_id=JOB, rank=command.rank, incarnation=command.incarnation))
            case _:
                self.streams[command.incarnation].down.append(command)

    def _order(self, command: Command) -> None:
        match command:
            case StartRank():
                self._start(command)
            case StopRank():
                process = self.processes.get(command.rank)
                if process is None or process.address["incarnation"] != command.incarnation or not process.is_alive:
                    return
                if command.waits_while_stopped:
                    process.clock.do(partial(process.exit, -15, was_stopped=process.is_frozen))
                else:
                    process.exit(-15)

    def _start(self, command: StartRank) -> None:
        address: Address = {"job_id": JOB, "rank": command.rank, "incarnation": command.incarnation}
        self.streams[command.incarnation] = Stream()
        self.clocks[command.rank] = Anytime(self)
        saved = list(self.saved.values())
        resumed = saved[-1] if command.spec.resume and saved else None
        self.processes[command.rank] = SyntheticRank(
            address,
            agent_id=HOST,
            clock=self.clocks[command.rank],  # type: ignore[arg-type]
            send=partial(self._tell, command.incarnation),
            collective=self.collective,
            batch_size=self.settings.batch_size,
            batch_s=self._batch_s,
            evaluation_s=0.0,
            overlaps=self.settings.averaging == "overlapped",
            saved=self.saved,
            resumed=resumed,
            is_alone=partial(self._is_alone, command.incarnation),
            is_deadly=self._is_deadly,
        )
        self.from_agent.append(RankStarted(**address, agent_id=HOST, log_path=""))
        ready = RankReady(
            **address,
            settings=self.settings,
            device="cpu",
            resumed=resumed.training if resumed else "",
            links_address="a:1",
        )
        self._tell(command.incarnation, ready)

    def _tell(self, key: int, event: Event) -> None:
        if isinstance(event, RankExited | RankStarted):
            self.from_agent.append(event)
        elif key in self.streams:
            self.streams[key].up.append(event)

    def _is_alone(self, key: int) -> bool:
        return self.is_away or key not in self.streams or self.streams[key].is_cut

    def _is_deadly(self, _: object) -> bool:
        return False

    def _batch_s(self, _: float) -> float:
        return BATCH_S

    def _sync_s(self) -> float:
        return SYNC_S

    def _breaks(self, _: object) -> bool:
        return False

    def _fate(self) -> Fate:
        return self.fates.pop(0) if self.fates else Fate.FAILS

    # What was

    def told(self, step: Step) -> str:
        """What a step is, in words, before it is done."""
        match step:
            case ("hear agent",):
                return f"coordinator hears: {_short(self.from_agent[0])}"
            case ("hear", key):
                return f"coordinator hears: {_short(self.streams[key].up[0])}"
            case ("order agent",):
                return f"agent does: {_short(self.to_agent[0])}"
            case ("tell", key):
                return f"rank {self._address(key)['rank']} is told: {_short(self.streams[key].down[0])}"
            case ("go on", rank, index):
                action = self.clocks[rank].pending[index][1].args[0]
                return f"rank {rank} goes on: {action.func.__name__.strip('_').replace('_', ' ')}"
            case ("end", index, *fates):
                what = self.groups.pending[index][1].func.__name__.strip("_")
                return " ".join(["its group:", what, *(str(fate.name).lower() for fate in fates)])
            case ("wait",):
                return f"time passes, to {self.core.next_deadline_s():g} s"
            case (("cut" | "give up" | "reconnect") as kind, key):
                return f"stream of rank {self._address(key)['rank']}: {kind}"
            case (kind, rank):
                return f"rank {rank}: {kind}"
            case (kind,):
                return f"{'coordinator' if kind in ('crash', 'return') else 'somebody'}: {kind}"
        raise ValueError(step)

    def ordered(self) -> list[str]:
        """What the coordinator ordered in the last step, in words."""
        return [_short(one) for _, commands, _ in self.handled for one in commands]

    # What must hold

    @property
    def _version(self) -> int:
        job = self.core.trainings.get(JOB)
        return job.run.training.version if job is not None and job.run.training is not None else -1

    def _check_commit(self) -> None:
        """One truth: every rank that has the newest version has in it exactly what the ledger has booked."""
        training, generation = self.job.run.training, self.job.run.generation
        if training is None or generation is None:
            return
        for rank, record in generation.members.items():
            process = self.processes[rank]
            if process.address["incarnation"] != record.incarnation or not record.is_present:
                continue
            if process.parameters.version == training.version:
                self._check_books(rank, process)

    def _check_books(self, rank: Rank, process: SyntheticRank) -> None:
        training = self.job.run.training
        assert training is not None
        ledger = training.ledger
        for number in range(ledger.num_epochs):
            seen = list(process.parameters.seen.get(number, ()))
            book = ledger.open_books().get(number)  # type: ignore[call-overload]
            booked = list(book.committed) if book is not None else None
            num_booked = ledger.committed_samples(number)  # type: ignore[arg-type]
            num_seen = sum(end - start for start, end in seen)
            if num_seen != num_booked or (booked is not None and seen != booked):
                was = f"version {training.version} on rank {rank} has {seen} of epoch {number}"
                raise Broken(f"{was}, and the ledger {booked if booked is not None else num_booked}")

    def _check_end(self) -> None:
        assert self.result is not None
        if self.result.outcome is Outcome.CANCELLED and self.left.get("cancel") == 0:
            return
        if self.result.outcome is not Outcome.SUCCEEDED:
            raise Broken(f"the job has {self.result.outcome}: {self.result.error}")
        training = self.job.run.training
        assert training is not None
        if not training.ledger.is_complete:
            raise Broken("the job has ended with samples that are not trained")
        for rank, process in self.processes.items():
            if "model" in process.files and not process.was_killed:
                self._check_books(rank, process)


def _rank_of(one: Any) -> int:
    return int(getattr(one, "rank", one).address["rank"])


def _short(message: Any) -> str:
    """A message's kind, rank and numbers."""
    names = ("rank", "incarnation", "generation", "round", "version", "after_step", "local_step", "exit_code", "reason")
    given = [f"{name} {value}" for name in names if (value := getattr(message, name, None)) not in (None, "")]
    report = getattr(message, "report", None)
    return " ".join([type(message).__name__, *([type(report).__name__] if report else given)])


def small_world(
    num_ranks: int = 2, *, faults: Mapping[str, int] | None = None, early: int = 0, **settings: Any
) -> SmallWorld:
    """A job of one epoch of four batches, unless it is said otherwise, with these faults at most."""
    given: dict[str, Any] = {
        "dataset_size": 4,
        "batch_size": 1,
        "epochs": 1,
        "policy": "cadence",
        "averaging": "blocking",
        "anchor": 1,
        "overhead_target": 0.5,
        "checkpoint_every_minutes": None,
        "ride_out_s": 0.0,
    }
    return SmallWorld(AgreedSettings(**given | settings), num_ranks, faults or {}, early)

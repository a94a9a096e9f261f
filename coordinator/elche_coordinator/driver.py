"""Runs the core: gives it events, makes its records durable, and performs its commands in their order."""

import asyncio
import hashlib
import logging
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from elche.v1 import agent_pb2, job_pb2, rank_pb2
from elche_coordinator import codec
from elche_coordinator.core.coordinator import Coordinator, JobFault
from elche_coordinator.core.describe import JobView, Particulars, describe, particulars
from elche_coordinator.core.jobs.job import Job
from elche_coordinator.core.messages.commands import (
    AskStacks,
    Command,
    Persist,
    Publish,
    RankCommand,
    StartRank,
    StopRank,
)
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    DeadlinePassed,
    Event,
    JobBroken,
    LoopAttached,
    SessionLost,
    SessionOpened,
)
from elche_coordinator.core.messages.ids import AgentId, Generation, Incarnation, JobId, Rank, RoundId
from elche_coordinator.core.messages.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    JobResult,
    Report,
    StallReport,
)
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import AgentRecord, Place
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.mailbox import Mailbox
from elche_coordinator.metrics import Moment
from elche_coordinator.pulse import Pulse
from elche_coordinator.records import Records, Writer
from elche_coordinator.wording import in_words

log = logging.getLogger(__name__)

AgentBox = Mailbox[agent_pb2.AttendResponse]
RankBox = Mailbox[rank_pb2.ConverseResponse]
WatchBox = Mailbox[job_pb2.WatchJobResponse]
Process = tuple[Rank, Incarnation]

MAX_WAITING = 10_000
"""Messages that may wait for one stream."""


class Driver:
    """The only caller of the core. Everything here runs on the event loop; only the writer has a thread."""

    def __init__(self, core: Coordinator, records: Records) -> None:
        self.pulse = Pulse()
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(records, self._on_written_in_thread, self._on_refused_in_thread)
        self._waiting: dict[str, deque[Command | asyncio.Future[None]]] = {}
        """What waits, for each job, for a record before it: commands, the `Persist` included, and answers."""
        self._timer: asyncio.TimerHandle | None = None
        self._agents: dict[AgentId, AgentBox] = {}
        self._ranks: dict[str, dict[Process, RankBox]] = defaultdict(dict)
        self._watchers: dict[str, list[WatchBox]] = {}
        self._credentials: dict[bytes, Address] = {}
        self._digests: dict[str, dict[Process, bytes]] = defaultdict(dict)
        """The keys of the credentials, by job."""
        self._ended: list[Callable[[JobId], None]] = []
        self._published: list[Callable[[JobId, Report], None]] = []
        self._performed: list[Callable[[RankCommand, str], None]] = []

    # Events in

    def handle(self, event: Event) -> None:
        """Gives one event to the core and performs what it says, in order, after what is made durable first.

        An exception of the core is a bug of its own: it costs the job that the event is of, not the others.
        """
        try:
            commands = self._core.handle(event, now_s=self._loop.time())
        except Exception as error:
            log.exception("the core could not take in %s; this is a bug", type(event).__name__)
            job_id: str = error.job_id if isinstance(error, JobFault) else getattr(event, "job_id", "")
            commands = error.commands if isinstance(error, JobFault) else []
            if job_id and not isinstance(event, JobBroken):
                self._break(
                    job_id, f"a bug in the coordinator: {type(event).__name__} could not be taken in; see its log"
                )
        for command in commands:
            self._enqueue(command)
        self._arm()

    def attend(self, agent_id: AgentId, host: str, hello: agent_pb2.AgentHello) -> AgentBox:
        """An agent's stream begins."""
        box = self._agents[agent_id] = AgentBox(MAX_WAITING)
        box.put(agent_pb2.AttendResponse(welcome=agent_pb2.AgentWelcome(agent_id=agent_id)))
        log.info("agent=%s host=%s offers %d slots", agent_id, host, len(hello.slots))
        self.handle(AgentJoined(agent_id=agent_id, host=host, slots=codec.slots(hello)))
        return box

    def leave(self, agent_id: AgentId) -> None:
        """An agent's stream has ended."""
        self._agents.pop(agent_id).close()
        log.info("agent=%s is gone", agent_id)
        self.handle(AgentLost(agent_id=agent_id))

    def attach(self, event: LoopAttached) -> list[str]:
        """A loop of the user's own appears as a job; returns its ranks' secrets, in order."""
        self.handle(event)
        job = self._core.jobs[event.job_id]
        return [self._new_secret(record.address(job.id)) for record in job.ranks.values()]

    def open_session(self, address: Address) -> RankBox | None:
        """A rank's stream begins; None when it has one or had one."""
        boxes = self._ranks[address["job_id"]]
        if _process(address) in boxes:
            return None
        box = boxes[_process(address)] = RankBox(MAX_WAITING)
        self.handle(SessionOpened(**address))
        return box

    def close_session(self, address: Address) -> None:
        """A rank's stream has ended, and its secret is worth nothing any more."""
        box = self._ranks[address["job_id"]].get(_process(address)) if address["job_id"] in self._ranks else None
        if box is not None:  # else the job has ended, and its boxes with it
            box.close()
            self._credentials.pop(self._digests[address["job_id"]].pop(_process(address), b""), None)
            self.handle(SessionLost(**address))

    def authenticate(self, secret: str) -> Address | None:
        """Whose secret it is; None for one that is not known."""
        return self._credentials.get(_digest(secret))

    def seat(self, address: Address, generation: Generation, round_id: RoundId) -> tuple[int, int] | None:
        """A rank's position among the members of an open round, and their number; None when it is no member."""
        job = self._core.jobs.get(address["job_id"])
        opened = job.training.open_round(round_id, generation) if job and job.training else None
        if job is None or opened is None or job.ranks[address["rank"]].incarnation != address["incarnation"]:
            return None
        return list(opened.targets).index(address["rank"]), len(opened.targets)

    # Watching

    def watch(self, job_id: str) -> WatchBox:
        """A mailbox that gets what happens to the job from now on."""
        box = WatchBox(MAX_WAITING)
        self._watchers.setdefault(job_id, []).append(box)
        return box

    def unwatch(self, job_id: str, box: WatchBox) -> None:
        """The watcher has left."""
        self._watchers[job_id].remove(box)
        if not self._watchers[job_id]:
            del self._watchers[job_id]

    def on_ended(self, action: Callable[[JobId], None]) -> None:
        """Calls the action with every job that ends."""
        self._ended.append(action)

    def on_published(self, action: Callable[[JobId, Report], None]) -> None:
        """Calls the action with everything that a job's watchers are told."""
        self._published.append(action)

    def on_performed(self, action: Callable[[RankCommand, str], None]) -> None:
        """Calls the action with everything that a rank is told, and why."""
        self._performed.append(action)

    def tell_clock(self, job_id: str, now_s: float) -> None:
        """Sends the clock to every rank of a job."""
        message = rank_pb2.ConverseResponse(clock=rank_pb2.Clock(sent_s=now_s))
        for box in self._ranks[job_id].values() if job_id in self._ranks else ():
            box.put(message)

    def hosts(self) -> tuple[dict[AgentId, AgentRecord], dict[Place, tuple[JobId, Rank]]]:
        """The hosts that attend, and which of their places are taken."""
        return self._core.fleet.agents, self._core.fleet.taken

    def views(self) -> list[JobView]:
        """All jobs as they are now."""
        return [self._described(job) for job in self._core.jobs.values()]

    def view(self, job_id: str) -> JobView | None:
        """One job as it is now."""
        job = self._core.jobs.get(JobId(job_id))
        return self._described(job) if job else None

    def _described(self, job: Job) -> JobView:
        """The job as it is now; one that cannot be described does not hide the others."""
        try:
            return describe(job, self._loop.time())
        except Exception:
            log.exception("job=%s cannot be described; this is a bug", job.id)
            return JobView(job_id=job.id, name=job.spec.name, state=job.phase, reason="its figures cannot be shown")

    def particulars(self, job_id: str) -> Particulars | None:
        """What was asked of a job, and what came of it; None when it is not known."""
        job = self._core.jobs.get(JobId(job_id))
        return particulars(job, self._loop.time()) if job else None

    def result(self, job_id: str) -> JobResult | None:
        """How the job ended; None while it has not, or while that is not durable."""
        job = self._core.jobs.get(JobId(job_id))
        return job.result if job and job_id not in self._waiting else None

    def resumable(self, job_id: str) -> tuple[JobSpec, tuple[Checkpoint, ...]] | None:
        """What an ended job was, without its source, and its checkpoints; None while it has not ended, while that is
        not durable, or when it is not known.
        """
        result = self.result(job_id)
        return (self._core.jobs[JobId(job_id)].spec, result.checkpoints) if result else None

    def submitted_as(self, key: str) -> JobId | None:
        """The job that was submitted with the key; None when none was."""
        return self._core.submitted_as(key)

    @property
    def failing(self) -> str:
        """Why records cannot be written; empty while they can."""
        return self._writer.failing

    def ask_for_model(self, job_id: str, transfer: str, *, best: bool = False) -> bool:
        """Asks the host that has the job's model to deliver it, or the best one beside it; whether it is here."""
        job = self._core.jobs.get(JobId(job_id))
        agent_id = job.model_agent_id if job else None
        if agent_id is None or agent_id not in self._agents:
            return False
        send = agent_pb2.SendModel(job_id=job_id, transfer=transfer, best=best)
        self._tell_agent(agent_id, agent_pb2.AttendResponse(send_model=send))
        return True

    def hosts_of(self, job_id: str) -> list[AgentId]:
        """The hosts of the job's ranks that are here."""
        job = self._core.jobs.get(JobId(job_id))
        agent_ids = dict.fromkeys(record.agent_id for record in job.ranks.values()) if job else {}
        return [agent_id for agent_id in agent_ids if agent_id in self._agents]

    def ask_for_checkpoint(self, job_id: str, agent_id: AgentId, path: str, transfer: str) -> None:
        """Asks a host to deliver the weights of a checkpoint."""
        send = agent_pb2.SendModel(job_id=job_id, transfer=transfer, checkpoint=path)
        self._tell_agent(agent_id, agent_pb2.AttendResponse(send_model=send))

    def ask_for_log(self, job_id: str, rank: Rank, transfer: str, max_bytes: int, *, follow: bool = False) -> bool:
        """Asks a rank's host to deliver the end of its log, and what follows; whether it is here."""
        job = self._core.jobs.get(JobId(job_id))
        record = job.ranks.get(rank) if job else None
        if record is None or record.agent_id not in self._agents:
            return False
        send = agent_pb2.SendLog(job_id=job_id, rank=rank, transfer=transfer, max_bytes=max_bytes, follow=follow)
        self._tell_agent(record.agent_id, agent_pb2.AttendResponse(send_log=send))
        return True

    def moment(self, past: list[JobView]) -> Moment:
        """Everything that is exported, as it is now; `past` are the jobs of earlier runs."""
        fleet = self._core.fleet
        streams = {"agent": len(self._agents), "rank": self._num_sessions()}
        return Moment(
            jobs=self.views(),
            ended=Counter(view.state for view in past),
            num_agents=len(fleet.agents),
            num_slots=sum(len(agent.slots) for agent in fleet.agents.values()),
            num_busy_slots=len(fleet.taken),
            streams={**streams, "watcher": sum(map(len, self._watchers.values()))},
            messages=dict(self.pulse.messages),
            loop_lag_s=self.pulse.lag_s,
            persist=self._writer.durations.copy(),
            num_persist_failures=self._writer.num_failures,
        )

    def stop(self) -> None:
        """Writes what waits, and closes every stream."""
        if self._timer is not None:
            self._timer.cancel()
        for agent in self._agents.values():
            agent.close()
        for boxes in self._ranks.values():
            for box in boxes.values():
                box.close()
        self._writer.stop()

    def _num_sessions(self) -> int:
        return sum(not box.is_closed for boxes in self._ranks.values() for box in boxes.values())

    async def durable(self, job_id: str) -> None:
        """Waits until what the job has become so far is on disk."""
        if job_id in self._waiting:
            written = self._loop.create_future()
            self._waiting[job_id].append(written)
            await written

    # Commands out

    def _enqueue(self, command: Command) -> None:
        job_id = command.job_id
        if isinstance(command, Persist):
            self._waiting.setdefault(job_id, deque()).append(command)
            self._writer.write(job_id, command.record, command.spec)
        elif job_id in self._waiting:
            self._waiting[job_id].append(command)
        else:
            self._try_to_perform(command)

    def _on_refused_in_thread(self, job_id: str, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._break, job_id, reason)

    def _break(self, job_id: str, reason: str) -> None:
        """Fails the job, once what is under way is done."""
        self._loop.call_soon(self.handle, JobBroken(job_id=JobId(job_id), reason=reason))

    def _on_written_in_thread(self, counts: dict[str, int]) -> None:
        self._loop.call_soon_threadsafe(self._on_written, counts)

    def _on_written(self, counts: dict[str, int]) -> None:
        for job_id, count in counts.items():
            waiting = self._waiting[job_id]
            while waiting and (count > 0 or not isinstance(waiting[0], Persist)):
                next_one = waiting.popleft()
                if isinstance(next_one, Persist):
                    count -= 1
                elif not isinstance(next_one, asyncio.Future):
                    self._try_to_perform(next_one)
                elif not next_one.done():
                    next_one.set_result(None)
            if not waiting:
                del self._waiting[job_id]

    def _try_to_perform(self, command: Command) -> None:
        """Performs a command. One that cannot be performed, because a value does not fit its message, say, fails its
        own job; what waits behind it goes on.
        """
        try:
            self._perform(command)
        except Exception as error:
            log.exception("job=%s %s cannot be performed", command.job_id, type(command).__name__)
            self._break(command.job_id, f"{type(command).__name__} cannot be carried out: {error}")

    def _perform(self, command: Command) -> None:
        match command:
            case StartRank():
                address: Address = {
                    "job_id": command.job_id,
                    "rank": command.rank,
                    "incarnation": command.incarnation,
                }
                self._tell_agent(command.agent_id, codec.start_rank(command, self._new_secret(address)))
            case StopRank():
                self._tell_agent(command.agent_id, codec.stop_rank(command))
            case AskStacks():
                self._tell_agent(command.agent_id, codec.ask_stacks(command))
            case RankCommand():
                for action in self._performed:
                    action(command, self._why(command.job_id))
                boxes = self._ranks.get(command.job_id, {})
                box = boxes.get((command.rank, command.incarnation))
                if box is not None:
                    self.pulse.messages["rank", "out"] += 1
                    box.put(codec.rank_response(command))
            case Publish():
                self._publish(command)
            case Persist():
                raise AssertionError("records go through the writer")
            case _:
                assert_never(command)

    def _why(self, job_id: JobId) -> str:
        job = self._core.jobs[job_id]
        return job.training.pacing if job.training else job.reason

    def _tell_agent(self, agent_id: AgentId, message: agent_pb2.AttendResponse) -> None:
        box = self._agents.get(agent_id)
        if box is not None:
            self.pulse.messages["agent", "out"] += 1
            box.put(message)

    def _new_secret(self, address: Address) -> str:
        secret = secrets.token_urlsafe(32)
        self._credentials[_digest(secret)] = address
        self._digests[address["job_id"]][_process(address)] = _digest(secret)
        return secret

    def _publish(self, command: Publish) -> None:
        report = command.report
        for action in self._published:
            try:
                action(command.job_id, report)
            except Exception:
                log.exception("job=%s %s cannot be noted; this is a bug", command.job_id, type(report).__name__)
        try:
            message = codec.watch_message(report)
            for box in self._watchers.get(command.job_id, ()):
                self.pulse.messages["watcher", "out"] += 1
                box.put(message)
        finally:
            self._log(command, report)

    def _log(self, command: Publish, report: Report) -> None:
        """Says what has happened; a job's end is one, whether its watchers could be told or not."""
        match report:
            case EpochReport():
                loss = "-" if report.loss is None else f"{report.loss:.4g}"
                log.info("job=%s epoch=%d loss=%s %.1f s", command.job_id, report.epoch, loss, report.duration_s)
            case EvaluationReport():
                log.info("job=%s epoch=%d metrics=%s", command.job_id, report.epoch, report.metrics)
            case StallReport():
                log.warning("job=%s %s", command.job_id, in_words(replace(report, stacks="")))
            case Checkpoint():
                log.info("job=%s checkpoint=%s %.1f s", command.job_id, report.path, report.duration_s)
            case JobResult():
                self._end(command.job_id, report)

    def _end(self, job_id: JobId, result: JobResult) -> None:
        log.info("job=%s %s %s", job_id, result.outcome, result.error)
        for box in self._watchers.get(job_id, ()):
            box.close()
        for digest in self._digests.pop(job_id, {}).values():
            self._credentials.pop(digest, None)
        self._ranks.pop(job_id, None)
        for action in self._ended:
            action(job_id)

    # Time

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._core.next_deadline_s()
        if next_s is not None:
            self._timer = self._loop.call_at(next_s, lambda: self.handle(DeadlinePassed()))


def _process(address: Address) -> Process:
    return address["rank"], address["incarnation"]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

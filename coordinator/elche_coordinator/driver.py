"""Runs the core: gives it events, makes its records durable, and performs its commands in their order."""

import asyncio
import hashlib
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable
from typing import assert_never

from elche.v1 import agent_pb2, job_pb2, rank_pb2
from elche_coordinator import codec
from elche_coordinator.core.commands import Command, Persist, Publish, RankCommand, StartRank, StopRank
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.describe import JobView, Particulars, describe, particulars
from elche_coordinator.core.events import (
    AgentJoined,
    AgentLost,
    DeadlinePassed,
    Event,
    LoopAttached,
    SessionLost,
    SessionOpened,
)
from elche_coordinator.core.fleet import AgentRecord, Place
from elche_coordinator.core.ids import AgentId, Generation, JobId, Rank, RoundId
from elche_coordinator.core.ranks import Address
from elche_coordinator.core.reports import Checkpoint, EpochReport, EvaluationReport, JobResult, Report
from elche_coordinator.core.spec import JobSpec
from elche_coordinator.mailbox import Mailbox
from elche_coordinator.metrics import Moment
from elche_coordinator.pulse import Pulse
from elche_coordinator.records import Records, Writer

log = logging.getLogger(__name__)

AgentBox = Mailbox[agent_pb2.AttendResponse]
RankBox = Mailbox[rank_pb2.ConverseResponse]
WatchBox = Mailbox[job_pb2.WatchJobResponse]
Key = tuple[str, int, int]
"""(job id, rank, incarnation)"""

MAX_WAITING = 10_000
"""Messages that may wait for one stream."""


class Driver:
    """The only caller of the core. Everything here runs on the event loop; only the writer has a thread."""

    def __init__(self, core: Coordinator, records: Records) -> None:
        self.pulse = Pulse()
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(records, self._on_written_in_thread)
        self._waiting: dict[str, deque[Command | asyncio.Future[None]]] = {}
        """What waits, for each job, for a record before it: commands, the `Persist` included, and answers."""
        self._timer: asyncio.TimerHandle | None = None
        self._agents: dict[AgentId, AgentBox] = {}
        self._ranks: dict[Key, RankBox] = {}
        self._watchers: dict[str, list[WatchBox]] = {}
        self._credentials: dict[bytes, Address] = {}
        self._ended: list[Callable[[JobId], None]] = []
        self._published: list[Callable[[JobId, Report], None]] = []
        self._performed: list[Callable[[RankCommand, str], None]] = []

    # Events in

    def handle(self, event: Event) -> None:
        """Gives one event to the core and performs what it says, in order, after what is made durable first."""
        for command in self._core.handle(event, now_s=self._loop.time()):
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
        if _key(address) in self._ranks:
            return None
        box = self._ranks[_key(address)] = RankBox(MAX_WAITING)
        self.handle(SessionOpened(**address))
        return box

    def close_session(self, address: Address) -> None:
        """A rank's stream has ended."""
        box = self._ranks.get(_key(address))
        if box is not None:  # else the job has ended, and its boxes with it
            box.close()
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
        for key, box in self._ranks.items():
            if key[0] == job_id:
                box.put(message)

    def hosts(self) -> tuple[dict[AgentId, AgentRecord], dict[Place, tuple[JobId, Rank]]]:
        """The hosts that attend, and which of their places are taken."""
        return self._core.fleet.agents, self._core.fleet.taken

    def views(self) -> list[JobView]:
        """All jobs as they are now."""
        return [describe(job, self._loop.time()) for job in self._core.jobs.values()]

    def view(self, job_id: str) -> JobView | None:
        """One job as it is now."""
        job = self._core.jobs.get(JobId(job_id))
        return describe(job, self._loop.time()) if job else None

    def particulars(self, job_id: str) -> Particulars | None:
        """What was asked of a job, and what came of it; None when it is not known."""
        job = self._core.jobs.get(JobId(job_id))
        return particulars(job, self._loop.time()) if job else None

    def result(self, job_id: str) -> JobResult | None:
        """How the job ended; None while it has not, or while that is not durable."""
        job = self._core.jobs.get(JobId(job_id))
        return job.result if job and job_id not in self._waiting else None

    def resumable(self, job_id: str) -> tuple[JobSpec, tuple[Checkpoint, ...]] | None:
        """What an ended job was, and its checkpoints; None while it has not ended, or when it is not known."""
        job = self._core.jobs.get(JobId(job_id))
        return (job.spec, job.result.checkpoints) if job and job.result else None

    def ask_for_model(self, job_id: str, transfer: str) -> bool:
        """Asks the host that has written the job's model to deliver it; whether it is here."""
        job = self._core.jobs.get(JobId(job_id))
        agent_id = job.model_agent_id if job else None
        if agent_id is None or agent_id not in self._agents:
            return False
        send = agent_pb2.SendModel(job_id=job_id, transfer=transfer)
        self._tell_agent(agent_id, agent_pb2.AttendResponse(send_model=send))
        return True

    def ask_for_log(self, job_id: str, rank: Rank, transfer: str, max_bytes: int) -> bool:
        """Asks a rank's host to deliver the end of its log; whether it is here."""
        job = self._core.jobs.get(JobId(job_id))
        record = job.ranks.get(rank) if job else None
        if record is None or record.agent_id not in self._agents:
            return False
        send = agent_pb2.SendLog(job_id=job_id, rank=rank, transfer=transfer, max_bytes=max_bytes)
        self._tell_agent(record.agent_id, agent_pb2.AttendResponse(send_log=send))
        return True

    def moment(self, past: list[JobView]) -> Moment:
        """Everything that is exported, as it is now; `past` are the jobs of earlier runs."""
        fleet = self._core.fleet
        streams = {"agent": len(self._agents), "rank": sum(not box.is_closed for box in self._ranks.values())}
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
        for rank in self._ranks.values():
            rank.close()
        self._writer.stop()

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
            self._writer.write(job_id, command.record)
        elif job_id in self._waiting:
            self._waiting[job_id].append(command)
        else:
            self._perform(command)

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
                    self._perform(next_one)
                elif not next_one.done():
                    next_one.set_result(None)
            if not waiting:
                del self._waiting[job_id]

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
            case RankCommand():
                for action in self._performed:
                    action(command, self._why(command.job_id))
                box = self._ranks.get((command.job_id, command.rank, command.incarnation))
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
        return secret

    def _publish(self, command: Publish) -> None:
        report = command.report
        for action in self._published:
            action(command.job_id, report)
        message = codec.watch_message(report)
        for box in self._watchers.get(command.job_id, ()):
            self.pulse.messages["watcher", "out"] += 1
            box.put(message)
        match report:
            case EpochReport():
                loss = "-" if report.loss is None else f"{report.loss:.4g}"
                log.info("job=%s epoch=%d loss=%s %.1f s", command.job_id, report.epoch, loss, report.duration_s)
            case EvaluationReport():
                log.info("job=%s epoch=%d metrics=%s", command.job_id, report.epoch, report.metrics)
            case Checkpoint():
                log.info("job=%s checkpoint=%s %.1f s", command.job_id, report.path, report.duration_s)
            case JobResult():
                self._end(command.job_id, report)

    def _end(self, job_id: JobId, result: JobResult) -> None:
        log.info("job=%s %s %s", job_id, result.outcome, result.error)
        for box in self._watchers.get(job_id, ()):
            box.close()
        self._credentials = {
            digest: address for digest, address in self._credentials.items() if address["job_id"] != job_id
        }
        self._ranks = {key: box for key, box in self._ranks.items() if key[0] != job_id}
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


def _key(address: Address) -> Key:
    return address["job_id"], address["rank"], address["incarnation"]


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

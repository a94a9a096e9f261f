"""Runs the core: passes events to it, makes its records durable, and performs its commands in order."""

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
from elche_coordinator.core.describe import JobDetails, JobView
from elche_coordinator.core.messages.commands import (
    AskStacks,
    Command,
    Persist,
    Publish,
    RankCommand,
    SendPing,
    SessionCommand,
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
    PingSent,
    SessionLost,
    SessionOpened,
)
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Incarnation, JobId, Rank, RoundId
from elche_coordinator.core.messages.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    JobResult,
    MembershipReport,
    Report,
    RoundReport,
    StallReport,
    UserEvent,
)
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.journal.entries import fault_text
from elche_coordinator.journal.journals import Extract, Journals
from elche_coordinator.loop_health import LoopHealth
from elche_coordinator.metrics import MetricsSnapshot
from elche_coordinator.records import Records, Writer
from elche_coordinator.report_text import describe_report
from elche_coordinator.send_queue import SendQueue

log = logging.getLogger(__name__)

AgentQueue = SendQueue[agent_pb2.AttendResponse]
RankQueue = SendQueue[rank_pb2.ConverseResponse]
WatchQueue = SendQueue[job_pb2.WatchJobResponse]
Process = tuple[Rank, Incarnation]

MAX_WAITING = 10_000
"""Messages that may wait in the queue of one stream."""


class Driver:
    """The only caller of the core's `handle`. It runs on the event loop; only the writer has a thread."""

    def __init__(self, core: Coordinator, records: Records, journals: Journals | None = None) -> None:
        self.health = LoopHealth()
        self._journals = journals or Journals()
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(records, self._on_written_in_thread, self._on_refused_in_thread)
        self._waiting: dict[str, deque[Command | asyncio.Future[None]]] = {}
        """By job, what waits for a durable record: commands, each `Persist` among them, and answers to clients."""
        self._timer: asyncio.TimerHandle | None = None
        self._agents: dict[AgentId, AgentQueue] = {}
        self._ranks: dict[str, dict[Process, RankQueue]] = defaultdict(dict)
        self._watchers: dict[str, list[WatchQueue]] = {}
        self._credentials: dict[bytes, Address] = {}
        self._digests: dict[str, dict[Process, bytes]] = defaultdict(dict)
        """Keys of `_credentials`, by job and process."""
        self._ended: list[Callable[[JobId], None]] = []
        self._published: list[Callable[[JobId, Report], None]] = []
        self._performed: list[Callable[[SessionCommand, str], None]] = []

    # Events in

    def handle(self, event: Event) -> None:
        """Passes one event to the core and performs its commands in order; what follows a `Persist` waits until that is
        durable.

        An exception out of the core is a bug: it fails the job of the event and leaves the others alone.
        """
        now_s, fault = self._loop.time(), None
        try:
            commands = self._core.handle(event, now_s=now_s)
        except Exception as error:
            log.exception("the core could not handle %s; this is a bug", type(event).__name__)
            job_id: str = error.job_id if isinstance(error, JobFault) else getattr(event, "job_id", "")
            commands, fault = error.commands if isinstance(error, JobFault) else [], (job_id, fault_text(error))
            if job_id and not isinstance(event, JobBroken):
                self._fail_later(
                    job_id, f"a bug in the coordinator: {type(event).__name__} could not be handled; see its log"
                )
        self._journals.note(self._core, now_s, event, commands, fault)
        for command in commands:
            self._enqueue(command)
        self._arm()

    def attend(self, agent_id: AgentId, host: str, hello: agent_pb2.AgentHello) -> AgentQueue:
        """Opens an agent's stream; returns the queue of messages to it."""
        queue = self._agents[agent_id] = AgentQueue(MAX_WAITING)
        queue.put(agent_pb2.AttendResponse(welcome=agent_pb2.AgentWelcome(agent_id=agent_id)))
        log.info("agent=%s host=%s offers %d slots", agent_id, host, len(hello.slots))
        self.handle(AgentJoined(agent_id=agent_id, host=host, slots=codec.slots(hello)))
        return queue

    def leave(self, agent_id: AgentId) -> None:
        """Closes an agent's stream."""
        self._agents.pop(agent_id).close()
        log.info("agent=%s has disconnected", agent_id)
        self.handle(AgentLost(agent_id=agent_id))

    def attach(self, event: LoopAttached) -> list[str]:
        """Makes a job of a script with its own loop; returns the secrets of its ranks, in rank order."""
        self.handle(event)
        return [self._new_secret(address) for address in self._core.addresses(event.job_id)]

    def open_session(self, address: Address) -> RankQueue | None:
        """Opens a rank's stream; returns the queue of messages to it. None if this process has opened one before."""
        queues = self._ranks[address["job_id"]]
        if _process(address) in queues:
            return None
        queue = queues[_process(address)] = RankQueue(MAX_WAITING)
        self.handle(SessionOpened(**address))
        return queue

    def close_session(self, address: Address) -> None:
        """Closes a rank's stream and revokes its secret."""
        queue = self._ranks[address["job_id"]].get(_process(address)) if address["job_id"] in self._ranks else None
        if queue is not None:  # None: the job has ended, and its queues are closed
            queue.close()
            self._credentials.pop(self._digests[address["job_id"]].pop(_process(address), b""), None)
            self.handle(SessionLost(**address))

    def authenticate(self, secret: str) -> Address | None:
        """The process to which the secret belongs; None for an unknown one."""
        return self._credentials.get(_digest(secret))

    def position_in_round(
        self, address: Address, generation: GenerationId, round_id: RoundId
    ) -> tuple[int, int] | None:
        """A rank's position among the members of an open round, and their number; None when it is no member."""
        return self._core.position_in_round(address, generation, round_id)

    # Watching

    def watch(self, job_id: str) -> WatchQueue:
        """A queue that gets the reports of the job from now on."""
        queue = WatchQueue(MAX_WAITING)
        self._watchers.setdefault(job_id, []).append(queue)
        return queue

    def unwatch(self, job_id: str, queue: WatchQueue) -> None:
        """Removes the queue of a watcher that has left."""
        self._watchers[job_id].remove(queue)
        if not self._watchers[job_id]:
            del self._watchers[job_id]

    def on_ended(self, action: Callable[[JobId], None]) -> None:
        """Registers an action to be called with every job that ends."""
        self._ended.append(action)

    def on_published(self, action: Callable[[JobId, Report], None]) -> None:
        """Registers an action to be called with every report of a job."""
        self._published.append(action)

    def on_performed(self, action: Callable[[SessionCommand, str], None]) -> None:
        """Registers an action to be called with every command to a rank, and its explanation."""
        self._performed.append(action)

    def tell_clock(self, job_id: str, now_s: float) -> None:
        """Sends the coordinator's clock, `now_s` in seconds since 1970, to every rank of a job."""
        message = rank_pb2.ConverseResponse(clock=rank_pb2.Clock(sent_s=now_s))
        for queue in self._ranks[job_id].values() if job_id in self._ranks else ():
            queue.put(message)

    def hosts(self) -> list[HostView]:
        """The connected hosts."""
        return self._core.hosts()

    def views(self) -> list[JobView]:
        """All jobs as they are now."""
        found = (self.view(job_id) for job_id in self._core.job_ids())
        return [view for view in found if view is not None]

    def view(self, job_id: str) -> JobView | None:
        """One job as it is now; None when it is not known. One that cannot be described does not hide the others."""
        try:
            return self._core.view(JobId(job_id), self._loop.time())
        except Exception:
            log.exception("job=%s cannot be described; this is a bug", job_id)
            return self._core.view_without_figures(JobId(job_id), "its figures cannot be shown")

    def details(self, job_id: str) -> JobDetails | None:
        """What was asked of a job, and what came of it; None when it is not known."""
        return self._core.details(JobId(job_id), self._loop.time())

    def result(self, job_id: str) -> JobResult | None:
        """How the job ended; None before that is durable."""
        return None if job_id in self._waiting else self._core.result(JobId(job_id))

    def num_wanted(self, job_id: str) -> int | None:
        """How many ranks the job is to have; None when that cannot be changed."""
        return self._core.num_wanted(JobId(job_id))

    def resumable(self, job_id: str) -> tuple[JobSpec, tuple[Checkpoint, ...]] | None:
        """The spec of an ended job, without its source, and its checkpoints; None for a job that is not known or whose
        end is not durable.
        """
        result, spec = self.result(job_id), self._core.spec(JobId(job_id))
        return (spec, result.checkpoints) if result and spec else None

    def journal(self, job_id: str, num_entries: int | None = None) -> Extract | None:
        """The newest entries of a job's journal, or all that are kept; None when there is none."""
        return self._journals.extract(job_id, self._loop.time(), num_entries)

    def submitted_as(self, key: str) -> JobId | None:
        """The job that was submitted with the key; None when none was."""
        return self._core.submitted_as(key)

    @property
    def failing(self) -> str:
        """Why records cannot be written at present; empty while they can."""
        return self._writer.failing

    def ask_for_model(self, job_id: str, transfer: str, *, best: bool = False) -> bool:
        """Asks the host with the job's final, or best, model to deliver it. False when that host is not connected."""
        agent_id = self._core.host_of_model(JobId(job_id))
        if agent_id is None or agent_id not in self._agents:
            return False
        send = agent_pb2.SendModel(job_id=job_id, transfer=transfer, best=best)
        self._tell_agent(agent_id, agent_pb2.AttendResponse(send_model=send))
        return True

    def hosts_of(self, job_id: str) -> list[AgentId]:
        """The connected hosts of the job's ranks."""
        return [agent_id for agent_id in self._core.hosts_of(JobId(job_id)) if agent_id in self._agents]

    def ask_for_checkpoint(self, job_id: str, agent_id: AgentId, path: str, transfer: str) -> None:
        """Asks a host to deliver the weights of the checkpoint at `path`."""
        send = agent_pb2.SendModel(job_id=job_id, transfer=transfer, checkpoint=path)
        self._tell_agent(agent_id, agent_pb2.AttendResponse(send_model=send))

    def ask_for_log(self, job_id: str, rank: Rank, transfer: str, max_bytes: int, *, follow: bool = False) -> bool:
        """Asks a rank's host to deliver the end of its log and, with `follow`, what is appended. False when the host is
        not connected.
        """
        agent_id = self._core.host_of_rank(JobId(job_id), rank)
        if agent_id is None or agent_id not in self._agents:
            return False
        send = agent_pb2.SendLog(job_id=job_id, rank=rank, transfer=transfer, max_bytes=max_bytes, follow=follow)
        self._tell_agent(agent_id, agent_pb2.AttendResponse(send_log=send))
        return True

    def metrics_snapshot(self, past: list[JobView]) -> MetricsSnapshot:
        """All that the metrics export, as it is now; `past` are the jobs of earlier runs of the coordinator."""
        hosts = self._core.hosts()
        streams = {"agent": len(self._agents), "rank": self._num_sessions()}
        return MetricsSnapshot(
            jobs=self.views(),
            ended=Counter(view.state for view in past),
            num_agents=len(hosts),
            num_slots=sum(len(host.slots) for host in hosts),
            num_busy_slots=sum(len(host.ranks) for host in hosts),
            streams={**streams, "watcher": sum(map(len, self._watchers.values()))},
            messages=dict(self.health.messages),
            loop_lag_s=self.health.lag_s,
            persist=self._writer.durations.copy(),
            num_persist_failures=self._writer.num_failures,
        )

    def stop(self) -> None:
        """Closes every stream, writes the records that wait and ends the writer."""
        if self._timer is not None:
            self._timer.cancel()
        for agent in self._agents.values():
            agent.close()
        for queues in self._ranks.values():
            for queue in queues.values():
                queue.close()
        self._writer.stop()

    def _num_sessions(self) -> int:
        return sum(not queue.is_closed for queues in self._ranks.values() for queue in queues.values())

    async def durable(self, job_id: str) -> None:
        """Waits until all records of the job so far are durable."""
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
        self._loop.call_soon_threadsafe(self._fail_later, job_id, reason)

    def _fail_later(self, job_id: str, reason: str) -> None:
        """Fails the job after the event that is being handled."""
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
        """Performs a command. One that cannot be performed, such as one whose value does not fit its message, fails its
        job; the commands after it are performed.
        """
        try:
            self._perform(command)
        except Exception as error:
            log.exception("job=%s %s cannot be performed", command.job_id, type(command).__name__)
            self._fail_later(command.job_id, f"{type(command).__name__} cannot be carried out: {error}")

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
                    action(command, self._core.explanation(command.job_id))
                queues = self._ranks.get(command.job_id, {})
                queue = queues.get((command.rank, command.incarnation))
                if queue is not None:
                    self.health.messages["rank", "out"] += 1
                    queue.put(codec.rank_response(command))
                    if isinstance(command, SendPing):
                        sent = PingSent(job_id=command.job_id, rank=command.rank, incarnation=command.incarnation)
                        self._loop.call_soon(self.handle, sent)
            case Publish():
                self._publish(command)
            case Persist():
                raise AssertionError("records go through the writer")
            case _:
                assert_never(command)

    def _tell_agent(self, agent_id: AgentId, message: agent_pb2.AttendResponse) -> None:
        queue = self._agents.get(agent_id)
        if queue is not None:
            self.health.messages["agent", "out"] += 1
            queue.put(message)

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
                log.exception("job=%s %s could not be recorded; this is a bug", command.job_id, type(report).__name__)
        try:
            message = codec.watch_message(report)
            for queue in self._watchers.get(command.job_id, ()):
                self.health.messages["watcher", "out"] += 1
                queue.put(message)
        finally:
            self._log(command, report)

    def _log(self, command: Publish, report: Report) -> None:
        """Logs a report. The end of a job takes effect here, even if its watchers could not be told."""
        match report:
            case EpochReport():
                loss = "-" if report.loss is None else f"{report.loss:.4g}"
                log.info("job=%s epoch=%d loss=%s %.1f s", command.job_id, report.epoch, loss, report.duration_s)
            case EvaluationReport():
                log.info("job=%s epoch=%d metrics=%s", command.job_id, report.epoch, report.metrics)
            case StallReport():
                log.warning("job=%s %s", command.job_id, describe_report(replace(report, stacks="")))
            case MembershipReport():
                level = logging.INFO if report.is_back else logging.WARNING
                log.log(level, "job=%s %s", command.job_id, describe_report(report))
            case Checkpoint():
                log.info("job=%s checkpoint=%s %.1f s", command.job_id, report.path, report.duration_s)
            case JobResult():
                self._end(command.job_id, report)
            case RoundReport() | UserEvent():
                pass  # they may be many a second
            case _:
                assert_never(report)

    def _end(self, job_id: JobId, result: JobResult) -> None:
        log.info("job=%s %s %s", job_id, result.outcome, result.error)
        for queue in self._watchers.get(job_id, ()):
            queue.close()
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

"""Runs the core: passes events to it, makes its records durable, and performs its commands in order."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, assert_never, cast

from google.protobuf.message import Message

from elche.errors import Unreachable
from elche.network import MAX_MESSAGE_BYTES
from elche.v1 import agent_pb2
from elche_coordinator import codec
from elche_coordinator.core.coordinator import Coordinator
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
from elche_coordinator.core.messages.events import (
    AgentJoined,
    AgentLost,
    DeadlinePassed,
    Event,
    JobBroken,
    JobsForgotten,
    JobSubmitted,
    LoopAttached,
    PingSent,
    RankEvent,
    ResultReceived,
    RoundEntered,
    RoundFailed,
    ScaleRequested,
    SessionLost,
    SessionOpened,
)
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.records.ranks import Address, address_of
from elche_coordinator.journal.entries import fault_text
from elche_coordinator.journal.journals import Journals
from elche_coordinator.limits.backlog import Backlog
from elche_coordinator.limits.open_jobs import OpenJobs
from elche_coordinator.loop_health import LoopHealth
from elche_coordinator.storage.job_rows import JobRows
from elche_coordinator.storage.snapshots import Snapshots
from elche_coordinator.storage.sources import Sources
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.tape import Entry, Recorded, Tape
from elche_coordinator.storage.writer import Writer
from elche_coordinator.streams.agents import Agents
from elche_coordinator.streams.presence import Presence
from elche_coordinator.streams.streams import Secrets, StartOrder, Stream, Streams
from elche_coordinator.streams.watchers import Watchers

log = logging.getLogger(__name__)

AnyStream = Stream[Any]

TAKEN_LATER_S = 2.0
"""Seconds for which acknowledgements of what ranks say in each round are collected."""
MAX_AWAY_S = 600.0
"""Most seconds without a coordinator that the core's clock counts: agents end their ranks after that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """An effect that becomes visible when its event is durable."""

    command: Command | None = None
    stream: AnyStream | None = None
    """The stream that keeps the command's message, or on which the message was read."""
    number: int = 0
    """The message's number."""
    is_followed: bool = False
    """True if another message follows the read one, whose acknowledgement is that of both."""
    written: asyncio.Future[None] | None = None
    """Set when the event is durable."""


class Driver:
    """The only caller of the core's `handle`. It runs on the event loop; only the writer has a thread. Other objects
    only query the core.
    """

    def __init__(self, core: Coordinator, store: SqlStore, *, recorded: Recorded | None = None) -> None:
        """With `recorded` it resumes the previous coordinator's state; else it begins with `core`."""
        self.health = LoopHealth()
        self.journals = Journals()
        self._loop = asyncio.get_running_loop()
        self.identity = store.identity()
        self.secrets = Secrets(self.identity.secret)
        self.core, self.streams = (core, Streams()) if recorded is None else recorded.state
        self._clock_offset_s = 0.0
        """Seconds by which the core's clock is ahead of the event loop's, which differs between machines."""
        in_loop = self._loop.call_soon_threadsafe
        self.writer = Writer(
            store,
            lambda last: in_loop(self._on_written, last),
            lambda job_id, reason: in_loop(self._fail_later, job_id, reason),
        )
        self._rows = JobRows(self.core)
        self._snapshots = Snapshots(self.core, self.streams, () if recorded is None else recorded.saved)
        self.sources = Sources(store.load_source, store.source_sizes())
        self.open_jobs = OpenJobs()
        self._backlog = Backlog()
        self._tape = Tape(
            self.writer,
            self._snapshots,
            first=1 if recorded is None else recorded.last + 1,
            rows=self._rows.take_changed,
            sources=self.sources.take_new,
            on_saved=self._note_sizes,
        )
        self._num_written = self._tape.last
        """Number of the last durable event."""
        self._waiting: deque[tuple[int, Visible]] = deque()
        """Effects that wait for an event to be durable, with its number."""
        self._unacknowledged: dict[AnyStream, None] = {}
        """Streams whose last durable message is not acknowledged yet."""
        self.ending: dict[JobId, int] = {}
        """Jobs whose end is not durable, with the number of the event that ended each."""
        self._last_changes: dict[JobId, int] = {}
        """The number of the last event that has changed each job."""
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s: float | None = None
        """The deadline for which the timer is set, by the core's clock."""
        self.watchers = Watchers(self.health)
        self.watchers.on_ended(self.streams.end_job)
        self._performed: list[Callable[[SessionCommand, str], None]] = []
        self._round_failed: list[Callable[[RoundFailed], None]] = []
        self._is_stopped = False
        self._doubted: Collection[JobId] = ()
        """Jobs whose state contradicts itself, while the events since are repeated."""
        self.agents = Agents(self.core, self.streams)
        self.presence = Presence(self.core, self.streams, self._handle_own)
        if recorded is not None:
            self._repeat(recorded)

    @property
    def now_s(self) -> float:
        """The core's time."""
        return self._loop.time() + self._clock_offset_s

    def last_change(self, job_id: str) -> int:
        """Number of the last event that has changed the job; 0: none in this run."""
        return self._last_changes.get(JobId(job_id), 0)

    # Events in

    def handle(self, event: Event, *, number: int = 0, identity: str = "") -> None:
        """Passes one event to the core; its effects follow, in order, when the event is durable.

        `number` is the message's in its stream, `identity` that of a client that opens a stream and may reopen it. An
        exception in the core is a bug: it fails the event's job, and no others. Raises `Unreachable` when this driver
        is stopped.
        """
        self.require_running()
        entry = Entry(self.now_s, event, number, identity)
        # First: what the event leads to waits for the number that it gets here.
        self._tape.add(entry)
        visible, commands, fault = self._take_in(entry)
        self.journals.note(self.core, entry.at_s, event, commands, fault)
        for command in commands:
            if isinstance(command, Publish) and isinstance(command.report, JobResult):
                self.ending[command.job_id] = self._tape.last
        self._waiting.extend((self._tape.last, one) for one in visible)
        if number and (stream := self._stream_of(event)) is not None:
            # Acknowledged once the event is durable: the sender drops an acknowledged message.
            is_followed = isinstance(event, RoundEntered | ResultReceived)  # by the result, and by the next round
            self._waiting.append((self._tape.last, Visible(stream=stream, number=number, is_followed=is_followed)))
        self._tape.flush(is_awaited=bool(visible))
        for asked in self.core.asked:
            self.handle(asked)
        self._arm()

    async def take(self, stream: AnyStream, message: Message, user: str) -> None:
        """Waits while too much of the stream, whose message was handled, or of the user's streams is not durable."""
        whose = (stream.is_of_agent, user) if user else ""
        if not self._backlog.add(stream, message, self._tape.last, whose):
            self._tape.flush(is_awaited=True)
            await self._backlog.room(stream, whose)

    def require_running(self) -> None:
        """Raises `Unreachable` once this driver is stopping: its successor would not know of further decisions."""
        if self._is_stopped:
            raise Unreachable("the coordinator is stopping")

    def _handle_own(self, event: Event) -> None:
        """Passes an event of the driver itself to the core, unless the driver is stopped."""
        if not self._is_stopped:
            self.handle(event)

    def _take_in(self, entry: Entry) -> tuple[list[Visible], list[Command], tuple[str, str] | None]:
        """Handles a new or repeated event. Returns its effects, to become visible later, its commands, and
        (job, exception) in case of a bug.
        """
        event, fault = entry.event, None
        self._note_stream(entry)
        if isinstance(event, JobSubmitted):
            # Before the core may start ranks, for which the file's text is looked up in `_prepare`.
            self.sources.hold(event.job_id, event.spec.source_hash)
        # Before the event, after which the core no longer knows who was on the host.
        lost_with_agent = self.core.ranks_of(event.agent_id) if isinstance(event, AgentLost) else []
        try:
            commands = self.core.handle(event, now_s=entry.at_s)
        # Any exception: a bug that one job meets must not end all others.
        except Exception as error:
            log.exception("the core could not handle %s; this is a bug", type(event).__name__)
            job_id: str = getattr(event, "job_id", None) or self.core.at_work or ""
            commands, fault = [], (job_id, fault_text(error))
            is_last_resort = isinstance(event, JobBroken) and not event.may_go_back
            if job_id and not is_last_resort and job_id not in self._doubted:
                self._fail_later(
                    job_id, f"a bug in the coordinator: {type(event).__name__} could not be handled; see its log"
                )
        visible = [one for command in commands if (one := self._prepare(command)) is not None]
        self._rows.touch(self.core.last_touched)
        self._snapshots.touch(self.core.last_touched)
        for job_id in self.core.last_touched:
            self._last_changes[job_id] = self._tape.last
            if self.core.result(job_id) is not None:
                self.sources.release(job_id)
                self.open_jobs.remove(job_id)
        self._note_handled(event, lost_with_agent)
        return visible, commands, fault

    def _note_stream(self, entry: Entry) -> None:
        """Adds the stream that the event opens, or notes that its message was read from one."""
        event = entry.event
        if isinstance(event, AgentJoined):
            self.streams.add_agent(event.agent_id, entry.identity)
        elif isinstance(event, SessionOpened):
            self.streams.add_rank(address_of(event), is_resumable=bool(entry.identity))
        elif entry.number and (stream := self._stream_of(event)) is not None:
            stream.num_read = entry.number

    def _note_handled(self, event: Event, lost_with_agent: list[Address]) -> None:
        """Updates counts, rows and streams for an event that the core has handled; with a lost agent its ranks go."""
        match event:
            case JobSubmitted() | LoopAttached() | ScaleRequested():
                self._count(event.job_id)
            case JobsForgotten():
                self._rows.forget(event.job_ids)
                for job_id in event.job_ids:
                    self._last_changes.pop(job_id, None)
            case AgentLost():
                self.streams.drop_agent(event.agent_id)
                self.agents.forget(event.agent_id)
                for address in lost_with_agent:  # further messages on their streams are ignored
                    self.streams.give_up_rank(address)
            case SessionLost():
                self.streams.give_up_rank(address_of(event))
            case RoundFailed():
                for action in self._round_failed:
                    action(event)

    def _repeat(self, recorded: Recorded) -> None:
        """Repeats the previous coordinator's events, which were durable, and whose effects may have been visible."""
        for job_id in self.core.job_ids():
            if (spec := self.core.spec(job_id)) is not None:
                self.sources.hold(job_id, spec.source_hash)
                self._count(job_id)
        self._doubted = recorded.doubted
        for entry in recorded.entries:
            for visible in self._take_in(entry)[0]:
                if isinstance(visible.command, Publish) and isinstance(visible.command.report, JobResult):
                    self.streams.end_job(visible.command.job_id)
        self._doubted = ()
        # Only now: what the events led to, such as which slots others got, must be what it was.
        for job_id, why in recorded.doubted.items():
            log.error("job=%s its saved state contradicts itself (%s); this is a bug. Other jobs go on", job_id, why)
            reason = "its saved state contradicted itself (see the coordinator's log)"
            self._loop.call_soon(self._handle_own, JobBroken(job_id=job_id, reason=reason, may_go_back=True))
        # The core's clock goes on, so that deadlines and silences are as long as they were (protocol P22.3).
        last_s = recorded.entries[-1].at_s if recorded.entries else self.core.now_s
        self._clock_offset_s = last_s + min(recorded.age_s, MAX_AWAY_S) - self._loop.time()
        self.core.forget_ended()
        # All that was repeated is on the tape: it may be sent again, and counts as received.
        for stream in self.streams:
            stream.settle()
        jobs = self.core.job_ids()
        log.info("goes on where the coordinator before this one was: %d jobs, after event %d", len(jobs), recorded.last)
        self.presence.await_all()
        self._arm()

    def _count(self, job_id: JobId) -> None:
        """Counts a job as open until it ends."""
        spec = self.core.spec(job_id)
        if spec is not None and self.core.result(job_id) is None:
            self.open_jobs.add(job_id, spec, self.sources.size_bytes(spec.source_hash))

    def _stream_of(self, message: Event | Command) -> AnyStream | None:
        """The stream on which an event arrived, or to which a command goes."""
        agent_id = getattr(message, "agent_id", None)
        if agent_id is not None:
            return self.streams.agents.get(agent_id)
        return self.streams.of_rank(address_of(message)) if isinstance(message, RankEvent | RankCommand) else None

    def on_performed(self, action: Callable[[SessionCommand, str], None]) -> None:
        """Registers an action to be called with every command to a rank, and its explanation."""
        self._performed.append(action)

    def on_round_failed(self, action: Callable[[RoundFailed], None]) -> None:
        """Registers an action to be called when a rank has lost a round, after the core has handled it."""
        self._round_failed.append(action)

    def stop(self) -> None:
        """Closes every stream, writes pending records and ends the writer. No stream is opened afterwards."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for stream in self.streams:
            stream.close()
        self._tape.close()
        self.writer.stop()

    async def durable(self) -> None:
        """Waits until all events so far are durable."""
        if self._tape.last > self._num_written:
            written = self._loop.create_future()
            self._waiting.append((self._tape.last, Visible(written=written)))
            self._tape.flush(is_awaited=True)
            await written

    # Commands out

    def _prepare(self, command: Command) -> Visible | None:
        """Turns a command into an effect, to become visible later; its message is numbered now, which fixes the order.
        If the message cannot be made, such as for a value that does not fit, the job fails; later commands are carried
        out.
        """
        try:
            match command:
                case Publish() | SendPing():
                    return Visible(command=command)
                case StartRank():
                    self.sources.text(command.spec.source_hash)  # raises for one that is lost
                    codec.start_rank(command, "", "")  # raises for what no message can carry
                    message: Any = StartOrder(command)
                case StopRank() | AskStacks():
                    message = codec.agent_order(command)
                case RankCommand():
                    message = codec.rank_response(command)
                case _:
                    assert_never(command)
        except Exception as error:
            log.exception("job=%s %s cannot be performed", command.job_id, type(command).__name__)
            self._fail_later(command.job_id, f"{type(command).__name__} cannot be carried out: {error}")
            return None
        if not isinstance(message, StartOrder) and (num_bytes := message.ByteSize()) > MAX_MESSAGE_BYTES:
            # gRPC would end the stream instead, and each one after it.
            self._fail_later(command.job_id, _why_too_large(command, num_bytes))
            return None
        stream = self._stream_of(command)
        return Visible(command=command, stream=stream, number=stream.keep(message) if stream is not None else 0)

    def order_message(self, order: agent_pb2.AttendResponse | StartOrder) -> agent_pb2.AttendResponse | None:
        """The message of an order to an agent. For the start of a rank it is made only as it is sent: it has the user's
        file, and a secret that is never stored. None if the rank's job has ended and is forgotten.
        """
        if not isinstance(order, StartOrder):
            return order
        command = order.command
        try:
            source = self.sources.found(command.spec.source_hash)
        except KeyError:
            return None
        message = codec.start_rank(command, self.secrets.new(address_of(command)), source)
        message.seq = order.seq
        return message

    def _note_sizes(self, sizes: Mapping[str, int]) -> None:
        for job_id, why in self.open_jobs.note_states(sizes).items():
            self._fail_later(job_id, why)

    def _fail_later(self, job_id: str, reason: str) -> None:
        """Fails the job once the present event is handled."""
        self._loop.call_soon(self._handle_own, JobBroken(job_id=JobId(job_id), reason=reason))

    def _on_written(self, last: int) -> None:
        """Events up to the number are durable."""
        self._num_written = last
        self._backlog.settle(last)
        self.ending = {job_id: number for job_id, number in self.ending.items() if number > last}
        while self._waiting and self._waiting[0][0] <= last:
            _, visible = self._waiting.popleft()
            try:
                self._show(visible)
            except Exception as error:
                command = visible.command
                assert command is not None
                log.exception("job=%s %s cannot be performed", command.job_id, type(command).__name__)
                self._fail_later(command.job_id, f"{type(command).__name__} cannot be carried out: {error}")

    def _show(self, visible: Visible) -> None:
        """Makes an effect visible, whose event is durable."""
        command, stream = visible.command, visible.stream
        if visible.written is not None and not visible.written.done():
            visible.written.set_result(None)
        match command:
            case Publish():
                self.watchers.publish(command.job_id, command.report)
            case SendPing():
                self._ping(command)
            case None if stream is not None:
                stream.num_taken = visible.number
                if visible.is_followed:
                    self._acknowledge_later(stream)
                else:
                    self._acknowledge(stream)
            case StartRank() | StopRank() | AskStacks() if stream is not None:
                self.health.messages["agent", "out"] += 1
                stream.show(visible.number)
            case RankCommand() if stream is not None:
                for action in self._performed:
                    action(cast(SessionCommand, command), self.core.explanation(command.job_id))
                self.health.messages["rank", "out"] += 1
                stream.show(visible.number)

    def _acknowledge(self, stream: AnyStream) -> None:
        """Acknowledges the stream's durable messages."""
        self._unacknowledged.pop(stream, None)
        stream.pass_on(codec.taken(stream.num_taken, to_agent=stream.is_of_agent))

    def _acknowledge_later(self, stream: AnyStream) -> None:
        if not self._unacknowledged:
            self._loop.call_later(TAKEN_LATER_S, self._acknowledge_all)
        self._unacknowledged[stream] = None

    def _acknowledge_all(self) -> None:
        for stream in list(self._unacknowledged):
            self._acknowledge(stream)

    def _ping(self, command: SendPing) -> None:
        """Pings a rank. One that has not reconnected to a restarted coordinator is not pinged, since it cannot answer
        in time.
        """
        stream = self.streams.of_rank(address_of(command))
        # Pings are not kept: `ask_again` follows when it connects.
        if stream is not None and stream.num_connections:
            stream.pass_on(codec.rank_response(command))
            sent = PingSent(job_id=command.job_id, rank=command.rank, incarnation=command.incarnation)
            self._loop.call_soon(self._handle_own, sent)

    def ask_again(self, address: Address) -> None:
        """Repeats a rank's unanswered ping on its new connection. Neither pings nor answers are kept: if one was lost
        with the previous connection, or the ping could not be sent, the core would wait for an answer forever.
        """
        if self.core.owes_answer(address):
            self._ping(SendPing(**address))

    # Time

    def _arm(self) -> None:
        """Sets the timer to the core's next deadline, if that has changed."""
        next_s = self.core.next_deadline_s()
        # Each report of each rank comes here, and few change the next deadline.
        if next_s == self._armed_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_s = next_s
        if next_s is not None:
            self._timer = self._loop.call_at(next_s - self._clock_offset_s, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = self._armed_s = None
        self._handle_own(DeadlinePassed())


def _why_too_large(command: RankCommand, num_bytes: int) -> str:
    return (
        f"a message to rank {command.rank} ({type(command).__name__}) has {num_bytes} bytes, and at most "
        f"{MAX_MESSAGE_BYTES} can be sent: record fewer scalars and metrics, with shorter names"
    )

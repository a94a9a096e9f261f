"""Messages to agents and ranks, numbered and kept until they are received, so that a stream survives its connections.

A connection may end at any moment, with the network or the coordinator; the conversation goes on (protocol P15). Each
side numbers messages that change the other's state, keeps them until the other has them, and sends them again, in
order, on the next connection. Duplicates are dropped by their numbers.
"""

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import deque
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Generic, TypeVar

from elche.errors import ElcheError
from elche_coordinator.core.messages.commands import StartRank
from elche_coordinator.core.messages.ids import AgentId, Incarnation, JobId, Rank
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.streams.send_queue import MAX_WAITING, SendQueue

MAX_KEPT = 50_000
"""Most messages that are kept for one receiver that does not acknowledge them."""
MAX_KEPT_BYTES = 64 << 20
"""Most bytes of these. An order to write a checkpoint may have 4 MB."""

Message = TypeVar("Message", bound=Any)
Process = tuple[Rank, Incarnation]


class Superseded(ElcheError):
    """An agent or rank has received messages that the store does not know: it is another store, or an older state."""


class StartOrder:
    """The order to start a rank, kept and queued without its job's file and settings: each of a thousand ranks would
    have its own copy. It is made into a message when it is sent.
    """

    __slots__ = ("command", "seq")

    def __init__(self, command: StartRank) -> None:
        self.command = command
        self.seq = 0
        """Its number in the stream."""


class Stream(Generic[Message]):
    """The messages to one receiver, over successive connections, and the numbers of its own messages."""

    def __init__(self, *, is_resumable: bool, is_of_agent: bool = False) -> None:
        self.is_of_agent = is_of_agent
        """True if the receiver is an agent; else it is a rank."""
        self.is_resumable = is_resumable
        """True if it may reconnect."""
        self.num_read = 0
        """Number of its last message that was handled."""
        self.is_over = False
        """True if it was given up, and may not reconnect."""
        self.num_taken = 0
        """Number of its last durable message."""
        self.num_connections = 0
        """Number of its connections since the coordinator started."""
        self.num_in_vain = 0
        """Number of its last connections that all ended before the oldest message had arrived; 0 if none waits."""
        self._oldest = 0
        """Number of the oldest message at the end of the last connection."""
        self._num_kept = 0
        self._num_visible = 0
        """Number of the last message that may be sent, since its event is durable."""
        self._kept: deque[Message] = deque()
        self._num_kept_bytes = 0
        self._queue: SendQueue[Message] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The present state, as of when all of it will be durable."""
        return {**self.__dict__, "_queue": None, "num_connections": 0}

    @property
    def is_connected(self) -> bool:
        """True if a connection is open."""
        return self._queue is not None and not self._queue.is_closed

    @property
    def is_lost(self) -> bool:
        """True if it had a connection to this process and has none now."""
        return self.num_connections > 0 and not self.is_connected

    def connect(self, num_received: int) -> SendQueue[Message]:
        """Opens a new connection, replacing the previous one, of a receiver that has received the first `num_received`
        messages; returns the queue of messages to send. Raises `Superseded`.
        """
        if num_received > self._num_kept:
            raise Superseded(
                f"message {num_received} was received, but only {self._num_kept} were sent: the coordinator's store is "
                "older than what it coordinates; start it on the newer one"
            )
        self.disconnect(self._queue)
        self.num_connections += 1
        self._queue = SendQueue(max(MAX_WAITING, 2 * len(self._kept)))  # `resend` adds all kept messages at once
        self.on_received(num_received)
        return self._queue

    def resend(self) -> None:
        """Sends messages again that were not received before. Called once, at the beginning of a connection."""
        for message in list(self._kept):
            # The rest follows by `show`, once it is durable: who acts on it before, acts on what a crash may undo.
            if message.seq <= self._num_visible:
                self.pass_on(message)

    def disconnect(self, queue: SendQueue[Message] | None) -> bool:
        """Handles the end of the connection with this queue; returns False if another has replaced it."""
        if queue is None or queue is not self._queue:
            return False
        queue.close()
        self._queue = None
        before, self._oldest = self._oldest, self._kept[0].seq if self._kept else 0
        self.num_in_vain = bool(self._oldest) + (self.num_in_vain if self._oldest == before else 0)
        return True

    def keep(self, message: Message) -> int:
        """Numbers a message, and keeps it until it is received; returns the number."""
        self._num_kept += 1
        message.seq = self._num_kept
        if not self.is_over:
            self._kept.append(message)
            self._num_kept_bytes += _size_bytes(message)
        return self._num_kept

    def show(self, number: int) -> None:
        """Allows messages up to the number to be sent."""
        # From the end: thousands may be kept, of which only the newest are not shown yet.
        hidden = list(takewhile(lambda message: message.seq > self._num_visible, reversed(self._kept)))
        for message in reversed(hidden):
            if message.seq <= number:
                self.pass_on(message)
        self._num_visible = max(self._num_visible, number)
        # Nobody comes back to ask for it again.
        if not self.is_resumable:
            self.on_received(number)
        elif len(self._kept) > MAX_KEPT or self._num_kept_bytes > MAX_KEPT_BYTES:
            self.give_up()

    def settle(self) -> None:
        """Marks all messages, sent and handled, as durable."""
        self._num_visible, self.num_taken = self._num_kept, self.num_read

    def pass_on(self, message: Message) -> None:
        """Sends a message on the present connection, if there is one."""
        if self._queue is not None:
            self._queue.put(message)

    def on_received(self, number: int) -> None:
        """Drops messages up to the number, which were received."""
        while self._kept and self._kept[0].seq <= number:
            self._num_kept_bytes -= _size_bytes(self._kept.popleft())
            self.num_in_vain = 0

    def is_news(self, number: int) -> bool:
        """True if its message of this number was not handled before. True for unnumbered ones."""
        return number == 0 or number > self.num_read

    def give_up(self) -> None:
        """Gives a lost receiver up: drops its messages, and does not let it reconnect."""
        self.is_over = True
        self._kept.clear()
        self.close()

    def close(self) -> None:
        """Ends the present connection after the messages in its queue."""
        if self._queue is not None:
            self._queue.close()


def _size_bytes(message: Any) -> int:
    """Size of a kept message; of an order to start a rank that of what is kept, which is little."""
    return 0 if isinstance(message, StartOrder) else int(message.ByteSize())


class Secrets:
    """Ranks' secrets, derived from the store's key, so that a restarted coordinator has the same ones."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def new(self, address: Address) -> str:
        """The secret of one process."""
        text = f"{address['rank']} {address['incarnation']} {address['job_id']}".encode()
        return f"{urlsafe_b64encode(text).decode()}.{self._sign(text)}"

    def read(self, secret: str) -> Address | None:
        """The process of a secret; None for an invalid one."""
        encoded, _, signature = secret.partition(".")
        try:
            text = urlsafe_b64decode(encoded)
            if not hmac.compare_digest(signature.encode(), self._sign(text).encode()):
                return None
            rank, incarnation, job_id = text.decode().split(" ", 2)
            return {"job_id": JobId(job_id), "rank": Rank(int(rank)), "incarnation": Incarnation(int(incarnation))}
        except ValueError:
            return None

    def _sign(self, text: bytes) -> str:
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()


class Streams:
    """All streams, by receiver. Pickled for a restarted coordinator."""

    def __init__(self) -> None:
        self.agents: dict[AgentId, Stream[Any]] = {}
        self.identities: dict[str, AgentId] = {}
        """Ids of agents that may reconnect, by the identity that they present."""
        self._num_agents = 0
        self.ranks: dict[JobId, dict[Process, Stream[Any]]] = {}

    @property
    def next_agent_id(self) -> AgentId:
        """The id of the next agent."""
        return AgentId(f"agent-{self._num_agents + 1}")

    def add_agent(self, agent_id: AgentId, identity: str) -> None:
        """Adds an agent that has joined."""
        self._num_agents += 1
        self.agents[agent_id] = Stream(is_resumable=bool(identity), is_of_agent=True)
        if identity:
            self.identities[identity] = agent_id

    def drop_agent(self, agent_id: AgentId) -> None:
        """Removes a lost agent."""
        self.agents.pop(agent_id, None)
        self.identities = {identity: one for identity, one in self.identities.items() if one != agent_id}

    def of_rank(self, address: Address) -> Stream[Any] | None:
        """A process's stream; None before it has opened one, and after its job has ended."""
        return self.ranks.get(address["job_id"], {}).get((address["rank"], address["incarnation"]))

    def add_rank(self, address: Address, *, is_resumable: bool) -> Stream[Any]:
        """A new stream of a process."""
        stream: Stream[Any] = Stream(is_resumable=is_resumable)
        self.ranks.setdefault(address["job_id"], {})[address["rank"], address["incarnation"]] = stream
        return stream

    def give_up_rank(self, address: Address) -> None:
        """Gives up the stream of a lost process."""
        if (stream := self.of_rank(address)) is not None:
            stream.give_up()

    def __iter__(self) -> Iterator[Stream[Any]]:
        yield from self.agents.values()
        for streams in self.ranks.values():
            yield from streams.values()

    def end_job(self, job_id: JobId) -> None:
        """Ends the streams of an ended job's ranks after the messages in their queues."""
        for stream in self.ranks.pop(job_id, {}).values():
            stream.close()

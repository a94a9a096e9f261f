"""Budgets: bounds on resources that each caller, and all together, use at once. Checked where calls arrive."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from elche.errors import TooMuch

MAX_REQUESTS = 96
"""HTTP requests with a token that are served at once; fewer than connections, which requests without one need, too."""
MAX_REQUESTS_OF_CALLER = 32
"""Of these, those of one caller; as with each further bound that has the same ending."""
MAX_CALLS = 8192
"""gRPC calls that are open at once, except those of agents and ranks."""
MAX_CALLS_OF_CALLER = 512
MAX_STREAMS_OF_CONNECTION = 1024
"""gRPC calls that are open on one connection, including those that the peer has reset and the server has not ended yet.
It is more than one caller, worker or rank may have open, so that only floods of calls that are reset at once reach it.
"""
MAX_HEADER_BYTES = 4 << 10
"""Bytes of a gRPC call's headers, of which each name and value counts 32 more. Without a bound of ours gRPC takes up to
16 KiB, before anybody knows whose they are, of each call on each connection.
"""
MAX_AGENT_CALLS = 16_384
"""gRPC calls of agents that are open at once: one of each host, and one of each file that it delivers."""
MAX_AGENT_CALLS_OF_CALLER = 8_192
MAX_HOSTS_BYTES = 128 << 20
"""Bytes of what the hosts that are known say of themselves; in memory some four times as much."""
MAX_HOSTS_BYTES_OF_CALLER = 32 << 20
HELLO_S = 20.0
"""Seconds in which an agent must say who it is."""
MAX_RANK_CALLS = 65_536
"""gRPC calls of ranks that are open at once, without their sessions: each rank has one that waits for a key or two."""
MAX_RANK_CALLS_OF_USER = 32_768
MAX_CALLS_OF_RANK = 256
"""Of these, those of one rank, whose processes are several in a replica group."""
MAX_RECEIVED_OF_CALLER = 8
"""Requests of one caller that are being received at once, each of up to 4 MiB."""
MAX_RECEIVED_OF_RANKS = 32
"""The same of one submitter's ranks. Streams are not counted, since each waits for its next message."""
MAX_REQUEST_BYTES = 512 << 20
"""Bytes of the requests of open calls, which have them until they end; again of ranks' calls. Also fields that nobody
knows take their bytes, so that a call that only has a job's id may have 4 MiB.
"""
MAX_REQUEST_BYTES_OF_CALLER = 64 << 20
MAX_REQUEST_BYTES_OF_RANKS = 256 << 20
"""Of these, those of one submitter's ranks, each of which may wait for a key of each other."""
RECEIVE_S = 30.0
"""Seconds in which a request must come, once it is its turn."""
FOLDER_CALL = "FetchBundle"
"""The call of ranks that holds a file open."""
MAX_FOLDER_CALLS_OF_RANK = 8
FILE_CALLS = frozenset({"FetchModel", "FetchTimeline", "FetchJournal", "UploadBundle"})
"""Calls that hold parts of files in memory."""
MAX_FILE_CALLS = 64
"""Such calls that are open at once."""
MAX_FILE_CALLS_OF_CALLER = 8
MAX_LOGS = 1024
"""Logs of ranks that are read at once; each needs a stream from its host, which has a bound of its own."""
MAX_LOGS_OF_CALLER = 96
MAX_ANNOUNCED_BYTES_OF_CALLER = 1 << 30
"""Bytes of the folders that one caller is uploading."""
MAX_UNWRITTEN_BYTES = 64 << 20
"""Bytes of messages of all agents and ranks that are not durable; with more, streams with many of them are not read."""
MAX_UNWRITTEN_BYTES_OF_STREAM = 4 << 20
MAX_UNWRITTEN_BYTES_OF_USER = 16 << 20
"""Of these, those of the ranks of one submitter, or of the agents of one token."""
MIN_UNWRITTEN_BYTES_OF_STREAM = 16 << 10
"""A stream with fewer such bytes is always read."""
TURN_BYTES = 64 << 10
"""Bytes of messages of one user's ranks, or of one token's agents, that are read in each turn of the event loop, which
takes some milliseconds.
"""
MAX_STORES_BYTES = 1 << 30
"""Bytes of keys and values in the rendezvous stores of all jobs."""
MAX_STORES_BYTES_OF_USER = 256 << 20
MAX_TIMELINES_BYTES = 4 << 30
"""Bytes of the timelines of all open jobs."""
MAX_TIMELINES_BYTES_OF_USER = 1 << 30
MAX_UNREAD_BYTES = 512 << 20
"""Bytes of answers, and of parts of streams, that are on their way to callers; again of answers to ranks."""
MAX_UNREAD_BYTES_OF_CALLER = 64 << 20
"""Of these, those of one caller, or of one submitter's ranks."""
MAX_REPORTS_BYTES = 256 << 20
"""Bytes of reports that wait for all watchers of jobs."""
MAX_REPORTS_BYTES_OF_CALLER = 32 << 20
TAKE_S = 600.0
"""Seconds for which a caller may take nothing from a stream. Long, since a person may be reading."""

PROCESSOR_FRACTION = 0.25
"""Fraction of the event loop's processor time that each caller gets for gRPC, and again for the page."""
PROCESSOR_STORE_S = 20.0
"""Seconds without calls for which a caller accumulates time: a quarter of it may then be used at once."""
MAX_TURN_S = 4.0
"""Most seconds that a call waits for its caller's turn, shorter than the clients' timeout; one that would wait longer
is refused."""


class Budget:
    """Counts how many of `what`, a plural for messages, callers have at once.

    A caller is the name of a token. It is empty for the coordinator's own token, or where none is needed: such callers
    have no bound of their own, but count in that of all.
    """

    def __init__(self, what: str, of_caller: int, in_all: int) -> None:
        self._what = what
        self._of_caller = of_caller
        self._in_all = in_all
        self._taken: Counter[str] = Counter()
        self._num = 0
        """All that is taken: a caller may be one of ten thousand ranks, and the sum of their counts takes long."""

    @contextmanager
    def taking(self, caller: str, num: int = 1) -> Iterator[None]:
        """Context in which the caller uses `num` more. Raises `TooMuch`, without taking any."""
        if caller:
            self._require("you have", self._taken[caller] + num, self._of_caller)
        self._require("all have", self._num + num, self._in_all)
        self._taken[caller] += num
        self._num += num
        try:
            yield
        finally:
            self._taken[caller] -= num
            self._num -= num
            if not self._taken[caller]:
                del self._taken[caller]

    def _require(self, who: str, num: int, limit: int) -> None:
        if num > limit:
            raise TooMuch(f"{who} {num} {self._what} at once, and {limit} is the limit: end some, or try again later")


class Held:
    """Counts the bytes of `what` that are held for each user's jobs, or the agents of a token."""

    def __init__(self, what: str, of_user: int, in_all: int, whose: str = "jobs") -> None:
        """Limits are in bytes: `of_user` for each user, `in_all` for all together."""
        self._what = what
        self._whose = whose
        self._of_user = of_user
        self._in_all = in_all
        self._held: Counter[str] = Counter()

    def change(self, user: str, num_bytes: int) -> None:
        """Adds bytes, or removes them if negative. Raises `TooMuch`, without a change."""
        if num_bytes > 0:
            self._require(f"your {self._whose} have", self._held[user] + num_bytes, self._of_user)
            self._require(f"all {self._whose} have", self._held.total() + num_bytes, self._in_all)
        self._held[user] += num_bytes
        if not self._held[user]:
            del self._held[user]

    def _require(self, who: str, num_bytes: int, limit: int) -> None:
        if num_bytes > limit:
            raise TooMuch(f"{who} {num_bytes >> 20} MiB of {self._what}, and {limit >> 20} MiB is the limit")

"""The tape: a log of every event of the core, made durable before any of the event's effects is visible.

A restarted coordinator loads the newest saved state and repeats the events since, by which it has its old state
(protocol P22). The core is a state machine without clock and I/O, so that nothing else has to be saved, and a crash at
any moment leaves a state that it had.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import elche
import elche_coordinator.core
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import Broken, check_places, check_training
from elche_coordinator.core.messages.events import Event, JobsForgotten, JobSubmitted, LoopAttached
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.storage.job_rows import Record
from elche_coordinator.storage.snapshots import Snapshots, join
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.unpickling import loads, unsealed
from elche_coordinator.storage.writer import Transaction, Writer
from elche_coordinator.streams import streams

log = logging.getLogger(__name__)

BACKED_UP = "backed up"
"""Stands for the code that made a state in a backup of a coordinator that ran on."""
FLUSH_S = 1.0
"""Seconds for which events without visible effects wait before they are written."""
MAX_ENTRIES = 500
"""Most such events that wait."""
SAVE_EVERY = 2000
"""Fewest events between two saved states, unless they are long."""
SAVE_BYTES = 32 << 20
"""Bytes of written events after which fewer are enough."""
SAVE_FRACTION = 0.05
"""Time that saving states may take, as a fraction of that for events. To repeat events takes about as long as they
took, so that a coordinator which starts does so for about twenty times a save.
"""
MAX_REASON_CHARS = 300
"""Most characters of a reason in the log: a broken rule may name all leases of an epoch."""


class Entry(NamedTuple):
    """One event on the tape."""

    at_s: float
    event: Event
    number: int = 0
    """Number of its message in its stream; 0: none."""
    identity: str = ""
    """Identity by which its stream may be reopened; empty: it may not."""


class Tape:
    """Collects events to be written, and passes them to the writer when an effect waits for them."""

    def __init__(
        self,
        writer: Writer,
        snapshots: Snapshots,
        first: int,
        *,
        rows: Callable[[], dict[str, Record]] = dict,
        sources: Callable[[], dict[str, str]] = dict,
        on_saved: Callable[[Mapping[str, int]], None] = lambda sizes: None,
    ) -> None:
        """`first` is the number of the first event; `rows` and `sources` return the changes since their last call,
        which become durable together with the events. `on_saved` gets the sizes in bytes of jobs' saved states.
        """
        self._writer = writer
        self._snapshots = snapshots
        self._rows = rows
        self._sources = sources
        self._on_saved = on_saved
        self._batch = Transaction(last=first - 1)
        self._num_since = SAVE_EVERY
        """Events since the last saved state. It begins so high that the first event is followed by a saved state."""
        self._num_bytes_saved = 0
        """Bytes of events that the writer had written by then."""
        self._began_s = 0.0
        """When the newest event came."""
        self._handled_s = 0.0
        """Seconds that events since the last saved state have taken."""
        self._saved_s = 0.0
        """Seconds that this saved state took."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._batch.last

    def add(self, entry: Entry) -> None:
        """Appends an event, which is then handled; `flush` follows."""
        self._began_s = time.monotonic()
        self._batch.last += 1
        self._batch.entries.append(entry)
        match entry.event:
            case JobsForgotten(job_ids=job_ids):
                self._batch.forget(job_ids)
            case JobSubmitted(job_id=job_id, spec=spec) | LoopAttached(job_id=job_id, spec=spec):
                self._batch.specs.setdefault(job_id, spec)
        self._num_since += 1

    def flush(self, *, is_awaited: bool) -> None:
        """Passes all events to the writer; with a delay if no effect waits."""
        if self._began_s:
            self._handled_s += time.monotonic() - self._began_s
            self._began_s = 0.0
        if not is_awaited and len(self._batch.entries) < MAX_ENTRIES:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, lambda: self.flush(is_awaited=True))
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        is_long = self._writer.num_bytes - self._num_bytes_saved >= SAVE_BYTES
        may_save = (is_long or self._num_since >= SAVE_EVERY) and self._saved_s <= SAVE_FRACTION * self._handled_s
        if may_save or self._snapshots.is_due:
            self._save_state()
        batch, self._batch = self._batch, Transaction(last=self._batch.last)
        if batch.entries or batch.saved:
            batch.rows |= {job_id: row for job_id, row in self._rows().items() if job_id not in batch.forgotten}
            batch.sources |= self._sources()
            self._writer.write(batch)

    def _save_state(self) -> None:
        started_s = time.monotonic()
        try:
            saved = self._snapshots.take(self._batch.last, code_version())
        except Exception:
            log.exception("the state cannot be saved; this is a bug. The tape goes on")
        else:
            self._batch.saved = saved
            # The saved state has these events in it.
            self._batch.entries = []
            self._on_saved({job_id: len(part) for job_id, part in saved.parts.items()})
        self._num_since, self._num_bytes_saved = 0, self._writer.num_bytes
        self._handled_s, self._saved_s = 0.0, time.monotonic() - started_s

    def close(self) -> None:
        """Writes the remaining events."""
        self.flush(is_awaited=True)


class Recorded(NamedTuple):
    """What a restarted coordinator resumes from."""

    state: tuple[Coordinator, streams.Streams]
    """The newest saved state: the core, and its streams."""
    entries: list[Entry]
    """The events since."""
    last: int
    """The number of the last event."""
    age_s: float = 0.0
    """Seconds since the newest of these was written."""
    saved: Collection[str] = ()
    """The jobs that are in the saved state."""
    doubted: Mapping[JobId, str] = MappingProxyType({})
    """The jobs whose state contradicts itself, with what is wrong: they alone do not go on with it."""


def read(store: SqlStore) -> Recorded | None:
    """Reads the state of a previous coordinator; None if there is none, or none that this code can use."""
    saved, pieces, age_s, lasts = store.load_state()
    why = ""
    if saved and saved.code != code_version():
        why = "ran on after this backup" if saved.code == BACKED_UP else "was another version"
    if saved is not None and not why:
        try:
            entries = list(_unpickled(pieces, lasts, saved.last))
            state = join(saved.state, saved.parts)
            check_places(state[0])
            state[0].next_deadline_s()
            doubted = dict(_contradictions(state[0]))
            return Recorded(state, entries, saved.last + len(entries), age_s, frozenset(saved.parts), doubted)
        # Whatever is wrong with it: jobs can go on from their checkpoints, and a coordinator that does not start helps
        # nobody.
        except Broken as error:
            why = f"has left a state that contradicts itself ({str(error)[:MAX_REASON_CHARS]})"
        except Exception as error:
            why = f"has left what cannot be read ({repr(error)[:MAX_REASON_CHARS]})"
    if why:
        log.warning("the coordinator before this one %s: jobs that ran go back to their newest checkpoints", why)
    return None


def _contradictions(core: Coordinator) -> Iterator[tuple[JobId, str]]:
    """The jobs whose state contradicts itself, with what is wrong."""
    for job_id, training in core.trainings.items():
        try:
            check_training(training, with_progress=False)  # a job that is stuck is no contradiction
        except Broken as error:
            yield job_id, str(error)[:MAX_REASON_CHARS]


def _unpickled(pieces: list[bytes], lasts: list[int], last: int) -> Iterator[Entry]:
    """The events after number `last`. Raises `Broken` if some are missing, or there twice, or an entry is no event."""
    for piece, end in zip(pieces, lasts, strict=True):
        entries = loads(unsealed(piece))
        if last + len(entries) != end:
            raise Broken(f"after event {last} its tape has {len(entries)} events up to number {end}")
        for entry in entries:
            last += 1
            if not isinstance(entry, Entry) or not isinstance(entry.event, Event) or not isfinite(entry.at_s):
                raise Broken(f"entry {last} of its tape is no event")
            yield entry


@cache
def code_version() -> str:
    """A hash of the code whose state is saved: other code must not load it."""
    digest = hashlib.sha256()
    folders = [Path(module.__path__[0]) for module in (elche_coordinator.core, elche)]
    for path in [Path(streams.__file__), *sorted(path for folder in folders for path in folder.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()

"""Finds ranks that make different collective calls, in which they would wait for each other forever.

Each rank numbers its calls. A rank that has waited in a call for a while writes its latest calls to the store at which
the group was formed, and reads those of others. Different calls of the same number are an error of the script, however
slow a rank is: no time limit decides.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import ref

from torch.distributed.distributed_c10d import PrefixStore, Store

from elche.errors import Misuse
from elche.output import notice

LOOK_EVERY_S = 1.0
"""Seconds between two comparisons of calls, while a rank waits in one."""
NUM_TOLD = 64
"""Number of its latest calls that a rank publishes: ranks that differ are rarely further apart."""
NUM_READ = 32
"""Ranks whose calls are read in each comparison, besides rank 0: with more ranks, others each time."""
NUM_WAITS = 3
"""Looks for which a rank waits until the others know of the difference, before it shuts connections."""
END_S = 10.0
"""Seconds for which a rank whose process has the store waits at its loop's end for those of the others."""
END_POLL_S = 0.05
"""Seconds between two looks whether they have ended theirs."""
STUCK_S = 5.0
"""Seconds that a call may take to end then, before the process is ended: over NCCL, and in a group that the script has
made, nothing can end a call."""

WHAT_TO_DO = (
    "every rank has to make the same calls, as often as the others: decide `continue`, `break` and `return` alike on "
    "all ranks, as by trainer.mean({'stop': float(stop)}), and where ranks divide the batches themselves, leave out "
    "those that do not divide evenly"
)


class CallsDiffer(Misuse):
    """Ranks do not make the same calls."""


class Calls:
    """This rank's calls, and those of the ranks in its group."""

    def __init__(self, number: int) -> None:
        self.difference = ""
        """The message on how the ranks' calls differ; "" until a difference is found."""
        self.end_call: Callable[[], None] = lambda: None
        """Ends a call that waits, where that is possible. Called on the watching thread."""
        self.on_stuck: Callable[[], Callable[[str], None] | None] = lambda: None
        """Called with the message before the process is ended because its call cannot be."""
        self._number = number
        self._members: tuple[int, ...] = ()
        """Numbers of the ranks that are compared, this one included."""
        self._store: Store | None = None
        """None while there is nobody to compare with."""
        self._calls: deque[str] = deque(maxlen=NUM_TOLD)
        self._num_calls = 0
        """Calls begun, also those that `_calls` has dropped: by it ranks compare calls of the same number."""
        self._is_waiting = False
        """True between `begin` and `end` of a call."""
        self._num_users = 0
        """Open loops that use the same process group."""
        self._num_opened = 0
        """Loops that have used it."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_looks = 0
        self._has_left = False
        """True once this rank has ended its loop: it waits for nobody, so it counts as knowing of a difference."""

    def follow(self, store: Store | None, members: Sequence[int]) -> None:
        """Compares calls among these ranks from now on, over the store at which their group was formed."""
        self._members = tuple(members)
        self._store = PrefixStore("calls", store) if store is not None and len(members) > 1 else None

    def open(self) -> int:
        """Counts one more loop, and returns its number, equal on every rank; the first starts the watching thread."""
        self._num_users += 1
        self._num_opened += 1
        if self._num_users == 1 and self._store is not None:
            self._stopped = threading.Event()
            arguments = (ref(self), self._stopped)
            self._thread = threading.Thread(target=_watch, args=arguments, name="calls", daemon=True)
            self._thread.start()
        return self._num_opened

    @property
    def is_open(self) -> bool:
        """True if a loop uses it."""
        return self._num_users > 0

    def close(self) -> None:
        """Counts one loop less; the last one stops the watching thread."""
        self._num_users -= 1
        if self._num_users == 0:
            self._stopped.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(STUCK_S)  # exiting while a thread is in the store's C++ code aborts the process

    @property
    def call(self) -> str:
        """The latest call."""
        return self._calls[-1] if self._calls else ""

    def begin(self, call: str) -> None:
        """Records that this rank makes a call, in which it may wait for others."""
        self._calls.append(call)
        self._has_left = False
        self._num_calls += 1
        self._is_waiting = True

    def end(self) -> None:
        """Records that the call is over."""
        self._is_waiting = False

    def leave(self, call: str) -> None:
        """Records a call that waits for nobody, and publishes it at once, since no further call may follow."""
        self.begin(call)
        self.end()
        self._has_left = True
        # The store has ended with rank 0's process: then nobody is left whom this rank could tell.
        with suppress(RuntimeError):
            self._publish()

    def publish_end(self, loop: int, text: str, *, limit_s: float) -> dict[int, str]:
        """Publishes this rank's `text` at the end of loop number `loop`. Returns the texts to compare, by rank: its
        own, and on the first rank those of all others, on each other one the first's. Waits `limit_s` for them, then
        leaves out the ranks whose loop has not ended: those compare when it does.
        """
        store, texts = self._store, {self._number: text}
        wanted = set(self._members if self._number == self._members[0] else self._members[:1]) - {self._number}
        until_s = time.monotonic() + limit_s
        with suppress(RuntimeError):
            if store is not None:
                store.set(f"end {loop} of {self._number}", text)
            while store is not None:
                ended = {number for number in wanted if store.check([f"end {loop} of {number}"])}
                texts |= {number: store.get(f"end {loop} of {number}").decode() for number in ended}
                wanted -= ended
                if not wanted or time.monotonic() >= until_s:
                    break
                time.sleep(END_POLL_S)
        return {self._members.index(number): text for number, text in texts.items()}

    def look(self) -> str:
        """Publishes this rank's calls and compares the others'. Returns how they differ, or "" if they do not."""
        if self._store is None:
            return ""
        with suppress(RuntimeError, ValueError):
            self._publish()
            published = {self._number: self._state(), **self._read()}
            self.difference = self.difference or self._difference(published)
        return self.difference

    def _state(self) -> dict[str, Any]:
        return {
            "num_calls": self._num_calls,
            "calls": list(self._calls),
            "knows": bool(self.difference) or self._has_left,
        }

    def _publish(self) -> None:
        if self._store is not None:
            self._store.set(str(self._number), json.dumps(self._state()))

    def _read(self) -> dict[int, dict[str, Any]]:
        """Published calls of some other ranks, by number: the first rank's always, and `NUM_READ` others in turn."""
        store = self._store
        assert store is not None
        others = [number for number in self._members if number != self._number]
        start = self._num_looks * NUM_READ % len(others)
        self._num_looks += 1
        # Also those of the first rank, so that all are compared with one: of ranks read in turn, two that differ may
        # never be looked at together.
        chosen = dict.fromkeys([others[0], *(others[start:] + others[:start])[:NUM_READ]])
        return {number: json.loads(store.get(str(number))) for number in chosen if store.check([str(number)])}

    def _difference(self, published: dict[int, dict[str, Any]]) -> str:
        """The message on the first call in which ranks differ, or ""."""
        calls = {number: _numbered(one) for number, one in published.items()}
        for at in sorted(calls[self._number]):
            made = {number: one[at] for number, one in sorted(calls.items()) if at in one}
            if differ(made.values()):
                return difference(self._members, made)
        return ""

    def watch(self, last: int, stopped: threading.Event) -> int:
        """Compares calls if this rank already waited in call `last` at the previous look. Ends the call, or the
        process, on a difference. Returns the number of the call that it waits in now, or -1.
        """
        now, is_waiting = self._num_calls, self._is_waiting
        if is_waiting and now == last and self.look():
            self._wait_for_others(stopped)
            self.end_call()
            if not stopped.wait(STUCK_S) and self._is_waiting and self._num_calls == now:
                self._end_process()
        return now if is_waiting else -1

    def _wait_for_others(self, stopped: threading.Event) -> None:
        """Waits until the others know of the difference, since the store may end with this process."""
        for _ in range(NUM_WAITS):
            with suppress(RuntimeError, ValueError):
                self._publish()
                if all(one["knows"] for one in self._read().values()):
                    return
            stopped.wait(LOOK_EVERY_S)

    def _end_process(self) -> None:
        notice(self.difference)
        if (report := self.on_stuck()) is not None:
            report(self.difference)
        # Not `sys.exit`, which ends this thread alone: the main thread is in a call that nothing in Python interrupts.
        os._exit(1)


def _watch(watched: "ref[Calls]", stopped: threading.Event) -> None:
    """The watching thread. It keeps `Calls` only while it compares, so that one that nobody uses is freed."""
    last = -1
    while not stopped.wait(LOOK_EVERY_S):
        calls = watched()
        if calls is None:
            return
        last = calls.watch(last, stopped)
        del calls


def differ(calls: Iterable[str]) -> bool:
    """True if calls differ in more than the epoch: loops over loaders of their own may be in different epochs."""
    return len({call.partition(" (epoch")[0] for call in calls}) > 1


def difference(members: Sequence[int], made: dict[int, str]) -> str:
    """The message on calls that differ, `made` by rank number; the calls of most ranks come first."""
    by_call: dict[str, list[int]] = {}
    for number, call in made.items():
        by_call.setdefault(call, []).append(members.index(number))
    most_first = sorted(by_call.items(), key=lambda item: -len(item[1]))[:3]
    texts = [f"{_ranks(ranks)} {call}" for call, ranks in most_first]
    return f"the ranks make different calls: {', '.join(texts)}; {WHAT_TO_DO}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"each of ranks {shown}"


def _numbered(published: dict[str, Any]) -> dict[int, str]:
    calls = published["calls"]
    return dict(enumerate(calls, published["num_calls"] - len(calls)))

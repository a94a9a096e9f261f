"""A search through everything that can happen to a small job: depth first, and no state twice.

A *deviation* is a step other than the first one that `SmallWorld.steps` names; how a round ends for each of its others
when a rank has died in it is none. A search with a bound on deviations looks at all that few of them lead to, one
without at everything. From each state that it reaches it also takes the first steps
only, without a further fault, until the job ends: it always goes on.
"""

import marshal
import pickle
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from hashlib import blake2b
from types import MethodType
from typing import Any

from elche.settings import AgreedSettings
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.commands import Command
from elche_coordinator.core.messages.events import Event
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.deadlines import Deadlines
from elche_coordinator.core.records.histogram import Histogram
from elche_coordinator.core.records.machine import Machine
from elche_coordinator.core.results.tally import EpochTally
from elche_coordinator.simulator.synthetic import SyntheticRank
from support.small_world import SmallWorld, Step

FIGURES = frozenset({"began_s", "_touched", "last_touched", "last_refusals", "handled", "fates", "result"})
"""Attributes that nothing that is still to come depends on."""
SAVED_EVERY = 8
"""A coordinator that has ended goes on from a state that is at most so many events old, and from its tape since."""
LONGEST = 1_000
"""A job that has not ended after so many steps never will."""


class Counterexample(AssertionError):
    """What must never happen has; the message tells how."""


@dataclass(frozen=True, slots=True)
class Node:
    """A state, and how the search has come to it."""

    before: "Node | None"
    step: Step
    digest: bytes
    world: bytes
    """Empty if the search has been there."""
    left: int
    """How many deviations there may be from here on."""
    saved: bytes
    """The core, as it was saved last."""
    tape: tuple[tuple[Event, list[Command], float], ...]

    def steps(self) -> list[Step]:
        """All steps from the beginning."""
        steps, node = [], self
        while node.before is not None:
            steps.append(node.step)
            node = node.before
        return steps[::-1]


@dataclass(slots=True)
class Search:
    """What has been looked at."""

    world: SmallWorld
    deviations: int | None = None
    """Bound; None: none."""
    most_states: int | None = None
    num_states: int = 0
    num_steps: int = 0
    num_ends: int = 0
    is_whole: bool = False
    """True once nothing is left to look at within the bound."""
    _expanded: dict[bytes, int] = field(default_factory=dict)
    """By digest: the most deviations that there might be after it."""

    def run(self) -> "Search":
        """Looks at everything. Raises `Counterexample`."""
        left = LONGEST * 10 if self.deviations is None else self.deviations
        blob = pickle.dumps(self.world, 5)
        begun, tape = pickle.dumps(Coordinator(), 5), tuple(self.world.handled)
        waiting = [Node(None, ("begin",), digest_of(self.world), blob, left, begun, tape)]
        while waiting:
            node: Node | None = waiting.pop()
            chain: set[bytes] = set()
            while node is not None and self._is_new(node, chain):
                chain.add(node.digest)
                node, others = self._expand(node)
                waiting += reversed(others)
                if self.most_states is not None and self.num_states >= self.most_states:
                    return self
        self.is_whole = True
        return self

    def _is_new(self, node: Node, chain: set[bytes]) -> bool:
        if node.digest in chain or len(chain) > LONGEST:
            raise Counterexample(self._story(node, "the job goes on and on, and never ends"))
        before = self._expanded.get(node.digest, -1)
        self.num_states += before < 0
        self._expanded[node.digest] = max(before, node.left)
        return before < node.left

    def _expand(self, node: Node) -> tuple[Node | None, list[Node]]:
        """What comes of a state when nothing deviates, None if the job ends then, and what else may come."""
        world: SmallWorld = pickle.loads(node.world)
        first, *others = world.steps() or [None]
        if first is None:
            raise Counterexample(self._story(node, "nothing more happens, and the job has not ended"))
        after = [
            self._after(node, step, pickle.loads(node.world), node.left - cost)
            for step in others
            if (cost := _cost(step)) <= node.left
        ]
        is_open = [one for one in after if one is not None and self._expanded.get(one.digest, -1) < one.left]
        return self._after(node, first, world, node.left), is_open

    def _after(self, node: Node, step: Step, world: SmallWorld, left: int) -> Node | None:
        """The state after a step; None if the job has ended."""
        self.num_steps += 1
        try:
            world.do(step)
            if step == ("crash",):
                world.core = _repeated(node, world.core)
        except Exception as error:
            raise Counterexample(self._story(node, f"{type(error).__name__}: {error}", step)) from error
        if world.result is not None:
            self.num_ends += 1
            return None
        saved, tape = node.saved, (*node.tape, *world.handled)
        if len(tape) >= SAVED_EVERY:
            saved, tape = pickle.dumps(world.core, 5), ()
        digest = digest_of(world)
        blob = b"" if self._expanded.get(digest, -1) >= left else pickle.dumps(world, 5)
        return Node(node, step, digest, blob, left, saved, tape)

    def _story(self, node: Node, what: str, *more: Step) -> str:
        world, lines = pickle.loads(pickle.dumps(self.world)), []
        for number, step in enumerate((*node.steps(), *more), 1):
            mark = " " if step == world.steps()[0] else "*"
            told = world.told(step)
            try:
                world.do(step)
            except Exception as error:
                lines.append(f"{number:4} {mark} {told}  !! {type(error).__name__}")
                break
            lines += [f"{number:4} {mark} {told}", *(f"         -> {text}" for text in world.ordered())]
        return "\n".join([*lines, what])


def _cost(step: Step) -> int:
    """How many deviations a step is that is not the first: none, if it is how a death ends a round for the others."""
    return 0 if step[0] == "end" and len(step) > 2 else 1


def _repeated(node: Node, core: Coordinator) -> Coordinator:
    """The core of a coordinator that starts again. Raises `AssertionError` unless it does as it did."""
    again: Coordinator = pickle.loads(node.saved)
    for event, commands, at_s in node.tape:
        assert again.handle(event, now_s=at_s) == commands, f"{event} leads elsewhere when it is repeated"
    assert plain(again) == plain(core), "events that are repeated lead to another state"
    return again


def digest_of(world: SmallWorld) -> bytes:
    """Equal for two worlds in which the same is still to come."""
    return blake2b(marshal.dumps(plain(world), 2), digest_size=12).digest()


ATOMS = frozenset({int, str, float, bool, bytes, type(None)})


def plain(value: object) -> object:
    """What of the value all that is still to come depends on, as tuples, numbers and text."""
    return _plain(value, {})


def _plain(value: Any, known: dict[int, int]) -> Any:
    """The same; an object that was seen before is its number."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is list or kind is tuple:
        return tuple([one if type(one) in ATOMS else _plain(one, known) for one in value])
    if kind is dict:
        return tuple(
            [(key if type(key) in ATOMS else _plain(key, known), _plain(one, known)) for key, one in value.items()]
        )
    if isinstance(value, Enum):
        return value.name
    if not _is_value(kind):
        if (number := known.get(id(value))) is not None:
            return number
        known[id(value)] = len(known)
    return _plain_object(kind, value, known)


@cache
def _is_value(kind: type) -> bool:
    """True of messages and the like, which may be one object or several that are equal."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return kind is partial or kind is MethodType or (parameters is not None and parameters.frozen)


def _plain_object(kind: type, value: Any, known: dict[int, int]) -> Any:
    if kind in (AgreedSettings, Histogram, EpochTally):
        return None  # the same in all of a search, or figures
    if kind is JobSpec:
        return value.resume
    if kind is Machine:
        return value.phase.name
    if kind is SyntheticRank and not value.is_alive:
        return (*value.address.values(), value.was_killed, _plain(value.files, known))
    if kind is partial:
        return (_plain(value.func, known), _plain(value.args, known), _plain(value.keywords, known))
    if kind is Deadlines:
        entries = sorted(value._heap, key=lambda entry: entry[:2])
        return tuple([(at, _plain(key, known)) for at, count, key in entries if value._live.get(key) == count])
    if kind in (set, frozenset):
        return tuple(sorted([_plain(one, known) for one in value], key=repr))
    if (function := getattr(value, "__func__", None)) is not None:
        return (function.__name__, _plain(value.__self__, known))
    if kind.__name__ == "deque":
        return _plain(tuple(value), known)
    if isinstance(value, dict):
        return _plain(dict(value), known)
    state = value.__getstate__()
    if isinstance(state, tuple):
        state = {**(state[0] or {}), **(state[1] or {})}
    if isinstance(state, dict):
        return (kind.__name__, tuple([_plain(one, known) for name, one in state.items() if name not in FIGURES]))
    return (kind.__name__, _plain(state, known))

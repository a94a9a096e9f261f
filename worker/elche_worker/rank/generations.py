"""The process groups of a rank: the one that its rounds use, and those that are built while training goes on."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from elche_worker.collectives.operations import CollectiveFailed, Collectives
from elche_worker.rank.acts import JoinGeneration


class GroupBuild:
    """Builds the group of a generation on a thread of its own. A forgotten build is not waited for: it may hang for
    minutes if a rank has died.
    """

    def __init__(
        self, act: JoinGeneration, connect: Callable[[JoinGeneration], Collectives], wake: Callable[[], None]
    ) -> None:
        """`wake` is called on the build's thread when it has ended."""
        self.act = act
        self.started_s = time.perf_counter()
        self.group: Future[Collectives] = Future()
        """Fails with `CollectiveFailed` when the ranks cannot meet."""
        self.is_finished = False
        """True if the group stands in all processes of the rank."""
        self._connect = connect
        self._wake = wake
        threading.Thread(target=self._run, name=f"generation {act.generation}", daemon=True).start()

    def _run(self) -> None:
        try:
            self.group.set_result(self._connect(self.act))
        # Whatever it is: without an outcome `finish` would wait forever.
        except BaseException as error:
            self.group.set_exception(error)
        self._wake()


class Generations:
    """The generation in use, if any, and newer ones that are built or being built."""

    def __init__(self, connect: Callable[[JoinGeneration], Collectives], wake: Callable[[], None]) -> None:
        """`connect` builds a group; `wake` is called on another thread when a build has ended."""
        self.in_use: Collectives | None = None
        """The group of the round that was entered last."""
        self._connect = connect
        self._wake = wake
        self._builds: dict[int, GroupBuild] = {}
        """By generation, all newer than the one in use. At most one of them is not finished."""

    def build(self, act: JoinGeneration) -> None:
        """Begins to build a group. Unfinished builds are forgotten."""
        self._builds = {generation: one for generation, one in self._builds.items() if one.is_finished}
        self._builds[act.generation] = GroupBuild(act, self._connect, self._wake)

    def finish(self, generation: int) -> str:
        """Waits until a build has ended, and marks it finished. Returns why it failed, or ""."""
        build = self._builds[generation]
        try:
            build.group.result()
        except CollectiveFailed as error:
            return str(error)
        build.is_finished = True
        return ""

    def forget(self, generation: int) -> None:
        """Drops a generation that will not be used: its build's outcome is ignored."""
        self._builds.pop(generation, None)

    @property
    def ended(self) -> list[GroupBuild]:
        """Builds that have ended, but for which `finish` was not called."""
        return [one for one in self._builds.values() if one.group.done() and not one.is_finished]

    def standing(self, generation: int) -> Collectives:
        """The group of a generation that is in use or built."""
        if self.in_use is not None and self.in_use.generation == generation:
            return self.in_use
        return self._builds[generation].group.result(0)

    def use(self, generation: int) -> JoinGeneration | None:
        """Makes rounds use this generation. Returns its description, or None if it was in use already."""
        if self.in_use is not None and self.in_use.generation == generation:
            return None
        build = self._builds[generation]
        old = [self.in_use]
        self.in_use = build.group.result(0)
        # The destructor of a group with a dead rank may wait for that rank. So the list holds the only reference, and
        # the thread drops it.
        threading.Thread(target=old.clear, name="old generation", daemon=True).start()
        self._builds = {newer: one for newer, one in self._builds.items() if newer > generation}
        return build.act

"""Breaks the code on purpose, one line at a time, and checks that a test notices: tests/mutants/*.toml.

Each mutant is a patch and the tests that must fail of it. It is made in a copy of the packages: the working tree
stays as it is. First all those tests must pass on a copy that nobody has touched. Tests run in processes that are
forked from one with the libraries that they import (`forked_tests.py`), which is most of the time of a short test.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from compileall import compile_dir
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "tests" / "mutants"
PACKAGES = ("proto", "coordinator", "worker", "client")
LIMIT_S = 180.0
"""A test that is not over by then hangs."""
OPTIONS = ("-x", "--tb=short", "-p", "no:cacheprovider", "-m", "not gpu and not multigpu")
PASSED, FAILED = 0, 1
"""Exit codes of pytest; others mean that it could not run the test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One patch of one file. `before` occurs in it exactly once."""

    area: str
    """Of the table that it stands in."""
    story: str
    """What a user would suffer."""
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    """Each of which must fail, as pytest names them."""
    hangs: bool = False
    """Whether the tests may also fail by never ending."""

    @property
    def name(self) -> str:
        """As people are shown it."""
        return f"{self.area}: {self.story}"

    def patched(self, folder: Path = ROOT) -> str:
        """The file's text with the mutation. Raises `ValueError` when there is no such place, or more than one."""
        text = (folder / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times, and should have once: {self.before!r}")
        return text.replace(self.before, self.after)


class MutantFate(StrEnum):
    """The outcome for a mutant."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"
    """It says nothing: the test could not be run, or hung."""


def load(folder: Path = TABLES) -> list[Mutant]:
    """All mutants, table by table. Raises `TypeError` for a row that lacks a field or has another one."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            mutants.append(Mutant(area=path.stem, **{**row, "tests": tuple(row["tests"])}))
    return mutants


class Copy:
    """A copy of the packages, and a process that runs tests on it. It is closed when it is not needed any more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
            compile_dir(folder / package, quiet=2)
        command = [sys.executable, str(ROOT / "tools" / "forked_tests.py")]
        more = {"PYTHONDONTWRITEBYTECODE": "1"}  # of a mutant: a file changes twice in a second
        pipe = subprocess.PIPE
        self._tests = subprocess.Popen(
            command, cwd=ROOT, env=_environment(folder) | more, stdin=pipe, stdout=pipe, text=True
        )

    def run_test(self, test: str) -> tuple[int | None, str]:
        """Pytest's exit code, None when it was not over in time; and what it has said."""
        said = self.folder / "said"
        arguments = [*OPTIONS, "-n0", test]
        assert self._tests.stdin is not None
        assert self._tests.stdout is not None
        print(
            json.dumps({"arguments": arguments, "output": str(said), "limit_s": LIMIT_S}),
            file=self._tests.stdin,
            flush=True,
        )
        code = json.loads(self._tests.stdout.readline())
        return code, said.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """With the mutant in it."""
        file, kept = self.folder / mutant.file, self.folder / "kept"
        text = mutant.patched(self.folder)
        shutil.copy2(file, kept)
        try:
            file.write_text(text, encoding="utf-8")
            yield
        finally:
            shutil.copy2(kept, file)  # with its time, by which Python knows that it has compiled it

    def close(self) -> None:
        """Ends the process."""
        self._tests.communicate()


def _environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join(str(folder / package) for package in PACKAGES)
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@contextmanager
def copies(num_copies: int) -> Iterator[list[Copy]]:
    """So many copies of the packages."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        made = [Copy(Path(name) / str(index)) for index in range(num_copies)]
        try:
            yield made
        finally:
            for one in made:
                one.close()


def try_mutant(mutant: Mutant, copy: Copy) -> tuple[MutantFate, str]:
    """Runs its tests. Returns its fate, and the output of a test that did not notice."""
    with copy.mutated(mutant):
        for test in mutant.tests:
            code, said = copy.run_test(test)
            if code == PASSED:
                return MutantFate.SURVIVED, f"{test} passes"
            if code != FAILED and not (code is None and mutant.hangs):
                return MutantFate.BROKEN, f"{test}: exit code {code}\n{said[-2000:]}"
    return MutantFate.KILLED, ""


def check_unmutated(mutants: Sequence[Mutant], folder: Path, num_processes: int) -> str:
    """Why the tests do not pass without a mutation; "" when they do."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    options = (*OPTIONS, f"-n{num_processes}", "--dist=loadfile")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT,
        env=_environment(folder),
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return "" if ended.returncode == PASSED else ended.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when every mutant is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, metavar="N", help="so many at a time (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those whose area, story, file or test has it")
    options = parser.parse_args(arguments)
    mutants = [one for one in load() if options.only in "\n".join((one.name, one.file, *one.tests))]
    if not mutants:
        parser.error(f"there is no mutant with {options.only!r}")
    with copies(options.n) as made:
        said = check_unmutated(mutants, made[0].folder, options.n)
        if said:
            print(said, "Without a mutation these tests must pass.", sep="\n")
            return 1
        fates = _try_all(mutants, made)
    counts = ", ".join(f"{list(fates.values()).count(fate)} {fate.value}" for fate in MutantFate)
    used_s = sum(os.times()[:4])
    print(f"{len(mutants)} mutants: {counts}, in {used_s:.0f} s of processor time")
    return int(any(fate is not MutantFate.KILLED for fate in fates.values()))


def _try_all(mutants: Sequence[Mutant], made: Sequence[Copy]) -> Mapping[str, MutantFate]:
    """By name; each is told as soon as it is known."""
    fates = {}
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in made:
        free.put(copy)

    def one(mutant: Mutant) -> None:
        copy = free.get()
        started_s = time.perf_counter()
        fate, said = try_mutant(mutant, copy)
        free.put(copy)
        fates[mutant.name] = fate
        print(
            f"{fate.value:8} {time.perf_counter() - started_s:5.1f} s  {mutant.name}",
            *filter(None, [said]),
            sep="\n",
            flush=True,
        )

    with ThreadPoolExecutor(len(made)) as threads:
        list(threads.map(one, mutants))
    return fates


if __name__ == "__main__":
    sys.exit(main())

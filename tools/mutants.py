"""Breaks the code on purpose, one line at a time, and checks that a test notices: tests/mutants/*.toml.

Each mutant is a patch and the tests that must fail of it. It is made in a copy of the packages: the working tree
stays as it is. First all those tests must pass on a copy that nobody has touched.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
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

    def patched(self) -> str:
        """The file's text with the mutation. Raises `ValueError` when there is no such place, or more than one."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times, and should have once: {self.before!r}")
        return text.replace(self.before, self.after)


class Fate(StrEnum):
    """What has become of a mutant."""

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


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the packages."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, Path(name) / package, ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(name)


def run_tests(
    tests: Sequence[str], folder: Path, *options: str, limit_s: float | None = None
) -> tuple[int | None, str]:
    """Pytest's exit code on the packages in a folder, None when it was not over in time; and what it has said."""
    paths = os.pathsep.join(str(folder / package) for package in PACKAGES)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    every = ("-m", "not gpu and not multigpu")
    command = [sys.executable, "-m", "pytest", "-x", "--tb=short", "-p", "no:cacheprovider", *every, *options, *tests]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, f"not over in {limit_s:g} s"
    finally:
        _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """With what the tests have started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def try_mutant(mutant: Mutant) -> tuple[Fate, str]:
    """Whether each of its tests notices; and what pytest says of one that does not."""
    with copied() as folder:
        (folder / mutant.file).write_text(mutant.patched(), encoding="utf-8")
        for test in mutant.tests:
            code, said = run_tests([test], folder, "-n0", limit_s=LIMIT_S)
            if code == PASSED:
                return Fate.SURVIVED, f"{test} passes"
            if code != FAILED and not (code is None and mutant.hangs):
                return Fate.BROKEN, f"{test}: {said[-2000:]}"
    return Fate.KILLED, ""


def check_unmutated(mutants: Sequence[Mutant], num_processes: int) -> str:
    """Why the tests do not pass without a mutation; "" when they do."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with copied() as folder:
        code, said = run_tests(tests, folder, f"-n{num_processes}", "--dist=loadfile")
    return "" if code == PASSED else said


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when every mutant is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, metavar="N", help="so many at a time (default: 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only those whose area, story, file or test has it")
    options = parser.parse_args(arguments)
    mutants = [one for one in load() if options.only in "\n".join((one.name, one.file, *one.tests))]
    if not mutants:
        parser.error(f"there is no mutant with {options.only!r}")
    said = check_unmutated(mutants, options.n)
    if said:
        print(said, "Without a mutation these tests must pass.", sep="\n")
        return 1
    fates = _try_all(mutants, options.n)
    counts = ", ".join(f"{list(fates.values()).count(fate)} {fate.value}" for fate in Fate)
    print(f"{len(mutants)} mutants: {counts}")
    return int(any(fate is not Fate.KILLED for fate in fates.values()))


def _try_all(mutants: Sequence[Mutant], num_processes: int) -> Mapping[str, Fate]:
    """By name; each is told as soon as it is known."""
    fates = {}

    def one(mutant: Mutant) -> None:
        started_s = time.perf_counter()
        fate, said = try_mutant(mutant)
        fates[mutant.name] = fate
        print(
            f"{fate.value:8} {time.perf_counter() - started_s:5.1f} s  {mutant.name}",
            *filter(None, [said]),
            sep="\n",
            flush=True,
        )

    with ThreadPoolExecutor(num_processes) as threads:
        list(threads.map(one, mutants))
    return fates


if __name__ == "__main__":
    sys.exit(main())

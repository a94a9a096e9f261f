"""The options of a submission besides the job's file, checked before any call."""

import ast
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from elche.artifacts import check_place
from elche.errors import InvalidJob
from elche.requirements import check_requirements
from elche.script import (
    MAX_PRIORITY,
    MAX_SOURCE_BYTES,
    check_arguments,
    check_environment,
    check_project,
    check_secrets,
)
from elche.selector import check_conditions
from elche.settings import SETTINGS

MAX_NAME_CHARS = 100
LOOP_NAMES = ("Trainer", "Ddp", "shard", "ElcheCallback")
"""Names of `elche_worker` that only scripts with their own loop import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of one submission. Raises `InvalidJob`, naming the invalid value."""

    num_ranks: int = 0
    """0: every slot that is free when the job is placed."""
    min_ranks: int = 0
    """Ranks that suffice to begin; others join when there are slots for them. 0: `num_ranks`."""
    slow_factors: Mapping[int, float] = field(default_factory=dict)
    """Rank to the factor, at least 1, by which it is slowed down."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings by name that replace those of the file."""
    output_dir: str = ""
    """Absolute path on the ranks' host; empty: a folder that the agent creates."""
    verify_rounds: bool = False
    """True if ranks compare their parameters after every round."""
    name: str = ""
    """Empty: the file's name without its suffix."""
    resume: str = ""
    """Checkpoint to resume from: a folder or URL that the ranks can read; empty: none."""
    priority: int = 0
    """Jobs with a higher one get slots first."""
    project: str = ""
    """Project whose slots it uses; empty: the submitter's."""
    artifacts: str = ""
    """Its artifact store, a folder that workers and coordinator share or a URL; empty: the coordinator's."""
    conditions: tuple[str, ...] = ()
    """Conditions on each device, such as "model=*H200*", "memory>=20GiB" or "zone!=eu"."""
    requirements: tuple[str, ...] = ()
    """Packages that the file needs besides the hosts', such as "einops>=0.8"."""
    module: str = ""
    """The job in the sent folder, as PACKAGE.MODULE:NAME; empty: `job` of the file."""
    secrets: tuple[str, ...] = ()
    """Environment variables whose values the hosts have (`elche-worker --secrets`)."""
    replay: bytes = b""
    """Rounds to repeat, as serialised `elche.v1.JobSpec` messages."""
    arguments: tuple[str, ...] = ()
    """Arguments of the user's file: `sys.argv` after its name."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the user's file, in addition to the agent's."""

    def __post_init__(self) -> None:
        for name in ("name", "project", "artifacts", "resume", "output_dir", "module"):
            value = getattr(self, name)
            _require(isinstance(value, str), f"{name} must be a string, not {value!r}")
        for name in ("environment", "slow_factors"):
            value = getattr(self, name)
            _require(isinstance(value, Mapping), f"{name} must be a mapping, not {value!r}")
        _require_whole("the number of ranks", self.num_ranks, least=0, below=2**16)
        _require_whole("the least number of ranks", self.min_ranks, least=0, below=2**16)
        _require(
            self.min_ranks <= self.num_ranks,
            f"the least number of ranks, {self.min_ranks}, is more than their number, {self.num_ranks}",
        )
        _require_whole("the priority", self.priority, least=-MAX_PRIORITY, below=MAX_PRIORITY + 1)
        for name, value in self.settings.items():
            _require(name in SETTINGS, f"there is no setting {name!r}; known are {', '.join(SETTINGS)}")
            SETTINGS[name].check(value)
        for rank, factor in self.slow_factors.items():
            _check_slow(rank, factor, self.num_ranks)
        _require(
            not self.output_dir or PurePath(self.output_dir).is_absolute(),
            f"the output folder must be an absolute path on the rank's host, not {self.output_dir!r}",
        )
        check_project(self.project)
        check_place(self.artifacts)
        check_conditions(self.conditions)
        check_requirements(self.requirements)
        check_arguments(self.arguments)
        check_environment(self.environment)
        check_secrets(self.secrets, self.environment)
        _require(len(self.name) <= MAX_NAME_CHARS, f"the job's name has more than {MAX_NAME_CHARS} characters")


def texts(what: str, given: Iterable[str]) -> tuple[str, ...]:
    """The texts of a list. Raises `InvalidJob` for a single text, which would be a list of its letters."""
    _require(isinstance(given, Iterable) and not isinstance(given, str), f"{what} must be a list, not {given!r}")
    return tuple(given)


def read_source(path: Path, *, is_job: bool = True) -> str:
    """The text of the user's file. Raises `InvalidJob` when it cannot be read, is too large or is not UTF-8."""
    if is_job and str(path).startswith(("/dev/stdin", "/dev/fd/")):
        # Redirected, it is a file here, and a pipe on which nobody writes in the process that checks the job.
        raise InvalidJob(f"{path} is another file in each process: save what it has under a name")
    _require(path.exists(), f"there is no file {path}")
    _require(path.is_file(), f"{path} is not a file")
    _require(path.suffix != ".ipynb", f"{path} is a notebook: call job.start() in it, or export it as a Python file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SOURCE_BYTES + 1)
        _require(len(content) <= MAX_SOURCE_BYTES, f"{path} is larger than {MAX_SOURCE_BYTES} bytes (1 MiB)")
        return content.decode("utf-8-sig")  # Python, too, takes a file with a byte order mark
    except OSError as error:
        raise InvalidJob(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidJob(f"{path} is not UTF-8 text (byte {error.start})") from error


def has_own_loop(path: Path) -> bool:
    """True if a file is a script with its own training loop: it defines no `job`, and uses one of `LOOP_NAMES`, itself
    or in a file of its folder that it imports.
    """
    files, seen = [path], {path}
    uses_loop = False
    while files:
        file = files.pop()
        try:
            tree = ast.parse(read_source(file))
        except (InvalidJob, SyntaxError, ValueError):
            continue  # whoever runs the file says what is wrong with it, and where
        if file == path and _defines_job(tree):
            return False
        uses_loop = uses_loop or _uses_loop(tree)
        for other, has_all in _imported_files(tree, file, path.parent):
            if has_all and file == path and _has_job(other):
                return False
            if other not in seen:
                seen.add(other)
                files.append(other)
    return uses_loop


def _uses_loop(tree: ast.Module) -> bool:
    """True if a file imports one of `LOOP_NAMES`, or takes it from a module of elche."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "elche_worker":
            names = {alias.name for alias in node.names}
            if names & {*LOOP_NAMES} or (node.module == "elche_worker" and "*" in names):
                return True
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            of_elche = [alias for alias in node.names if alias.name.split(".")[0] == "elche_worker"]
            modules |= {alias.asname or alias.name.split(".")[0] for alias in of_elche}
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in LOOP_NAMES]
    return any(ast.unparse(node).split(".")[0] in modules for node in taken)


def _imported_files(tree: ast.Module, file: Path, folder: Path) -> Iterator[tuple[Path, bool]]:
    """The files of a script's folder that a file imports, and True for those of which it imports all names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((one, False) for one in _files_of(folder, alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            start = folder if not node.level else file.parents[min(node.level, len(file.parents)) - 1]
            for alias in node.names:
                found = _files_of(start, [*(node.module or "").split("."), alias.name])
                yield from ((one, alias.name == "*") for one in found)


def _files_of(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The files in a folder that importing a module by the parts of its name runs."""
    for part in filter(None, parts):
        yield from (one for one in (folder / f"{part}.py", folder / part / "__init__.py") if one.is_file())
        folder = folder / part


def _has_job(path: Path) -> bool:
    """True if a file defines a `job` at its top level."""
    try:
        return _defines_job(ast.parse(read_source(path)))
    except (InvalidJob, SyntaxError, ValueError):
        return False


def _defines_job(tree: ast.Module) -> bool:
    """True if a file's top level, or a function by `global`, gives the name `job` a value in any way."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(id="job", ctx=ast.Store()) | ast.FunctionDef(name="job") | ast.ClassDef(name="job"):
                return True
            case ast.alias(name=name, asname=other) if (other or name.partition(".")[0]) == "job":
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                if any(isinstance(one, ast.Global) and "job" in one.names for one in ast.walk(node)):
                    return True
            case _:
                waiting += ast.iter_child_nodes(node)
    return False


def check_loop(path: Path, options: JobOptions) -> None:
    """Raises `InvalidJob` for options that a script with its own loop does not take."""
    names = ", ".join(f"--{name.replace('_', '-')}" for name in options.settings)
    _require(not names, f"{path} has its own training loop, which takes no {names}: set them in the script")
    _require(not options.min_ranks, f"{path} has its own training loop, which trains with all of its ranks: --ranks N")
    _require(not options.verify_rounds, f"{path} has its own training loop, which has no rounds: leave out --verify")


def _check_slow(rank: int, factor: float, num_ranks: int) -> None:
    _require_whole("a slow rank", rank, least=0, below=2**16)
    _require(
        isinstance(factor, int | float) and math.isfinite(factor) and factor >= 1,
        f"rank {rank} can be slowed by a factor of at least 1, not {factor!r}",
    )
    there_are = "there is only rank 0" if num_ranks == 1 else f"there are ranks 0 to {num_ranks - 1}"
    _require(num_ranks == 0 or rank < num_ranks, f"rank {rank} cannot be slowed: {there_are}")


def _require_whole(what: str, value: object, *, least: int, below: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    _require(is_whole, f"{what} must be a whole number, not {value!r}")
    if isinstance(value, int):
        _require(least <= value < below, f"{what} must be from {least} to {below - 1}, not {value}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidJob(message)

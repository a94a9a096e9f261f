"""Loads a user's file as a `TrainingJob`, and turns its errors into one clear message."""

import ast
import importlib
import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from elche.errors import ElcheError, HelpShown, InvalidJob
from elche.output import add_flush, use_empty_input
from elche.package import package_of
from elche.script import check_module
from elche_worker.user.job import JobDefinition


class UserCodeRaised(ElcheError):
    """User code raised. The message is one line; `traceback` shows the user's frames."""

    def __init__(self, message: str, traceback_text: str) -> None:
        super().__init__(message)
        self.traceback = traceback_text


ASK_FOR_HELP = frozenset({"-h", "--help", "--version"})
"""Arguments at which a script prints something, and ends."""
_script_pid = 0
"""Process id of the process that runs a user's file as a script, if any."""


def as_a_script(file_name: str, arguments: Sequence[str]) -> None:
    """Sets `sys.argv` to the file's name and arguments, and standard input to an empty file."""
    global _script_pid
    _script_pid = os.getpid()
    sys.argv = [file_name, *arguments]
    use_empty_input()


def leave_if_forked(error: BaseException) -> None:
    """Ends a process that user code has forked and in which it raised, so that it does not go on as the rank."""
    if _script_pid in (0, os.getpid()):
        return
    is_in_order = isinstance(error, SystemExit) and not error.code
    if not is_in_order:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if is_in_order else 1)


def _is_asked_for_help() -> bool:
    """False for options of these names that have a value, such as the version of a data set."""
    return any(one in ASK_FOR_HELP and after.startswith("-") for one, after in pairwise([*sys.argv[1:], "-"]))


_is_loading = False
"""True while a user's file is run for its `job`."""


LOOP_IN_JOB = (
    "Trainer.setup() is for a script with a loop of its own, and this file is run as one that defines a `job`: start "
    "the script that imports Trainer, itself or from a file of its folder, and that has nothing named `job` at its top "
    "level"
)
RUN_IN_JOB = (
    "job.run() must stand under `if __name__ == '__main__':`, because the ranks run the file too, and each would train "
    "the whole job by itself first"
)


HYDRA_MAIN = re.compile(r"^@hydra\.main\b", re.MULTILINE)
"""The decorator whose function returns nothing, and which looks for the configuration of the module `__main__`."""
FOR_HYDRA = (
    "@hydra.main returns no job: put `with hydra.initialize(FOLDER, version_base=None): job = "
    "build(hydra.compose(NAME, overrides=sys.argv[1:]))` at the top level instead"
)


def check_not_loading(problem: str) -> None:
    """Raises `InvalidJob` with this problem while a file is run for its `job`: what trains there would train alone."""
    if _is_loading:
        raise InvalidJob(problem)


def load_job(source: str, file_name: str, name: str = "") -> JobDefinition:
    """Runs the file and returns its `job`, or imports the job of a module, named PACKAGE.MODULE:NAME.

    Raises `InvalidJob`, or `UserCodeRaised` when the file itself raises.
    """
    if name:
        return _load_module(name, file_name)
    module = ModuleType("elche_job")
    module.__file__ = file_name
    sys.modules["elche_job"] = module
    # So that tracebacks show the file's lines, which may not be on this host. None: it is not looked for there.
    linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
    package, root = package_of(source, file_name)
    if package:
        module.__package__ = package
    for folder in filter(None, (root, str(Path(file_name).resolve().parent))):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    _let_spawned_import(file_name)
    global _is_loading
    _is_loading = True
    try:
        _refuse_without_job(source, file_name)
        exec(compile(source, file_name, "exec"), module.__dict__)
    except InvalidJob as error:
        raise InvalidJob(f"{file_name}: {message_of(error)}") from None
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""  # null bytes have no line
        raise InvalidJob(f"{file_name}{where}: {error.msg}") from None
    except BaseException as error:
        leave_if_forked(error)
        if isinstance(error, SystemExit):  # argparse has said why
            is_answer = error.code in (None, 0, 1)  # 1: as absl ends after its help
            how = (
                "its own arguments come after --, as in `elche run FILE -- --lr 0.1`"
                if error.code
                else "let what calls its main return, as in `job = main(standalone_mode=False)` with click and typer"
            )
            how = FOR_HYDRA if HYDRA_MAIN.search(source) else how
            raise (HelpShown if is_answer and _is_asked_for_help() else InvalidJob)(
                f"{file_name} ended itself (SystemExit: {message_of(error)}) before all of it was run: {how}, and "
                "what ends a script belongs under `if __name__ == '__main__':`"
            ) from None
        raise describe_raised(error, file_name) from None
    finally:
        _is_loading = False
    if module.__dict__.get("job", 0) is None and HYDRA_MAIN.search(source) and not _is_asked_for_help():
        raise InvalidJob(f"{file_name}: {FOR_HYDRA}")
    return _job_of(module, file_name)


JOB_FILE = "ELCHE_JOB_FILE"
"""Environment variable with the path of the file that defines the job."""


MAY_DEFINE_JOB = re.compile(r"\bjob\b|\belche_worker\b|import \*")
"""Text that every file has which defines a job, or is a loop that uses elche."""
NO_JOB = (
    "defines no `{0}`: write `{0} = TrainingJob(...)` at its top level (`elche init` writes an example), or keep its "
    "own loop and call elche_worker.Trainer in it (docs/tutorials/loop.md)"
)


def _let_spawned_import(file_name: str) -> None:
    """Lets processes that the file starts by spawn or forkserver import what they are to run from the file. They have
    its environment and `sys.path`, and no module `elche_job`: those of a pool would end and be restarted, forever.
    """
    os.environ[JOB_FILE] = str(Path(file_name).resolve())
    folder = str(Path(__file__).resolve().parent / "spawned")
    if folder not in sys.path:
        sys.path.append(folder)


def run_again(namespace: dict[str, Any]) -> None:
    """Runs the user's file in a process that the file has started by spawn or forkserver: its functions are looked up
    in the module `elche_job`, whose namespace this is.
    """
    path = Path(os.environ[JOB_FILE])
    try:
        source = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ImportError(
            f"a process that was started by spawn or forkserver reads the file that started it, and there is no {path} "
            "here: put what it runs into a module beside it"
        ) from error
    namespace["__file__"] = str(path)
    if package := package_of(source, str(path))[0]:
        namespace["__package__"] = package
    exec(compile(source, path, "exec"), namespace)


def _refuse_without_job(source: str, file_name: str) -> None:
    """Raises `InvalidJob` for a training script that defines no job: run here, it would train alone, for hours perhaps,
    before that is noticed, or wait for other processes if it makes torch's process group.
    """
    nodes = list(ast.walk(ast.parse(source, file_name)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    lines = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "init_process_group"
    ]
    if lines and not names & {"job", "*"}:
        raise InvalidJob(
            f"line {min(lines)} makes a process group, as scripts for torchrun do, and there is no `job`: put "
            "Trainer.setup(model, optimizer) instead of process group, DistributedDataParallel and sampler, or "
            "define job = TrainingJob(...); docs/moving.md shows both"
        )
    if not MAY_DEFINE_JOB.search(source):
        raise InvalidJob(f"it was not run, since it {NO_JOB.format('job')}")


def _load_module(name: str, file_name: str) -> JobDefinition:
    """The job of a module in the working directory, which is the job's folder."""
    module_name, attribute = check_module(name)
    sys.path.insert(0, os.getcwd())  # before the host's modules of the same name
    try:
        sys.modules["elche_job"] = module = importlib.import_module(module_name)
    except InvalidJob as error:
        raise InvalidJob(f"{file_name}: {message_of(error)}") from None
    except BaseException as error:
        leave_if_forked(error)
        raise describe_raised(error, file_name) from None
    return _job_of(module, file_name, attribute)


def with_settings(job: JobDefinition, settings: Mapping[str, Any]) -> JobDefinition:
    """The job with settings replaced by the command line's. Raises `InvalidJob`."""
    return replace(job, **settings) if settings else job


def refused(error: BaseException, file_name: str) -> ElcheError:
    """Converts an error of the user's function: its own `InvalidJob` with the file's name, else `UserCodeRaised`."""
    leave_if_forked(error)
    is_refusal = isinstance(error, InvalidJob)
    return InvalidJob(f"{file_name}: {message_of(error)}") if is_refusal else describe_raised(error, file_name)


def message_of(error: BaseException) -> str:
    """The error's message. The class may be user code, whose `__str__` may itself raise."""
    try:
        return str(error)
    except BaseException as other:
        return f"[its message cannot be shown: __str__ raised {type(other).__name__}]"


def describe_raised(error: BaseException, file_name: str) -> UserCodeRaised:
    """Describes an error of user code in one line, with its notes, and the traceback from the user's file on."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, frame in enumerate(frames) if frame.filename == file_name), 0)
    shown = traceback.StackSummary.from_list(frames[first:])
    last = next((frame for frame in reversed(frames) if frame.filename == file_name), None)
    kind = "".join(_exception_only(error)).strip()
    line = f" ({file_name}, line {last.lineno})" if last else f" ({file_name})" if file_name else ""
    text = "Traceback (most recent call last):\n" + "".join(shown.format()) + kind
    words = next(iter(message_of(error).splitlines()), "")
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, ModuleNotFoundError):
        notes += "; install it, put it beside the file, or name its package by --requirements"
    return UserCodeRaised(f"{type(error).__name__}{': ' if words else ''}{words}{line}{notes}", text)


def _exception_only(error: BaseException) -> list[str]:
    try:
        return traceback.format_exception_only(error)
    except BaseException:
        return [f"{type(error).__name__}: {message_of(error)}"]


def check_json() -> None:
    """Raises `InvalidJob` if user code has put other functions into the module `json`, which elche calls, too."""
    value = {"a": [1, 0.5, None, "b"]}
    try:
        is_same = json.loads(json.dumps(value)) == value
    except Exception:
        is_same = False
    if not is_same:
        raise InvalidJob(
            "the job's code has replaced json.loads or json.dumps by a function that does something else, and all "
            "libraries call these: give that function a name of its own"
        )


def _job_of(module: ModuleType, file_name: str, name: str = "job") -> JobDefinition:
    add_flush()
    chosen = torch.get_default_device()
    if chosen.type != "cpu":
        raise InvalidJob(
            f"{file_name}: torch.set_default_device('{chosen}') would put tensors there that belong to the host. Each "
            "rank puts model and batches on its own device: leave it out, and make other tensors where a batch is "
            "(device=batch.device), or `with torch.device(...)` inside a function"
        )
    try:
        check_json()
    except InvalidJob as error:
        raise InvalidJob(f"{file_name}: {error}") from None
    job = getattr(module, name, None)
    if job is None:
        others = [other for other, value in vars(module).items() if isinstance(value, JobDefinition)]
        named = f"names its job {' and '.join(others)}, and " if others else ""
        raise InvalidJob(f"{file_name} {named}{NO_JOB.format(name)}")
    if not isinstance(job, JobDefinition):
        # click returns from a main with standalone_mode=False when it has shown its help.
        kind = HelpShown if _is_asked_for_help() else InvalidJob
        raise kind(f"{file_name}: `{name}` must be a TrainingJob, not {type(job).__name__}")
    return job

"""Runs a user's script with its own loop, as `python SCRIPT` would."""

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from elche.errors import Misuse, PeerLost
from elche.output import notice, take_any_text, use_empty_input
from elche.package import package_of
from elche_worker.collectives.calls import CallsDiffer
from elche_worker.session.submitted import is_submitted

SPAWNS = (
    "the script starts a process for each rank by itself, as torch.multiprocessing.spawn does, and its launcher has "
    "done so already: call what it spawns once in each process, as by run(int(os.environ['RANK']), "
    "int(os.environ['WORLD_SIZE'])), without spawn(), MASTER_PORT and init_process_group()"
)
_path = ""
"""The script that this process runs, as it was named when the process began; empty before, and under torchrun."""
_is_run = False
"""True while this process runs a script, so that its end is seen here."""
_raised: list[Callable[[bool], None]] = []
"""Calls for loops that exceptions have ended; see `when_known`."""


def run_script(script: str, arguments: Sequence[str], *, left_alone_code: int) -> None:
    """Runs the script as `python SCRIPT ARGUMENT...` would, or with `-m` if it has relative imports. Exits with
    `left_alone_code` if it ends because another rank has.
    """
    take_any_text(encoding="utf-8")  # the encoding in which its log is read
    global _path
    _path = os.path.abspath(script)
    use_empty_input()
    sys.argv = [script, *arguments]
    sys.excepthook = _print_from_script
    package, root = package_of(_text_of(script), script)
    sys.path.insert(0, root or str(Path(script).resolve().parent))
    try:
        with _settling():
            if package:
                runpy.run_module(f"{package}.{Path(script).stem}", run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except (CallsDiffer, PeerLost) as error:  # no traceback: the line at which the script waits is not at fault
        sys.last_value = error
        notice(error)
        sys.exit(left_alone_code if isinstance(error, PeerLost) else 1)
    except SystemExit as error:
        if error.code:
            sys.last_value = error  # as Python does for uncaught exceptions; trainers that are still open report it
        raise


def script_path() -> Path:
    """Absolute path of the script, which may have changed the working directory or `sys.argv` since."""
    return Path(_path or getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0]).resolve()


@contextmanager
def _settling() -> Iterator[None]:
    """Wraps the run of the script, at whose end it is known which exceptions it has caught."""
    global _is_run
    _is_run = True
    try:
        yield
    except BaseException as error:
        settle(is_caught=isinstance(error, SystemExit) and not error.code)
        raise
    else:
        settle(is_caught=True)
    finally:
        _is_run = False


def is_run() -> bool:
    """True while a script is run here, so that its end is seen."""
    return _is_run


def when_known(tell: Callable[[bool], None]) -> None:
    """Calls `tell` once it is known whether the script has caught the exception that has ended a loop: when it sets up
    its next trainer, or when it ends, if it is run here.
    """
    _raised.append(tell)


def settle(*, is_caught: bool) -> None:
    """Tells the loops that exceptions have ended whether the script has caught these."""
    while _raised:
        _raised.pop(0)(is_caught)


def _print_from_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an uncaught exception as `python SCRIPT` would."""
    trim(error)
    if is_submitted() and _lacks_file(error):  # first: the last line is told as the reason
        notice(
            "a job has the folder that is sent with it, by default the script's own: `elche submit --folder FOLDER` "
            "sends another one, and `--requirements FILE` names packages"
        )
    sys.__excepthook__(kind, error, trace)
    if kind.__module__ == "torch.multiprocessing.spawn" and has_several_ranks():
        notice(SPAWNS)  # whatever has failed in the processes that it has spawned


def has_several_ranks() -> bool:
    """True if elche or torchrun has started several ranks on this host."""
    is_launched = "ELCHE_RESUME" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    return is_launched and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"


def changed_place() -> str:
    """Why this process no longer knows its rank: the script has changed its launcher's variables; or ""."""
    if not has_several_ranks():
        return ""
    rank, size, local_rank, local_size = (
        os.environ.get(name, default)
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    is_kept = rank == local_rank if size == local_size else size != "1"
    if is_kept:
        return ""
    return (
        f"RANK is {rank} and WORLD_SIZE is {size} in process {local_rank} of the {local_size} that the launcher has "
        "started here, so that ranks would not find each other, and each would train alone: leave out what sets these "
        "in os.environ, or start the script as one process"
    )


def _lacks_file(error: BaseException) -> bool:
    """True if a module is not there, or a file that has a relative path."""
    if isinstance(error, FileNotFoundError):
        return isinstance(error.filename, str) and not Path(error.filename).is_absolute()
    return isinstance(error, ModuleNotFoundError)


def trim(error: BaseException) -> None:
    """Leaves only the script's own frames in a traceback, and of a `Misuse` not those of elche that found it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not run_script.__code__:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
        error.__traceback__ = trace
    last, trace = None, error.__traceback__ if isinstance(error, Misuse) else None
    while trace is not None:
        if not str(trace.tb_frame.f_globals.get("__name__")).startswith("elche_worker."):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None


def _text_of(script: str) -> str:
    """The script's text; empty if it cannot be read, which running it says."""
    try:
        return Path(script).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return ""

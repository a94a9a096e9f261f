"""Runs a user's script with its own loop, as `python SCRIPT` would."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from elche.errors import PeerLost
from elche.output import notice, take_any_text
from elche.package import package_of
from elche_worker.collectives.calls import Parted


def run_script(script: str, arguments: Sequence[str], *, left_alone_code: int) -> None:
    """Runs the script as `python SCRIPT ARGUMENT...` would, or with `-m` if it has relative imports. Exits with
    `left_alone_code` if it ends because another rank has.
    """
    take_any_text(encoding="utf-8")  # the encoding in which its log is read
    sys.argv = [script, *arguments]
    sys.excepthook = _print_from_script
    package, root = package_of(_text_of(script), script)
    sys.path.insert(0, root or str(Path(script).resolve().parent))
    try:
        if package:
            runpy.run_module(f"{package}.{Path(script).stem}", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except (Parted, PeerLost) as error:  # no traceback: the line at which the script waits is not at fault
        sys.last_value = error
        notice(error)
        sys.exit(left_alone_code if isinstance(error, PeerLost) else 1)
    except SystemExit as error:
        if error.code:
            sys.last_value = error  # as Python does for uncaught exceptions; trainers that are still open report it
        raise


def _print_from_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an uncaught exception as `python SCRIPT` would: without the frames below the script's own."""
    while trace is not None and trace.tb_frame.f_code is not run_script.__code__:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _text_of(script: str) -> str:
    """The script's text; empty if it cannot be read, which running it says."""
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""

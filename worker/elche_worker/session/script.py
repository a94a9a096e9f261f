"""Runs a user's script with its own loop, as `python SCRIPT` would."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from elche.errors import PeerLost
from elche.output import notice, take_any_text
from elche_worker.collectives.calls import Parted
from elche_worker.user.loading import WITHOUT_PACKAGE, is_without_package


def run_script(script: str, arguments: Sequence[str], *, left_alone_code: int) -> None:
    """Runs the script as `python SCRIPT ARGUMENT...` would. Exits with `left_alone_code` if it ends because another
    rank has.
    """
    take_any_text(encoding="utf-8")  # the encoding in which its log is read
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except (Parted, PeerLost) as error:  # no traceback: the line at which the script waits is not at fault
        sys.last_value = error
        notice(error)
        sys.exit(left_alone_code if isinstance(error, PeerLost) else 1)
    except ImportError as error:
        if is_without_package(error):
            error.msg += f"; {WITHOUT_PACKAGE}"
        raise
    except SystemExit as error:
        if error.code:
            sys.last_value = error  # as Python does for uncaught exceptions; trainers that are still open report it
        raise

"""`python -m elche_worker.trainer PARENT_PID SCRIPT [ARGUMENT...]`: runs a loop's script; ends with its parent."""

import runpy
import sys
from pathlib import Path

from elche.errors import PeerLost
from elche.output import take_any_text
from elche_worker.collectives.calls import Parted
from elche_worker.process.parent import end_with_parent


def main() -> None:
    """Runs the script as `python SCRIPT ARGUMENT...` would."""
    take_any_text(encoding="utf-8")  # the encoding in which its log is read
    parent_pid, script, *arguments = sys.argv[1:]
    end_with_parent(int(parent_pid))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except (Parted, PeerLost) as error:  # without a traceback: the line where the script waits is not at fault
        sys.last_value = error
        print(f"elche: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as error:
        if error.code:
            sys.last_value = error  # as Python does for uncaught exceptions: open trainers report it
        raise


if __name__ == "__main__":
    main()

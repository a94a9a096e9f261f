"""`python -m elche_worker.trainer PARENT_PID SCRIPT [ARGUMENT...]`: runs a loop's script; it ends with its parent."""

import runpy
import sys
from pathlib import Path

from elche_worker.parent import end_with_parent


def main() -> None:
    """Runs the script as `python SCRIPT ARGUMENT...` would."""
    parent_pid, script, *arguments = sys.argv[1:]
    end_with_parent(int(parent_pid))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

"""`python -m elche_worker.trainer PARENT_PID SCRIPT [ARGUMENT...]`: runs a loop's script; ends with its parent."""

import sys

from elche_worker.process.parent import end_with_parent, keep_input
from elche_worker.session.script import run_script


def main() -> None:
    """Runs the script as `python SCRIPT ARGUMENT...` would, with an empty standard input: ranks share no keyboard."""
    parent_pid, script, *arguments = sys.argv[1:]
    end_with_parent(int(parent_pid))
    keep_input()
    run_script(script, arguments, left_alone_code=1)


if __name__ == "__main__":
    main()

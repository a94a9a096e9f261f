"""`python -m elche_worker.rank.script FD`: a rank of a submitted script with its own loop (protocol P26).

The process that was forked for the rank replaces itself by this program, so that the script runs in a fresh interpreter
as with `python SCRIPT`: with its own `__main__` and exit handlers, and with CUDA untouched.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

from elche.channel import open_channel
from elche.errors import LEFT_ALONE, ElcheError, InvalidJob
from elche.output import notice
from elche_worker.process.alive import show_alive
from elche_worker.process.anonymous_files import anonymous_file
from elche_worker.process.stacks import write_when_asked
from elche_worker.rank.bundle import enter_folder
from elche_worker.rank.packages import enter_packages
from elche_worker.session import submitted
from elche_worker.session.launch import Launch
from elche_worker.session.script import run_script

FOLDER = ".script-"
"""Prefix of the folder, in the job's output folder, for a script that was sent without its own folder. The job's id
follows: several jobs may have the same output folder.
"""


def become_script(launch: Launch) -> NoReturn:
    """Replaces this process by one that runs the script."""
    # The agent writes nothing to standard input and keeps it open: a script that reads it would wait forever.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # In memory, not as an argument: the launch line has the rank's secret, and all users of the host can read
    # arguments.
    file = anonymous_file(launch.to_line())
    file.flush()
    os.set_inheritable(file.fileno(), True)
    module = "elche_worker.rank.script"
    # `-P`: no file of the working directory is to hide a module that this program imports.
    os.execv(sys.executable, [sys.executable, "-u", "-P", "-m", module, str(file.fileno())])


def main() -> None:
    """Fetches what the script needs, and runs it."""
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        launch = Launch.from_line(file.read())
    os.environ["SPT_NOENV"] = "1"  # otherwise the title overwrites the environment that /proc shows
    setproctitle(f"elche rank {launch.rank} of {launch.job_id}")
    del os.environ["SPT_NOENV"]
    write_when_asked(f"{launch.output_dir}/rank-{launch.rank}.log")
    try:
        script = _prepared(launch)
    except ElcheError as error:
        notice(error)
        sys.exit(1)
    submitted.begin(launch)
    show_alive(launch.output_dir, launch.job_id, launch.rank)
    run_script(script, launch.arguments, left_alone_code=LEFT_ALONE)


def _prepared(launch: Launch) -> str:
    """Fetches the script's folder and packages; returns its path. Raises `ElcheError`."""
    if launch.missing_secrets:
        raise InvalidJob(f"the host has no secret {launch.missing_secrets[0]} (`elche-worker --secrets`)")
    if launch.bundle:
        with open_channel(launch.coordinator, launch.tls) as channel:
            enter_folder(launch, channel)
    enter_packages(launch.requirements, Path(launch.packages_dir))
    return launch.file_name if launch.bundle else _written(launch)


def _written(launch: Launch) -> str:
    """Writes the script through a draft of this rank's own; returns its path. No rank reads half of it."""
    path = Path(launch.output_dir) / f"{FOLDER}{launch.job_id}" / Path(launch.file_name).name
    draft = path.with_name(f".{path.name}.{launch.rank}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(launch.source, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ElcheError(f"the script cannot be written to {path}: {error.strerror}") from error
    return str(path)


if __name__ == "__main__":
    main()

"""`python -m elche_worker.agent.for_run ARGUMENTS`: the agent of `elche run`, which checks the job's file first.

The process that ranks are forked from has imported torch, so the file is checked by a fork of it, too. The arguments
are those of `elche_worker.rank.check`. First a line is printed: the check's exit code, a space, and what it has found.
Then a line of JSON is read, with what the agent needs; without one, and later when standard input ends, this process
does, too.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from elche.errors import ElcheError
from elche.token import read_token
from elche.v1 import agent_pb2
from elche_worker.agent.agent import Agent
from elche_worker.agent.main import serve
from elche_worker.agent.processes import Spawner


def main() -> None:
    """Returns when nothing is ordered."""
    words = sys.argv[1:]
    spawner = Spawner(int(words[words.index("--ranks") + 1]) if "--ranks" in words else 1)
    code, line = spawner.check(words)
    print(code, line, flush=True)
    if not (ordered := sys.stdin.readline()):
        spawner.kill()
        return
    order: dict[str, Any] = json.loads(ordered)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    slots = [agent_pb2.Slot(**slot) for slot in order["slots"]]
    try:
        agent = Agent(order["coordinator"], slots, Path(order["work_dir"]), token=read_token(), spawner=spawner)
        serve(agent, exit_with_stdin=True)
    except ElcheError as error:
        print(f"elche-worker: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

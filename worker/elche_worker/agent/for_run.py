"""`python -m elche_worker.agent.for_run PARENT`: the agent of `elche run`, which first has the job's file checked.

The file is checked by a fork of the spawner, which has imported torch. Standard input has two lines of JSON: the check
(arguments of `elche_worker.rank.check.answer`, and `num_ranks`, 0 for unknown), and then the agent's settings; without
the second one this process ends. In between it prints `checked`, the check's exit code, and its answer. It ends with
its parent, and with its standard input.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from elche.errors import ElcheError
from elche.logs import set_up
from elche.token import read_token
from elche_worker.agent.processes import SpawnerProcess
from elche_worker.process.parent import end_with_parent


def main() -> None:
    """Runs the check and then the agent. Returns when no agent is ordered."""
    end_with_parent(int(sys.argv[1]))  # loading user code may never return
    request = sys.stdin.readline()
    if not request:
        return
    spawner = SpawnerProcess(json.loads(request)["num_ranks"] or 1, output=2, compiles_later=True)
    from elche_worker.agent.agent import Agent  # gRPC is imported while the spawner imports torch
    from elche_worker.agent.main import serve, slots_of

    code, line = spawner.check(request)
    print("checked", code, line, flush=True)
    if not (ordered := sys.stdin.readline()):
        spawner.kill()
        return
    order: dict[str, Any] = json.loads(ordered)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    spawner.write_to(log)
    os.close(log)
    set_up()
    slots = slots_of(order["slots"])
    try:
        agent = Agent(order["coordinator"], slots, Path(order["work_dir"]), token=read_token, spawner=spawner)
        serve(agent, exit_with_stdin=True)
    except ElcheError as error:
        print(f"elche-worker: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""`python -m elche_coordinator.for_run`: the coordinator of `elche run`, which imports its modules beforehand.

A line of JSON on standard input has the `arguments` of `elche-coordinator`, and the path of the `log` to which it
prints from then on. Without that line it ends. When restarted, it gets the arguments on its command line.
"""

import json
import os
import sys
from importlib import import_module

from elche_coordinator.main import main

IMPORTS = ("elche_coordinator.config", "elche_coordinator.daemon")


def wait_for_order() -> list[str] | None:
    """Waits for the arguments; None if standard input ends without them."""
    for module in IMPORTS:
        import_module(module)
    if not (line := sys.stdin.readline()):
        return None
    order = json.loads(line)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # On the descriptor, since gRPC and the interpreter itself write there, too.
    os.dup2(log, 2)
    os.close(log)
    arguments: list[str] = order["arguments"]
    return arguments


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before gRPC is imported
    given = sys.argv[1:] or wait_for_order()
    if given is not None:
        main(given)

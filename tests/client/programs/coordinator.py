"""Stands for the coordinator: plays what JOB says to the command that has started it."""

import os
import signal
import sys
import time
from pathlib import Path

from support.scripted import (
    CANCELLED,
    EPOCH,
    EVALUATION,
    FAILURE,
    RESULT,
    ROUND,
    UNTIL_CANCELLED,
    VIEW,
    ScriptedJobs,
    serving,
)

how = os.environ.get("JOB", "succeeds")
data = Path(sys.argv[sys.argv.index("--data") + 1])
data.mkdir(parents=True)
(data.parent / "coordinator.pid").write_text(str(os.getpid()))
if how == "refused":
    print("elche-coordinator: the port is in use", file=sys.stderr)
    sys.exit(2)
script = [VIEW, ROUND, EPOCH, EVALUATION, FAILURE if how == "fails" else RESULT]
if how == "waits":
    script = [VIEW, UNTIL_CANCELLED, CANCELLED]


class Jobs(ScriptedJobs):
    def WatchJob(self, request, context):  # noqa: N802 - the service's name
        (data.parent / "spec.txt").write_text(str(self.specs[0]))
        while not (data.parent / "agent.pid").exists():
            time.sleep(0.01)
        if how == "dies":
            print("no room on the disk", file=sys.stderr, flush=True)
            os._exit(1)
        yield from super().WatchJob(request, context)

    def CancelJob(self, request, context):  # noqa: N802 - the service's name
        (data.parent / "cancelled").touch()
        return super().CancelJob(request, context)


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
with serving(Jobs(*script)) as address:
    print(f"elche-coordinator listening on {address}", flush=True)
    sys.stdin.read()
    os._exit(0)

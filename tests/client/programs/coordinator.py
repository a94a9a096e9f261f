"""Stands for `python -m elche_coordinator.for_run`: plays what JOB says to the command that has started it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from elche.v1 import job_pb2 as pb
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

if begun := os.environ.get("BEGUN"):
    Path(begun).touch()
if not (line := sys.stdin.readline()):
    sys.exit(0)
order = json.loads(line)
os.dup2(os.open(order["log"], os.O_WRONLY | os.O_CREAT), 2)
how = os.environ.get("JOB", "succeeds")
data = Path(order["arguments"][order["arguments"].index("--data") + 1])
data.mkdir(parents=True, exist_ok=True)
(data.parent / "coordinator.pid").write_text(str(os.getpid()))
if how == "refused":
    print("elche-coordinator: the port is in use", file=sys.stderr)
    sys.exit(2)
QUEUED = pb.JobView(job_id="j-1", name="digits", state=pb.JOB_STATE_QUEUED, reason="waits for 2 free slots")
ALONE = pb.JobView(job_id="j-1", name="digits", state=pb.JOB_STATE_QUEUED)
ALONE.reason = "waits for 2 free slots: no host offers any; start more workers"
QUEUED_STILL = [ALONE, QUEUED] if how == "waits for slots" else []
script = [QUEUED, *QUEUED_STILL, VIEW, ROUND, EPOCH, EVALUATION, FAILURE if how == "fails" else RESULT]
if how == "waits":
    script = [VIEW, UNTIL_CANCELLED, CANCELLED]
if how == "succeeds as it is cancelled":
    script = [VIEW, UNTIL_CANCELLED, RESULT]


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

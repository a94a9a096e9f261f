"""Runs tests, each time in a process of its own that is forked from one in which the libraries are imported already.

Reads one request per line, `{"arguments": of pytest, "output": a file for what it says, "limit_s": seconds}`, and
answers with pytest's exit code, or `null` when the tests were not over in time. What is tested is not imported before.
"""

import gc
import json
import os
import select
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("pytest", "_pytest.unittest", "_pytest.junitxml", "_hypothesis_pytestplugin", "anyio.pytest_plugin"),
    *("pytest_timeout", "platformdirs.pytest_plugin", "xdist.looponfail", "xdist.plugin", "hypothesis.stateful"),
    *("google.protobuf.internal.builder", "google.protobuf.timestamp_pb2", "google.protobuf.duration_pb2"),
    *("grpc.aio", "grpc_health", "pathspec", "sqlalchemy", "starlette.applications", "uvicorn"),
    *("numpy", "torch.distributed", "torch.optim", "torch.utils.data"),
)

QUICK = "mutants"
"""A profile of Hypothesis that looks for no smaller example than the first one that fails."""


def main() -> int:
    """Serves until standard input ends. In a forked process it returns when the tests have ended, with their code."""
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # as `python -m pytest` has it there
    for library in LIBRARIES:
        import_module(library)
    hypothesis = sys.modules["hypothesis"]
    hypothesis.settings.register_profile(QUICK, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _run(request)
        print(json.dumps(_ended(pid, request["limit_s"])), flush=True)
    return 0


def _run(request: dict[str, Any]) -> int:
    os.setsid()
    said = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
        os.dup2(file, number)
    return int(sys.modules["pytest"].main([f"--hypothesis-profile={QUICK}", *request["arguments"]]))


def _ended(pid: int, limit_s: float) -> int | None:
    """Also whatever the tests have left in their session ends."""
    ended = os.pidfd_open(pid)
    in_time = bool(select.select([ended], [], [], limit_s)[0])
    os.close(ended)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it had not come to have a session
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if in_time else None


if __name__ == "__main__":
    sys.exit(main())

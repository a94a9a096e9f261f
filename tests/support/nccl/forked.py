"""Processes that the stand-in may end: forked from one that has imported PyTorch, with PyTorch's times made short."""

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from support.nccl.installed import nccl_in_use
from support.simulated_cuda import Device, Stream

SHORT = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5",
    "TORCH_NCCL_COORD_CHECK_MILSEC": "20",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1",
}
"""15 s, 1 s and 8 minutes, if nobody says otherwise."""
PATIENCE_S = 20.0


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def ends(stories: Sequence[Callable[[], None]], environments: Sequence[Mapping[str, str]]) -> list[int]:
    """How processes end in which the stories run, side by side; 0 for one that comes to its end. One that hangs is
    killed, when it has shown where.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(story, environment, folder) for story, environment in zip(stories, environments, strict=True)]
        deadline_s = time.monotonic() + PATIENCE_S
        return [_end(pid, deadline_s) for pid in pids]


def _end(pid: int, deadline_s: float) -> int:
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        time.sleep(0.01)
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)  # to show it
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
    return os.waitstatus_to_exitcode(ended[1])


def _forked(story: Callable[[], None], environment: Mapping[str, str], folder: str) -> int:
    pid = os.fork()
    if pid == 0:
        faulthandler.register(signal.SIGUSR1)
        os.environ.update(environment)
        tempfile.tempdir = folder
        try:
            with ExitStack() as stack:
                patch = pytest.MonkeyPatch()
                stack.enter_context(Device().in_use(patch))
                compute: Any = Stream(name="compute")
                stack.enter_context(torch.cuda.stream(compute))
                stack.enter_context(nccl_in_use(patch))
                story()
                os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid

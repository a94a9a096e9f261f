"""What the stand-in's watchdog and monitor do to a process whose collective does not end, by the environment.

Each case runs in processes forked from one of a world. There PyTorch's times are short, which are minutes.
"""

import gc
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from support.nccl import ProcessGroupNCCL
from support.nccl.communicator import pace
from support.nccl.forked import SHORT, ends, until
from support.nccl.work import WorkNCCL
from support.simulated_cuda import CUDA, device
from support.worlds import Worlds

TIMEOUT = timedelta(milliseconds=50)
KILLED, LIVES = -signal.SIGABRT, 0


def stuck(path: Path) -> tuple[ProcessGroupNCCL, WorkNCCL]:
    """A collective that never ends, in a group whose store is a file."""
    group = ProcessGroupNCCL(PrefixStore("1/1/0", dist.FileStore(str(path), -1)), 0, 1, timeout=TIMEOUT)
    pace.hold()
    work = group.allreduce([torch.ones(4, device=CUDA)])
    assert work is not None
    return group, work


def has_been_watched(path: Path) -> None:
    """Until the watchdog has found the timeout and gone on, over and over."""
    group, work = stuck(path)
    until(lambda: dist.FileStore(str(path), -1).check(["exception_dump"]))
    beats = group._shared.beats
    until(lambda: group._shared.beats > beats + 6)
    assert work.error is None  # who has the work is not told
    assert not work.is_completed()


def has_been_cleaned_up(path: Path) -> None:
    group, work = stuck(path)
    until(work.is_completed)
    with pytest.raises(dist.DistBackendError, match="aborted"):
        group.allreduce([torch.ones(4, device=CUDA)])


def is_monitored(path: Path) -> None:
    """Longer than a watchdog that stands still may take."""
    group, _ = stuck(path)
    until(lambda: not group._shared.settings.dumps or group._shared.monitor_ends.is_set())


def is_idle(path: Path) -> None:
    """Nothing to do in its group, beside a rank that has had a timeout, and says so to all of the job."""
    group = ProcessGroupNCCL(PrefixStore("other", dist.FileStore(str(path), -1)), 0, 1)
    dist.FileStore(str(path), -1).set("exception_dump", "\1\0\0\0")
    until(group._shared.terminated.is_set)


def has_dropped_its_first_group(path: Path) -> None:
    """Only the first group's monitor looks, and ends with its group: later ones do not take its place."""
    ProcessGroupNCCL(dist.FileStore(str(path), -1), 0, 1)
    gc.collect()
    group = ProcessGroupNCCL(dist.FileStore(str(path), -1), 0, 1)
    dist.FileStore(str(path), -1).set("exception_dump", "\1\0\0\0")
    beats = group._shared.beats
    until(lambda: group._shared.beats > beats + 15)


def has_a_kernel_that_fails(path: Path) -> None:
    """Any kernel, such as one of the model's, beside a collective."""
    group, _ = stuck(path)
    device().error = "device-side assert triggered"
    assert group._watchdog is not None
    until(group._watchdog.is_set)


def in_processes(cases: Sequence[tuple[str, dict[str, str]]], folder: Path) -> list[int]:
    return ends(
        [
            lambda name=name, at=at: globals()[name](folder / str(at))  # type: ignore[misc]
            for at, (name, _) in enumerate(cases)
        ],
        [environment for _, environment in cases],
    )


CASES = {
    "by default": (has_been_watched, {}, KILLED),
    "torn down after a clean-up": (has_been_watched, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, KILLED),
    "no handling, but the monitor": (is_monitored, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, KILLED),
    "no handling, and no dump": (
        has_been_watched,
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        LIVES,
    ),
    "no handling, and no monitor that ends": (
        has_been_watched,
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"},
        LIVES,
    ),
    "a clean-up alone": (
        has_been_cleaned_up,
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        LIVES,
    ),
    "an earlier name of a variable": (
        has_been_watched,
        {"NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        LIVES,
    ),
    "another rank's timeout": (is_idle, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, KILLED),
    "the same, and not in the first group": (has_dropped_its_first_group, {}, LIVES),
    "an error of any kernel": (has_a_kernel_that_fails, {}, KILLED),
    "the same, not thrown again": (has_a_kernel_that_fails, {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}, LIVES),
}


def test_the_environment_says_whether_a_collective_that_does_not_end_ends_the_process(
    worlds: Worlds, tmp_path: Path
) -> None:
    cases = [(story.__name__, {**SHORT, **environment}) for story, environment, _ in CASES.values()]
    (codes,) = worlds.run(1, in_processes, cases, tmp_path)
    assert dict(zip(CASES, codes, strict=True)) == {name: code for name, (*_, code) in CASES.items()}

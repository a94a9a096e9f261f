"""Puts the stand-in in PyTorch's place."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.nccl import bootstrap, communicator, process_groups, watchdog
from support.nccl.group import ProcessGroupNCCL
from support.nccl.words import NCCL_VERSION
from support.simulated_cuda import device

MODEL = "NVIDIA Simulated"


def put_in_place(
    replace: Callable[[Any, str, Any], None], *, num_devices: int = 1, index: Callable[[], int] = int
) -> None:
    """PyTorch as it is where NCCL is built in; the simulated device is in use already."""

    def properties(of: Any = None) -> Any:
        number = torch.device(of).index if isinstance(of, str | torch.device) else of
        number = index() if number is None else number
        return SimpleNamespace(
            name=MODEL,
            major=9,
            minor=0,
            total_memory=device().memory.total,
            uuid=f"{number:08x}-0000-0000-0000-000000000000",
        )

    changes: dict[str, Any] = {
        "device_count": lambda: num_devices,
        "current_device": index,
        "device": lambda of: nullcontext(),
        "get_device_properties": properties,
    }
    for name, value in changes.items():
        replace(torch.cuda, name, value)
    replace(torch.cuda.nccl, "version", lambda: NCCL_VERSION)
    for place in (dist, dist.distributed_c10d):
        replace(place, "ProcessGroupNCCL", ProcessGroupNCCL)
    replace(dist.distributed_c10d, "_NCCL_AVAILABLE", True)
    process_groups.put_in_place(replace)
    device().run_collective = process_groups.run


@contextmanager
def nccl_in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[communicator.Pace]:
    """Within a test, in which the simulated device is in use. Ranks are threads, each with a GPU of its own."""
    with monkeypatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(tempfile, "tempdir", folder)
        put_in_place(lambda owner, name, value: patch.setattr(owner, name, value, raising=False))
        patch.setattr(bootstrap, "card_of", str)
        patch.setattr(watchdog, "should_dump", type(watchdog.should_dump)())
        try:
            yield communicator.pace
        finally:
            communicator.pace.may_run.set()
            communicator.pace.delay_s = 0.0

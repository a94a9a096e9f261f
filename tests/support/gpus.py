"""Whole processes that believe they have GPUs: the simulated device, and the stand-in for NCCL, from beginning to end.

With `TEST_GPUS=2` in its environment, a process that the fork server starts and that uses devices (ranks, scripts, and
what looks for devices) finds two GPUs. A rank's tensors are on the one that it is given. All others know nothing of it.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

VARIABLE = "TEST_GPUS"
"""How many GPUs the host has."""
DELAY = "TEST_NCCL_MS"
"""What each collective takes, in milliseconds; 0 without it."""
FINDS_DEVICES = "elche_worker.device.discovery"
WITH_DEVICES = ("elche_worker.rank", FINDS_DEVICES, "elche_worker.device.build")
"""Modules whose processes use devices."""


def take_part(program: str) -> None:
    """Called in a process before it runs its module or script."""
    num_devices = int(os.environ.get(VARIABLE, "0"))
    if num_devices and (program in WITH_DEVICES or program.endswith(".py")):
        _give_devices(num_devices)
    if num_devices and program == FINDS_DEVICES:
        import_module(program).main()
        sys.exit()


def _give_devices(num_devices: int) -> None:
    import pytest
    import torch

    from support import simulated_cuda
    from support.nccl import communicator, installed

    patch = pytest.MonkeyPatch()  # never undone
    in_use = simulated_cuda.Device().in_use(patch)
    in_use.__enter__()
    _keep.append(in_use)
    tempfile.tempdir = os.environ.get("TMPDIR")  # not that of the fork server
    communicator.pace.delay_s = float(os.environ.get(DELAY, "0")) / 1000

    def replace(owner: Any, name: str, value: Any) -> None:
        patch.setattr(owner, name, value, raising=False)

    def set_device(device: Any) -> None:
        simulated_cuda.CUDA = torch.device(device)

    installed.put_in_place(replace, num_devices=num_devices, index=lambda: simulated_cuda.CUDA.index)
    changes: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "set_device": set_device,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for name, value in changes.items():
        replace(torch.cuda, name, value)
    replace(torch.version, "cuda", "12.8")
    # As in torch's CPU build: optimizers ask it at each step, and the CUDA build would ask a driver.
    replace(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    replace(simulated_cuda.Device, "run", _loading(simulated_cuda.Device.run, communicator.wait_until_idle))
    new_tensor = torch.tensor

    def tensor(data: Any, *, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        made = new_tensor(data, **more)
        return made.pin_memory() if pin_memory else made

    def cuda(self: torch.Tensor, on: Any = None, non_blocking: bool = False) -> torch.Tensor:
        return self.to(on or simulated_cuda.CUDA, non_blocking=non_blocking)

    replace(torch, "tensor", tensor)
    replace(torch.Tensor, "cuda", cuda)
    discovery = import_module(FINDS_DEVICES)  # with trials in forks, but for those of fresh processes
    replace(discovery, "_try", lambda name, trial, limit_s: _tried(discovery, name))


def _loading(run: Callable[..., Any], wait_until_idle: Callable[[], None]) -> Callable[..., Any]:
    """CUDA loads a kernel when it is launched for the first time, and then waits for the kernels that run ("Lazy
    Loading" in its programming guide): also for a collective's, which may wait for a rank that has ended.
    """
    loaded: set[Any] = set()

    def run_loaded(self: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func not in loaded and func.namespace == "aten":
            loaded.add(func)
            wait_until_idle()
        return run(self, func, args, kwargs)

    return run_loaded


def _tried(discovery: Any, name: str) -> Any:
    """The trial of a device, in this process: there is no driver that could crash it."""
    try:
        return discovery.try_here(name)
    except discovery.Unusable as error:
        traceback.print_exc(file=sys.stderr)
        return error


_keep: list[Any] = []

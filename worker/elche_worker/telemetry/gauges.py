"""Gauges of a rank's device: memory, load, temperature and power, sampled on a thread of its own."""

import os
import resource
import threading
from contextlib import suppress
from typing import Any

import torch

from elche.v1 import rank_pb2

EVERY_S = 1.0


class Gauges:
    """Samples a device once a second on a thread. `take` gives a new sample, for the loop to complete."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml = _open_nvml(device)
        self._newest: rank_pb2.Gauges | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="gauges", daemon=True).start()

    def take(self) -> rank_pb2.Gauges | None:
        """The newest sample, or None if it was taken before."""
        newest, self._newest = self._newest, None
        return newest

    def stop(self) -> None:
        """Stops sampling."""
        self._stop.set()

    def _run(self) -> None:
        while True:
            sample = _cuda_memory(self._device) if self._device.type == "cuda" else _host_memory()
            if self._nvml is not None:
                _add_nvml(sample, *self._nvml)
            self._newest = sample
            if self._stop.wait(EVERY_S):
                return


def _cuda_memory(device: torch.device) -> rank_pb2.Gauges:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return rank_pb2.Gauges(
        memory_used_bytes=total_bytes - free_bytes,
        memory_reserved_bytes=torch.cuda.memory_reserved(device),
        memory_peak_bytes=torch.cuda.max_memory_allocated(device),
        memory_total_bytes=total_bytes,
    )


def _host_memory() -> rank_pb2.Gauges:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    used_bytes = 0
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as statm:
        used_bytes = int(statm.read().split()[1]) * page_bytes
    return rank_pb2.Gauges(
        memory_used_bytes=used_bytes,
        memory_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        memory_total_bytes=os.sysconf("SC_PHYS_PAGES") * page_bytes,
    )


def _open_nvml(device: torch.device) -> tuple[Any, Any] | None:
    """NVML and its handle of the device; None without NVIDIA's driver."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception as error:  # whatever the driver raises: gauges must not stop training
        print(f"load, heat and power of {device} are not shown: {error}", flush=True)
        return None


def _add_nvml(sample: rank_pb2.Gauges, nvml: Any, handle: Any) -> None:
    with suppress(nvml.NVMLError):
        sample.gpu_utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with suppress(nvml.NVMLError):
        sample.gpu_temperature_celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    with suppress(nvml.NVMLError):
        sample.gpu_power_watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000

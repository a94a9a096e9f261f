"""NVML measurements of a rank's GPU: load, temperature, power, throttling, errors, and the processes that use its
memory.

A MIG slice has its own memory and processes; other values are those of its GPU, and the load of a slice is unknown.
Values that the GPU, driver or container does not provide are left out.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elche.v1 import rank_pb2

SLOWDOWNS = {
    "nvmlClocksEventReasonSwPowerCap": "power_cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware",
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal",
    "nvmlClocksEventReasonHwThermalSlowdown": "thermal",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power_brake",
}
"""NVML's reasons for a clock lower than the load would need, without idleness and clocks set by the user."""


class Nvml:
    """One GPU in NVML. The constructor raises NVML's errors if there is none."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._device = self._find(device)
        """NVML's handle of the GPU, or the slice."""
        is_slice = False
        with self._left_out():
            is_slice = bool(pynvml.nvmlDeviceIsMigDeviceHandle(self._device))
        self._card = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._device) if is_slice else self._device
        self.slice_of = ""
        """The UUID of the GPU of which this is a slice; "" if it is a whole GPU."""
        with self._left_out():
            self.slice_of = str(pynvml.nvmlDeviceGetUUID(self._card)) if is_slice else ""
        self._xids: Any = None
        """NVML's event set for Xids, if the driver reports them."""
        self._num_xids = 0
        with self._left_out():
            xids = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._card, pynvml.nvmlEventTypeXidCriticalError, xids)
            self._xids = xids

    def add_to(self, sample: rank_pb2.Gauges) -> None:
        """Adds the values that are available to the sample."""
        nvml, card = self._nvml, self._card
        with self._left_out():
            sample.gpu_utilization = nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100
        with self._left_out():
            sample.gpu_temperature_celsius = nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
        with self._left_out():
            sample.gpu_power_watts = nvml.nvmlDeviceGetPowerUsage(card) / 1000
        with self._left_out():
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(card)
            found = {reason for name, reason in SLOWDOWNS.items() if reasons & getattr(nvml, name)}
            sample.gpu_slowdowns.extend(sorted(found))
        with self._left_out():
            sample.gpu_corrected_ecc_errors = self._num_ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
        with self._left_out():
            sample.gpu_uncorrected_ecc_errors = self._num_ecc_errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        with self._left_out():
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(self._device):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    sample.memory_process_bytes = process.usedGpuMemory
        if self._xids is not None:
            self._take_xids()
            sample.gpu_xid_errors = self._num_xids

    def _find(self, device: torch.device) -> Any:
        """Finds the device by its UUID, which is a slice's (MIG) or its GPU's in a process that may use a slice."""
        uuid = torch.cuda.get_device_properties(device).uuid
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        *others, last = ([visible] if visible.startswith("MIG-") else []) + [f"GPU-{uuid}", f"MIG-{uuid}"]
        for name in others:
            with self._left_out():
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
        return self._nvml.nvmlDeviceGetHandleByUUID(last)

    def _num_ecc_errors(self, kind: int) -> int:
        """ECC errors of a kind since the driver was loaded."""
        return int(self._nvml.nvmlDeviceGetTotalEccErrors(self._card, kind, self._nvml.NVML_VOLATILE_ECC))

    def _take_xids(self) -> None:
        """Counts Xids that the driver has reported since the last call. Does not wait."""
        with self._left_out():  # when there are no more, NVML raises a timeout
            while True:
                xid = self._nvml.nvmlEventSetWait(self._xids, 0).eventData
                self._num_xids += 1
                print(f"the driver reports Xid {xid} of this GPU", flush=True)

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        """Ignores errors of values that are not available."""
        try:
            yield
        except (self._nvml.NVMLError, AttributeError):  # `AttributeError` of an older module
            return


def slice_of(device: torch.device) -> str:
    """The UUID of the GPU of which a device is a slice; "" if it is none, or there is no NVML."""
    try:
        return Nvml(device).slice_of if device.type == "cuda" else ""
    except Exception:  # whatever the driver raises: the device is then taken for a whole GPU
        return ""


def opened(device: torch.device) -> Nvml | None:
    """Opens the device in NVML. Without NVIDIA's driver prints a line and returns None."""
    if device.type != "cuda":
        return None
    try:
        return Nvml(device)
    except Exception as error:  # whatever the driver raises: gauges must not stop training
        print(f"load, temperature and power of {device} are not shown: {error}", flush=True)
        return None

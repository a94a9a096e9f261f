"""What NVIDIA's driver says of a rank's GPU (NVML): load, heat, power, slowdowns, errors, and who has its memory.

A slice of a card (MIG) has memory and processes of its own; all else is the card's, and load is not known of a slice.
What a card, a driver or a container does not say is left out.
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
"""NVML's reasons for a clock below what the load asks for. That a card is idle, or set to a clock, is none."""


class Nvml:
    """One GPU in NVML. Raises what the driver raises where there is none."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._device = self._find(device)
        """The GPU, or the slice."""
        is_slice = False
        with self._left_out():
            is_slice = bool(pynvml.nvmlDeviceIsMigDeviceHandle(self._device))
        self._card = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._device) if is_slice else self._device
        self._xids: Any = None
        """Where the driver reports Xids, if it does."""
        self._num_xids = 0
        with self._left_out():
            xids = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._card, pynvml.nvmlEventTypeXidCriticalError, xids)
            self._xids = xids

    def add_to(self, sample: rank_pb2.Gauges) -> None:
        """Adds what is known."""
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
        """By its id. To a process that may use a slice, CUDA may give the id of the slice or of its card."""
        uuid = torch.cuda.get_device_properties(device).uuid
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
        *others, last = ([visible] if visible.startswith("MIG-") else []) + [f"GPU-{uuid}", f"MIG-{uuid}"]
        for name in others:
            with self._left_out():
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
        return self._nvml.nvmlDeviceGetHandleByUUID(last)

    def _num_ecc_errors(self, kind: int) -> int:
        """Since the driver was loaded."""
        return int(self._nvml.nvmlDeviceGetTotalEccErrors(self._card, kind, self._nvml.NVML_VOLATILE_ECC))

    def _take_xids(self) -> None:
        """Counts what the driver has reported since the last call. Does not wait."""
        with self._left_out():  # when there are no more, it is a time-out
            while True:
                xid = self._nvml.nvmlEventSetWait(self._xids, 0).eventData
                self._num_xids += 1
                print(f"the driver reports Xid {xid} of this GPU", flush=True)

    @contextmanager
    def _left_out(self) -> Iterator[None]:
        """Goes on without what is not known."""
        try:
            yield
        except (self._nvml.NVMLError, AttributeError):  # or what the installed module does not have yet
            return


def opened(device: torch.device) -> Nvml | None:
    """The device in NVML; None without NVIDIA's driver, of which a line tells."""
    if device.type != "cuda":
        return None
    try:
        return Nvml(device)
    except Exception as error:  # whatever the driver raises: gauges must not stop training
        print(f"load, heat and power of {device} are not shown: {error}", flush=True)
        return None

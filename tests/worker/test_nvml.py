"""What NVML says of a GPU, by a stand-in whose functions are those of the real module."""
# ruff: noqa: N802, N803  # names are those of NVML

import inspect
import os
from collections.abc import Callable
from ctypes import c_uint
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import torch.distributed as dist

from elche.v1 import rank_pb2
from elche_worker.device.build import build_of
from elche_worker.telemetry import nvml

CUDA = torch.device("cuda:0")
CARD, SLICE = "GPU-7", "MIG-7-1"
NOT_SUPPORTED, TIMEOUT = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


class Driver:
    """A card, in place of NVML. Handles are its names; what `unknown` names is not supported."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()
        self.names = {CARD}
        self.slowdowns = pynvml.nvmlClocksEventReasonGpuIdle
        self.xids: list[int] = []
        self.pid = os.getpid()
        self.used: int | None = 700

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceIsMigDeviceHandle(self, device: str) -> c_uint:
        return c_uint(device.startswith("MIG-"))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: str) -> str:
        assert migDevice == SLICE
        return CARD

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle == SLICE:
            raise NOT_SUPPORTED
        return SimpleNamespace(gpu=50, memory=10)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert (handle, sensor) == (CARD, pynvml.NVML_TEMPERATURE_GPU)
        return 60

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        assert handle == CARD
        return 300_000

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        assert handle == CARD
        return self.slowdowns

    def nvmlDeviceGetTotalEccErrors(self, handle: str, errorType: int, counterType: int) -> int:
        assert (handle, counterType) == (CARD, pynvml.NVML_VOLATILE_ECC)
        return {pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED: 5, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: 1}[errorType]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        assert handle in self.names
        return [SimpleNamespace(pid=1, usedGpuMemory=9), SimpleNamespace(pid=self.pid, usedGpuMemory=self.used)]

    def nvmlEventSetCreate(self) -> list[int]:
        return self.xids

    def nvmlDeviceRegisterEvents(self, handle: str, eventTypes: int, eventSet: list[int]) -> None:
        assert (handle, eventTypes) == (CARD, pynvml.nvmlEventTypeXidCriticalError)

    def nvmlEventSetWait(self, eventSet: list[int], timeoutms: int) -> Any:
        assert timeoutms == 0, "the thread would wait"
        if not eventSet:
            raise TIMEOUT
        return SimpleNamespace(eventData=eventSet.pop(0))


FUNCTIONS = [name for name in vars(Driver) if name.startswith("nvml")]


def of(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Callable[[], rank_pb2.Gauges]:
    """Opens the device; what it returns takes a sample."""

    def refuses(*arguments: Any) -> Any:
        raise NOT_SUPPORTED

    for name in FUNCTIONS:
        monkeypatch.setattr(pynvml, name, refuses if name in driver.unknown else getattr(driver, name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7"))
    opened = nvml.opened(CUDA)
    assert opened is not None

    def sample() -> rank_pb2.Gauges:
        made = rank_pb2.Gauges()
        opened.add_to(made)
        return made

    return sample


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stand_ins_functions_are_those_of_the_module(name: str) -> None:
    own = list(inspect.signature(getattr(Driver, name)).parameters)[1:]
    assert own == list(inspect.signature(inspect.unwrap(getattr(pynvml, name))).parameters)


def test_a_card_tells_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver()
    driver.slowdowns |= pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    driver.slowdowns |= pynvml.nvmlClocksEventReasonSwPowerCap
    sample = of(monkeypatch, driver)
    driver.xids += [79, 48]
    assert sample() == rank_pb2.Gauges(
        gpu_utilization=0.5,
        gpu_temperature_celsius=60,
        gpu_power_watts=300,
        gpu_slowdowns=["power_cap", "thermal"],
        gpu_corrected_ecc_errors=5,
        gpu_uncorrected_ecc_errors=1,
        gpu_xid_errors=2,
        memory_process_bytes=700,
    )
    assert "Xid 79" in capsys.readouterr().out
    assert sample().gpu_xid_errors == 2


@pytest.mark.parametrize("uuid_is_the_slices", [True, False])
def test_a_slice_has_memory_of_its_own_and_what_its_card_has(
    monkeypatch: pytest.MonkeyPatch, uuid_is_the_slices: bool
) -> None:
    driver = Driver()
    driver.names = {SLICE, "MIG-7"} if uuid_is_the_slices else {SLICE, CARD}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{SLICE},MIG-8")
    sample = of(monkeypatch, driver)()
    assert not sample.HasField("gpu_utilization")
    assert (sample.gpu_temperature_celsius, sample.memory_process_bytes, sample.gpu_uncorrected_ecc_errors) == (
        60,
        700,
        1,
    )


@pytest.mark.parametrize("is_slice", [True, False])
def test_slices_of_one_card_are_one_device_to_those_who_choose_nccl(
    monkeypatch: pytest.MonkeyPatch, is_slice: bool
) -> None:
    """NCCL refuses two of them: `Duplicate GPU detected`."""
    driver = Driver()
    driver.names = {SLICE, CARD}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE if is_slice else "0")
    of(monkeypatch, driver)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    build = build_of(CUDA, needs_encryption=False, slice_of=nvml.slice_of(CUDA))
    assert build.device_id == (CARD if is_slice else "7")


def test_without_a_driver_a_device_is_a_whole_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (_ for _ in ()).throw(NOT_SUPPORTED))
    assert nvml.slice_of(CUDA) == ""


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("nvmlInit", "nvmlDeviceGetHandleByUUID")])
def test_what_a_card_does_not_say_is_left_out_and_nothing_else(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    driver = Driver()
    whole = of(monkeypatch, driver)().ListFields()
    driver.unknown = {name}
    less = of(monkeypatch, driver)().ListFields()
    assert len(less) >= len(whole) - 2
    assert all(one in whole for one in less)


def test_memory_that_is_not_told_by_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.used = None
    assert not of(monkeypatch, driver)().HasField("memory_process_bytes")
    driver.used, driver.pid = 700, -1  # a container's processes have other numbers
    assert not of(monkeypatch, driver)().HasField("memory_process_bytes")


def test_without_a_driver_one_line_tells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (_ for _ in ()).throw(NOT_SUPPORTED))
    assert nvml.opened(CUDA) is None
    assert capsys.readouterr().out == "load, temperature and power of cuda:0 are not shown: Not Supported\n"
    assert nvml.opened(torch.device("cpu")) is None

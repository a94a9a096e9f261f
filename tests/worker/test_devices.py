"""Devices are tried before they are used: what is broken is named and left out, and spoils nothing else."""

import subprocess
import sys
import time

import pytest
import torch

from elche.errors import InvalidJob
from elche_worker.device import discovery as devices
from elche_worker.device.discovery import (
    Device,
    Unusable,
    choose_devices,
    own_device,
    summary,
    try_devices,
    usable_devices,
)

GIB = 2**30

STRANGE = """
import json, os, signal, sys, time
name = sys.argv[1]
if name == "cuda:1":
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "cuda:2":
    time.sleep(600)
if name == "cuda:3":
    sys.exit("the driver says no")
if name == "cuda:4":
    print(json.dumps({"label": "cuda:4 NVIDIA Tesla K40m", "problem": "no kernel image is available"}))
else:
    print("a library says hello")
    print(json.dumps({"device": name, "model": "NVIDIA RTX 4090", "memory_bytes": 24 << 30}))
"""
"""Devices, each of which fails its trial in another way; cuda:0 and cuda:5 do not."""


def test_one_bad_device_spoils_nothing_but_itself(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"cuda:{index}" for index in (0, 1, 3, 4, 5)]
    usable = usable_devices([*names, "cuda:5", "cpu"], trial=STRANGE)
    good = [Device(device=name, model="NVIDIA RTX 4090", memory_bytes=24 * GIB) for name in ("cuda:0", "cuda:5")]
    assert usable == [*good, good[1], Device(device="cpu")]
    assert capsys.readouterr().err.splitlines() == [
        "elche: cuda:1 cannot be used and is left out: the process that tried it ended with SIGSEGV",
        "elche: cuda:3 cannot be used and is left out: the process that tried it ended with exit code 1: "
        "the driver says no",
        "elche: cuda:4 NVIDIA Tesla K40m cannot be used and is left out: no kernel image is available",
    ]


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here cuda:0 can be used")


@needs_no_gpu
def test_a_device_that_is_not_there_is_found_by_trying(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = try_devices(["cuda:0"])["cuda:0"]
    assert isinstance(found, Unusable)
    assert found.problem == "Torch not compiled with CUDA enabled" or "driver" in found.problem
    monkeypatch.setattr(devices, "try_devices", lambda names, **_: {"cuda:0": found})  # once is enough
    with pytest.raises(InvalidJob, match=r"1 rank needs 1 device of kind cuda:0; usable here: 0$"):
        choose_devices("cuda:0", 0)
    assert "elche: cuda:0 cannot be used and is left out:" in capsys.readouterr().err
    with pytest.raises(Unusable, match="cuda:0 cannot be used"):
        own_device("cuda")


@needs_no_gpu
def test_where_all_listed_devices_fail_auto_is_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_listed", lambda: ["cuda:0", "cuda:1"])  # listed; that they fail is real
    assert own_device("auto", 1) == Device(device="cpu")
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["cuda:1", "cuda:0"]
    assert all("is left out" in line for line in said)
    with pytest.raises(Unusable, match="cuda:1 cannot be used"):
        own_device("auto", 1, may_move=False)
    monkeypatch.setattr(devices, "_listed", list)
    assert own_device("auto") == Device(device="cpu")
    assert choose_devices("auto", 2) == [Device(device="cpu")] * 2


def test_a_device_that_hangs_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert usable_devices(["cuda:2"], trial=STRANGE, limit_s=0.2) == []
    said = capsys.readouterr().err
    assert said == "elche: cuda:2 cannot be used and is left out: it does not answer within 0.2 s\n"


def test_a_process_does_not_wait_for_its_own_device_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_listed", lambda: ["cuda:0", "cpu"])
    monkeypatch.setattr(devices, "try_here", lambda name: time.sleep(600))
    with pytest.raises(Unusable, match=r"cuda:0 cannot be used: it does not answer within 0.05 s") as raised:
        own_device("auto", limit_s=0.05)
    assert raised.value.hangs


def test_unlike_devices_are_summed_up_by_name_and_memory() -> None:
    fast = Device(device="cuda:0", model="NVIDIA RTX 4090", memory_bytes=24 * GIB)
    slow = Device(device="cuda:1", model="NVIDIA GTX 1060", memory_bytes=6 * GIB)
    assert summary([fast, slow]) == "2 devices (heterogeneous): RTX 4090 (24 GiB), GTX 1060 (6 GiB)"
    assert summary([fast, slow, fast]) == "3 devices (heterogeneous): 2 x RTX 4090 (24 GiB), GTX 1060 (6 GiB)"
    assert summary([fast, fast]) == "2 devices: RTX 4090 (24 GiB)"
    assert summary([slow]) == "1 device: GTX 1060 (6 GiB)"
    assert summary([Device(device="cpu")] * 2) == "2 devices: cpu"


@needs_no_gpu
def test_a_worker_without_any_usable_device_ends_with_one_clear_error() -> None:
    command = [sys.executable, "-m", "elche_worker.agent", "--coordinator", "127.0.0.1:9", "--devices", "cuda:0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    left_out, error = done.stderr.splitlines()
    assert left_out.startswith("elche: cuda:0 cannot be used and is left out: ")
    assert error == "elche-worker: --devices cuda:0: none of them can be used; use auto, or cpu"

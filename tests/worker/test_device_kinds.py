"""Kinds of devices that no machine of ours has, on stand-ins for the modules that PyTorch has for them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elche_worker.collectives import world
from elche_worker.device import discovery, kinds
from elche_worker.device.kinds import GIB, KINDS, Cards, Host, MemoryUse, kind_of
from elche_worker.device.share import SHARE_VARIABLE

XPU = torch.device("xpu:1")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`torch.xpu` has two cards; what is done to them."""
    done: list[Any] = []
    made = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda device: SimpleNamespace(name="Intel Max", total_memory=48 * GIB),
        "set_device": lambda device: done.append(("set_device", device)),
        "empty_cache": lambda: done.append("empty_cache"),
        "reset_peak_memory_stats": lambda: done.append("reset_peak_memory_stats"),
        "mem_get_info": lambda device: (40 * GIB, 48 * GIB),
        "memory_reserved": lambda device: 6 * GIB,
        "max_memory_allocated": lambda device: 7 * GIB,
    }
    for name, value in made.items():
        assert hasattr(torch.xpu, name), f"torch.xpu has no {name}"
        monkeypatch.setattr(torch.xpu, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return done


def test_intels_cards_are_found_and_told_apart(calls: list[Any]) -> None:
    assert discovery._listed() == ["xpu:0", "xpu:1"]
    found = discovery._describe(XPU, "xpu:1")
    assert (found.device, found.model, found.memory_bytes) == ("xpu:1", "Intel Max", 48 * GIB)
    kind = kind_of(XPU)
    kind.select(XPU)
    kind.empty_cache()
    assert calls == [("set_device", XPU), "empty_cache", "reset_peak_memory_stats"], "the peak was of what did not fit"
    assert kind.memory(XPU) == MemoryUse(used=8 * GIB, reserved=6 * GIB, peak=7 * GIB, total=48 * GIB)


def test_apples_gpu_has_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mps = torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    assert KINDS["mps"].listed() == ["mps"]
    assert kind_of(mps).described(mps) == ("Apple", 0)
    kind_of(mps).empty_cache()
    assert kind_of(mps).memory(mps).total == kind_of(torch.device("cpu")).memory(mps).total > GIB


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_most_memory_of_a_process_is_in_bytes(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    """On a Mac, whose system counts bytes, it was shown as 1024 times as much."""
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3000))
    assert Host().memory(torch.device("cpu")).peak == 3000 * unit


@pytest.mark.parametrize(("share", "limits"), [("4", [0.25]), ("1", []), (None, [])])
def test_a_process_has_its_part_of_a_gpu_that_is_offered_several_times(
    monkeypatch: pytest.MonkeyPatch, share: str | None, limits: list[float]
) -> None:
    """Ranks of jobs had; those of scripts with their own loop took what they liked."""
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: seen.append(fraction))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(world, "own_device", lambda wanted, index, may_move: SimpleNamespace(device="cuda:0"))
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    if share is not None:
        monkeypatch.setenv(SHARE_VARIABLE, share)
    assert world.choose_device("auto") == torch.device("cuda:0")
    assert seen == limits


def test_a_card_of_nvidia_comes_first(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert discovery._listed() == ["cuda:0"]


def test_only_a_kind_of_numbered_cards_has_a_module_of_pytorch() -> None:
    assert kinds.NUMBERED == ("cuda", "xpu")
    assert {name for name, kind in KINDS.items() if not isinstance(kind, Cards)} == {"cpu", "mps"}
    assert type(kind_of(torch.device("meta"))) is Host

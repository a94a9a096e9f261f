"""The device of a test: a real one, and in the gate a simulated one, which shows that the test itself is whole."""

from collections.abc import Iterator

import pytest
import torch

REAL = pytest.param(
    "real",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
)


@pytest.fixture(params=[REAL, "simulated"])
def is_simulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether `cuda:0` is only simulated, with NCCL's stand-in: times and sizes of memory say nothing there."""
    if request.param == "real":
        yield False
        return
    from support.nccl import nccl_in_use  # not on a machine with a GPU, whose PyTorch may be another one
    from support.simulated_cuda import Device

    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    with Device().in_use(monkeypatch), nccl_in_use(monkeypatch):
        yield True


@pytest.fixture(params=[REAL])
def needs_gpu() -> None:
    """Of tests of times, of sizes of memory, or of the driver."""

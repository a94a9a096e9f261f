"""Devices are tried in forked processes while a job's file is loaded: each alone, and not by what has used one."""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from elche.errors import InvalidJob
from elche_worker.device import discovery
from elche_worker.device.discovery import Device, Unusable, choose_devices
from elche_worker.device.trials import Trials, begin_trials

GOOD = Device(device="cuda:0", model="NVIDIA RTX 4090", memory_bytes=24 << 30)
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="here devices are tried by fresh processes"
)


def strange(name: str) -> Device:
    """Each of these devices fails its trial in another way, but the first and the last."""
    faulthandler.disable()
    match name:
        case "cuda:1":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "cuda:2":
            sys.exit("the driver says no")
        case "cuda:3":
            raise Unusable("cuda:3 NVIDIA Tesla K40m", "no kernel image is available")
        case "cuda:4":
            os.close(1)
            os.write(2, b"a library says hello\n" * 100_000)
            raise SystemError("it is broken")
        case "hangs":
            time.sleep(600)
        case "tells and hangs":
            sys.stdout = None
            os._exit = lambda _: time.sleep(600)  # type: ignore[assignment]
    return replace(GOOD, device=name)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the host list these devices."""

    def give(*names: str) -> None:
        monkeypatch.setattr(discovery, "_listed", lambda: list(names))
        monkeypatch.setattr(discovery, "try_here", strange)

    return give


def test_one_bad_device_spoils_nothing_but_itself(
    listed: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    listed(*(f"cuda:{index}" for index in range(6)))
    trials = begin_trials("auto")
    assert choose_devices("auto", 0, trials=trials) == [GOOD, replace(GOOD, device="cuda:5")]
    assert capfd.readouterr().err.splitlines() == [
        "elche: cuda:1 cannot be used and is left out: the process that tried it ended with SIGSEGV",
        "elche: cuda:2 cannot be used and is left out: the process that tried it ended with exit code 1: "
        "the driver says no",
        "elche: cuda:3 NVIDIA Tesla K40m cannot be used and is left out: no kernel image is available",
        "elche: cuda:4 cannot be used and is left out: the process that tried it ended with exit code 1: it is broken",
    ]


def test_a_device_that_hangs_is_left_out_and_one_that_has_answered_is_not(listed: Callable[..., None]) -> None:
    listed("cuda:0", "hangs", "tells and hangs")
    names, tried = Trials("auto", limit_s=10.0).outcome()
    assert names == ["cuda:0", "hangs", "tells and hangs"]
    assert [isinstance(tried[name], Device) for name in names] == [True, False, True]
    hangs = tried["hangs"]
    assert isinstance(hangs, Unusable)
    assert (hangs.problem, hangs.hangs) == ("it does not answer within 10 s", True)


def test_no_process_that_has_used_a_device_is_forked(
    listed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lists the devices has asked the driver, and whoever tries one has used it."""
    listed()
    used = []

    def uses(answer: object) -> Callable[..., object]:
        def use(*given: object) -> object:
            assert not used, "it was forked from a process that has used a device"
            used.append(given)
            return replace(GOOD, device=given[0]) if given else answer

        return use

    monkeypatch.setattr(discovery, "_listed", uses(["cuda:0", "cuda:1"]))
    monkeypatch.setattr(discovery, "try_here", uses(None))
    names, tried = Trials("auto").outcome()
    assert [tried[name] for name in names] == [GOOD, replace(GOOD, device="cuda:1")]
    assert not used, "nor is anything used here"


def test_a_driver_that_crashes_when_it_is_asked_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_listed", lambda: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGABRT)))
    with pytest.raises(InvalidJob, match=r"torch cannot list the devices \(.*ended with SIGABRT\)"):
        choose_devices("auto", 0, trials=begin_trials("auto"))


def test_a_file_that_chooses_other_devices_has_those_tried(
    listed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed("cuda:0")
    trials = begin_trials("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    listed("cuda:7")
    monkeypatch.setattr(discovery, "try_devices", lambda names, **_: {name: strange(name) for name in names})
    assert choose_devices("auto", 0, trials=trials) == [replace(GOOD, device="cuda:7")]


def test_where_no_device_is_wanted_none_is_tried() -> None:
    assert begin_trials("cpu") is None
    with pytest.raises(InvalidJob, match="unknown device 'tpu'"):
        choose_devices("tpu", 0, trials=begin_trials("tpu"))

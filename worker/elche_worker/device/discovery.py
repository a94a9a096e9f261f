"""Finds the usable devices of this host: each is tried in a process of its own before it is used.

A listed device may be broken, full, or too old for this build of torch. Such a device is named and left out. Devices
are tried by forks (`trials`) of a process that has loaded no user code, else by new processes.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Protocol

import torch

from elche.errors import ElcheError, InvalidJob
from elche.output import notice
from elche_worker.device.kinds import KINDS, NAMES, NUMBERED, kind_of
from elche_worker.process.ending import end
from elche_worker.process.parent import end_with_parent
from elche_worker.user.device import Device

TRIAL_LIMIT_S = 60.0
"""Seconds after which a device that has not answered its trial is considered hanging."""
TRIAL = "from elche_worker.device.discovery import try_and_print; try_and_print()"
"""The program that tries a device: arguments are its name and our process id; it prints a line of JSON."""


class Unusable(InvalidJob):
    """A device that cannot be used; `problem` says why."""

    def __init__(self, label: str, problem: str, *, hangs: bool = False) -> None:
        super().__init__(f"{label} cannot be used: {problem}")
        self.label = label
        self.problem = problem
        self.hangs = hangs


class Begun(Protocol):
    """Trials of devices that are under way (`trials.Trials`)."""

    def still_hold(self, wanted: str) -> bool: ...

    def outcome(self) -> tuple[list[str], dict[str, Device | Unusable]]: ...


def choose_devices(wanted: str, num_ranks: int, group_size: int = 1, *, trials: Begun | None = None) -> list[Device]:
    """Returns `group_size` devices for each rank; 0 ranks: as many as there are GPUs for, or one on the CPU.

    `wanted` is "auto" (GPUs if there are any), or a kind or device of torch. A CPU can hold several ranks, and so can a
    GPU that is named with its number. Each GPU is tried; unusable ones are named on stderr and left out. The outcome of
    `trials` is used unless the environment has changed since they began. Raises `InvalidJob` for too few devices.
    """
    kind, index = _checked(wanted)
    needed = (num_ranks or 1) * group_size
    if kind == "cpu":
        return [Device(device="cpu")] * needed
    if trials is not None and trials.still_hold(wanted):
        devices = _usable(*trials.outcome())
    else:
        devices = usable_devices(names_of(wanted))
    if kind == "auto" and not devices:
        return [Device(device="cpu")] * needed
    if devices and index:
        return devices * needed
    if len(devices) < needed:
        ranks = "1 rank" if (num_ranks or 1) == 1 else f"{num_ranks} ranks"
        of = "" if group_size == 1 else f" of {group_size} processes"
        verb, plural = "needs" if ranks == "1 rank" else "need", "" if needed == 1 else "s"
        raise InvalidJob(f"{ranks}{of} {verb} {needed} device{plural} of kind {wanted}; usable here: {len(devices)}")
    return devices[: needed if num_ranks else len(devices) // group_size * group_size]


def _checked(wanted: str) -> tuple[str, str]:
    """Splits a device's name into kind and index, which may be empty. Raises `InvalidJob` for an unknown kind."""
    kind, _, index = wanted.partition(":")
    if kind not in ("auto", *KINDS):
        raise InvalidJob(f"unknown device {wanted!r}; use {NAMES}")
    return kind, index


def names_of(wanted: str) -> list[str]:
    """The devices to try for "auto", a kind or a device of torch."""
    kind, index = _checked(wanted)
    listed = _listed() if kind == "auto" else [name for name in _listed() if name.partition(":")[0] == kind]
    return [wanted] if index else listed or ([wanted] if kind != "auto" else [])


def usable_devices(names: Sequence[str], *, trial: str = TRIAL, limit_s: float = TRIAL_LIMIT_S) -> list[Device]:
    """The usable devices in the given order; names the others on stderr. A name may be given several times."""
    return _usable(names, try_devices(names, trial=trial, limit_s=limit_s))


def _usable(names: Sequence[str], tried: Mapping[str, Device | Unusable]) -> list[Device]:
    for found in tried.values():
        if isinstance(found, Unusable):
            _warn_of_unusable(found)
    return [found for name in names if isinstance(found := tried[name], Device)]


def try_devices(
    names: Sequence[str], *, trial: str = TRIAL, limit_s: float = TRIAL_LIMIT_S
) -> dict[str, Device | Unusable]:
    """Tries all devices at once, each in its own process: one that crashes or hangs affects no other."""
    different = list(dict.fromkeys(names))
    with ThreadPoolExecutor(max(1, len(different))) as threads:
        return dict(zip(different, threads.map(lambda name: _try(name, trial, limit_s), different), strict=True))


def _try(name: str, trial: str, limit_s: float) -> Device | Unusable:
    if name == "cpu":
        return Device(device=name)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", trial, name, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: in a hanging driver it may survive SIGKILL
        return hanging(name, limit_s)
    return _read(name, out, err, process.returncode)


def _read(name: str, out: str, err: str, code: int) -> Device | Unusable:
    """The outcome of a trial, which may have ended without output."""
    lines = out.strip().splitlines()
    with suppress(ValueError, TypeError, KeyError, IndexError):
        found = json.loads(lines[-1])
        return Unusable(found["label"], found["problem"]) if "problem" in found else Device(**found)
    return Unusable(name, f"the process that tried it {ended(code, err)}")


def ended(code: int | None, output: str) -> str:
    """A process's end in words, with the last line of its output; `code` is None if it has not ended."""
    how = "does not end"
    if code is not None:
        how = f"ended with {f'exit code {code}' if code >= 0 else signal.Signals(-code).name}"
    last = (output.strip().splitlines() or [""])[-1]
    return how + (f": {last}" if last else "")


def try_and_print() -> None:
    """Runs the trial of one device: prints its description, or why it cannot be used."""
    name, parent = sys.argv[1:]
    end_with_parent(int(parent))
    try:
        outcome = asdict(try_here(name))
    except Unusable as error:
        outcome = {"label": error.label, "problem": error.problem}
    print(json.dumps(outcome))


def try_here(name: str) -> Device:
    """Computes a little on a device, in this process. Raises `Unusable`, with torch's error."""
    label = name
    try:
        device = torch.device(name)
        found = _describe(device, name)
        label = found.label
        ones = torch.ones(16, 16, device=device)
        if (ones @ ones).sum().item() != 16**3:
            raise Unusable(label, "it computes wrong numbers")
    except (RuntimeError, AssertionError, AttributeError, ValueError, NotImplementedError) as error:
        raise Unusable(label, str(error).strip().partition("\n")[0] or type(error).__name__) from None
    return found


def own_device(wanted: str, index: int = 0, *, may_move: bool = True, limit_s: float = TRIAL_LIMIT_S) -> Device:
    """The device on which this process itself trains, tried here; "auto": the GPU of that index, else the CPU.

    If that GPU cannot be used, it is named, and with `may_move` another one, or the CPU, is taken. Raises `Unusable`
    for a device that was asked for, and for one that hangs, since this process may hang with it. Row T8.
    """
    if wanted != "auto":
        return _try_in_time(f"{wanted}:{index}" if wanted in NUMBERED else wanted, limit_s)
    listed = _listed()
    for name in [*listed[index:], *listed[:index]]:
        try:
            return _try_in_time(name, limit_s)
        except Unusable as error:
            if error.hangs or not may_move:
                raise
            _warn_of_unusable(error)
    return Device(device="cpu")


def _try_in_time(name: str, limit_s: float) -> Device:
    """`try_here` with a time limit."""
    outcome: list[Device | Unusable] = []

    def run() -> None:
        try:
            outcome.append(try_here(name))
        except Unusable as error:
            outcome.append(error)

    trial = threading.Thread(target=run, name=f"trial of {name}", daemon=True)
    trial.start()
    trial.join(limit_s)
    found = outcome[0] if outcome else hanging(name, limit_s)
    if isinstance(found, Unusable):
        raise found
    return found


def hanging(name: str, limit_s: float) -> Unusable:
    """A device that has not answered its trial in time."""
    return Unusable(name, f"it does not answer within {limit_s:g} s", hangs=True)


def _warn_of_unusable(found: Unusable) -> None:
    notice(f"{found.label} cannot be used and is left out: {found.problem}")


def summary(devices: Sequence[Device]) -> str:
    """A text such as "2 devices (heterogeneous): RTX 4090 (24 GiB), GTX 1060 (6 GiB)". Row T6."""
    counts = Counter((one.model.removeprefix("NVIDIA ") or one.device, one.memory_bytes) for one in devices)
    named = []
    for (name, memory_bytes), count in counts.items():
        gib = memory_bytes / 2**30
        memory = f" ({gib:.0f} GiB)" if gib >= 10 else f" ({gib:.2g} GiB)" if memory_bytes else ""
        named.append(f"{count} x {name}{memory}" if count > 1 and len(counts) > 1 else f"{name}{memory}")
    is_mixed = len({name for name, _ in counts}) > 1
    number = f"{len(devices)} device{'s' if len(devices) > 1 else ''}{' (heterogeneous)' if is_mixed else ''}"
    return f"{number}: {', '.join(named)}"


def _listed() -> list[str]:
    """The accelerators that torch lists, of one kind."""
    return next((found for kind in KINDS.values() if (found := kind.listed())), [])


def _describe(device: torch.device, name: str) -> Device:
    model, memory_bytes = kind_of(device).described(device)
    return Device(device=name, model=model, memory_bytes=memory_bytes)


def main() -> None:
    """`python -m elche_worker.device.discovery NAMES`: prints the usable ones as one line of JSON; "auto": all."""
    try:
        names = sys.argv[1].split(",")
        found = choose_devices("auto", 0) if names == ["auto"] else usable_devices(names)
    except ElcheError as error:
        sys.exit(f"elche: {error}")
    print(json.dumps([asdict(one) for one in found]))
    end(0)  # the agent waits for it


if __name__ == "__main__":
    main()

"""Runs a command and says what it cost: seconds on the wall, and seconds of processors of all that it has started.

Where it may make a control group, as root may, these are counted by that, also of processes that nobody has waited for.
Elsewhere they come from /proc/stat, with all else that runs on the machine beside.

    python tools/cost.py make test
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PLACES = (GROUPS / "cpuacct", GROUPS / "cpu,cpuacct", GROUPS)
"""Where control groups are made: of version 1, and of version 2."""


def meter() -> tuple[Callable[[], float], str]:
    """Tells the seconds of processors so far, of this process and what it starts from now on; and how it knows."""
    for place in PLACES:
        group = place / f"cost-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cgroup.procs").write_text("0")
        except OSError:
            continue
        if (usage := group / "cpuacct.usage").exists():
            return lambda: int(usage.read_text()) / 1e9, "of all that it started"
        if (stat := group / "cpu.stat").exists():
            return lambda: int(stat.read_text().split()[1]) / 1e6, "of all that it started"
    return busy_s, "of the whole machine"


def busy_s() -> float:
    """Time that all processors have worked since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    worked, of_what = meter()
    began_s, before_s = time.monotonic(), worked()
    code = subprocess.run(sys.argv[1:], check=False).returncode
    wall_s, worked_s = time.monotonic() - began_s, worked() - before_s
    print(f"{' '.join(sys.argv[1:])}: {wall_s:.0f} s, {worked_s:.0f} s of processors ({of_what}), exit code {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()

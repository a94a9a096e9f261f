"""Runs a command and says what it cost: seconds on the wall, and seconds of processors, of all that it started and of
the whole machine.

The former are counted by a control group, where one may be made, as by root; also of processes that nobody has waited
for, but not of containers, which have groups of their own. The latter come from /proc/stat, with all that runs beside.

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


def started_s() -> Callable[[], float] | None:
    """Tells the time of processors so far of this process and what it starts from now on; None where it cannot."""
    for place in PLACES:
        group = place / f"cost-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cgroup.procs").write_text("0")
        except OSError:
            continue
        if (usage := group / "cpuacct.usage").exists():
            return lambda: int(usage.read_text()) / 1e9
        if (stat := group / "cpu.stat").exists():
            return lambda: int(stat.read_text().split()[1]) / 1e6
    return None


def busy_s() -> float:
    """Time that all processors have worked since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    started = started_s()
    began_s, before_s = time.monotonic(), busy_s()
    code = subprocess.run(sys.argv[1:], check=False).returncode
    wall_s, worked_s = time.monotonic() - began_s, busy_s() - before_s
    own = f", {started():.0f} s of it by what this started" if started else ""
    print(f"{' '.join(sys.argv[1:])}: {wall_s:.0f} s, {worked_s:.0f} s of processors{own}, exit code {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()

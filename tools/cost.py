"""Runs a command and says what it cost: seconds on the wall, and seconds of all processors of this machine.

The latter comes from /proc/stat, so it counts processes that nobody has waited for, and all else that runs beside.

    python tools/cost.py make test
"""

import os
import subprocess
import sys
import time
from pathlib import Path


def busy_s() -> float:
    """Time that all processors have worked since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    began_s, before_s = time.monotonic(), busy_s()
    code = subprocess.run(sys.argv[1:], check=False).returncode
    wall_s, worked_s = time.monotonic() - began_s, busy_s() - before_s
    print(f"{' '.join(sys.argv[1:])}: {wall_s:.0f} s, {worked_s:.0f} s of processors, exit code {code}")
    sys.exit(code)


if __name__ == "__main__":
    main()

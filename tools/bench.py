"""Runs every command of docs/benchmarks.md, one after the other, and keeps what they print beside a table of them.

python tools/bench.py                    # hours, on a machine that does nothing else
python tools/bench.py --only own_loop    # those whose command contains a text
python tools/bench.py --list
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
COMMAND = re.compile(r"^    python (benchmarks/[^#\n]+)|`python (benchmarks/[^`]+)`", re.MULTILINE)
PACKAGES = ("torch", "grpcio", "protobuf")


def commands(only: str) -> list[str]:
    """The page's commands with this text, each once. Those for a GPU are `make bench-gpu`."""
    found = [(one[1] or one[2]).strip() for one in COMMAND.finditer(PAGE.read_text(encoding="utf-8"))]
    return [one for one in dict.fromkeys(found) if only in one and not one.startswith("benchmarks/gpu.py")]


def processor() -> str:
    """The name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor()


def machine() -> list[str]:
    """The machine, and versions, on which the figures depend."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return [
        f"{datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in PACKAGES),
        f"{os.cpu_count()} processors ({processor()}), {platform.system()} {platform.release()}, "
        f"load {os.getloadavg()[0]:.1f} at the beginning",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="run only commands that contain this")
    parser.add_argument("--out", type=Path, default=ROOT / "bench", help="folder for the outputs (default: bench)")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    options = parser.parse_args()
    wanted = commands(options.only)
    if not wanted:
        sys.exit(f"no command of {PAGE.name} contains {options.only!r}")
    if options.list:
        print("\n".join(wanted))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows = ["# Benchmarks", "", *machine(), "", "| command | output | exit code | time |", "|---|---|---|---|"]
    num_failed = 0
    for number, words in enumerate(wanted, start=1):
        output = options.out / f"{number:02}-{Path(words.split()[0]).stem}.txt"
        print(f"{number}/{len(wanted)} python {words}", flush=True)
        began_s = time.monotonic()
        with output.open("w", encoding="utf-8") as file:
            command = [sys.executable, *shlex.split(words)]
            done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
        num_failed += done.returncode != 0
        rows.append(f"| `{words}` | {output.name} | {done.returncode} | {time.monotonic() - began_s:.0f} s |")
        (options.out / "README.md").write_text("\n".join([*rows, ""]), encoding="utf-8")
    print(f"{options.out / 'README.md'}: {len(wanted)} commands, {num_failed} failed")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()

"""Writes requirements.lock: every package that development, CI and the images install, with version and hashes.

    python tools/lock.py              the newest that pyproject.toml allows for what is new, all else as it is
    python tools/lock.py --upgrade    the newest of all

`pyproject.toml` says what users may have; the lock says what is tested. Torch is there without the CUDA libraries that
its wheel for Linux asks for (`[tool.uv]` in pyproject.toml). Its CPU build is another wheel with a version of its own,
which `make` tries first; it stands in a comment.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Every package that development, CI and the images install. Written by `make lock`, which keeps the versions that are
# here; `make lock UPGRADE=--upgrade` takes the newest.
"""
CPU_BUILDS = {"2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}
"""SHA-256 of the wheel torch-VERSION+cpu-cp311-cp311-manylinux_2_28_x86_64.whl, by version."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest version of everything")
    options = parser.parse_args()
    command = [find_uv_bin(), "pip", "compile", "pyproject.toml", "--extra", "dev", "--universal", "--quiet"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-header", "--output-file", str(LOCK)]
    subprocess.run([*command, *(["--upgrade"] if options.upgrade else [])], cwd=ROOT, check=True)
    LOCK.write_text(HEADER + with_cpu_build(LOCK.read_text()))


def with_cpu_build(lock: str) -> str:
    """The lock with a comment on torch's CPU build. Exits with a message when that is not known."""
    found = re.search(r"^torch==(\S+)", lock, re.MULTILINE)
    if found is None or found[1] not in CPU_BUILDS:
        sys.exit(f"torch {found and found[1]}: add its CPU build's hash to CPU_BUILDS in tools/lock.py")
    cpu_build = f"# torch=={found[1]}+cpu --hash=sha256:{CPU_BUILDS[found[1]]}\n"
    return lock[: found.start()] + cpu_build + lock[found.start() :]


if __name__ == "__main__":
    main()

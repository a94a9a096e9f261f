"""Collects what a machine with a GPU lacks beside Python and PyTorch into one folder of wheels: `make gpu-wheels`.

Only what is in requirements.lock, with its hashes, and elche itself. On the other machine `make test-gpu` and
`make bench-gpu` find the folder, unpack it and fetch nothing.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docker"))

from requirements import closure, locked, name_of  # noqa: E402

MAX_BYTES = 64 << 20
EXTRAS = ("coordinator", "worker")
TESTS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
THERE = "torch"
"""With all that it needs itself."""
NOT_USED = "uv"
"""Installs what a job requires, which none of these does."""


def wanted() -> list[str]:
    """Lines of the lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    names = {name_of(one) for one in asked} | set(TESTS)
    lines, needs = locked()
    needs[THERE] = set()
    return [lines[name] for name in sorted(closure(names, needs) - {THERE, NOT_USED})]


def collect(folder: Path, version: str, machine: str) -> None:
    """Downloads the wheels for that Python and machine, and builds elche's."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    tags = ["--implementation", "cp", "--python-version", version]
    for abi in (f"cp{version.replace('.', '')}", "abi3", "none"):
        tags += ["--abi", abi]
    for libc in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        tags += ["--platform", f"{libc}_{machine}"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted()))
        file.flush()
        fixed = ["--no-deps", "--require-hashes", "--only-binary=:all:", *tags]
        subprocess.run([*pip, "download", *fixed, "-d", str(folder), "-r", file.name], check=True)
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)], check=True, cwd=ROOT
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help=f"that of the other machine (default {here})")
    parser.add_argument("--machine", default="x86_64", help="x86_64 (the default) or aarch64")
    parser.add_argument("--folder", type=Path, default=ROOT / "gpu-wheels")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    collect(options.folder, options.python, options.machine)
    sizes = [one.stat().st_size for one in options.folder.iterdir()]
    print(f"{options.folder}: {len(sizes)} wheels for Python {options.python}, {sum(sizes) / (1 << 20):.1f} MiB")
    if sum(sizes) >= MAX_BYTES:
        raise SystemExit(f"the folder is larger than {MAX_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()

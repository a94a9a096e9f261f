"""Generates the Python code of the .proto files beside them, or checks that what is committed is fresh."""

import argparse
import filecmp
import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


def generate(target: Path) -> list[Path]:
    """Writes the generated code under `target`; returns paths relative to it. Exits with protoc's errors."""
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # protoc finds its plugins here
    )
    protos = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main(["protoc", f"-I{SOURCE}", f"-I{WELL_KNOWN}", *outputs, *protos]):
        sys.exit(1)
    return sorted(path.relative_to(target) for path in target.rglob("*_pb2*.py*") if "__pycache__" not in path.parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed file is stale")
    if not parser.parse_args().check:
        generate(SOURCE)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generated = generate(fresh)
        committed = {path.relative_to(SOURCE) for path in SOURCE.rglob("*_pb2*.py*") if "__pycache__" not in path.parts}
        stale = [
            str(path)
            for path in sorted(committed | set(generated))
            if path not in committed
            or path not in generated
            or not filecmp.cmp(fresh / path, SOURCE / path, shallow=False)
        ]
    if stale:
        sys.exit(f"generated code is stale, run `make generated`: {', '.join(stale)}")


if __name__ == "__main__":
    main()

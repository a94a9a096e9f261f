"""Generates the Python code of the .proto files beside them, or checks that what is committed is fresh."""

import os
import sys
import tempfile
from pathlib import Path

from fresh import ROOT, write_all
from grpc_tools import protoc

SOURCE = ROOT / "proto"
WELL_KNOWN = Path(protoc.__file__).parent / "_proto"


def generated_in(folder: Path) -> list[Path]:
    """The files of generated code below a folder."""
    return [path for path in folder.rglob("*_pb2*.py*") if "__pycache__" not in path.parts]


def generated() -> dict[Path, str]:
    """The text that each file of generated code is to have. Exits with protoc's errors."""
    # protoc finds its plugins here
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    protos = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        if protoc.main(["protoc", f"-I{SOURCE}", f"-I{WELL_KNOWN}", *outputs, *protos]):
            sys.exit(1)
        made = generated_in(Path(folder))
        return {SOURCE / path.relative_to(folder): path.read_text(encoding="utf-8") for path in made}


if __name__ == "__main__":
    write_all(generated(), generated_in(SOURCE))

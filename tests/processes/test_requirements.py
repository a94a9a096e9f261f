"""Packages that a job requires are installed on its hosts, beside theirs, once."""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from elche.errors import JobFailed
from elche_client import Client, JobState
from support.real_processes import Command, Mark, agent, coordinator

JobFile = Callable[..., Path]
USES = """
import elche_test_greeting
import torch
print("says", elche_test_greeting.TEXT, "with torch", torch.__version__, flush=True)
"""
INLINE = """# /// script
# dependencies = ["elche-test-greeting>=2"]
# ///
"""


def wheel(folder: Path, name: str, version: str, code: str, requires: str = "") -> None:
    """A package of one module, as an index would have it."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", code)
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def index(tmp_path: Path) -> Mapping[str, str]:
    """The environment of an agent that finds some packages, and no others."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "elche_test_greeting", "1.0", "TEXT = 'old'\n")
    wheel(folder, "elche_test_greeting", "2.1", "from elche_test_words import TEXT\n", "elche-test-words")
    wheel(folder, "elche_test_words", "1.0", "TEXT = 'hello'\n", "torch")
    wheel(folder, "elche_test_torch", "1.0", "", "torch<2")
    return {"UV_FIND_LINKS": str(folder), "UV_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}


def test_a_job_gets_the_packages_that_it_requires_and_the_hosts_torch(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Callable[..., Command], index: Mapping[str, str]
) -> None:
    base = (Path(__file__).parent / "jobs" / "linear.py").read_text(encoding="utf-8")
    path = job_file("uses.py", text=INLINE + base + USES)
    (tmp_path / "requirements.txt").write_text("# of the lab\nelche-test-greeting < 2  # the old one\n")
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu,cpu", env=index),
        Client(one.address, token="") as client,
    ):
        told = []
        for options in ((), (), ("--requirements", "requirements.txt")):
            done = elche("submit", str(path), "--epochs", "1", "--ranks", "2", *options, "--coordinator", one.address)
            assert done.code == 0, done.err
            job = client.job(done.out.strip())
            assert job.result().state is JobState.SUCCEEDED
            told.append("\n".join(line.text for line in client.logs(job.id)))
        for text, says in zip(told, ("hello", "hello", "old"), strict=True):
            assert text.count(f"says {says} with torch {torch.__version__}") == 2
        installs = [text.count("elche: installs ") for text in told]
        assert installs == [1, 0, 1], "once for both ranks, and for the next job"
        assert "elche: installs elche-test-greeting==2.1, elche-test-words==1.0" in told[0]


@pytest.mark.long(reason="beside one that installs")
def test_what_cannot_be_installed_fails_the_job_with_what_uv_says(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Callable[..., Command], index: Mapping[str, str]
) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address, devices="cpu", env=index),
        Client(one.address, token="") as client,
    ):
        for requirement, says in (("elche-test-torch", "torch<2"), ("elche-test-nothing", "elche-test-nothing")):
            job = client.submit(job_file("linear.py"), num_ranks=1, requirements=[requirement])
            with pytest.raises(JobFailed, match="cannot be installed beside what this host has") as caught:
                job.result()
            assert says in str(caught.value)
            assert caught.value.invalid
        (tmp_path / "bad.txt").write_text("-r other.txt\n")
        refused = elche("submit", str(job_file("linear.py")), "--requirements", "bad.txt", "--coordinator", one.address)
        assert refused.err.startswith("elche: '-r other.txt' is not a requirement: write one package per line")
        path = job_file("inline.py", text="# /// script\n# dependencies = 3\n# ///\n")
        refused = elche("submit", str(path), "--coordinator", one.address)
        assert "metadata (# /// script) cannot be read" in refused.err

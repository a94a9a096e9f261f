"""The documentation builds, opens without a network, and what its code blocks say is so."""

import ast
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest

from elche_client.cli.main import cli
from elche_client.commands.sweep import read_sweep
from elche_coordinator.main import main as coordinator
from elche_worker.agent.main import main as worker
from support.documented import PAGES, ROOT, blocks, commands, named

REMOTE = re.compile(r"""(?:src|href)=["'](?:https?:)?//[^"']+\.(?:js|css|woff2?|png|svg)["']""")
PROGRAMS: dict[str, click.Command] = {"elche": cli, "elche-coordinator": coordinator, "elche-worker": worker}


def test_the_site_builds_without_a_dead_link_and_needs_no_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        assert not REMOTE.findall(page.read_text(encoding="utf-8")), page.name
    assert "TrainingJob" in (tmp_path / "python.html").read_text(encoding="utf-8")
    assert '<pre class="mermaid">' in (tmp_path / "phases.html").read_text(encoding="utf-8"), "drawn, not shown as text"


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_is_one(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options and arguments are those of the program; what they name need not be there."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    program, *words = shlex.split(command.replace("/run/secrets", str(tmp_path)))  # a folder that is there
    one: click.Command = PROGRAMS[program]
    names_another = isinstance(one, click.Group) and not (words and words[0].startswith("-"))
    context = one.make_context(program, list(words), resilient_parsing=names_another)
    while names_another and isinstance(one, click.Group) and words:
        inner = one.get_command(context, words[0])
        assert inner is not None, words[0]
        one, words = inner, words[1:]
        is_group = isinstance(one, click.Group)
        context = one.make_context(program, list(words), parent=context, resilient_parsing=is_group)


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_is_python(page: str, text: str) -> None:
    ast.parse(text)


@pytest.mark.parametrize(("page", "text"), blocks("diff"))
def test_what_a_diff_makes_is_python(page: str, text: str) -> None:
    ast.parse(textwrap.dedent("\n".join(line[1:] for line in text.splitlines() if not line.startswith("-"))))


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_a_sweep_is_one(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sweep.yaml").write_text(text)
    assert read_sweep(tmp_path / "sweep.yaml").spaces


@pytest.mark.parametrize(("page", "text"), named("train.py"))
def test_a_job_trains_and_its_model_can_be_read(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    ranks = "1" if "group_size" in text else "2"
    run = [
        sys.executable,
        "-m",
        "elche_client",
        "run",
        "train.py",
        "--epochs",
        "1",
        "--ranks",
        ranks,
        "--device",
        "cpu",
    ]
    _succeeds(run, tmp_path)
    for reader in (one for where, one in blocks("python") if where == page and "load_file" in one):
        assert ".weight" in _succeeds([sys.executable, "-c", reader], tmp_path)


@pytest.mark.parametrize(("page", "text"), named("loop.py"))
def test_a_loop_runs(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(text)
    _succeeds([sys.executable, "-m", "elche_client", "run", "loop.py", "--ranks", "2", "--device", "cpu"], tmp_path)


README = ROOT / "README.md"
OF_README = {
    kind: [text for page, text in blocks(kind) if page == README.name] for kind in ("sh", "python", "text", "diff")
}
LOOP = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from elche_worker import Trainer

inputs = torch.randn(200, 20)
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size=64, shuffle=True)
model = nn.Linear(20, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
before = model.weight.detach().clone()
"""
TRAINED = "assert not torch.equal(model.weight, before)\n"


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_readme_shows_what_its_job_prints(tmp_path: Path) -> None:
    """The lines that it shows, whatever the numbers and the folder are, in their order."""
    (job,), (shown,) = OF_README["python"], OF_README["text"]
    (command,) = [words for page, words in commands() if page == README.name and "--slow" in words]
    (tmp_path / "train.py").write_text(job)
    printed = iter(_shape(_succeeds([sys.executable, "-m", "elche_client", *shlex.split(command)[1:]], tmp_path)))
    for line in _shape(shown):
        assert line in printed, line


def test_the_plan_that_its_page_shows_is_what_the_command_prints(tmp_path: Path) -> None:
    """In virtual time, so to the last figure: the page's were of an older cadence. Paste what it prints now."""
    (command,) = [words for page, words in commands() if page == "docs/plan.md" and "--add" in words]
    printed = _succeeds([sys.executable, "-m", "elche_client", *shlex.split(command)[1:]], tmp_path)
    (shown,) = [text for page, text in blocks("text") if page == "docs/plan.md"]
    assert shown in printed


def _shape(text: str) -> list[str]:
    """The lines without borders, and with N for a number and its unit and RUN for the run's folder."""
    text = re.sub(r"\S*runs/train-[\d-]+", "RUN", re.sub(r"[│╭╮╰╯─]", " ", text))
    text = re.sub(r"\b\d[\d.,]*( [kM]\b)?( (ms|s|min|%))?(?!\S)", "N", re.sub(r"epoch \d+", "epoch N", text))
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_loop_of_the_readme_runs_before_and_after(tmp_path: Path) -> None:
    (diff,) = OF_README["diff"]
    for sign in "-+":
        loop = "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] in (" ", sign))
        (tmp_path / "loop.py").write_text(LOOP + loop + TRAINED)
        _succeeds([sys.executable, "loop.py"], tmp_path)


def test_a_figure_of_the_readme_is_on_the_page_that_it_names() -> None:
    rows = re.findall(r"^\| .+ \| (.+) \| \[\w+\]\((\S+)\) \|$", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(rows) > 5
    for figures, page in rows:
        text = (ROOT / page).read_text(encoding="utf-8")
        for figure in re.findall(r"\+?\d+\.\d+", figures):
            assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", text), (figure, page)


def _succeeds(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

"""What is the user's own in a job (`state`) through kill -9, Ctrl-C and `elche resume`, in real processes."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.interrupted import start, text_of
from support.real_processes import Command, Mark, eventually

JOB = Path(__file__).parent / "jobs" / "own_state.py"
LINE = re.compile(r"pid (\d+) rank (\d+) version (\d+) averaged (\d+)")
LIMIT_S = 200.0


def lines(folder: Path) -> list[tuple[int, int, int, int]]:
    """(process, rank, version, rounds in the mean) of each round that a rank has had."""
    return [tuple(map(int, one)) for one in LINE.findall(text_of(folder))]  # type: ignore[misc]


def heard(folder: Path) -> list[int]:
    """Epochs of which `metrics_fn` has heard, with those before the resume."""
    said = re.findall(r"heard of (\[.*\])", text_of(folder))
    return list(json.loads(said[-1])) if said else []


def rounds_in_mean(said: list[tuple[int, int, int, int]]) -> dict[int, int]:
    """By version, in order; all processes must have the same."""
    counts: dict[int, int] = {}
    for *_, version, count in sorted(said, key=lambda one: one[2]):
        assert counts.setdefault(version, count) == count, version
    return counts


def test_a_rank_that_is_killed_and_a_training_that_is_resumed_go_on_with_it(mark: Mark, tmp_path: Path) -> None:
    """The mean has each round in which something was trained once, in each process."""
    options = ["--ranks", "2", "--device", "cpu", "--max-anchor", "10", "--epochs", "400"]
    first = start(mark, tmp_path, "run", str(JOB), *options, "--out", "run")
    victim = eventually(lambda: next((pid for pid, rank, *_ in lines(tmp_path) if rank == 1), 0), "rank 1 has a round")
    os.kill(victim, signal.SIGKILL)
    eventually(
        lambda: any(rank == 1 and pid != victim and count > 10 for pid, rank, _, count in lines(tmp_path)),
        "it has joined again",
    )
    first.send_signal(signal.SIGINT)
    assert first.wait(LIMIT_S) == 130, text_of(tmp_path)
    before = lines(tmp_path)
    (tmp_path / "next").mkdir()
    resume = ["resume", str(tmp_path / "run"), "--device", "cpu", "--out", "rest", "--epochs", "401"]
    second = start(mark, tmp_path / "next", *resume)
    eventually(lambda: len({rank for _, rank, *_ in lines(tmp_path / "next")}) == 2, "both ranks have a round")
    eventually(lambda: heard(tmp_path / "next"), "an epoch is over")
    second.send_signal(signal.SIGINT)
    assert second.wait(LIMIT_S) == 130, text_of(tmp_path / "next")
    after = lines(tmp_path / "next")
    assert heard(tmp_path / "next") == list(range(len(heard(tmp_path / "next"))))
    counts = rounds_in_mean(before)
    assert list(counts.values()) == list(range(1, len(counts) + 1))
    again = rounds_in_mean(after)
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "run").rglob("manifest.json")]
    resumed = max(one["training"]["version"] for one in manifests)
    so_far = max(count for version, count in counts.items() if version <= resumed)
    assert so_far > 10
    assert list(again.values()) == list(range(so_far + 1, so_far + len(again) + 1))


@pytest.mark.gate
def test_after_ctrl_c_one_rank_goes_on_bit_for_bit(mark: Mark, elche: Callable[..., Command], tmp_path: Path) -> None:
    """Weights, random numbers, the mean of the weights, and what is kept of epochs."""
    options = ["run", str(JOB), "--ranks", "1", "--device", "cpu", "--policy", "sync"]
    whole = elche(*options, "--out", "whole", "--json")
    assert whole.code == 0, whole.err
    first = start(mark, tmp_path, *options, "--out", "run")
    eventually(lambda: any(version > 40 for *_, version, _ in lines(tmp_path)), "it trains")
    first.send_signal(signal.SIGINT)
    assert first.wait(LIMIT_S) == 130, text_of(tmp_path)
    rest = elche("resume", "run", "--device", "cpu", "--out", "rest", "--json")
    assert rest.code == 0, rest.err
    wanted, found = json.loads(whole.out), json.loads(rest.out)
    assert found["metrics"] == wanted["metrics"]
    assert found["metrics"]["averaged"] == 3 * 150
    assert (found["metrics"]["begun"], found["metrics"]["heard"]) == (3, 2)
    models = [load_file(one["model"]) for one in (wanted, found)]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])

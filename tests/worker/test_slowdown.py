"""What `--slow` slows: the training, at the pace of the latest batches."""

import time

import pytest

from elche_worker.telemetry.slowdown import Slowdown


def test_what_is_compiled_or_prepared_is_not_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step that compiled for 20 s took 46 s with --slow 2.3, while the other rank waited."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    slowdown = Slowdown(3.0)
    for took_s in (20.0, 0.1, 0.3, 30.0, 0.2):  # compiled, trained, trained, compiled again, trained
        slowdown.sleep(took_s)
    assert slept == pytest.approx([0.2, 0.6, 6.0, 0.4])


def test_a_short_batch_does_not_end_the_slowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an epoch's last batch of one sample the next 20 took 1.8 times as long, in place of 3."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    slowdown = Slowdown(3.0)
    for took_s in (0.1, 0.1, 0.004, 0.1):
        slowdown.sleep(took_s)
    assert slept == pytest.approx([0.2, 0.008, 0.2])


def test_only_a_factor_above_one_slows() -> None:
    assert [Slowdown(factor).is_on for factor in (1.0, 1.5)] == [False, True]

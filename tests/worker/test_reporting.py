"""What a framework measures reaches the coordinator: in the epoch that it is of, and without ending the training."""

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from elche.errors import Misuse
from elche.v1 import rank_pb2
from elche_worker.integrations.reporting import MAX_METRICS, Reporting, leave_resume_to_framework
from elche_worker.trainer import Trainer, TrainerConfig
from elche_worker.trainer.attachment import Attachment
from elche_worker.user.scalars import Sum, take_scalars


class Told(Attachment):
    """A coordinator's side: what it is told of each epoch, and last."""

    is_attached = True

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.scalars: dict[str, float] = {}
        self.epochs: list[tuple[int, list[float], dict[str, float]]] = []
        self.evaluations: list[tuple[int, Mapping[str, float]]] = []
        self.last: list[float] = []

    def add_batches(
        self, num_batches: int, num_samples: int, loss_sum: Any, num_losses: int, scalars: Mapping[str, Sum]
    ) -> None:
        if num_losses:
            self.losses.append(float(loss_sum) / num_losses)
        self.scalars |= {name: float(total) / count for name, (total, count) in scalars.items()}

    def end_epoch(self, epoch: int, num_done: int, duration_s: float) -> None:
        self.epochs.append((epoch, self.losses, self.scalars))
        self.losses, self.scalars = [], {}

    def report(self, progress: rank_pb2.LoopProgress, learning_rate: float | None, *, is_last: bool = False) -> None:
        self.last = list(self.losses)

    def report_metrics(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((epoch, metrics))


@pytest.fixture
def told() -> Told:
    take_scalars()
    return Told()


@pytest.fixture
def trainer(told: Told) -> Trainer:
    model = nn.Linear(2, 1)
    made = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(device="cpu"))
    made._progress.attachment = told
    return made


def step(trainer: Trainer) -> None:
    trainer.model(torch.ones(1, 2)).sum().backward()
    trainer.step()


def test_what_is_logged_after_an_epochs_last_step_is_of_that_epoch(trainer: Trainer, told: Told) -> None:
    reporting = Reporting(trainer, 2)
    for epoch in range(2):
        reporting.begin_epoch(epoch)
        reporting.record({"loss": torch.tensor(8.0 - epoch)})
        step(trainer)
        reporting.record({"loss": 4.0 - epoch, "grad_norm": 0.5})
        reporting.evaluated({"accuracy": 0.1 * epoch})
    reporting.end()
    assert told.epochs == [(0, [8.0, 4.0], {"grad_norm": 0.5}), (1, [7.0, 3.0], {"grad_norm": 0.5})]
    assert told.evaluations == [(0, {"accuracy": 0.0}), (1, {"accuracy": 0.1})]


def test_what_is_recorded_after_the_last_step_is_in_the_last_report(trainer: Trainer, told: Told) -> None:
    step(trainer)
    Reporting(trainer, 0).record({"loss": 2.5})
    trainer.close()
    assert told.last == [2.5]


def test_what_cannot_be_reported_is_left_out_and_does_not_end_the_training(trainer: Trainer, told: Told) -> None:
    reporting = Reporting(trainer, 1)
    odd = {"text": "high", "none": None, "several": torch.ones(3), "n" * 300: 1.0, "one": torch.ones(1)}
    reporting.record(odd)
    reporting.evaluated(odd)
    reporting.evaluated({"text": "high"})
    reporting.evaluated({f"metric {number}": 1.0 for number in range(5000)})
    step(trainer)
    assert told.scalars == {"one": 1.0}
    assert [list(metrics)[:1] for _, metrics in told.evaluations] == [["one"], ["metric 0"]]
    assert len(told.evaluations[1][1]) == MAX_METRICS


def test_a_framework_does_not_go_on_from_a_checkpoint_that_lacks_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELCHE_RESUME", "")
    leave_resume_to_framework(0, "its own")
    monkeypatch.setenv("ELCHE_RESUME", "runs/one")
    with pytest.raises(Misuse, match=r"runs/one lacks the framework's own state, .*: go on with its own$"):
        leave_resume_to_framework(0, "its own")
    leave_resume_to_framework(7, "its own")
    assert "ELCHE_RESUME" not in os.environ

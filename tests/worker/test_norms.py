"""The norm of the parameters: at every tenth batch since a round, of what is trained, and cheap."""

import math

import pytest
import torch
from torch import nn

from elche_worker.model.layout import Layout
from elche_worker.model.norms import ParameterNorm, of_parts
from support.effort import values_read

CPU = torch.device("cpu")


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4).bfloat16(), nn.Linear(4, 4).double())
    model[3].requires_grad_(False)
    return model


def expected(model: nn.Module) -> float:
    return math.sqrt(sum(float(one.detach().double().pow(2).sum()) for one in model.parameters() if one.requires_grad))


def test_it_is_measured_at_every_tenth_batch_since_a_round() -> None:
    model = net()
    norm = ParameterNorm(Layout(model), CPU)
    measured = []
    for num_since_round in [*range(1, 23), *range(1, 12)]:  # a round after 22 batches
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
        norm.note_batch(num_since_round)
        if norm.value == pytest.approx(expected(model), rel=1e-5):
            measured.append(num_since_round)
    assert measured == [10, 20, 10]


def test_what_no_batch_has_measured_is_not_known() -> None:
    norm = ParameterNorm(Layout(net()), CPU)
    for num_since_round in (1, 2, 3, 1, 2):
        norm.note_batch(num_since_round)
    assert norm.value is None


def test_parts_of_a_divided_model_make_its_norm() -> None:
    assert of_parts([3.0, 4.0], 1) == 5.0
    assert of_parts([3.0, 4.0, 3.0, 4.0], 2) == 5.0, "each part is held twice"
    assert of_parts([3.0, None], 1) is None


def test_a_measurement_costs_little_beside_ten_batches() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20)))
    norm = ParameterNorm(Layout(model), CPU)

    def ten_batches() -> None:
        for _ in range(10):
            model(torch.randn(32, 256)).sum().backward()

    assert 0 < values_read(lambda: norm.note_batch(10)) < 0.05 * values_read(ten_batches)

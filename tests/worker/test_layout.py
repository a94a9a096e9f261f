"""The layout averages each storage once, copies the rest from the source, and can exchange the result."""

import math

import pytest
import torch
from torch import nn

from elche_worker.collectives.reduction import AverageResult
from elche_worker.model.layout import Layout, digest_of


class Everything(nn.Module):
    """One tensor of every sort: tied, frozen, half precision, double, complex, integer buffer, empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.bf16 = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
        self.f64 = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("running_mean", torch.randn(3))


def placed(model: nn.Module, **policies: str) -> Layout:
    layout = Layout(model, **policies)
    layout.place(torch.device("cpu"))
    return layout


def test_each_sort_of_tensor_goes_where_it_belongs() -> None:
    kinds = {entry.name: entry.kind for entry in Layout(Everything()).entries}
    assert kinds == {
        "first.weight": "float32",
        "frozen": "broadcast",
        "bf16": "float32",
        "f64": "float64",
        "phase": "float32",
        "count": "broadcast",
        "running_mean": "float32",
    }


def test_views_of_one_storage_count_once() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("same", model.weight.data)
    assert [entry.name for entry in Layout(model).entries] == ["weight", "bias"]


def test_the_flat_buffers_hold_the_values_and_are_applied() -> None:
    model = Everything()
    layout = placed(model)
    before = model.first.weight.detach().clone()
    layout.gather()
    assert layout.is_finite()
    for flat in layout.flat_buffers.values():
        flat.mul_(2)
    layout.apply()
    assert torch.equal(model.first.weight, 2 * before)


def test_values_that_are_not_finite_are_seen() -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float("nan"))
    layout = placed(model)
    layout.gather()
    assert not layout.is_finite()


def test_exchanging_twice_changes_no_bit() -> None:
    model = Everything()
    layout = placed(model)
    layout.gather()
    with torch.no_grad():
        model.first.weight.add_(1.0)
        model.bf16.add_(1.0)
    digest = layout.digest()
    layout.swap()
    assert layout.digest() != digest
    layout.swap()
    assert layout.digest() == digest


def test_source_bytes_carry_counters_and_frozen_parameters_where_they_differ() -> None:
    sender, receiver = Everything(), Everything()
    sender.count.fill_(2**40)
    sent, received = placed(sender), placed(receiver)
    received.apply_bytes(sent.buffer_bytes())
    assert int(receiver.count) == 2**40
    assert not torch.equal(receiver.frozen, sender.frozen)
    assert received.frozen_digest() != sent.frozen_digest()
    received.apply_bytes(torch.cat([sent.buffer_bytes(), sent.frozen_bytes()]))
    assert torch.equal(receiver.frozen, sender.frozen)
    assert received.frozen_digest() == sent.frozen_digest()


def test_a_sign_that_differs_is_seen_in_each_place() -> None:
    """The highest bit of a word had no effect, and so every second flipped sign of a float32 had none."""
    values = torch.randn(3 * 1024)
    whole, seen = digest_of([values, torch.ones(3)]), set()
    for at in range(0, len(values), 3):
        values[at].neg_()
        seen.add(digest_of([values, torch.ones(3)]))
        values[at].neg_()
    assert whole not in seen


@pytest.mark.parametrize("size", [1, 7, 8 * 1024 // 4, 50_000])
def test_a_frozen_value_that_differs_is_seen_wherever_it_is(size: int) -> None:
    values = torch.randn(size)
    model = nn.Linear(2, 2)
    model.frozen = nn.Parameter(values.clone(), requires_grad=False)
    layout, seen = placed(model), set()
    for at in {0, size // 2, size - 1}:
        model.frozen.copy_(values)
        seen.add(layout.frozen_digest())
        model.frozen.data[at] += 1  # also where autograd does not see it
        seen.add(layout.frozen_digest())
    assert len(seen) == 1 + len({0, size // 2, size - 1})
    model.frozen.copy_(values)
    if size > 1:
        model.frozen[[0, size - 1]] = model.frozen[[size - 1, 0]]
        assert layout.frozen_digest() not in seen


def test_a_model_without_frozen_parameters_has_nothing_to_digest() -> None:
    layout = placed(nn.Linear(2, 2))
    assert layout.frozen_digest() == 0
    assert not layout.frozen_bytes().numel()


@pytest.mark.parametrize("keep", [False, True])
def test_divergence_is_relative_to_the_result(keep: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    layout = placed(model)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 9.0]]))
    layout.gather(keep=keep)
    layout.flat_buffers["float32"].copy_(torch.tensor([3.0, 4.0]))
    distance = layout.compare()
    assert distance == pytest.approx((5.0, 5.0))
    assert AverageResult([], torch.empty(0), 0.0, distance=distance).divergence == pytest.approx(1.0)
    layout.gather(keep=keep)
    layout.flat_buffers["float32"].zero_()
    assert AverageResult([], torch.empty(0), 0.0, distance=layout.compare()).divergence == 0.0


def test_divergence_from_a_result_that_is_lost_is_not_small() -> None:
    """The coordinator takes what is not finite for as far as can be."""
    for changed, size in ((math.nan, math.nan), (math.nan, 1.0), (math.inf, 1.0), (math.nan, math.inf)):
        divergence = AverageResult([], torch.empty(0), 0.0, distance=(changed, size)).divergence
        assert divergence is not None
        assert not math.isfinite(divergence)


def test_other_architectures_have_other_hashes() -> None:
    same, other = nn.Linear(2, 2), nn.Linear(2, 3)
    assert Layout(same).hash == Layout(nn.Linear(2, 2)).hash
    assert Layout(same).hash != Layout(other).hash
    assert 0 <= Layout(same).hash < 2**63

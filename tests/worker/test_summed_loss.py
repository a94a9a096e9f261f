"""A loss that is a sum over a rank's part of a batch, divided by the whole batch, is told."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from elche_worker.trainer.summed_loss import WATCHED, SummedLoss

PART, WHOLE = 6, 16
LABELS = torch.zeros(PART, dtype=torch.long)
Loss = Callable[[torch.Tensor], torch.Tensor]
TOLD: dict[str, Loss] = {
    "a loss function's sum": lambda x: mse_loss(x, torch.zeros_like(x), reduction="sum") / WHOLE,
    "of labels": lambda x: cross_entropy(x, LABELS, reduction="sum") / WHOLE,
    "a sum of squares": lambda x: x.square().sum() / WHOLE,
    "of losses by sample": lambda x: mse_loss(x, torch.zeros_like(x), reduction="none").sum() / float(WHOLE),
    "scaled": lambda x: x.square().sum() / WHOLE * 1024.0,
}
NOT_TOLD: dict[str, Loss] = {
    "a mean": lambda x: mse_loss(x, torch.zeros_like(x)),
    "a mean that is divided": lambda x: mse_loss(x, torch.zeros_like(x)) / WHOLE,
    "a sum by the part": lambda x: mse_loss(x, torch.zeros_like(x), reduction="sum") / len(x),
    "a sum": lambda x: x.square().sum(),
    "the part itself": lambda x: x.sum(),
}


@pytest.fixture(autouse=True)
def backward(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's function is there again at the end; what a test leaves in its place is gone then."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", torch.Tensor.backward)
        yield


def trained(loss: Loss, whole: int = WHOLE, *, tells: bool = True) -> None:
    watch, original = SummedLoss(tells=tells), torch.Tensor.backward
    for _ in range(WATCHED):
        x = torch.ones(PART, 3, requires_grad=True)
        watch.begin_batch(PART, whole)
        loss(x).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
    assert torch.Tensor.backward is original


@pytest.mark.parametrize("loss", TOLD.values(), ids=TOLD)
def test_a_sum_over_a_part_that_is_divided_by_the_whole_is_told_once(
    loss: Loss, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(loss)
    assert capsys.readouterr().err.count(f"a sum over this rank's {PART} samples, divided by {WHOLE}") == 1


@pytest.mark.parametrize("loss", NOT_TOLD.values(), ids=NOT_TOLD)
def test_other_losses_are_not_told(loss: Loss, capsys: pytest.CaptureFixture[str]) -> None:
    trained(loss)
    trained(TOLD["a sum of squares"], whole=PART)  # the rank has all of it
    trained(TOLD["a sum of squares"], tells=False)
    assert not capsys.readouterr().err


def test_a_loop_that_ends_leaves_what_another_one_looks_with(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = SummedLoss(tells=True), SummedLoss(tells=True)
    for one in (first, second):
        one.begin_batch(PART, WHOLE)
    first.close()
    TOLD["a sum of squares"](torch.ones(PART, 3, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    assert "divided by" in capsys.readouterr().err
    second.close()

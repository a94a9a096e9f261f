"""What rounds do with buffers and with the optimizer's state: average, take from the source, or leave alone."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from elche.errors import InvalidJob
from elche_worker.model.layout import Layout

Parts = tuple[nn.Sequential, Optimizer]


def layout_of(model: nn.Module, optimizer: torch.optim.Optimizer, optimizer_state: str) -> Layout:
    return Layout(model, [optimizer], optimizer_state=optimizer_state)


def parts(make: Callable[[list[nn.Parameter]], Optimizer] = Adam) -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model, make(list(model.parameters()))


def train(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def kinds(layout: Layout) -> dict[str, str]:
    return {entry.name: entry.kind for entry in layout.entries}


@pytest.mark.parametrize(
    ("policy", "mean", "count"),
    [("average", "float32", "broadcast"), ("from_source", "broadcast", "broadcast"), ("local", None, None)],
)
def test_buffers_have_a_policy(policy: str, mean: str | None, count: str | None) -> None:
    found = kinds(Layout(parts()[0], buffers=policy))
    assert (found.get("1.running_mean"), found.get("1.num_batches_tracked")) == (mean, count)
    assert found["0.weight"] == "float32"


@pytest.mark.parametrize(
    ("policy", "moment", "step"),
    [("average", "float32", "broadcast"), ("from_source", "broadcast", "broadcast"), ("local", None, None)],
)
def test_the_optimizer_s_state_has_a_policy(policy: str, moment: str | None, step: str | None) -> None:
    found = kinds(layout_of(*parts(), optimizer_state=policy))
    names = [f"optimizer state {key} of 0.weight" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert [found.get(name) for name in names] == [moment, moment, step]


def test_the_optimizers_state_is_in_the_models_order_whatever_that_of_its_groups() -> None:
    """Ranks whose groups are made of sets were refused, as if their models differed."""
    alike = [
        layout_of(*parts(make), optimizer_state="average").hash for make in (Adam, lambda given: Adam(given[::-1]))
    ]
    assert alike[0] == alike[1]


@pytest.mark.parametrize(
    "make",
    [
        Adam,
        lambda p: Adam(p, amsgrad=True),
        lambda p: AdamW(p, weight_decay=0.5),
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: RMSprop(p, centered=True, momentum=0.5),
    ],
)
def test_state_that_is_made_beforehand_changes_no_step(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    fresh, prepared = parts(make), parts(make)
    before = [parameter.clone() for parameter in prepared[0].parameters()]
    layout_of(*prepared, optimizer_state="average")
    assert all(map(torch.equal, before, prepared[0].parameters()))
    for seed in range(3):
        train(*fresh, seed)
        train(*prepared, seed)
    for mine, theirs in zip(fresh[0].parameters(), prepared[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_moments_keep_newer_steps_under_a_correction_as_parameters_do() -> None:
    model, optimizer = parts()
    layout = layout_of(model, optimizer, optimizer_state="average")
    layout.place(torch.device("cpu"))
    train(model, optimizer, seed=1)
    layout.gather(keep=True)
    layout.fill()
    layout.flat_buffers["float32"].mul_(2)
    train(model, optimizer, seed=2)
    names = {"0.weight": model[0].weight.data}
    for name in ("exp_avg", "exp_avg_sq"):
        names[f"optimizer state {name} of 0.weight"] = optimizer.state[model[0].weight][name]
    before = {name: tensor.clone() for name, tensor in names.items()}
    held = {entry.name: view.clone() for entry, view in layout.averaged()}
    layout.compare()
    layout.correct()
    for name, tensor in names.items():  # the snapshot was half of the result
        torch.testing.assert_close(tensor, before[name] + held[name] / 2, rtol=1e-5, atol=0)


def test_a_mean_of_squares_is_never_below_the_ranks_own_and_the_result() -> None:
    model, optimizer = parts()
    layout = layout_of(model, optimizer, optimizer_state="average")
    layout.place(torch.device("cpu"))
    train(model, optimizer, seed=1)
    layout.gather(keep=True)
    layout.fill()
    layout.flat_buffers["float32"].mul_(0.25)
    state = optimizer.state[model[0].weight]
    kept = state["exp_avg_sq"].clone()
    state["exp_avg_sq"].mul_(0.5)
    state["exp_avg"].mul_(0.5)
    mean = state["exp_avg"].clone()
    layout.compare()
    layout.correct()
    torch.testing.assert_close(state["exp_avg_sq"], kept / 4, rtol=1e-5, atol=0)
    torch.testing.assert_close(state["exp_avg"], -mean / 2, rtol=1e-5, atol=0)


def test_an_optimizer_that_needs_a_closure_has_no_shared_state() -> None:
    model, _ = parts()
    with pytest.raises(InvalidJob, match="whose step\\(\\) needs no closure; use 'local'"):
        layout_of(model, torch.optim.LBFGS(model.parameters()), optimizer_state="average")


@pytest.mark.parametrize(
    "kind", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
def test_optimizers_begin_as_they_would_without_rounds(kind: str) -> None:
    """Their state is there before the first batch, as a step makes it that nobody wants."""
    trained = []
    for optimizer_state in ("local", "average"):
        model, optimizer = parts(lambda parameters: getattr(torch.optim, kind)(parameters, lr=0.01))
        layout_of(model, optimizer, optimizer_state)
        for seed in range(3):
            train(model, optimizer, seed)
        trained.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
    assert torch.equal(*trained)

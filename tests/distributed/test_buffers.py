"""Buffers of loops: equal on all ranks after the steps, and never written while a graph needs them."""

from typing import Any

import pytest
import torch
from torch import nn

from elche_worker.collectives.consistency import buffers_beside
from elche_worker.trainer import Trainer, TrainerConfig
from support.worlds import Worlds


class Scale(nn.Module):
    """A running scale, which backward needs, without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean()
        return x * self.scale


class Mask(nn.Module):
    """A constant that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


def new_nets(kind: str) -> nn.ModuleDict:
    layer = {"batch": nn.BatchNorm1d, "plain batch": nn.BatchNorm1d, "scale": Scale, "mask": Mask}[kind]

    def new(*sizes: int) -> nn.Sequential:
        own = layer(4, affine=kind != "plain batch") if layer is nn.BatchNorm1d else layer()
        return nn.Sequential(nn.Linear(sizes[0], 4), own, nn.Tanh(), nn.Linear(4, sizes[1]))

    nets = nn.ModuleDict({"g": new(2, 3), "d": new(3, 1)})
    if kind in ("plain batch", "mask"):
        nets["around"] = nn.BatchNorm1d(3, affine=False) if kind == "plain batch" else Mask()
    return nets


def train_gan(kind: str) -> list[Any]:
    """As in the well-known example: one fake batch serves both steps."""
    nets = new_nets(kind)
    g, d = nets["g"], nets["d"]
    optimizers = {name: torch.optim.SGD(nets[name].parameters(), lr=0.1) for name in ("g", "d")}
    trainer = Trainer.setup(nets, optimizers)
    torch.manual_seed(trainer.rank)
    told = []
    for _ in range(4):
        fake = g(torch.randn(8, 2))
        if kind == "plain batch":
            fake = nets["around"](fake)
        elif kind == "mask":
            fake = fake * nets["around"](torch.ones(8, 4))[:, :3]
        (d(torch.randn(8, 3)).mean() - d(fake.detach()).mean()).backward()
        trainer.step(optimizer="d")
        told.append([one.clone() for one in d.buffers()])
        d(fake).mean().backward()
        trainer.step(optimizer="g")
        optimizers["d"].zero_grad()
        told.append([one.clone() for one in g.buffers()])
    return [one for some in told for one in some]


@pytest.mark.parametrize("kind", ["batch", "plain batch", "scale", "mask"])
def test_one_fake_batch_serves_both_steps(worlds: Worlds, kind: str) -> None:
    first, second = worlds.run(2, train_gan, kind)
    assert first
    assert all(map(torch.equal, first, second))


def test_buffers_belong_to_the_optimizer_of_their_module_or_the_one_around_it() -> None:
    nets = new_nets("plain batch")
    nets["frozen"] = nn.BatchNorm1d(3)
    g, d = (list(nets[name].parameters()) for name in ("g", "d"))

    def names(stepped: list[nn.Parameter], others: list[nn.Parameter]) -> set[str]:
        pointers = {one.data_ptr() for one in buffers_beside(nets, stepped, others)}
        return {name.partition(".")[0] for name, one in nets.named_buffers() if one.data_ptr() in pointers}

    assert names(d, g) == {"d", "around", "frozen"}
    assert names(g, d) == {"g", "around", "frozen"}
    assert names([*g, *d], []) == {"g", "d", "around", "frozen"}
    assert len(buffers_beside(nets, [*g, *d], [])) == len(list(nets.buffers()))


def train_with_a_buffer_of_inference_mode() -> list[float]:
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("seen", torch.zeros(2))
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), 0.1), TrainerConfig(max_anchor=0))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        with torch.inference_mode():
            model.seen = model.seen + 1 + trainer.rank
        trainer.step()
    found: list[float] = model.seen.tolist()
    return found


def test_a_buffer_that_was_made_in_inference_mode_is_equal_on_all_ranks(worlds: Worlds) -> None:
    """Other ranks than the first failed: outside of that mode it cannot be written."""
    assert worlds.run(2, train_with_a_buffer_of_inference_mode) == [[3.0, 3.0]] * 2


class Table(nn.Module):
    """Factors by position, made anew for the longest input that was seen, as caches of rotary embeddings are."""

    def __init__(self, is_saved: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.is_saved = is_saved
        self._make(1)

    def _make(self, length: int) -> None:
        self.register_buffer("factors", torch.arange(1.0, length + 1).sqrt(), persistent=self.is_saved)
        self.register_buffer("inverse", 1 / self.factors, persistent=self.is_saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > len(self.factors):
            self._make(x.shape[1])
        return x * (self.factors + self.inverse)[: x.shape[1]] * self.scale


def train_with_table(is_saved: bool, lengths: list[int]) -> bool:
    """Whether the table is still what it was made as, where one rank's inputs are longer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9), Table(is_saved))
    table: Any = model[1]
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(1 if is_saved else 3):
        table(model[0](torch.randn(3, 4))[:, : lengths[trainer.rank]]).mean().backward()
        trainer.step()
    expected = torch.arange(1.0, len(table.factors) + 1).sqrt()
    return torch.equal(table.factors, expected) and torch.equal(table.inverse, 1 / expected)


@pytest.mark.parametrize("lengths", [[5, 9], [9, 5]])
def test_tables_that_ranks_make_of_their_own_size_stay_theirs(worlds: Worlds, lengths: list[int]) -> None:
    """The second rank trained on with parts of one table in the other."""
    assert worlds.run(2, train_with_table, False, lengths) == [True, True]


def test_saved_buffers_of_other_sizes_are_refused(worlds: Worlds) -> None:
    refused = worlds.run(2, train_with_table, True, [5, 9], may_raise=True)[1]
    assert "a buffer of the model has another size on rank 0 than on this rank" in refused.message

"""Sparse gradients in loops: ranks train what one process trains, and optimizers that need them sparse get them so."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding
from torch.optim import Adam, SparseAdam
from torch.utils.data import DataLoader, TensorDataset

from elche_worker.collectives.sparse import clip_norm, packed, unpacked
from elche_worker.trainer import Trainer, TrainerConfig
from elche_worker.trainer.ddp import Ddp
from support.worlds import Worlds

NUM_STEPS = 12
BATCH = 12


class Bags(nn.Module):
    """A recommender in small: bags of ids, and a dense part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.bag = nn.EmbeddingBag(40, 4, mode="sum", sparse=kind != "functional")
        self.top = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind == "functional":
            rows = embedding(ids, self.bag.weight, sparse=True).sum(1)
        else:
            rows = self.bag(ids)
        if self.kind == "tied":
            rows = rows + self.bag.weight.mean(0)
        return self.top(rows)


def new_bags(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = Bags(kind).double()
    if kind == "adam":
        return model, {"table": SparseAdam(model.bag.parameters(), lr=0.05), "rest": Adam(model.top.parameters())}
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 40, (NUM_STEPS * BATCH, 3), generator=generator)
    return TensorDataset(ids, torch.rand(len(ids), 1, generator=generator, dtype=torch.float64))


def train(kind: str, max_grad_norm: float | None) -> list[torch.Tensor]:
    model, optimizers = new_bags(kind)
    trainer = Trainer.setup(model, optimizers, TrainerConfig(max_anchor=0, max_grad_norm=max_grad_norm))
    trainer.set_data_loader(DataLoader(batches(), batch_size=BATCH), forward_input="ids", names=("ids", "y"))
    for batch in trainer.epoch(0):
        (trainer.forward_batch(batch) - batch["y"]).square().mean().backward()
        trainer.step()
    assert trainer.num_steps == NUM_STEPS
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "max_grad_norm"), [("adam", None), ("sgd", None), ("sgd", 0.05), ("tied", None), ("functional", None)]
)
def test_ranks_train_what_one_process_trains(worlds: Worlds, kind: str, max_grad_norm: float | None, size: int) -> None:
    (alone,) = worlds.run(1, train, kind, max_grad_norm)
    first, *others = worlds.run(size, train, kind, max_grad_norm)
    assert not torch.equal(alone[0], next(new_bags(kind)[0].parameters()))
    for other in others:
        assert all(map(torch.equal, first, other))
    for one, own in zip(alone, first, strict=True):
        torch.testing.assert_close(own, one)


def gradients_of_unequal_ranks() -> list[bool]:
    """Rank 1 has no sample in the first step, and nobody has any in the table in the second."""
    model, optimizers = new_bags("adam")
    trainer = Trainer.setup(model, optimizers)
    rank = trainer.rank
    loss = model(torch.tensor([[1, 1, 2]])).sum() if rank == 0 else 0 * model.top.bias.sum()
    loss.backward()
    trainer.average_gradients(samples=1 - rank)
    table = model.bag.weight.grad
    told = [table.is_sparse, table.coalesce().indices().tolist() == [[1, 2]], table.coalesce().values()[0, 0].item()]
    trainer.step()
    model.top.bias.sum().backward()
    trainer.average_gradients(samples=1)
    told.append(model.bag.weight.grad is None)
    trainer.step()
    return told


def test_a_rank_without_rows_gets_those_of_others(worlds: Worlds) -> None:
    model, _ = new_bags("adam")
    twice = 2 * model.top.weight[0, 0].item()
    for told in worlds.run(2, gradients_of_unequal_ranks):
        assert told == [True, True, pytest.approx(twice), True]


def average_by_hand() -> Any:
    model, _ = new_bags("sgd")
    wrapped = Ddp.wrap(model)
    model(torch.tensor([[dist.get_rank(), 5, 6]])).sum().backward()
    wrapped.all_reduce_gradients()
    return model.bag.weight.grad.is_sparse, model.bag.weight.grad.to_dense()


def test_ddp_averages_rows(worlds: Worlds) -> None:
    model, _ = new_bags("sgd")
    (model(torch.tensor([[0, 5, 6], [1, 5, 6]])).sum() / 2).backward()
    for is_sparse, table in worlds.run(2, average_by_hand):
        assert is_sparse
        torch.testing.assert_close(table, model.bag.weight.grad.to_dense())


def train_by_cadence() -> list[torch.Tensor]:
    model, optimizers = new_bags("adam")
    trainer = Trainer.setup(model, optimizers, TrainerConfig(anchor=2, max_anchor=2, max_grad_norm=0.1))
    trainer.set_data_loader(DataLoader(batches(), batch_size=3), forward_input="ids", names=("ids", "y"))
    trainer.set_loss_fn(lambda context: (context.output - context.batch["y"]).square().mean())
    for batch in trainer.epoch(0):
        trainer.forward_batch(batch)
        trainer.step()
    return [one.detach() for one in model.parameters()]


def test_several_batches_per_step_are_clipped_and_averaged(worlds: Worlds) -> None:
    first, second = worlds.run(2, train_by_cadence)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], next(new_bags("adam")[0].parameters()))


def test_the_norm_of_rows_that_stand_twice_is_that_of_their_sums() -> None:
    models = [new_bags("sgd")[0], new_bags("sgd")[0]]
    for model in models:
        for _ in range(2):
            model(torch.tensor([[1, 1, 2], [3, 1, 2]])).sum().backward()
    whole = models[1].bag.weight
    whole.grad = whole.grad.to_dense()
    clip_norm(list(models[0].parameters()), 0.3)
    nn.utils.clip_grad_norm_(models[1].parameters(), 0.3)
    torch.testing.assert_close(models[0].bag.weight.grad.to_dense(), whole.grad)
    torch.testing.assert_close(models[0].top.weight.grad, models[1].top.weight.grad)


def test_a_sparse_gradient_is_packed_for_a_rank_that_is_behind() -> None:
    model, _ = new_bags("sgd")
    model(torch.tensor([[1, 1, 2]])).sum().backward()
    for parameter in model.parameters():
        again = unpacked(packed(parameter.grad))
        assert again is not None
        assert again.is_sparse == parameter.grad.is_sparse
        assert torch.equal(again.to_dense(), parameter.grad.to_dense())
    assert unpacked(packed(None)) is None

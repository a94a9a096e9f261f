"""Data parallelism by hand: several models, several groups, and steps that the loop orders itself."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche.errors import Misuse
from elche_worker.trainer.ddp import Ddp
from support.worlds import Raised, Worlds


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def train_gan(num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A generator and a discriminator with two optimizers, on all ranks; returned with the same on one process."""
    torch.manual_seed(dist.get_rank())  # so that they begin unlike
    nets = [nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), nn.Linear(4, 1)]
    ddps = [Ddp.wrap(net) for net in nets]
    for ddp in ddps:
        ddp.sync_params()
    torch.manual_seed(0)
    alone = [nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), nn.Linear(4, 1)]
    size, rank = dist.get_world_size(), dist.get_rank()

    def losses(generator: nn.Module, critic: nn.Module, noise: torch.Tensor, real: torch.Tensor) -> Any:
        fake = generator(noise)
        yield critic(fake.detach()).mean() - critic(real).mean()
        yield -critic(generator(noise)).mean()

    ours = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    theirs = [torch.optim.Adam(net.parameters(), lr=0.01) for net in alone]
    for step in range(num_steps):
        numbers = torch.Generator().manual_seed(step)
        noise, real = torch.randn(size, 4, 3, generator=numbers), torch.randn(size, 4, 4, generator=numbers)
        for which, loss in zip((1, 0), losses(*nets, noise[rank], real[rank]), strict=True):
            loss.backward()
            ddps[which].all_reduce_gradients()
            ours[which].step()
            for optimizer in ours:
                optimizer.zero_grad()
        ddps[0].sync_buffers()
        for which in (1, 0):
            total: Any = 0.0
            for one in range(size):
                critic, generator = losses(*alone, noise[one], real[one])
                total = total + (critic if which else generator)
            (total / size).backward()
            theirs[which].step()
            for optimizer in theirs:
                optimizer.zero_grad()
    return flat([*nets[0].parameters(), *nets[1].parameters()]), flat([*alone[0].parameters(), *alone[1].parameters()])


def test_a_gan_trains_as_on_one_process(worlds: Worlds) -> None:
    for parameters, expected in worlds.run(2, train_gan, 5):
        assert torch.allclose(parameters, expected, rtol=0, atol=1e-6)


def weigh(counts: list[int]) -> tuple[list[float], list[float] | None]:
    rank = dist.get_rank()
    model = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "unused": nn.Linear(2, 1, bias=False)})
    ddp = Ddp.wrap(model)
    if counts[rank]:
        (model["used"](torch.tensor([[1.0, 2.0]])) * (rank + 1)).sum().backward()
    ddp.weighted_all_reduce_gradients(counts)
    gradient: Any = model["used"].weight.grad
    return gradient.reshape(-1).tolist(), model["unused"].weight.grad


def test_weighted_gradients_count_by_batches_and_missing_ones_are_zeros(worlds: Worlds) -> None:
    for gradient, unused in worlds.run(3, weigh, [3, 1, 0]):
        assert gradient == pytest.approx([(3 * 1 + 1 * 2) / 4, 2 * (3 * 1 + 1 * 2) / 4])
        assert unused is None


def in_groups() -> tuple[int, list[float], list[str]]:
    """Two groups of two ranks; each averages among itself."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(1, 1, bias=False)
    ddp = Ddp.wrap(model, groups[rank // 2])
    nn.init.constant_(model.weight, rank)
    ddp.sync_params()
    (model(torch.ones(1, 1)) * rank).sum().backward()
    ddp.all_reduce_gradients()
    gradient: Any = model.weight.grad
    return ddp.world_size, [float(model.weight), float(gradient)], ddp.devices


def test_groups_average_among_themselves(worlds: Worlds) -> None:
    told = worlds.run(4, in_groups)
    assert [size for size, _, _ in told] == [2] * 4
    assert [values for _, values, _ in told] == [[0.0, 0.5], [0.0, 0.5], [2.0, 2.5], [2.0, 2.5]]
    assert told[0][2] == ["cpu", "cpu"]


def give_counts(kind: str) -> None:
    rank = dist.get_rank()
    ddp = Ddp.wrap(nn.Linear(1, 1))
    counts = {"length": [1, 2, 3], "zero": [0, 0], "negative": [2, -1], "differ": [1, 1 + rank]}[kind]
    ddp.weighted_all_reduce_gradients(counts)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("length", "3 counts, and there are 2 ranks"),
        ("zero", "at least 0, and one of them more"),
        ("negative", "at least 0"),
        ("differ", "batch_counts differ"),
    ],
)
def test_counts_that_cannot_work_are_told_on_every_rank(worlds: Worlds, kind: str, words: str) -> None:
    for raised in worlds.run(2, give_counts, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert words in raised.message


def wrap_different() -> None:
    Ddp.wrap(nn.Linear(2, 2 + dist.get_rank()))


def test_models_that_differ_are_told_on_every_rank(worlds: Worlds) -> None:
    for raised in worlds.run(2, wrap_different, may_raise=True):
        assert isinstance(raised, Raised)
        assert "'weight' is (2, 2) float32 on rank 0 and (3, 2) float32 on rank 1" in raised.message


def test_on_one_process_nothing_happens() -> None:
    model = nn.Linear(1, 1)
    ddp = Ddp.wrap(model)
    model(torch.ones(1, 1)).sum().backward()
    ddp.sync_params()
    ddp.all_reduce_gradients()
    ddp.weighted_all_reduce_gradients([4])
    assert float(model.bias.grad or 0.0) == 1.0
    assert (ddp.world_size, ddp.rank, ddp.devices) == (1, 0, ["cpu"])
    with pytest.raises(Misuse, match="there are 1 ranks"):
        ddp.weighted_all_reduce_gradients([1, 1])

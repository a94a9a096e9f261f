"""Loops whose parameters change as they train, are complex, or are stepped by a wrapper: on two ranks as on one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import close, flat, new_model, samples
from support.worlds import Worlds

KINDS = [
    "a group is added",
    "a group of one of several",
    "a layer is added",
    "a layer is replaced",
    "complex",
    "wrapped",
]


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.complex64) @ self.weight).real + self.bias


class Lookahead(torch.optim.Optimizer):
    """As in public scripts, without a call of `Optimizer.__init__`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults
        self.num = 0
        self.slow = [one.detach().clone() for group in base.param_groups for one in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self.num += 1
        if self.num % 3 == 0:
            fast = (one for group in self.param_groups for one in group["params"])
            for slow, one in zip(self.slow, fast, strict=True):
                one.copy_(slow.lerp_(one, 0.5))


def train(kind: str, size: int) -> Tensor:
    """Twelve steps of whole batches, of which each of `size` ranks has its part; a rank alone has no trainer."""
    rank = dist.get_rank() if size > 1 else 0
    model: Any = Spectral() if kind == "complex" else new_model()
    if "group" in kind:
        model[4].requires_grad_(False)
    optimizer: Any = SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    if kind == "wrapped":
        optimizer = Lookahead(optimizer)
    trainer = None
    if size > 1:
        given = {"one": optimizer} if "several" in kind else optimizer
        trainer = Trainer.setup(model, given, TrainerConfig(max_anchor=0))
    for step in range(12):
        torch.manual_seed(step)
        if step == 4 and "group" in kind:
            model[4].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.05})
        elif step == 4 and kind == "a layer is added":
            model.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(model[5].parameters())})
        elif step == 4 and kind == "a layer is replaced":
            model[4] = nn.Linear(16, 3)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        inputs, labels = samples(8, seed=step)[:]
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        loss: Any = cross_entropy(model(inputs[part]), labels[part])
        loss.backward()
        if trainer is not None:
            trainer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
    return torch.view_as_real(model.weight.detach()).flatten() if kind == "complex" else flat(model)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_it_as_one_does(worlds: Worlds, kind: str) -> None:
    """With several optimizers, or a layer of its own, the ranks' models parted; the last two were refused."""
    alone = train(kind, 1)
    for trained in worlds.run(2, train, kind, 2):
        assert close(trained, alone)

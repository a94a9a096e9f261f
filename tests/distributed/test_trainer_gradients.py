"""What `step()` does with gradients is what one process does with all samples.."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elche.errors import Misuse
from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, close, flat, new_model, new_optimizer, samples, train_alone
from support.worlds import Raised, Worlds


def train_beside_ddp(num_steps: int, overlap: bool) -> float:
    """The largest difference of parameters, after as many steps of the same loop with each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ours, theirs = new_model(), DistributedDataParallel(new_model())
    our_optimizer, their_optimizer = new_optimizer(ours), new_optimizer(theirs)
    trainer = Trainer.setup(ours, our_optimizer, TrainerConfig(max_anchor=0, overlap=overlap))
    dataset = samples(num_steps * size * 8)
    for step in range(num_steps):
        start = (step * size + rank) * 8
        inputs, labels = dataset[start : start + 8]
        cross_entropy(ours(inputs), labels).backward()
        trainer.step()
        cross_entropy(theirs(inputs), labels).backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
    trainer.close()
    return float((flat(ours) - flat(theirs.module)).abs().max())


@pytest.mark.parametrize(("size", "overlap"), [(3, True), (2, False)])
def test_a_hundred_steps_equal_those_of_ddp(worlds: Worlds, size: int, overlap: bool) -> None:
    assert max(worlds.run(size, train_beside_ddp, 100, overlap)) < 1e-6


def add_up_gradients(overlap: bool) -> tuple[bool, list[bool]]:
    """Two backward passes in each step; and whether a bucket had left before its end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = new_model()
    trainer = Trainer.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(max_anchor=0, overlap=overlap)
    )
    alone = new_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    dataset, sent_early = samples(5 * size * 8), []
    for step in range(5):
        start = (step * size + rank) * 8
        for half in (slice(start, start + 4), slice(start + 4, start + 8)):
            inputs, labels = dataset[half]
            (cross_entropy(model(inputs), labels) / 2).backward()
        sent_early.append(trainer._stepper.averager.gradients[0]._num_sent > 0)
        trainer.step()
        inputs, labels = dataset[step * size * 8 : (step + 1) * size * 8]
        cross_entropy(alone(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return close(flat(model), flat(alone)), sent_early


def test_gradients_that_are_added_up_are_sent_after_the_last_backward(worlds: Worlds) -> None:
    for is_equal, sent_early in worlds.run(2, add_up_gradients, True):
        assert is_equal
        assert sent_early == [False, True, True, True, True]
    for is_equal, sent_early in worlds.run(2, add_up_gradients, False):
        assert is_equal
        assert not any(sent_early)


def clip_average(max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(
        model, torch.optim.SGD(model.parameters(), lr=1.0), TrainerConfig(max_anchor=0, max_grad_norm=max_norm)
    )
    inputs, labels = samples(8).tensors
    own = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    cross_entropy(model(inputs[own]), labels[own]).backward()
    trainer.step()
    cross_entropy(alone(inputs), labels).backward()
    nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    return flat(model), flat(alone)


def test_without_el_che_the_average_is_clipped(worlds: Worlds) -> None:
    for parameters, expected in worlds.run(2, clip_average, 0.05):
        assert close(parameters, expected)


# Gradients that are not everywhere


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.even, self.odd, self.never, self.shared = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, inputs: torch.Tensor, way: int) -> torch.Tensor:
        branch = self.odd if way else self.even
        result: torch.Tensor = self.shared(branch(inputs))
        return result


def train_branches(overlap: bool) -> tuple[dict[str, bool], torch.Tensor, torch.Tensor]:
    """Every rank goes through another branch, none through the last; by hand all gradients are known."""
    rank, model = dist.get_rank(), Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(max_anchor=0, overlap=overlap))
    alone = Branches()
    by_hand = torch.optim.SGD(alone.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(2, 3, 4, generator=generator)
        ways = (step % 2, (step // 2) % 2)
        model(inputs[rank], ways[rank]).sum().backward()
        trainer.average_gradients()
        has_gradient = {name: one.grad is not None for name, one in model.named_parameters()}
        trainer.step()
        (sum(alone(inputs[one], ways[one]).sum() for one in range(2)) / 2).backward()  # type: ignore[union-attr]
        assert has_gradient == {name: one.grad is not None for name, one in alone.named_parameters()}
        by_hand.step()
        by_hand.zero_grad()
    return has_gradient, flat(model), flat(alone)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_gradient_that_one_rank_has_is_everybodys_and_one_that_nobody_has_is_nobodys(
    worlds: Worlds, overlap: bool
) -> None:
    for has_gradient, parameters, expected in worlds.run(2, train_branches, overlap):
        assert not has_gradient["never.weight"]
        assert close(parameters, expected)


def unfreeze() -> tuple[torch.Tensor, bool]:
    model = new_model()
    first: Any = model[0]  # type: ignore[index]
    first.requires_grad_(False)
    trainer = Trainer.setup(model, new_optimizer(model))
    before, dataset = first.weight.clone(), samples(100)
    for step in range(6):
        if step == 3:
            assert torch.equal(before, first.weight)
            first.requires_grad_(True)
        if step == 5:
            model[2].requires_grad_(False)  # type: ignore[index,union-attr]
        start = step * 16 + 8 * dist.get_rank()
        inputs, labels = dataset[start : start + 8]
        cross_entropy(model(inputs), labels).backward()
        trainer.step()
    return flat(model), not torch.equal(before, first.weight)


def test_layers_may_be_unfrozen_on_the_way(worlds: Worlds) -> None:
    (first, has_changed), (second, _) = worlds.run(2, unfreeze)
    assert has_changed
    assert torch.equal(first, second)


def one_more_backward() -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    for passes in (1, 2):
        for _ in range(passes):
            model(torch.ones(1, 6)).sum().backward()
        trainer.step()


def test_a_backward_too_many_is_an_error_that_says_what_to_do(worlds: Worlds) -> None:
    for raised in worlds.run(2, one_more_backward, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert "overlap=False" in raised.message


def accumulate_batches(overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """An optimizer step after every second batch of `epoch`."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0, overlap=overlap))
    trainer.set_data_loader(DataLoader(samples(48), batch_size=8), forward_input="inputs", names=NAMES)
    for number, batch in enumerate(trainer.epoch(0)):
        (cross_entropy(trainer.forward_batch(batch), batch["labels"]) / 2).backward()
        if number % 2:
            trainer.step()
    return flat(model), train_alone(samples(48), [16, 16, 16])


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_several_batches_may_be_added_up_before_a_step(worlds: Worlds, overlap: bool) -> None:
    for parameters, alone in worlds.run(2, accumulate_batches, overlap):
        assert close(parameters, alone)


def scale_gradients() -> tuple[torch.Tensor, torch.Tensor]:
    """The averaged gradient is looked at, and the optimizer stepped by hand."""
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, labels = samples(8).tensors
    own = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    (cross_entropy(model(inputs[own]), labels[own]) * 16).backward()
    trainer.average_gradients()
    with pytest.raises(Misuse, match="averaged already"):
        trainer.average_gradients()
    for one in model.parameters():
        assert one.grad is not None
        one.grad.div_(16)
    trainer.optimizer.step()
    trainer.finish_step()
    assert all(one.grad is None for one in model.parameters())
    cross_entropy(alone(inputs), labels).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return flat(model), flat(alone)


def test_a_step_may_be_made_in_parts(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, scale_gradients):
        assert close(parameters, alone)


def clip_averaged() -> tuple[torch.Tensor, torch.Tensor]:
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    by_hand = torch.optim.SGD(alone.parameters(), lr=1.0)
    own = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    for step in range(4):
        inputs, labels = samples(8, seed=step).tensors
        cross_entropy(model(inputs[own]), labels[own]).backward()
        trainer.average_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        trainer.step()
        cross_entropy(alone(inputs), labels).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        by_hand.step()
        by_hand.zero_grad()
    return flat(model), flat(alone)


def test_averaged_gradients_may_be_clipped_by_hand(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, clip_averaged):
        assert close(parameters, alone)


def keep_averaged() -> list[bool]:
    """Whether the gradients of each step are later still what they were; a loop may also change them with a graph."""
    model = new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    kept, then = [], []
    for step in range(3):
        inputs, labels = samples(8, seed=step).tensors
        cross_entropy(model(inputs), labels).backward()
        trainer.average_gradients()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        kept.append([one.detach() for one in gradients])
        then.append([one.detach().clone() for one in gradients])
        model[0].bias.grad.mul_(model[0].bias.norm())  # type: ignore[index,union-attr,operator]
        then[-1][1] = gradients[1].detach().clone()
        trainer.step()
    return [torch.equal(*pair) for one, other in zip(kept, then, strict=True) for pair in zip(one, other, strict=True)]


def test_gradients_that_a_loop_keeps_stay_what_they_were(worlds: Worlds) -> None:
    """Grokfast filters by the gradients of the last steps, and had the newest one in place of each."""
    for are_kept in worlds.run(2, keep_averaged):
        assert len(are_kept) == 18
        assert all(are_kept)


def weigh_by_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Shards by samples, and gradients weighted by something else, as language models do."""
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.set_data_loader(DataLoader(samples(32), batch_size=8), forward_input="inputs", names=NAMES)
    by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number, batch in enumerate(trainer.epoch(0)):
        tokens = 3 if dist.get_rank() else 1
        cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
        trainer.step(samples=tokens)
        for rank, weight in ((0, 0.25), (1, 0.75)):
            inputs, labels = samples(32)[number * 8 + rank * 4 : number * 8 + rank * 4 + 4]
            (cross_entropy(alone(inputs), labels) * weight).backward()
        by_hand.step()
        by_hand.zero_grad()
    return flat(model), flat(alone)


def test_gradients_may_be_weighted_by_tokens(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, weigh_by_tokens):
        assert close(parameters, alone)


def accumulate_to_the_tail() -> tuple[torch.Tensor, torch.Tensor]:
    """Five samples in batches of four, two batches a step: the second rank has none in the tail."""
    model, alone = new_model(), new_model()
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), TrainerConfig(max_anchor=0))
    trainer.set_data_loader(DataLoader(samples(5), batch_size=4), forward_input="inputs", names=NAMES)
    trainer.set_loss_fn(lambda context: cross_entropy(context.output, context.batch["labels"]))
    for batch in trainer.epoch(0):
        trainer.forward_batch(batch)
    trainer.step()
    inputs, labels = samples(5).tensors
    cross_entropy(alone(inputs), labels).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return flat(model), flat(alone)


def test_a_stand_in_counts_nothing_where_gradients_are_added_up(worlds: Worlds) -> None:
    for parameters, alone in worlds.run(2, accumulate_to_the_tail):
        assert close(parameters, alone)


def test_clipping_sees_what_the_optimizer_steps_and_nothing_is_left_of_the_rest() -> None:
    model = new_model()
    head: Any = model[4]  # type: ignore[index]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(device="cpu", max_grad_norm=0.1))
    steps = []
    for _ in range(3):
        before = head.weight.detach().clone()
        model(torch.ones(4, 6)).sum().backward()
        trainer.step()
        steps.append((head.weight.detach() - before).norm().item())
        assert all(one.grad is None for one in model.parameters())
    assert steps[2] == pytest.approx(steps[0], rel=0.05)

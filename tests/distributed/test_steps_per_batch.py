"""Several steps of one batch, as SAM and inner loops make them, each with gradients weighted by samples."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elche_worker.trainer import Trainer, TrainerConfig
from support.loops import NAMES, close, flat, new_model, samples
from support.worlds import Worlds


def train(config: dict[str, Any], then: str) -> tuple[torch.Tensor, int]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(max_anchor=0, **config))
    loader = DataLoader(samples(80), batch_size=20)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    for epoch in range(2):
        for batch in trainer.epoch(epoch):
            for _ in range(2):
                cross_entropy(trainer.forward_batch(batch), batch["labels"]).backward()
                trainer.step()
            if then == "leaves epochs":
                break
        own = samples(8)[:]
        if then != "nothing":
            half = slice(4 * trainer.rank, 4 * trainer.rank + 8 // trainer.world_size)
            cross_entropy(model(own[0][half]), own[1][half]).backward()
            trainer.step()
    return flat(model), trainer.num_steps


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("then", ["nothing", "takes batches of its own", "leaves epochs"])
def test_every_step_of_a_batch_counts_by_its_samples(worlds: Worlds, overlap: bool, then: str) -> None:
    """The second one counted all ranks alike: a rank with a fifth of the samples had half of the gradient."""
    [(expected, num_steps)] = worlds.run(1, train, {}, then)
    for got, steps in worlds.run(2, train, {"overlap": overlap, "speed_hint": (1, 4.0)}, then):
        assert steps == num_steps
        assert close(got, expected)

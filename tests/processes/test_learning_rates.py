"""Learning rates follow the position of all ranks, in one optimizer and in several."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elche.errors import InvalidJob
from elche_client.events import EpochReport, JobState, RoundReport
from elche_worker.model.checkpoint import load
from support.noting import BATCH_SIZE, EPOCHS, LR, NUM_SAMPLES, Trained, here, trained
from support.real_processes import Cluster

GAN = """
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))


def two_optimizers(model):
    return {
        "discriminator": torch.optim.Adam(model.discriminator.parameters(), lr=0.01),
        "generator": torch.optim.SGD(model.generator.parameters(), lr=0.02, momentum=0.9),
    }


def two_steps(model, batch, optimizers):
    note("optimizers", {name: one.param_groups[0]["lr"] for name, one in optimizers.items()})
    is_real = nn.functional.binary_cross_entropy_with_logits
    real, noise = batch[1], torch.randn(len(batch[1]), 2)
    optimizers["discriminator"].zero_grad()
    fake = model.generator(noise)
    judged, judged_fake = model.discriminator(real), model.discriminator(fake.detach())
    told = is_real(judged, torch.ones_like(judged)) + is_real(judged_fake, torch.zeros_like(judged_fake))
    told.backward()
    optimizers["discriminator"].step()
    optimizers["generator"].zero_grad()
    judged_fake = model.discriminator(fake)
    loss = is_real(judged_fake, torch.ones_like(judged_fake))
    loss.backward()
    optimizers["generator"].step()
    return {"loss": loss, "discriminator": told}
"""
TWO_OPTIMIZERS = "model=Gan, optimizer=two_optimizers, train_step=two_steps, manual_optimization=True"


def test_a_gan_steps_two_optimizers_and_is_resumed(cluster: Cluster, write: Callable[..., Path]) -> None:
    more = "optimizer_state='average', checkpoint_every_epochs=1"
    path = write(GAN, replaced=f"{TWO_OPTIMIZERS}, {more}")
    first = trained(cluster, path)
    rates = {"discriminator": 0.01, "generator": 0.02}
    assert first.noted("optimizers", 0) == [[rates]] * first.result.ranks[0].batches
    log = [line.text for line in cluster.client.logs(cluster.client.jobs()[-1].job_id)]
    assert sum("(merge='mean'): train_step steps 2 optimizers itself" in line for line in log) == 1
    assert all(report.scalars["discriminator"] > 0 for report in first.of(EpochReport))

    before = load(first.result.checkpoints[-1].path)
    torch.manual_seed(0)
    start = here(path).model().state_dict()
    assert all(not torch.equal(before.weights[name], start[name]) for name in start), "a part was never stepped"
    adam, sgd = before.state["optimizers"]
    assert all("exp_avg" in moments for moments in adam["state"].values())
    assert all("momentum_buffer" in moments for moments in sgd["state"].values())

    again = Trained(path, list(cluster.client.resume(cluster.client.jobs()[-1].job_id, epochs=EPOCHS + 2).watch()))
    assert again.result.state is JobState.SUCCEEDED, again.result
    assert again.result.committed_samples == (NUM_SAMPLES,) * (EPOCHS + 2)
    after, _ = load(again.result.checkpoints[-1].path).state["optimizers"]
    assert after["state"][0]["step"] > adam["state"][0]["step"], "Adam began anew"


@pytest.mark.parametrize(
    "replaced",
    [
        "schedule=lambda progress: 0.5 if progress.step >= 10 else 1.0",
        "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)",
    ],
)
def test_learning_rates_of_all_optimizers_follow_the_position(write: Callable[..., Path], replaced: str) -> None:
    path = write(GAN, replaced=f"{TWO_OPTIMIZERS}, {replaced}, epochs=1")
    here(path).run(device="cpu")
    rates = {
        name: [one[name] for (one,) in Trained(path, []).noted("optimizers", 0)]
        for name in ("discriminator", "generator")
    }
    assert rates["discriminator"] == pytest.approx([0.01] * 10 + [0.005] * 3)
    assert rates["generator"] == pytest.approx([0.02] * 10 + [0.01] * 3)


# Learning rates

SCHEDULED = """
TOTAL_STEPS = math.ceil(EPOCHS * NUM_SAMPLES / BATCH_SIZE)


def fall(progress):
    assert progress.total_samples == EPOCHS * NUM_SAMPLES and progress.total_steps == TOTAL_STEPS
    assert progress.step == progress.samples // BATCH_SIZE
    note("position", progress.samples)
    return 1 - progress.fraction


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL_STEPS, eta_min=0.01)


def take_result(model, version):
    note("round", version)
"""


def falling(samples: int) -> float:
    return LR * (1 - samples / (EPOCHS * NUM_SAMPLES))


def cosine(samples: int) -> float:
    step, total_steps = samples // BATCH_SIZE, math.ceil(EPOCHS * NUM_SAMPLES / BATCH_SIZE)
    return 0.01 + (LR - 0.01) * (1 + math.cos(math.pi * step / total_steps)) / 2


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [("schedule=fall, max_anchor=4", falling), ("scheduler=cosine, policy='sync', anchor=None", cosine)],
    ids=["schedule", "scheduler, sync"],
)
def test_learning_rates_are_those_of_the_position(
    cluster: Cluster, write: Callable[..., Path], replaced: str, expected: Callable[[int], float]
) -> None:
    """A rank knows what all ranks had trained at the last round, and what it has trained since then itself."""
    path = write(SCHEDULED, replaced=f"{replaced}, after_round=take_result, averaging='blocking'")
    done = trained(cluster, path, slow_factors={1: 2.0})
    committed, total = {}, 0
    for report in done.of(RoundReport):
        total += report.samples
        committed[report.version] = total
    assert total == EPOCHS * NUM_SAMPLES
    lowest = LR
    for rank in (0, 1):
        position, positions, rates = 0, [], []
        for kind, *values in done.notes(rank):
            if kind == "round":
                position = committed[values[0]]
            elif kind == "batch":
                indices, rate = values
                positions.append(position)
                rates.append(rate)
                position += len(indices)
        assert len(positions) > 2
        assert rates == pytest.approx([expected(position) for position in positions], rel=1e-6)
        asked = [[one] for one in [positions[0], *positions]]  # twice for the first batch
        assert not done.noted("position", rank) or done.noted("position", rank) == asked
        lowest = min(lowest, *rates)
    assert lowest < 0.4 * LR  # whoever trained last


def test_a_schedule_that_returns_nothing_is_named(write: Callable[..., Path]) -> None:
    job = here(write(replaced="schedule=lambda progress: None"))
    with pytest.raises(InvalidJob, match=r"schedule\(\) must return a number.*not NoneType"):
        job.run(device="cpu")

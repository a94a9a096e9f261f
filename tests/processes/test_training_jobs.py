"""How much a `TrainingJob` trains, which samples, and models that change, seen from outside by what ranks note."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from elche_client.events import EpochReport, EvaluationReport, RoundReport
from elche_worker.data.dataset import Drawn
from support.noting import BASE, EPOCHS, EVERY_SAMPLE_ONCE_PER_EPOCH, NUM_SAMPLES, REPLACE, Trained, here, trained
from support.real_processes import Cluster, Command

# How much is trained


@pytest.fixture(scope="module")
def ten_steps(shared_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Epochs of six batches, and ten batches in all."""
    path = tmp_path_factory.mktemp("steps") / "train.py"
    replaced = "max_steps=10, epochs=3, evaluate=lambda model: {'one': 1.0}, checkpoint_every_epochs=1"
    path.write_text("\n".join([BASE, "NUM_SAMPLES = 96", REPLACE.format(replaced)]), encoding="utf-8")
    yield trained(shared_cluster, path, slow_factors={1: 1.5})
    shared_cluster.mark.assert_none_left("elche rank")


def test_max_steps_ends_training_in_the_middle_of_an_epoch(ten_steps: Trained) -> None:
    assert ten_steps.result.committed_samples == (96, 64)
    assert sum(rank.batches for rank in ten_steps.result.ranks) == 10
    assert [report.committed for report in ten_steps.of(EpochReport)] == [96, 64]
    assert [report.epoch for report in ten_steps.of(EvaluationReport)] == [0, 1]


def test_a_job_that_max_steps_has_ended_is_resumed_where_it_was(cluster: Cluster, ten_steps: Trained) -> None:
    again = cluster.client.submit(
        ten_steps.path, num_ranks=1, max_steps=None, resume=ten_steps.result.checkpoints[-1].path
    )
    assert again.result().committed_samples == (96, 96, 96)
    assert ten_steps.samples(0, 1) == dict.fromkeys(range(96), 3)


RESUMED = """
NUM_SAMPLES = 96


def fall(progress):
    note("position", progress.samples)
    return 1 - progress.fraction
"""


def test_a_resumed_job_has_the_learning_rates_of_its_file(
    cluster: Cluster, write: Callable[..., Path], ten_steps: Trained
) -> None:
    """The optimizer's state in the checkpoint has the rate of then, and the file another one."""
    checkpoint = ten_steps.result.checkpoints[-1]
    path = write(RESUMED, "LR = 0.3", replaced="schedule=fall, epochs=4, averaging='blocking'")
    done = trained(cluster, path, resume=checkpoint.path)
    assert done.result.committed_samples == (96,) * 4
    first = []
    for rank in (0, 1):
        fractions = [samples / (96 * 4) for (samples,) in done.noted("position", rank)]
        first += fractions[:1]  # on a busy machine one rank may have had no batch of so few
        expected = [0.3 * (1 - one) for one in fractions[1:]]  # the schedule is asked twice for the first batch
        assert [rate for _, rate in done.noted("batch", rank)] == pytest.approx(expected)
    assert 0.25 <= min(first) < 0.5


def test_max_steps_counts_samples_where_epochs_have_a_tail(write: Callable[..., Path]) -> None:
    """Nine full batches' worth: 100 samples, and 44 of the next epoch, which is a batch more."""
    path = write("NUM_SAMPLES = 100", replaced="max_steps=9")
    here(path).run(device="cpu")
    assert [len(batch) for batch in Trained(path, []).batches(0)] == [16] * 6 + [4] + [16] * 2 + [12]


def test_in_lockstep_unequal_ranks_make_equally_many_batches_in_a_round(
    cluster: Cluster, write: Callable[..., Path]
) -> None:
    done = trained(cluster, write("NUM_SAMPLES = 320"), slow_factors={1: 3.0}, max_batch_diff=0)
    rounds = [report.rank_batches for report in done.of(RoundReport)]
    assert done.samples(0, 1) == dict.fromkeys(range(320), EPOCHS)
    assert sum(counts[0] != counts[1] for counts in rounds) <= EPOCHS, "an epoch's last rounds aside"
    assert sum(counts[0] == counts[1] > 0 for counts in rounds) >= 2


# Which samples


def test_samples_are_drawn_as_their_weights_say(cluster: Cluster, write: Callable[..., Path]) -> None:
    """One sample in ten is of the rare class; the weights make both as likely."""
    lines = "NUM_SAMPLES = 1000\ndef balanced():\n    return [9.0 if index % 10 == 0 else 1.0 for index in range(1000)]"
    done = trained(cluster, write(lines, replaced="sample_weights=balanced, batch_size=50, seed=5"))
    assert done.result.committed_samples == (1000,) * EPOCHS
    drawn = done.samples(0, 1)
    num_drawn = 1000 * EPOCHS
    assert sum(drawn.values()) == num_drawn
    num_rare = sum(count for index, count in drawn.items() if index % 10 == 0)
    assert abs(num_rare - num_drawn / 2) < 4.5 * math.sqrt(num_drawn) / 2
    order = Drawn(np.array([9.0 if index % 10 == 0 else 1.0 for index in range(1000)]), seed=5)
    assert drawn == Counter(index for epoch in range(EPOCHS) for index in order.indices(epoch, 0, 1000))


PARTS = """
SIZES = [50, 7, 0, 100, 43]
STARTS = [sum(SIZES[:index]) for index in range(len(SIZES))]
POINTS = Points()


class Part(torch.utils.data.IterableDataset):
    def __init__(self, index):
        self.index = index

    def __iter__(self):
        return (POINTS[STARTS[self.index] + position] for position in range(SIZES[self.index]))
"""


@pytest.mark.parametrize(
    "replaced",
    [
        "dataset=lambda: Shards(SIZES, Part)",
        "dataset=lambda: [Part(index) for index in range(5)], num_workers=1",
    ],
    ids=["shards", "streams"],
)
def test_parts_are_trained_once_in_every_epoch(cluster: Cluster, write: Callable[..., Path], replaced: str) -> None:
    done = trained(cluster, write(PARTS, replaced=replaced), slow_factors={1: 1.5})
    assert done.samples(0, 1) == EVERY_SAMPLE_ONCE_PER_EPOCH
    assert done.result.committed_samples == (NUM_SAMPLES,) * EPOCHS
    assert done.batches(0)
    assert done.batches(1)


def test_parts_are_shuffled_on_one_device_too(write: Callable[..., Path]) -> None:
    path = write(PARTS, replaced="dataset=lambda: Shards(SIZES, Part)")
    here(path).run(device="cpu")
    seen = [index for indices in Trained(path, []).batches(0) for index in indices]
    epochs = {tuple(seen[start : start + NUM_SAMPLES]) for start in range(0, EPOCHS * NUM_SAMPLES, NUM_SAMPLES)}
    assert len(epochs) > 1


def test_one_rank_and_one_process_train_alike(cluster: Cluster, write: Callable[..., Path]) -> None:
    lines = "def rare():\n    return [1 + index % 3 for index in range(NUM_SAMPLES)]"
    more = "sample_weights=rare, schedule=lambda progress: 1 - progress.fraction, max_grad_norm=0.5, accumulate=3"
    path = write(lines, replaced=f"{more}, max_steps=20")
    done = trained(cluster, path, num_ranks=1, averaging="blocking")
    num_batches = len(done.batches(0))
    state = here(path).run(device="cpu")
    assert done.batches(0)[:num_batches] == done.batches(0)[num_batches:]
    for name, tensor in load_file(done.result.model).items():
        assert torch.equal(state.params[name], tensor)


def test_a_loader_is_refused_before_anything_is_started(
    elche: Callable[..., Command], write: Callable[..., Path]
) -> None:
    replaced = "dataset=lambda: torch.utils.data.DataLoader(Points(), batch_size=4, shuffle=True)"
    done = elche("run", str(write(replaced=replaced)))
    assert done.code == 2
    assert "dataset() returned a DataLoader; return the data set itself" in done.complaint


# Models that change while they train


def test_a_buffer_that_the_first_forward_makes_is_resumed(cluster: Cluster, write: Callable[..., Path]) -> None:
    lazy = """
class Lazy(nn.Linear):
    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(1), persistent=False)
        return super().forward(x) * self.mask
"""
    path = write(lazy, replaced="model=lambda: Lazy(4, 1), checkpoint_every_epochs=1, epochs=1")
    trained(cluster, path, num_ranks=1)
    assert cluster.client.resume(cluster.client.jobs()[-1].job_id, epochs=2).result().epochs == 2


DRAWN_AT_RANDOM = """
import random

import numpy as np

AT_IMPORT = [float(torch.rand(())), float(np.random.rand()), random.random(), list({f"word {one}" for one in range(9)})]


def split():
    drawn = np.random.permutation(NUM_SAMPLES).tolist()
    note("drawn", AT_IMPORT, drawn, float(torch.rand(())), random.random())
    return drawn[:NUM_SAMPLES // 2], drawn[NUM_SAMPLES // 2:]


def eval_step(model, batch):
    note("evaluated", batch[2].tolist())
    return {"one": 1.0}
"""


def test_what_a_file_draws_at_random_is_alike_on_every_rank_and_of_one_split(
    cluster: Cluster, write: Callable[..., Path]
) -> None:
    """Ranks had other samples than each other, some in no data set and some in both, without a word."""
    parts = [f"torch.utils.data.Subset(Points(), split()[{one}])" for one in (0, 1)]
    replaced = f"dataset=lambda: {parts[0]}, eval_dataset=lambda: {parts[1]}, eval_step=eval_step"
    done = trained(cluster, write(DRAWN_AT_RANDOM, replaced=replaced))
    drawn = [values for rank in (0, 1) for values in done.noted("drawn", rank)]
    assert len(drawn) >= 4
    assert all(values == drawn[0] for values in drawn)
    assert done.samples(0, 1) == dict.fromkeys(drawn[0][1][: NUM_SAMPLES // 2], EPOCHS)
    evaluated = {index for rank in (0, 1) for (indices,) in done.noted("evaluated", rank) for index in indices}
    assert evaluated == set(drawn[0][1][NUM_SAMPLES // 2 :])

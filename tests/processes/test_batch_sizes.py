"""How many samples each device takes at once: given, by device, or as many as fit."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elche.errors import InvalidJob
from support.noting import EPOCHS, EVERY_SAMPLE_ONCE_PER_EPOCH, NUM_SAMPLES, Trained, here, log_of, trained
from support.real_processes import Cluster, Command


def test_each_device_has_its_batch_size_and_steps_count_in_the_jobs(
    cluster: Cluster, write: Callable[..., Path]
) -> None:
    done = trained(cluster, write(replaced="batch_size={'cpu': 8, 'RTX 3090': 256, '': 24}, drop_last=True"))
    assert {len(indices) for indices in done.batches(0, 1)} == {8}
    assert done.result.committed_samples == (192,) * EPOCHS  # 8 batches of 24
    assert max(done.samples(0, 1).values()) <= EPOCHS


def test_a_function_sees_the_device(write: Callable[..., Path]) -> None:
    path = write(replaced="batch_size=lambda device: 10 if device.device == 'cpu' else 1")
    here(path).run(device="cpu")
    assert {len(indices) for indices in Trained(path, []).batches(0)} == {10}


def test_a_device_that_is_not_named_is_told(elche: Callable[..., Command], write: Callable[..., Path]) -> None:
    done = elche("run", str(write(replaced="batch_size={'RTX 3090': 256}")), "--device", "cpu")
    assert done.code == 2
    assert 'batch_size names no part of "cpu"; give "" for all other devices: \'RTX 3090\'' in done.complaint


MEMORY = """
NUM_CALLS = 0


def limited(model, batch):
    global NUM_CALLS
    NUM_CALLS += 1
    if len(batch[0]) > 30 and NUM_CALLS > {after}:
        raise torch.OutOfMemoryError("it has room for 30 samples")
    return train_step(model, batch)
"""


def test_auto_finds_what_fits_before_training(cluster: Cluster, write: Callable[..., Path]) -> None:
    path = write(MEMORY.format(after=0), replaced="train_step=limited, batch_size='auto'")
    done = trained(cluster, path, num_ranks=1)
    assert done.batches(0)[0] == list(range(25)), "tried: 200 samples, 100, 50, and the first 25"
    assert done.samples(0) - Counter(range(25)) == EVERY_SAMPLE_ONCE_PER_EPOCH
    assert {len(indices) for indices in done.batches(0)} == {25}
    assert done.result.committed_samples == (NUM_SAMPLES,) * EPOCHS


def test_auto_backs_off_when_memory_becomes_short(cluster: Cluster, write: Callable[..., Path]) -> None:
    """The trial and the first batch fit; then a batch goes in parts, and nothing of it counts twice."""
    path = write(MEMORY.format(after=2), replaced="train_step=limited, batch_size='auto', seed=1, epochs=6")
    done = trained(cluster, path)
    assert done.result.committed_samples == (NUM_SAMPLES,) * 6
    for rank in (0, 1):
        sizes = [len(indices) for indices in done.batches(rank)]
        assert sizes[0] == 200  # the trial
        assert all(size <= 30 for size in sizes[2:])
    tried = Counter(dict.fromkeys(range(NUM_SAMPLES), 2))
    assert done.samples(0, 1) - tried == dict.fromkeys(range(NUM_SAMPLES), 6)
    assert "batches are split into 8 parts" in log_of(cluster, 0) + log_of(cluster, 1)


def test_a_batch_in_parts_makes_the_step_of_the_whole_batch(write: Callable[..., Path]) -> None:
    whole, parts = (
        here(write(MEMORY.format(after=after), replaced="train_step=limited, batch_size='auto', epochs=30")).run(
            device="cpu"
        )
        for after in (1000, 3)
    )
    for name, tensor in whole.params.items():
        torch.testing.assert_close(parts.params[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", ["{'': 'auto'}", "lambda device: 'auto'"])
def test_auto_for_one_kind_of_device_is_auto(write: Callable[..., Path], given: str) -> None:
    replaced = f"train_step=limited, batch_size={given}, epochs=2"
    here(write(MEMORY.format(after=0), replaced=replaced)).run(device="cpu")


def test_auto_is_refused_where_train_step_steps_itself(write: Callable[..., Path]) -> None:
    with pytest.raises(InvalidJob, match="batch_size 'auto' has no effect with manual_optimization: give a number"):
        here(write(replaced="manual_optimization=True, batch_size='auto'"))


def test_the_evaluation_keeps_to_what_fits(write: Callable[..., Path]) -> None:
    lines = "def eval_step(model, batch):\n    return {'loss': limited(model, batch)}"
    replaced = "train_step=limited, batch_size='auto', epochs=2, eval_dataset=Points, eval_step=eval_step"
    here(write(MEMORY.format(after=0), lines, replaced=replaced)).run(device="cpu")

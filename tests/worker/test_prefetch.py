"""How many batches may wait on the device, and what moves them where there is none."""

import pytest
import torch

from elche_worker.rank.prefetch import MAX_DEPTH, HostMover, new_mover, prefetch_depth
from elche_worker.rank.transfer import num_bytes, tensors_in

GB = 10**9


@pytest.mark.parametrize(
    ("usable", "peak", "batch", "depth"),
    [
        (10 * GB, None, GB, 0),  # not measured is not 0 bytes
        (10 * GB, 0, GB, 10),
        (10 * GB, 7.5 * GB, GB, 2),
        (10 * GB, 9.5 * GB, GB, 0),
        (10 * GB, 12 * GB, GB, 0),
        (10 * GB, GB, 1000, MAX_DEPTH),
        (10 * GB, GB, 0, 0),
    ],
)
def test_the_depth_is_what_training_leaves(usable: float, peak: int | None, batch: int, depth: int) -> None:
    assert prefetch_depth(usable_bytes=usable, peak_bytes=peak, batch_bytes=batch) == depth


def test_on_the_host_nothing_is_moved() -> None:
    mover = new_mover(torch.device("cpu"))
    assert isinstance(mover, HostMover)
    data = {"x": torch.ones(3), "name": "a"}
    moved, event = mover.move(data, 5)
    assert moved is data
    assert event is None
    assert mover.receive(data, None)["x"] is data["x"]


def test_bytes_of_a_nested_batch() -> None:
    batch = {"a": [torch.zeros(4), (torch.zeros(2, dtype=torch.int64), "text")], "b": 7}
    assert num_bytes(batch) == 16 + 16
    assert len(list(tensors_in(batch))) == 2

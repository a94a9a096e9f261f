"""How many samples a job trains."""

import pytest

from elche.extent import Extent


@pytest.mark.parametrize(
    ("drop_last", "max_steps", "sizes"),
    [
        (False, None, [25, 25]),
        (True, None, [20, 20]),
        (False, 1, [10]),
        (False, 3, [25, 5]),
        (False, 5, [25, 25]),
        (False, 6, [25, 25]),  # no more than its epochs
        (True, 9, [20, 20]),
    ],
)
def test_training_ends_with_its_epochs_or_its_steps_whichever_is_first(
    drop_last: bool, max_steps: int | None, sizes: list[int]
) -> None:
    extent = Extent(dataset_size=25, batch_size=10, epochs=2, drop_last=drop_last, max_steps=max_steps)
    assert extent.num_epochs == len(sizes)
    assert [extent.epoch_size(epoch) for epoch in range(3)] == [*sizes, 0, 0][:3]
    assert extent.total_samples == sum(sizes)

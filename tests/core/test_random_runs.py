"""Random jobs befallen by whatever can befall them (`make simulate` for more): each ends, with every sample once."""

import pytest

from support.disasters import random_run

NUM_SEEDS = 200
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, AT_ONCE))
def test_random_runs(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        run = random_run(seed)
        try:
            run.run()
        except Exception as error:
            pytest.fail(f"{run.describe()}\nseed {seed}: {type(error).__name__}: {error}")

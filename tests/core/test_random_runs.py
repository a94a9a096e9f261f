"""Random jobs befallen by whatever can befall them (`make simulate` for more): each ends, with every sample once."""

import pytest

from support.disasters import random_run

SEEDS = tuple(
    first + one
    for first in (10_000, 200_000, 10_000_000, 20_000_000, 40_000_000, 50_000_000)
    for one in range(20 if first > 10**6 else 50)
)
FOUND = {
    4102: "a round that ranks had made alone, unknown to a coordinator that let one of them go",
    4258: "granted rounds that were granted anew when somebody entered one of them",
    6955: "a round that waited was granted anew after its grants were taken back",
    7049: "a rank that was left out before the first group stood, of which the first round was to learn",
    8065: "ranks that left while the generation after one that was given up was built: it was never built again",
    23131: "a rank that was ended with the only result of a round had the version of those that went on",
    32598: "a granted round that a rank entered after it had given its grants back",
    70635: "rounds granted to a rank after it was asked to give its grants back, and before it answered",
    200050: "a checkpoint of a round that its writer had long left behind, with a later model: it has samples twice",
    200386: "ranks that left before the first round after a checkpoint: who was left had not loaded it",
    5000692: "a starting process, taken before the first round to go on alone with the initial model",
    5006252: "the first three deaths of a job, at random on the same samples, for which it may fail",
    5007845: "batches after the only round of a generation that is to be replaced, of which nothing was planned",
    5007189: "a finished epoch that was told again to the rank that was let go: its callback was awaited forever",
    5007055: "a job that went back with fewer ranks, whose checker looked for a version that only killed ranks had",
    10000254: "a rank that had written the last model and died, which was asked for the best one",
    10001587: "the late word of a dead rank that it has written the last model",
    10000640: "results after a round that was given up, forgotten when a rank died before all had said that it was",
    10001781: "a round that was given up in a pause, after which the next group was to take over",
    10001590: "a training that ended early while no rank had work, before the round that makes its final model",
    10003085: "a job that went back to the end of its own training, and had nothing to train",
    10021602: "a host that was drained no more after the last round, for which another round was announced",
    10013863: "ranks that died with the last work of a training that was to end early: no round made its final model",
    10006873: "two ranks that had trained together and could not meet any more",
    20011247: "a job that failed by the event after which another one asked for its slots, which became its error",
    20014751: "a rank that the simulator started on a host that was lost while the coordinator slept",
    10865: "deaths at random on the same samples, for which these were blamed",
}
"""Seeds beyond these that have found something."""
AT_ONCE = 10


def ends_well(seed: int) -> None:
    run = random_run(seed)
    try:
        run.run()
    except Exception as error:
        pytest.fail(f"{run.describe()}\nseed {seed}: {type(error).__name__}: {error}")


LONG = pytest.mark.long(reason="`make simulate` runs as many as one likes")


@pytest.mark.parametrize(
    "first",
    [first if index % 2 == 0 else pytest.param(first, marks=LONG) for index, first in enumerate(SEEDS[::AT_ONCE])],
)
def test_random_runs(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        ends_well(seed)


@pytest.mark.parametrize("seed", FOUND)
def test_runs_that_have_found_something(seed: int) -> None:
    ends_well(seed)

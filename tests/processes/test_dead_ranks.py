"""Ranks that die within a collective, as real processes: the others go on, and no sample is lost or counted twice."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elche_client.events import JobState
from support.real_processes import Cluster

pytestmark = pytest.mark.slow(reason="each job starts a rank anew, which loads PyTorch")

JobFile = Callable[..., Path]
REPLACE = "import dataclasses\njob = dataclasses.replace(job, averaging={!r}, outer_optimizer='nesterov', max_anchor=3)"

DIE = """
import signal
import elche_worker.collectives.reduction as reduction

MARK = NOTES.with_name("died")

def dying(self, group, *given, count=[0], before=reduction.Reduction._average, **more):
    count[0] += 1
    if os.environ["ELCHE_RANK"] == "1" and count[0] == 4 and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return before(self, group, *given, **more)

reduction.Reduction._average = dying
"""


@pytest.mark.parametrize(("backend", "averaging"), [("gloo", "overlapped"), ("cpu", "blocking")])
def test_a_rank_that_dies_in_an_averaging_is_left_out_and_replaced(
    cluster: Cluster, job_file: JobFile, backend: str, averaging: str
) -> None:
    """`verify_rounds` compares parameters after each round, for which the outer optimizers must be equal, too."""
    path = job_file("linear.py", REPLACE.format(averaging), DIE)
    result = cluster.client.submit(path, num_ranks=3, backend=backend, verify_rounds=True).result()
    assert path.with_name("died").exists()
    assert result.state is JobState.SUCCEEDED
    assert result.committed_samples == (500,) * 3

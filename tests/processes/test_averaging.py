"""Every way to average, on real processes: one result on all ranks, every sample once, and a model that has learnt."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elche.errors import JobFailed
from elche_client.events import JobState, UserEvent
from support.real_processes import Cluster

JobFile = Callable[..., Path]
NUM_SAMPLES = 500  # of jobs/linear.py
REPLACE = "import dataclasses\nfrom elche_worker.outer import SGD, Nesterov\njob = dataclasses.replace(job, {})"


@pytest.mark.parametrize(
    "how",
    [
        "averaging='overlapped', num_workers=2, compress='auto'",
        "averaging='overlapped', compress='int8', outer_optimizer=Nesterov(lr=0.5, momentum=0.5), merge='adascale'",
        "compress='bf16', outer_optimizer=SGD(lr=0.9), max_grad_norm=10.0, lr_scale_ratio=0.1, weighting='uniform', "
        "schedule=lambda progress: 1.0 if progress.step < 20 else 0.5",
    ],
)
def test_a_job_averages_as_it_says(cluster: Cluster, job_file: JobFile, how: str) -> None:
    path = job_file("linear.py", REPLACE.format(f"epochs=6, {how}"))
    result = cluster.client.submit(path, num_ranks=2, verify_rounds=True, slow_factors={1: 2.0}).result()
    assert result.state is JobState.SUCCEEDED
    assert result.committed_samples == (NUM_SAMPLES,) * 6
    trained = [int(i) for rank in (0, 1) for i in path.with_suffix(f".rank-{rank}").read_text().split()]
    assert sorted(trained) == sorted(list(range(NUM_SAMPLES)) * 6)
    assert result.metrics["mse"] < 6.0  # 8 before training; how many rounds there are depends on the machine's load


POISON = """
def train_step(model, batch, before=train_step, count=[0]):
    count[0] += 1
    if os.environ["ELCHE_RANK"] == "1" and count[0] == 5:
        with torch.no_grad():
            model.weight.fill_(float("nan"))
    return before(model, batch)
"""


def test_parameters_that_are_not_finite_fail_the_job_by_name(cluster: Cluster, job_file: JobFile) -> None:
    path = job_file("linear.py", POISON, REPLACE.format("train_step=train_step"))
    with pytest.raises(JobFailed, match="the parameters of rank 1 are not finite"):
        cluster.client.submit(path, num_ranks=2).result()


def test_a_rank_that_is_not_finite_is_skipped_and_goes_on(cluster: Cluster, job_file: JobFile) -> None:
    path = job_file("linear.py", POISON, REPLACE.format("epochs=6, train_step=train_step, nonfinite='skip'"))
    result = cluster.client.submit(path, num_ranks=2, verify_rounds=True).result()
    assert result.committed_samples == (NUM_SAMPLES,) * 6
    assert 0 < result.discarded_samples < 3 * NUM_SAMPLES  # as many as the rank makes until it has the result
    assert result.metrics["mse"] < 4.0


WRONG = """
import time

from elche_worker import this_rank

rounds = []


def train_step(model, batch, before=train_step):
    if os.environ["ELCHE_RANK"] == "1" and this_rank().epoch >= 2 and len(rounds) >= 12 and "wrong" not in rounds:
        rounds.append("wrong")
        with torch.no_grad():
            model.weight[0, 0] = 1e6
    # Longer than an averaging on a busy machine: else there are too few rounds.
    time.sleep(0.1 if this_rank().epoch >= 8 and len(rounds) < 30 else 0.01)
    return before(model, batch)
"""


def test_a_device_that_computes_wrong_after_a_resume_is_left_out(cluster: Cluster, job_file: JobFile) -> None:
    """One number of one rank becomes a million. The job ends as if nothing had been, and says whose it was."""
    how = "epochs=20, max_anchor=1, train_step=train_step, after_round=lambda *_: rounds.append(None)"
    path = job_file("linear.py", WRONG, REPLACE.format(how))
    first = cluster.client.submit(path, num_ranks=2, epochs=2, checkpoint_every_epochs=1, verify_rounds=True)
    assert first.result().metrics["mse"] < 20.0
    handle = cluster.client.resume(first.id, epochs=20)
    # Not that a rank has had little of its share, which may be said on a busy machine.
    left_out = [
        report.rank
        for report in handle.watch()
        if isinstance(report, UserEvent) and "left out of the average" in report.text
    ]
    result = handle.result()
    assert left_out in ([1], [1, 1])  # a round may be entered before the rank has the result
    assert result.committed_samples == (NUM_SAMPLES,) * 20
    assert 0 < result.discarded_samples < 3 * NUM_SAMPLES, "of a round or two, which are long on a busy machine"
    assert result.metrics["mse"] < 4.0

"""Every policy with every backend that runs without a GPU, on real processes; one word changes it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elche.errors import InvalidJob, JobFailed
from elche_client.events import JobState, JobView, RoundReport
from support.real_processes import Cluster, Command

JobFile = Callable[..., Path]
NUM_SAMPLES, EPOCHS = 500, 3  # of jobs/linear.py
REPLACE = "import dataclasses\nfrom elche_worker.outer import Nesterov\njob = dataclasses.replace(job, {})"


def train_and_check(cluster: Cluster, path: Path, **options: object) -> bytes:
    """Trains on two unequal ranks, equal after every round, each sample once; returns the model file."""
    job = cluster.client.submit(path, num_ranks=2, verify_rounds=True, slow_factors={1: 2.0}, **options)  # type: ignore[arg-type]
    result = job.result()
    assert result.state is JobState.SUCCEEDED
    assert result.committed_samples == (NUM_SAMPLES,) * EPOCHS
    trained = [int(i) for rank in (0, 1) for i in path.with_suffix(f".rank-{rank}").read_text().split()]
    assert sorted(trained) == sorted(list(range(NUM_SAMPLES)) * EPOCHS)
    for rank in (0, 1):
        path.with_suffix(f".rank-{rank}").unlink()
    return Path(result.model).read_bytes()


def test_both_backends_make_the_same_model_bit_for_bit(cluster: Cluster, job_file: JobFile) -> None:
    """Under `sync` the rounds do not depend on time, so that nothing but the way differs."""
    path = job_file()
    models = {
        train_and_check(cluster, path, policy="sync", anchor=None, backend=backend) for backend in ("gloo", "cpu")
    }
    assert len(models) == 1


@pytest.mark.parametrize(
    "how",
    [
        "averaging='overlapped', compress='int8', outer_optimizer=Nesterov(lr=0.5, momentum=0.5)",
        "averaging='overlapped', policy='async', compress='bf16', weighting='uniform', merge='adascale'",
    ],
)
def test_all_ways_to_average_go_through_the_coordinator_too(cluster: Cluster, job_file: JobFile, how: str) -> None:
    train_and_check(cluster, job_file("linear.py", REPLACE.format(how)), backend="cpu")


def test_every_kind_of_tensor_goes_through_the_coordinator(cluster: Cluster, job_file: JobFile) -> None:
    result = cluster.client.submit(job_file("zoo.py"), num_ranks=3, verify_rounds=True, backend="cpu").result()
    assert result.state is JobState.SUCCEEDED


@pytest.mark.parametrize("policy", ["average", "from_source", "local"])
def test_policies_for_buffers_and_optimizer_state(cluster: Cluster, job_file: JobFile, policy: str) -> None:
    how = f"buffers={policy!r}, optimizer_state={policy!r}, averaging='overlapped'"
    result = cluster.client.submit(job_file("zoo.py", REPLACE.format(how)), num_ranks=2, verify_rounds=True).result()
    assert result.state is JobState.SUCCEEDED


def test_the_choice_is_told_with_its_reason(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file(), num_ranks=2)
    views = [event for event in job.watch() if isinstance(event, JobView)]
    assert views[-1].backend == "gloo (rank 0 is on cpu)"


BREAK = """
import elche_worker.collectives.relay as relay

def broken(self, tensor, count=[0], before=relay.Relay.all_reduce):
    count[0] += 1
    if os.environ["ELCHE_RANK"] == "1" and count[0] in BROKEN:
        self._answers.cancel()
    before(self, tensor)

relay.Relay.all_reduce = broken
"""


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_a_round_whose_stream_breaks_is_given_up_and_its_work_goes_into_the_next(
    cluster: Cluster, job_file: JobFile, averaging: str
) -> None:
    how = f"averaging={averaging!r}, outer_optimizer=Nesterov(lr=0.5, momentum=0.5)"
    path = job_file("linear.py", REPLACE.format(how), "BROKEN = (1, 3, 4)", BREAK)
    train_and_check(cluster, path, backend="cpu")


def test_a_stream_that_breaks_before_its_last_answer_asks_how_the_round_ended(
    cluster: Cluster, job_file: JobFile
) -> None:
    cut = """
import elche_worker.collectives.relay as relay

def broken(self, part, before=relay.Relay._send):
    before(self, part)
    if part.operation == relay.averaging_pb2.OPERATION_FINISH and os.environ["ELCHE_RANK"] == "1":
        time.sleep(0.05)  # so that it has been sent
        self._answers.cancel()

relay.Relay._send = broken
"""
    train_and_check(cluster, job_file("linear.py", cut), backend="cpu")


@pytest.mark.long(reason="a job is failed only after half a minute of broken rounds")
def test_rounds_that_always_break_fail_the_job(cluster: Cluster, job_file: JobFile) -> None:
    path = job_file("linear.py", "BROKEN = range(100_000)", BREAK)
    with pytest.raises(JobFailed, match=r"averagings in a row, over 3. s, were given up, the last one because"):
        cluster.client.submit(path, num_ranks=2, backend="cpu").result()


def test_a_rank_is_not_too_far_ahead_of_the_slowest(cluster: Cluster, job_file: JobFile) -> None:
    path = job_file("linear.py", REPLACE.format("max_batch_diff=2, anchor=8, epochs=1, batch_size=4"))
    events = list(cluster.client.submit(path, num_ranks=2, slow_factors={1: 6.0}).watch())
    counts = [event.rank_batches for event in events if isinstance(event, RoundReport)]
    early = counts[:-2]  # the last of 125 batches are left to who still has work
    assert any(slow > 1 for _, slow in early), counts
    assert all(fast - slow <= 2 for fast, slow in early), counts


def test_models_that_differ_are_named(cluster: Cluster, job_file: JobFile) -> None:
    other = 'def model():\n    return nn.Linear(8, 1 + int(os.environ["ELCHE_RANK"]))'
    path = job_file("linear.py", other, REPLACE.format("model=model"))
    with pytest.raises(
        JobFailed, match=r"rank \d has weight float32 \(\d, 8\) averaged, and rank \d has weight"
    ) as told:
        cluster.client.submit(path, num_ranks=2).result()
    assert told.value.invalid


def test_nccl_without_gpus_is_refused(cluster: Cluster, elche: Callable[..., Command], job_file: JobFile) -> None:
    path = job_file()
    with pytest.raises(JobFailed, match="backend 'nccl' cannot work here: rank 0 is on cpu; use 'gloo', or 'auto'"):
        cluster.client.submit(path, num_ranks=2, backend="nccl").result()
    with pytest.raises(InvalidJob, match="backend must be one of auto, nccl, gloo, cpu, not 'mpi'"):
        cluster.client.submit(path, num_ranks=2, backend="mpi")
    done = elche("run", str(path), "--ranks", "2", "--device", "cpu", "--backend", "nccl")
    assert done.code == 2
    assert "nccl" in done.complaint

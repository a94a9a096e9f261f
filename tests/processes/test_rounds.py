"""What ranks hold after rounds: the same bits, whatever the model is made of."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elche_client.events import EpochReport, JobState
from elche_worker.model.state import load_state
from elche_worker.user.loading import load_job
from support.real_processes import Cluster

JobFile = Callable[..., Path]
NUM_SAMPLES, BATCH_SIZE, EPOCHS = 330, 8, 2  # of jobs/zoo.py
KEPT = NUM_SAMPLES // BATCH_SIZE * BATCH_SIZE


@pytest.mark.parametrize(("policy", "num_ranks"), [("cadence", 3), ("async", 2), ("sync", 2)])
def test_all_kinds_of_tensors_stay_equal(cluster: Cluster, job_file: JobFile, policy: str, num_ranks: int) -> None:
    path = job_file("zoo.py")
    slow = {num_ranks - 1: 3.0}
    job = cluster.client.submit(
        path, num_ranks=num_ranks, policy=policy, anchor=None, verify_rounds=True, slow_factors=slow
    )
    events = list(job.watch())
    result = events[-1]
    assert result.state is JobState.SUCCEEDED, result
    assert result.committed_samples == (KEPT,) * EPOCHS
    assert result.dropped_samples == (NUM_SAMPLES - KEPT,) * EPOCHS
    epochs = [event for event in events if isinstance(event, EpochReport)]
    assert [(report.committed, report.dropped) for report in epochs] == [(KEPT, NUM_SAMPLES - KEPT)] * EPOCHS

    lines = [path.with_suffix(f".rank-{rank}").read_text().split() for rank in range(num_ranks)]
    seen = Counter(int(index) for rank in lines for index in rank)
    assert sum(seen.values()) == KEPT * EPOCHS
    assert max(seen.values()) <= EPOCHS
    assert set(seen) <= set(range(NUM_SAMPLES))

    user_job = load_job(path.read_text(), str(path))
    model = user_job.model()
    frozen_before = [parameter.clone() for parameter in user_job.model().frozen.parameters()]
    load_state(model, result.model)
    assert model.first.weight is model.second.weight
    assert model.coarse.weight.dtype is torch.bfloat16
    assert [p.shape for p in model.frozen.parameters()] == [p.shape for p in frozen_before]
    assert user_job.evaluate is not None
    assert user_job.evaluate(model) == pytest.approx(dict(result.metrics), rel=1e-6)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_a_data_set_smaller_than_one_batch_for_each_rank(cluster: Cluster, job_file: JobFile) -> None:
    lines = "NUM_SAMPLES = 3", "import dataclasses", "job = dataclasses.replace(job, batch_size=2)"
    result = cluster.client.submit(job_file("linear.py", *lines), num_ranks=2, verify_rounds=True).result()
    assert result.committed_samples == (3, 3, 3)
    assert sum(rank.batches for rank in result.ranks) == 6


NOTE_STATE = """
def train_step(model, batch, before=train_step):
    import hashlib
    held = b"".join(bytes(t.detach().contiguous().numpy().tobytes()) for t in model.state_dict().values())
    with Path(__file__).with_suffix(f".state-{os.environ['ELCHE_RANK']}").open("a") as notes:
        notes.write(hashlib.sha256(held).hexdigest() + "\\n")
    return before(model, batch)
"""
REASSIGNED_BUFFER = """
class Averaging(nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0).detach()
        return super().forward(x)
"""
REASSIGNED_DATA = """
class Replacing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.05 * parameter.grad
"""
REPLACED = """
import dataclasses
job = dataclasses.replace(
    job, train_step=train_step, epochs=1, policy="sync", anchor=None, model=Averaging,
    optimizer=lambda model: Replacing(model.parameters(), lr=0.05),
)
"""


def test_a_buffer_that_the_model_replaces_and_data_that_the_optimizer_replaces_are_equal_too(
    cluster: Cluster, job_file: JobFile
) -> None:
    """Under `sync` every batch begins with what a round left: both ranks note the same states, one after the other."""
    path = job_file("linear.py", NOTE_STATE, REASSIGNED_BUFFER, REASSIGNED_DATA, REPLACED)
    result = cluster.client.submit(path, num_ranks=2, verify_rounds=True).result()
    assert result.state is JobState.SUCCEEDED
    noted = [path.with_suffix(f".state-{rank}").read_text().split() for rank in (0, 1)]
    fewest = min(len(states) for states in noted)
    assert fewest > 10
    assert noted[0][:fewest] == noted[1][:fewest]

"""A rank's parts without a coordinator: a small job, built as a rank process builds it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elche.extent import Extent
from elche_worker import TrainingJob
from elche_worker.data.dataset import Shuffled
from elche_worker.data.lease_loader import LeaseLoader
from elche_worker.model.layout import Layout
from elche_worker.model.own_state import build_own_state
from elche_worker.model.step import build_model
from elche_worker.rank.parts import Parts
from elche_worker.rank.replica_group import ReplicaGroup
from elche_worker.session.launch import Launch

CPU = torch.device("cpu")
SIZE, BATCH_SIZE = 400, 4


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0)), torch.ones(SIZE, 1))


JOB = TrainingJob(
    model=lambda: nn.Linear(3, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    dataset=dataset,
    train_step=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    batch_size=BATCH_SIZE,
    epochs=2,
)


@contextmanager
def parts_of(job: TrainingJob, wake: Callable[[], None]) -> Iterator[Parts]:
    """What a rank trains with; `wake` is called when a batch is there."""
    built = build_model(job, CPU, "train.py")
    layout = Layout(built.model, built.all_optimizers, buffers=job.buffers, optimizer_state=job.optimizer_state)
    samples: Any = job.dataset()
    loader = LeaseLoader(samples, order=Shuffled(SIZE, 0), batch_size=BATCH_SIZE, collate_fn=job.collate_fn, wake=wake)
    yield Parts(
        built=built,
        layout=layout,
        dataset=samples,
        loader=loader,
        extent=Extent(dataset_size=SIZE, batch_size=BATCH_SIZE, epochs=job.epochs),
        group=ReplicaGroup(),
        batch_size=BATCH_SIZE,
        own_state=build_own_state(job, built.model, "train.py"),
    )
    loader.stop()


def launch(folder: Path, rank: int = 0) -> Launch:
    """As an agent says it."""
    return Launch(
        coordinator="127.0.0.1:1",
        secret="",
        job_id="job",
        rank=rank,
        device="cpu",
        label="cpu",
        source="",
        file_name="train.py",
        output_dir=str(folder),
    )

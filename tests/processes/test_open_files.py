"""Files that a job's own code opens, reads and leaves open."""

from collections.abc import Callable
from pathlib import Path

from support.real_processes import Command

WRITES = """
import atexit
import os

import torch
from torch.utils.data import TensorDataset

from elche_worker import TrainingJob

PATH = f"{__file__}.{os.environ.get('ELCHE_RANK', 'checked')}"
table = open(f"{PATH}.csv", "w")
binary = open(f"{PATH}.bin", "wb")
atexit.register(lambda: open(f"{PATH}.end", "w").write("over"))


def train_step(model, batch):
    table.write("a row\\n")
    binary.write(b"x")
    return model(batch[0]).square().mean()


job = TrainingJob(
    model=lambda: torch.nn.Linear(1, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    dataset=lambda: TensorDataset(torch.arange(400.0)[:, None] / 400),
    train_step=train_step,
    batch_size=10,
    epochs=2,
)
"""


def test_what_a_job_writes_to_a_file_that_it_leaves_open_is_in_it(
    elche: Callable[..., Command], tmp_path: Path
) -> None:
    """And its handlers at exit have run, in which trackers and libraries write their last figures."""
    path = tmp_path / "train.py"
    path.write_text(WRITES)
    done = elche("run", str(path), "--ranks", "2", "--device", "cpu")
    assert done.code == 0, done.err
    rows = [(tmp_path / f"train.py.{rank}.csv").read_text() for rank in range(2)]
    assert {row for one in rows for row in one.splitlines()} == {"a row"}
    assert sum(one.count("\n") for one in rows) == 2 * 40
    assert sum(len((tmp_path / f"train.py.{rank}.bin").read_bytes()) for rank in range(2)) == 2 * 40
    assert [(tmp_path / f"train.py.{rank}.end").read_text() for rank in range(2)] == ["over"] * 2


READS = """
import os
from pathlib import Path

import torch

from elche_worker import TrainingJob

BYTES = Path(f"{__file__}.data")


class OfFile(torch.utils.data.Dataset):
    \"\"\"Opens its file at the first access, so that each process has its own.\"\"\"

    file = None

    def __len__(self):
        return 256

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(BYTES, "rb", buffering=0)
            self.opened_by = os.getpid()
        assert self.opened_by == os.getpid(), "a file that another process has open, too"
        self.file.seek(index)
        return torch.tensor(float(self.file.read(1)[0] == index))


def train_step(model, batch):
    assert batch.all()
    return model(batch[:, None]).square().mean()


job = TrainingJob(
    model=lambda: torch.nn.Linear(1, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    dataset=OfFile,
    train_step=train_step,
    batch_size="auto",
    num_workers=2,
    epochs=2,
)
"""


def test_a_batch_size_that_is_tried_opens_no_file_for_worker_processes(
    elche: Callable[..., Command], tmp_path: Path
) -> None:
    """They would share its position, and read each other's samples."""
    path = tmp_path / "train.py"
    path.write_text(READS)
    (tmp_path / "train.py.data").write_bytes(bytes(range(256)))
    done = elche("run", str(path), "--ranks", "1", "--device", "cpu")
    assert done.code == 0, done.err

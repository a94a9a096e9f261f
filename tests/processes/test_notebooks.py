"""A job that is defined in a notebook's cell trains on local ranks, shows how far it is, and says what is wrong."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from elche.notebook import progress_html

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elche_worker import TrainingJob

def dataset():
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))

def train_step(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)

job = TrainingJob(
    model=lambda: nn.Linear(8, 1),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    dataset=dataset,
    train_step=train_step,
    batch_size=16,
    epochs=3,
)
handle = job.start(ranks=2, device="cpu")
handle
"""
JOIN = """
import threading
state = handle.join()
for thread in threading.enumerate():
    if thread.name == "progress in a notebook":
        thread.join()
print(type(state).__name__)
"""


def run(folder: Path, *cells: str) -> list[list[dict[str, Any]]]:
    """The outputs of the cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", allow_errors=True, resources=place).execute()
    return [cell["outputs"] for cell in notebook.cells]


MINE = JOB.replace("job = Tr", "mine = Tr").replace("job.start", "mine.start")


@pytest.mark.gate
def test_a_cell_that_ranks_cannot_run_gets_one_clear_error_and_a_job_in_one_trains_and_shows_its_progress(
    tmp_path: Path,
) -> None:
    imports, between, rest = JOB.partition("def dataset")
    unnamed, _, split, shown, joined = run(tmp_path, MINE, imports, between + rest, JOB, JOIN)
    for outputs, mend in ((split, "which another one defines"), (unnamed, "defines no `job`")):
        (error,) = [one for one in outputs if one["output_type"] == "error"]
        assert error["ename"] == "InvalidJob"
        assert mend in error["evalue"]
        assert "%%writefile train.py" in error["evalue"]
    (display,) = [one for one in shown if one["output_type"] == "display_data"]
    html = display["data"]["text/html"]
    assert "succeeded" in html
    assert html.count("ms/batch") == 2
    assert "value='1.0000'" in html
    assert [one["text"] for one in joined] == ["TrainedState\n"]


def test_what_a_job_is_called_is_text() -> None:
    view = {"name": "<script>", "state": "training", "dataset_size": 100, "num_epochs": 2, "epoch": 1, "loss": 0.25}
    html = progress_html({**view, "epoch_committed": 50})
    assert "<script>" not in html
    assert "value='0.7500'" in html
    assert "loss 0.25" in html

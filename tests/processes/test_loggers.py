"""Trackers get every epoch that the coordinator has committed: one run for a job, each epoch once."""

import json
import runpy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elche.errors import InvalidJob
from elche_client.events import EpochReport
from elche_worker import EpochMetrics, TensorBoard, TrainingJob
from elche_worker.user.loggers import Loggers, values_of
from support.real_processes import Cluster

JobFile = Callable[..., Path]
EPOCHS = 4
METRICS = EpochMetrics(
    epoch=2, loss=0.5, scalars={"a": 1.0}, metrics={"b": 2.0}, duration_s=1, samples=9, samples_per_s=9
)

NOTING = """
import json
class Noting:
    def __init__(self, path, fails=()):
        self.path, self.fails = path, fails
    def note(self, *what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\\n")
        if what[0] in self.fails:
            raise OSError(f"no {what[0]}")
    def begin(self, job): self.note("begin", job)
    def log(self, step, values): self.note("log", step, dict(values))
    def end(self): self.note("end")
"""


def replaced(loggers: str) -> str:
    return f"import dataclasses\njob = dataclasses.replace(job, loggers=[{loggers}])"


def trained(cluster: Cluster, path: Path, *, num_ranks: int = 1) -> tuple[str, list[EpochReport], int]:
    """(job id, epochs as watchers were told, callback errors on rank 0)"""
    job = cluster.client.submit(path, num_ranks=num_ranks, epochs=EPOCHS)
    epochs = [event for event in job.watch() if isinstance(event, EpochReport)]
    job.result()
    (view,) = [view for view in cluster.client.jobs() if view.job_id == job.id]
    return job.id, epochs, view.ranks[0].callback_errors


def test_every_epoch_is_logged_once_in_one_run(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    path = job_file("linear.py", NOTING, replaced(f"Noting({str(tmp_path / 'noted')!r})"))
    job_id, epochs, num_errors = trained(cluster, path, num_ranks=2)
    noted = [json.loads(line) for line in (tmp_path / "noted").read_text().splitlines()]
    assert noted[0] == ["begin", job_id]
    assert noted[-1] == ["end"]
    logged = noted[1:-1]
    assert [(what, step) for what, step, _ in logged] == [("log", step) for step in range(1, EPOCHS + 1)]
    assert [values["train/loss"] for _, _, values in logged] == pytest.approx([report.loss for report in epochs])
    assert all(values["batches/rank_0"] + values["batches/rank_1"] > 0 for _, _, values in logged)
    assert all(values["speed/rank_0"] + values["speed/rank_1"] > 0 for _, _, values in logged)
    assert "eval/mse" in logged[0][2]
    assert num_errors == 0


def test_a_logger_that_raises_is_counted_and_the_others_go_on(
    cluster: Cluster, job_file: JobFile, tmp_path: Path
) -> None:
    good, bad, worse = (str(tmp_path / name) for name in ("good", "bad", "worse"))
    loggers = f"Noting({bad!r}, ['begin']), Noting({worse!r}, ['log', 'end']), Noting({good!r})"
    _, _, num_errors = trained(cluster, job_file("linear.py", NOTING, replaced(loggers)))
    assert len((tmp_path / "good").read_text().splitlines()) == EPOCHS + 2
    assert len((tmp_path / "bad").read_text().splitlines()) == 1
    assert num_errors == 1 + EPOCHS + 1, "begin of one; every epoch and the end of another"


def test_tensorboard_reads_what_was_written(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = f"elche_worker.TensorBoard({str(tmp_path / 'boards')!r})"
    job_id, epochs, _ = trained(cluster, job_file("linear.py", "import elche_worker", replaced(loggers)))
    assert [folder.name for folder in (tmp_path / "boards").iterdir()] == [job_id]
    board = EventAccumulator(str(tmp_path / "boards" / job_id))
    board.Reload()
    losses = board.Scalars("train/loss")
    assert [one.step for one in losses] == list(range(1, EPOCHS + 1))
    assert [one.value for one in losses] == pytest.approx([report.loss for report in epochs])


def test_mlflow_has_one_finished_run(
    cluster: Cluster, job_file: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path / 'mlruns'}"
    allow = "import os; os.environ['MLFLOW_ALLOW_FILE_STORE'] = 'true'"
    loggers = f"elche_worker.MLflow('points', {uri!r})"
    job_id, epochs, _ = trained(cluster, job_file("linear.py", allow, "import elche_worker", replaced(loggers)))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("points")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (job_id, "FINISHED")
    history = sorted(client.get_metric_history(run.info.run_id, "train/loss"), key=lambda one: one.step)
    assert [one.value for one in history] == pytest.approx([report.loss for report in epochs])


def test_wandb_has_one_finished_run(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    options = {"mode": "offline", "dir": str(tmp_path)}
    loggers = f"elche_worker.WandB('points', {options!r})"
    job_id, _, num_errors = trained(cluster, job_file("linear.py", "import elche_worker", replaced(loggers)))
    assert num_errors == 0
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert run.name.endswith(job_id)
    assert any(run.glob("*.wandb"))


def test_alone_they_are_called_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELCHE_RANK", "0")
    source = (Path(__file__).parent / "jobs" / "linear.py").read_text(encoding="utf-8")
    path = tmp_path / "alone.py"
    path.write_text("\n".join([source, NOTING, replaced("Noting('noted')")]))
    runpy.run_path(str(path))["job"].run(device="cpu")
    noted = [json.loads(line)[0] for line in (tmp_path / "noted").read_text().splitlines()]
    assert noted[0] == "begin"
    assert noted[-1] == "end"
    assert set(noted[1:-1]) == {"log"}


def test_names_group_the_figures() -> None:
    names = ["train/loss", "train/a", "eval/b", "speed/samples_per_s", "speed/epoch_s", "attempt"]
    assert list(values_of(METRICS)) == names


def test_a_tracker_that_never_answers_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    answers = threading.Event()

    class Stuck:
        def begin(self, job: str) -> None:
            answers.wait()

        def log(self, step: int, values: object) -> None: ...

        def end(self) -> None: ...

    loggers = Loggers([Stuck()], "job")
    loggers.log(METRICS)
    loggers.end(timeout_s=0.05)
    answers.set()
    assert "the loggers have not ended in 0.05 s and are not waited for" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [[1], TensorBoard(), ["tensorboard"], None])
def test_what_is_no_logger_is_refused(bad: object) -> None:
    with pytest.raises(InvalidJob, match="loggers must be a list"):
        TrainingJob(
            model=lambda: None,  # type: ignore[arg-type,return-value]
            optimizer=lambda model: None,  # type: ignore[arg-type,return-value]
            dataset=list,
            train_step=lambda model, batch: None,  # type: ignore[arg-type,return-value]
            batch_size=1,
            epochs=1,
            loggers=bad,  # type: ignore[arg-type]
        )

"""Training in a coordinator and local ranks, controlled through a handle."""

import ast
import atexit
import builtins
import inspect
import json
import linecache
import queue
import shutil
import signal
import subprocess
import symtable
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from elche.errors import InvalidJob, JobFailed
from elche.notebook import EVERY_S, show_live
from elche.settings import SETTINGS
from elche_worker.device.rng import seed_all
from elche_worker.model.state import TrainedState, load_state
from elche_worker.run.same_job import check_is_of_file, innermost
from elche_worker.user.callbacks import EpochMetrics
from elche_worker.user.job import JobDefinition


class Handle:
    """A running training. Its metrics come epoch by epoch; `join` waits for its model."""

    def __init__(self, job: JobDefinition, arguments: list[str]) -> None:
        self._job = job
        self._process = subprocess.Popen(
            # With -P, since `-m` would import from the working directory first, such as a user's own queue.py.
            [sys.executable, "-P", "-m", "elche_client", "run", "--events", "--no-logs", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Otherwise Ctrl-C would reach it as well, and `cancel` be a second signal, which ends it without a
            # checkpoint.
            start_new_session=True,
        )
        self._metrics: queue.Queue[EpochMetrics | None] = queue.Queue()
        self._is_over = False
        self._is_cancelled = False
        self._started = threading.Event()
        self._devices: tuple[str, ...] = ()
        self._epochs: dict[int, dict[str, Any]] = {}
        """Epochs whose evaluation was not received yet."""
        self._result: dict[str, Any] | None = None
        self._view: dict[str, Any] | None = None
        """The newest view."""
        self._errors: list[str] = []
        # One for each pipe: the process would stand still once one of them is full.
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank; waits until the ranks are placed. Empty if they never were."""
        self._started.wait()
        return self._devices

    @property
    def world_size(self) -> int:
        """Number of ranks; waits until they are placed."""
        return len(self.devices)

    def poll_metrics(self) -> EpochMetrics | None:
        """The next finished epoch, or None if there is none yet. Does not block."""
        try:
            return self._take(self._metrics.get_nowait())
        except queue.Empty:
            return None

    def next_metrics(self) -> EpochMetrics | None:
        """The next finished epoch; waits for it. None when training is over."""
        return None if self._is_over else self._take(self._metrics.get())

    def cancel(self) -> None:
        """Ends the training after a checkpoint. `join` then raises `JobFailed`, unless it had succeeded before."""
        if not self._is_cancelled and self._process.poll() is None:
            self._is_cancelled = True  # a second signal would end it without a checkpoint
            self._process.send_signal(signal.SIGINT)

    def join(self) -> TrainedState:
        """Waits for the end and returns the trained state. Raises `JobFailed`, with the user's traceback, unless it
        succeeded; and `InvalidJob` if frozen parameters were left out (`save_frozen=False`) and `model()` makes
        different ones.
        """
        self._process.wait()
        for thread in self._threads:
            thread.join()
        result = self._result or {
            "state": "failed",
            "error": "".join(self._errors[-1:]).strip() or "it ended without reporting a result",
        }
        if result["state"] != "succeeded":
            message = result.get("error") or f"the training was {result['state']}"
            raise JobFailed(message, traceback=result.get("traceback", ""))
        if not self._job.save_frozen:
            seed_all(self._job.seed)  # as the ranks do: parameters that the file leaves out may be random
        model = self._job.model()
        load_state(model, result["model"])
        return TrainedState.of(model)

    def _ipython_display_(self) -> None:
        """Shows live progress in a notebook."""
        show_live(self._views())

    def _views(self) -> Iterator[dict[str, Any]]:
        """Yields the newest view at intervals until the process has ended; the last one has the result's state."""
        is_over = False
        while not is_over:
            # Looked at first: whatever has come until the end is then yielded below.
            is_over = self._process.poll() is not None and not self._threads[0].is_alive()
            view, result = self._view, self._result
            if view is not None:
                yield view if result is None else {**view, "state": result["state"]}
            if not is_over:
                time.sleep(EVERY_S)

    def _take(self, metrics: EpochMetrics | None) -> EpochMetrics | None:
        self._is_over = metrics is None
        return metrics

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._note(json.loads(line))
        self._started.set()
        self._metrics.put(None)

    def _note(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "view":
            self._view = event
        match kind:
            case "view" if event["ranks"] and not self._started.is_set():
                self._devices = tuple(rank["device"] for rank in event["ranks"])
                self._started.set()
            case "epoch":
                self._add_epoch(event)
            # the final model's evaluation may be in the middle of an epoch, which is not reported
            case "evaluation" if event["epoch"] in self._epochs:
                self._put(self._epochs.pop(event["epoch"]), event["metrics"])
            case "result":
                self._result = event

    def _add_epoch(self, epoch: dict[str, Any]) -> None:
        if self._job.has_evaluation:
            self._epochs[epoch["epoch"]] = epoch
        else:
            self._put(epoch, {})

    def _put(self, epoch: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        duration_s = epoch["duration_s"]
        self._metrics.put(
            EpochMetrics(
                epoch=epoch["epoch"],
                loss=epoch["loss"],
                scalars=dict(epoch["scalars"]),
                metrics=dict(metrics),
                duration_s=duration_s,
                samples=epoch["committed"],
                attempt=epoch["attempt"],
                samples_per_s=epoch["committed"] / duration_s if duration_s else 0.0,
                rank_batches=tuple(epoch["rank_batches"]),
                rank_samples_per_s=tuple(epoch["rank_samples_per_s"]),
            )
        )

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._errors.extend(line for line in lines if line.strip())


def start(job: JobDefinition, *, ranks: int, device: str, slow: Mapping[int, float], out: str | None) -> Handle:
    """Starts the job of the file that defines it. Raises `InvalidJob` if it cannot be started."""
    if "elche_job" in sys.modules:
        raise InvalidJob(
            "job.start() must stand under `if __name__ == '__main__':`, because the ranks run the file too"
        )
    if find_spec("elche_client") is None or find_spec("elche_coordinator") is None:
        raise InvalidJob("job.start() needs the coordinator and the client: pip install 'elche[all]'")
    check_is_of_file(job)
    arguments = [str(_file_of(job)), "--ranks", str(ranks), "--device", device]
    arguments += ["--out", out] if out is not None else []
    for rank, factor in slow.items():
        arguments += ["--slow", f"{rank}={factor}"]
    for name, setting in SETTINGS.items():
        text = setting.unparse(getattr(job, name))
        arguments += [setting.flag, text] if text else []
    return Handle(job, [*arguments, "--", *sys.argv[1:]])  # the file may read what this program was given


def _file_of(job: JobDefinition) -> Path:
    """The file that the ranks run, which defines the job's functions and `job`."""
    try:
        path = Path(inspect.getfile(innermost(job.train_step)))
    except TypeError:
        path = Path("<unknown>")
    if path.is_file():
        return path
    if lines := linecache.getlines(str(path)):
        return _file_of_cell("".join(lines))
    raise InvalidJob(
        f"job.start() needs a file that the ranks can run, and train_step is defined in {path}: "
        "write the job into a file of its own"
    )


def _file_of_cell(source: str) -> Path:
    """Writes a notebook's cell up to its `job` to a file. Raises `InvalidJob` if ranks cannot run it."""
    advice = (
        "in a notebook the cell that defines `job` has all that the job needs, with its imports, since every rank runs "
        "it on its own; or begin it with %%writefile train.py, and then: from train import job"
    )
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise InvalidJob(f"the cell that defines train_step cannot be run by the ranks ({error}): {advice}") from None
    ends = [one.end_lineno for one in body if _names(one) == ["job"]]
    if not ends:
        raise InvalidJob(f"the cell that defines train_step defines no `job`: {advice}")
    text = "".join(source.splitlines(keepends=True)[: ends[-1]])
    if missing := _missing(text):
        raise InvalidJob(f"the cell that defines `job` uses {missing[0]}, which another one defines: {advice}")
    folder = Path(tempfile.mkdtemp(prefix="elche-notebook-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "notebook_job.py"
    path.write_text(text, encoding="utf-8")
    return path


def _names(statement: ast.stmt) -> list[str]:
    """The names to which a statement assigns."""
    match statement:
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
        case _:
            return []


def _missing(source: str) -> list[str]:
    """Names that the source uses and neither it nor Python defines; empty if it has a star import."""
    if any(one.names[0].name == "*" for one in ast.walk(ast.parse(source)) if isinstance(one, ast.ImportFrom)):
        return []
    whole = symtable.symtable(source, "cell", "exec")
    known = {one.get_name() for one in whole.get_symbols() if one.is_assigned() or one.is_imported()}
    known |= {one.get_name() for one in whole.get_symbols() if one.is_namespace()} | {"__name__", "__file__"}
    found, tables = [], [whole]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_global = [one for one in table.get_symbols() if one.is_referenced() and (table is whole or one.is_global())]
        found += [one.get_name() for one in is_global if not hasattr(builtins, one.get_name())]
    return sorted(set(found) - known)

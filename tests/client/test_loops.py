"""What `elche run` gives the processes of a loop."""

import os
import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elche import torchrun
from elche.errors import ElcheError, InvalidJob
from elche_client.display.progress import ProgressDisplay
from elche_client.events import Checkpoint, JobResult, JobState, JobView
from elche_client.local import script_run
from elche_client.local.notifications import Interrupted, ProcessExited, SignalReceived
from elche_client.local.processes import ChildProcesses, ProcessError
from elche_client.local.script_run import ScriptRun
from elche_client.options import JobOptions


class Jobs:
    """A coordinator's client that has no job at the first look, and one from the second on."""

    def __init__(self, jobs: list[Any]) -> None:
        self._looks: Iterator[list[Any]] = iter([[], jobs])
        self._jobs = jobs

    def jobs(self) -> list[Any]:
        return next(self._looks, self._jobs)

    def job(self, job_id: str) -> Any:
        return SimpleNamespace(id=job_id, watch=lambda: iter([JobResult(state=JobState.SUCCEEDED)]))


def new_run(**more: Any) -> ScriptRun:
    return ScriptRun(path=Path("loop.py"), options=JobOptions(), device="cpu", out=None, as_json=False, **more)


def follow(client: Jobs) -> tuple[JobResult, int]:
    """A run of two ranks, of which one is killed after the first look for the job and before the second."""
    told: list[str] = []
    run = new_run(_running={name: SimpleNamespace(tell=told.append) for name in ("rank 0", "rank 1")})
    run.notifications.put(ProcessExited(process="rank 1", code=-9, log=None))
    run.notifications.put(ProcessExited(process="rank 0", code=0, log=None))
    shown = SimpleNamespace(show=lambda event: None)
    try:
        return run._follow_loop(cast(Any, client), cast(ProgressDisplay, shown))
    finally:
        assert told == ["1"], "rank 0, which may wait for it, is not told"


def test_a_resume_that_the_environment_asks_for_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was overwritten, and the training began anew in silence."""
    given: list[str] = []
    start = lambda *_, environment, **__: given.append(environment["ELCHE_RESUME"])  # noqa: E731
    monkeypatch.setattr(script_run, "ChildProcess", start)
    monkeypatch.setenv("ELCHE_RESUME", "runs/one/checkpoints")
    for resume in ("", "runs/two"):
        run = new_run()
        run.options = replace(run.options, resume=resume)
        run._start_ranks(tmp_path, "127.0.0.1:1", ("cpu",))
        run.processes = ChildProcesses()
    assert given == ["runs/one/checkpoints", "runs/two"]


def test_what_takes_long_before_the_first_trainer_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a script imported its libraries, nothing was said for as long as that took."""
    monkeypatch.setattr(script_run, "ChildProcess", lambda *_, **__: None)
    new_run()._start_ranks(tmp_path, "127.0.0.1:1", ("cpu", "cpu"))
    assert capsys.readouterr().err == "elche: 2 ranks run loop.py; progress is shown from Trainer.setup on\n"


def test_a_rank_that_dies_as_soon_as_the_job_begins_is_the_jobs_to_judge() -> None:
    result, code = follow(Jobs([SimpleNamespace(job_id="loop-1")]))
    assert (result.state, code) == (JobState.SUCCEEDED, 0)


@pytest.mark.parametrize(("state", "expected"), [(JobState.SUCCEEDED, 3), (JobState.FAILED, 1)])
def test_trainers_that_are_not_closed_are_followed_beside_later_ones(state: JobState, expected: int) -> None:
    """Only the first was: it ends when the script does, after the others."""
    names, newest_has_ended = ("loop-1", "loop-2", "loop-3"), Event()
    run = new_run(_running={"rank 0": SimpleNamespace(tell=lambda name: None)})
    shown: list[Any] = []

    def watch(job_id: str) -> Iterator[Any]:
        yield JobView(job_id=job_id)
        if job_id != names[-1]:
            newest_has_ended.wait()
        yield JobResult(state=state if job_id == "loop-1" else JobState.SUCCEEDED, epochs=int(job_id[-1]))
        if job_id == names[-1]:
            newest_has_ended.set()
            run.notifications.put(ProcessExited(process="rank 0", code=0, log=None))

    client = SimpleNamespace(
        jobs=lambda: [SimpleNamespace(job_id=name) for name in names],
        job=lambda job_id: SimpleNamespace(id=job_id, watch=lambda: watch(job_id)),
    )
    result, code = run._follow_loop(cast(Any, client), cast(ProgressDisplay, SimpleNamespace(show=shown.append)))
    assert (result.epochs, code) == (expected, int(state is JobState.FAILED))
    assert "loop-3" in [one.job_id for one in shown if isinstance(one, JobView)]


def test_ctrl_c_asks_each_open_trainer_for_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """It asked the first alone, which no longer trained, and after a minute all was lost. A trainer that refuses, and a
    version that is lower than another trainer's, do not matter.
    """
    asked: list[str] = []
    run = new_run()
    run.record.rounds.append(cast(Any, SimpleNamespace(version=9)))

    def refuse() -> None:
        asked.append("loop-1")
        raise InvalidJob("it does not train")

    for name, ask in (("loop-1", refuse), ("loop-2", partial(asked.append, "loop-2"))):
        cancel = partial(asked.append, name)
        run._jobs[name] = cast(Any, SimpleNamespace(id=name, checkpoint=ask, cancel=cancel))
    run.notifications.put(Checkpoint(version=1))
    run.notifications.put(JobResult(state=JobState.CANCELLED))
    run._cancel_loop(Interrupted(signal.SIGINT), cast(ProgressDisplay, SimpleNamespace(show=lambda event: None)))
    assert asked == ["loop-1", "loop-2"] * 2
    assert "elche: writing a checkpoint" in capsys.readouterr().err


def test_the_result_after_ctrl_c_is_that_of_the_newest_trainer() -> None:
    """The record and `--json` said 0 epochs, no ranks and no checkpoint of a loop that had trained seven."""
    run = new_run()
    for name, epochs in (("loop-1", 2), ("loop-2", 7)):
        run._jobs[name] = cast(Any, SimpleNamespace(id=name, checkpoint=lambda: None, cancel=lambda: None))
        run._take_in(name, JobResult(state=JobState.CANCELLED, epochs=epochs, error="cancelled by request"))
    shown = cast(ProgressDisplay, SimpleNamespace(show=lambda event: None))
    result = run._cancel_loop(Interrupted(signal.SIGINT), shown)
    assert (result.state, result.epochs, result.error) == (JobState.CANCELLED, 7, "interrupted by SIGINT")


@pytest.mark.parametrize(("exit_code", "expected"), [(0, 0), (3, 130)])
def test_a_script_that_had_ended_before_ctrl_c_reached_it_is_no_interrupted_one(exit_code: int, expected: int) -> None:
    """Exit code 130 of a script that had trained, saved its model and ended well."""
    run = new_run()
    run._running["rank 0"] = cast(Any, None)

    def watch() -> Iterator[Any]:
        yield JobResult(state=JobState.SUCCEEDED)
        run.notifications.put(ProcessExited(process="rank 0", code=exit_code, log=None))

    client = SimpleNamespace(
        jobs=lambda: [SimpleNamespace(job_id="loop-1")],
        job=lambda job_id: SimpleNamespace(id=job_id, watch=watch, checkpoint=lambda: None, cancel=lambda: None),
    )
    run.notifications.put(SignalReceived(number=signal.SIGINT))
    shown = cast(ProgressDisplay, SimpleNamespace(show=lambda event: None))
    result, code = run._follow_loop(cast(Any, client), shown)
    assert (result.state, code) == (JobState.SUCCEEDED, expected)


def test_a_rank_that_dies_before_there_is_a_job_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_run, "PEERS_GRACE_S", 0.0)
    with pytest.raises(ProcessError, match="rank 1 was killed by SIGKILL"):
        follow(Jobs([]))


@pytest.mark.parametrize(
    ("devices", "known", "shown"),
    [
        (("cpu", "cpu"), None, ""),
        (("cuda:0", "cuda:1"), None, "0,1"),
        (("cuda:0", "cuda:2"), None, "0,2"),
        (("cuda:1",), "", "1"),
        (("cuda:0", "cuda:2"), "GPU-a, 5,7", "GPU-a,7"),
    ],
)
def test_a_rank_finds_its_own_device_also_where_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], known: str | None, shown: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if known is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", known)
    assert torchrun.visible(devices, os.environ) == shown


def test_the_port_of_rank_0_is_none_that_a_connection_may_take_until_it_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = server.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda ports, num: [held, 20_001, 20_002])
        assert torchrun.free_port() in (20_001, 20_002)
        monkeypatch.setattr(random, "sample", lambda ports, num: [held])
        with pytest.raises(ElcheError, match="is free for rank 0"):
            torchrun.free_port()

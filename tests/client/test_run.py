"""`elche run` as a process; real but scripted processes stand for the coordinator, the agent and the check."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elche.errors import Unreachable
from elche.manifest import write_manifest
from elche_client.display.output import log_paths
from elche_client.display.record import JobRecord
from elche_client.events import Checkpoint, JobResult, JobState, JobView, RankView, RoundReport
from elche_client.local import job_run
from elche_client.local.check import arguments_of
from elche_client.local.notifications import Interrupted, ProcessExited, ProcessRestarted
from elche_client.local.processes import ProcessError, exit_error
from elche_client.options import JobOptions
from elche_client.transport.rank_output import RankOutput

ELCHE = [sys.executable, "-m", "elche_client"]
TESTS = Path(__file__).parents[1]
LIMIT_S = 400.0


def program(name: str) -> str:
    """The text of a program that stands for a real one."""
    return (Path(__file__).parent / "programs" / f"{name}.py").read_text(encoding="utf-8")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a job file, and with packages that stand for the worker and the coordinator."""
    for name, source in {
        "packages/elche_worker/__init__.py": "",
        "packages/elche_worker/rank/__init__.py": "",
        "packages/elche_worker/rank/check.py": program("check"),
        "packages/elche_worker/agent/__init__.py": "",
        "packages/elche_worker/agent/for_run.py": program("agent"),
        "packages/elche_coordinator/__init__.py": "",
        "packages/elche_coordinator/for_run.py": program("coordinator"),
        "digits.py": "job = None\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


def environment(place: Path, **how: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(place / "packages"), str(TESTS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | how


def run(place: Path, *arguments: str, **how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        check=False,
        args=[*ELCHE, "run", "digits.py", *arguments],
        cwd=place,
        env=environment(place, **how),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@contextmanager
def running(place: Path, *arguments: str, **how: str) -> Iterator[subprocess.Popen[str]]:
    command = [*ELCHE, "run", "digits.py", "--out", "out", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=place, env=environment(place, **how), stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) for name in ("coordinator.pid", "agent.pid")]


def wait_until(condition: object, *arguments: object) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition(*arguments):  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.01)


def test_a_run_from_start_to_summary(place: Path) -> None:
    done = run(place, "--ranks", "2", "--slow", "1=2.3", "--epochs", "3", "--verify", JOB="succeeds")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "elche: the data set is short\n"
    (folder,) = (place / "runs").iterdir()
    assert folder.name.startswith("digits-20")
    assert done.stdout.splitlines()[:2] == ["digits: starting", "digits: training"]  # it waits for its own agent alone
    for part in ("digits: training", "accuracy 0.98", "1.20 k samples/s", "/out/model.safetensors"):
        assert part in done.stdout
    assert f"runs/{folder.name}/record.json" in done.stdout
    record = json.loads((folder / "record.json").read_text())
    assert (record["job_id"], record["name"], record["state"]) == ("j-1", "digits", "succeeded")
    assert [len(record[key]) for key in ("epoch_reports", "evaluations", "round_reports")] == [1, 1, 1]
    assert [one["device"] for one in json.loads((folder / "agent.args").read_text())["slots"]] == ["cpu", "cpu"]
    spec = (folder / "spec.txt").read_text()
    for part in (f'output_dir: "{folder}"', "num_ranks: 2", "value: 2.3", 'value: "3"', "verify_rounds: true"):
        assert part in spec
    assert not any(is_alive(pid) for pid in pids(folder))


def test_a_range_of_ranks_is_checked_with_the_least() -> None:
    """`--ranks 1+` was told that 10,007 samples are fewer than one batch for each of 10000 ranks."""
    arguments = arguments_of(Path("train.py"), JobOptions(num_ranks=10_000, min_ranks=1), None)
    assert arguments[arguments.index("--ranks") + 1] == "1"


def test_a_job_that_goes_on_waiting_for_slots_says_why(place: Path) -> None:
    done = run(place, JOB="waits for slots")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == [
        "digits: starting",
        "digits: queued, its agent has not reached the coordinator yet",
        "digits: queued, waits for 2 free slots",
        "digits: training",
    ]


def test_the_coordinator_begins_while_the_file_is_checked(place: Path) -> None:
    done = run(place, CHECK="waits for the coordinator", BEGUN=str(place / "begun"))
    assert done.returncode == 0, done.stderr


def test_a_coordinator_that_cannot_be_imported_ends_the_run_and_not_the_check_alone(place: Path) -> None:
    (place / "packages/elche_coordinator/for_run.py").write_text("raise SystemExit(3)\n")
    done = run(place, CHECK="hangs")
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, ["elche: the coordinator exited with code 3"])


def test_when_the_job_has_succeeded_no_process_waits_for_another(place: Path) -> None:
    done = run(place, "--out", "out", AGENT="waits for the coordinator's end")
    assert done.returncode == 0, done.stderr
    assert (place / "out" / "last").exists(), "the agent was waited for first, and killed"


def test_what_takes_long_is_started_before_what_takes_a_while_is_imported() -> None:
    slow = "{'grpc', 'rich', 'numpy', 'google'}"
    told = f"import sys, elche_client.local.job_run; print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "[]\n"


def test_two_runs_in_one_second_have_their_own_folders(place: Path) -> None:
    processes = [
        subprocess.Popen([*ELCHE, "run", "digits.py"], cwd=place, env=environment(place), stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.wait(LIMIT_S) for process in processes] == [0, 0]
    assert len(list((place / "runs").iterdir())) == 2


def test_json_ends_stdout_with_one_object(place: Path) -> None:
    done = run(place, "--json", "--out", "out", "--device", "cuda", AGENT="prints")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    document = json.loads(line)
    assert (document["state"], document["rounds"], document["model"]) == ("succeeded", 21, "/out/model.safetensors")
    assert "digits: training" in done.stderr
    assert done.stderr.splitlines().count("rank 0 | hello") == 1
    record = json.loads((place / "out" / "record.json").read_text())
    assert document.items() <= record.items()
    assert '"device": "cuda"' in (place / "out" / "agent.args").read_text()


@pytest.mark.parametrize(("options", "stream"), [([], "out"), (["--events", "--no-logs"], "")])
def test_what_ranks_print_is_shown_where_it_does_not_disturb(place: Path, options: list[str], stream: str) -> None:
    done = run(place, *options, AGENT="prints")
    assert done.returncode == 0, done.stderr
    shown = {"out": done.stdout.splitlines(), "err": done.stderr.splitlines()}
    assert {name: lines.count("rank 0 | hello") for name, lines in shown.items()} == {
        name: int(name == stream) for name in shown
    }
    assert "it is done" not in done.stdout + done.stderr


def test_where_warnings_are_errors_a_run_says_nothing_of_them(place: Path) -> None:
    """Python said that it ignored files which nobody had closed."""
    done = run(place, JOB="succeeds", PYTHONWARNINGS="error")
    assert (done.returncode, done.stderr) == (0, "elche: the data set is short\n")


def test_the_way_to_go_on_is_the_last_line(place: Path) -> None:
    unfinished = {"format": 2, "saved_at": 1, "files": {}, "tensors": [], "settings": {}}
    unfinished |= {"num_ranks": 1, "file_name": "digits.py", "job": "j-1"}
    folder = place / "an out" / "checkpoints" / "j-1" / "epoch-0001-step-00000010"
    folder.mkdir(parents=True)
    write_manifest(folder, unfinished, training={})
    for job in ("fails", "dies"):
        shutil.rmtree(place / "an out" / "coordinator", ignore_errors=True)
        (place / "an out" / "agent.pid").unlink(missing_ok=True)
        done = run(place, "--out", "an out", JOB=job)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "elche: to go on: elche resume 'an out'"


def test_a_job_that_fails_shows_the_users_traceback_and_the_logs(place: Path) -> None:
    done = run(place, "--out", "out", JOB="fails")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-4:] == [
        "Traceback ...",
        "ValueError: no",
        "elche: rank 1 failed at batch 3",
        "elche: log: out",
    ]
    assert json.loads((place / "out" / "record.json").read_text())["error"] == "rank 1 failed at batch 3"


def test_a_file_that_the_check_refuses(place: Path) -> None:
    done = run(place, CHECK="refuses")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["Traceback ...", "NameError: x", "elche: there is no `job` in it"]
    assert done.stdout == ""
    assert not (place / "runs").exists()


def test_a_file_that_shows_its_help_is_all_that_is_shown(place: Path) -> None:
    """`elche run train.py -- --help` said then that the file had ended itself, with code 2."""
    for done in (run(place, CHECK="shows help"), run(place, "--json", CHECK="shows help")):
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert not (place / "runs").exists()


def test_a_check_that_crashes(place: Path) -> None:
    done = run(place, CHECK="crashes")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("elche: digits.py could not be checked, the process that loaded it was killed by SIGKILL")


def test_slow_ranks_are_counted_against_the_devices_found(place: Path) -> None:
    done = run(place, "--slow", "1=2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "elche: rank 1 cannot be slowed: there is only rank 0"


def test_submit_checks_the_file_where_a_worker_is_installed(place: Path) -> None:
    from support.scripted import ScriptedJobs, serving

    jobs = ScriptedJobs()
    with serving(jobs) as address:
        command = [*ELCHE, "submit", "digits.py", "--coordinator", address]
        for check, code in (("refuses", 2), ("shows help", 0), ("", 0)):
            done = subprocess.run(
                command, cwd=place, env=environment(place, CHECK=check), check=False, capture_output=True, text=True
            )
            assert done.returncode == code
            assert ("elche: there is no `job` in it" in done.stderr) == (code == 2)
    assert len(jobs.specs) == 1


def test_a_coordinator_that_refuses_speaks_for_itself(place: Path) -> None:
    done = run(place, JOB="refused")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["elche: the data set is short", "elche: the port is in use"]


def test_a_coordinator_that_dies_is_named_with_its_last_words(place: Path) -> None:
    done = run(place, "--out", "out", JOB="dies")
    assert done.returncode == 1
    assert (
        "elche: the coordinator exited with code 1: no room on the disk (log: out/coordinator.log)"
        in done.stderr.splitlines()
    )
    assert not any(is_alive(pid) for pid in pids(place / "out"))


def asked_to_submit(*answers: object) -> tuple[job_run.LocalRun, Any, list[str]]:
    """A run and a client whose calls have these answers, one after another, with the keys of those calls."""
    one = job_run.LocalRun(path=Path("train.py"), options=JobOptions(), device="cpu", out=None, as_json=False)
    rest, keys = iter(answers), list[str]()

    def submit(path: Path, options: JobOptions, *, key: str) -> object:
        keys.append(key)
        answer = next(rest)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    return one, SimpleNamespace(submit_options=submit), keys


def test_a_coordinator_that_is_killed_while_a_job_is_submitted_has_it_once_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ended, and told to start a coordinator by hand."""
    monkeypatch.setattr(job_run, "RESTART_S", 0.01)
    away = Unreachable("no coordinator answers")
    one, client, keys = asked_to_submit(away, away, "handle")
    one.notifications.put(ProcessRestarted(process="coordinator", number=signal.SIGKILL))
    assert one._submit(client, one.options) == "handle"
    assert len(keys) == 3
    assert len(set(keys)) == 1, "it may have the job already"
    assert "elche: the coordinator was killed by SIGKILL; it is started again" in capsys.readouterr().err.splitlines()


def test_what_ranks_print_while_their_job_is_submitted_again_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator may have had the job when it was killed. Lines of its ranks were dropped meanwhile."""
    monkeypatch.setattr(job_run, "RESTART_S", 0.01)
    one, client, _ = asked_to_submit(Unreachable("no coordinator answers"), "handle")
    one.notifications.put(RankOutput(rank="0", lines=("begins",)))
    assert one._submit(client, one.options) == "handle"
    one.notifications.put(RankOutput(rank="0", lines=("ends",)))
    one.notifications.put(ProcessExited(process="coordinator", code=-signal.SIGKILL, log=None))
    one._explain(Unreachable("no coordinator answers"))
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["begins", "ends"]


def test_a_coordinator_that_is_not_started_again_while_a_job_is_submitted_ends_the_run_at_once(tmp_path: Path) -> None:
    """What it has logged last is no reason for its end."""
    (tmp_path / "coordinator.log").write_text("INFO page and metrics on 127.0.0.1:80")
    one, client, _ = asked_to_submit(Unreachable("no coordinator answers"))
    log = tmp_path / "coordinator.log"
    one.notifications.put(ProcessExited(process="coordinator", code=-signal.SIGKILL, log=log))
    with pytest.raises(ProcessError, match=r"^the coordinator was killed by SIGKILL \(log: \S+\)$"):
        one._submit(client, one.options)


def test_an_agent_that_dies_is_named_with_its_last_words(place: Path) -> None:
    done = run(place, "--out", "out", "--json", JOB="waits", AGENT="dies")
    assert done.returncode == 1
    error = "the agent exited with code 1: cuda:7 is not there (log: out/agent.log)"
    assert f"elche: {error}" in done.stderr.splitlines()
    assert json.loads(done.stdout)["error"] == error


def test_a_run_whose_folder_is_removed_names_no_log_that_is_gone(tmp_path: Path) -> None:
    """`rm -rf runs` in the middle of a run: its last words sent the user to files that were not there."""
    ended = exit_error(ProcessExited(process="coordinator", code=1, log=Path("runs/a/coordinator.log")))
    gone = "(runs/a/coordinator.log is gone: a run needs its folder until it has ended)"
    assert str(ended) == f"the coordinator exited with code 1 {gone}"
    there = tmp_path / "rank-0.log"
    there.touch()
    ranks = tuple(RankView(rank=rank, log_path=str(tmp_path / f"rank-{rank}.log")) for rank in range(2))
    record = JobRecord(last_view=JobView(job_id="j-1", name="digits", state=JobState.TRAINING, ranks=ranks))
    assert log_paths(record, None, here=True) == [str(there)]
    assert len(log_paths(record, None, here=False)) == 2, "they may be on other hosts"


@pytest.mark.parametrize("name", ["coordinator.log", "agent.log"])
def test_a_log_that_cannot_be_made_is_named_without_a_traceback(place: Path, name: str) -> None:
    """As on a full disk: what the process wrote of it before it had its log was Python's traceback."""
    (place / "out" / name).mkdir(parents=True)
    done = run(place, "--out", "out", JOB="waits")
    assert done.returncode == 1
    assert f"elche: out/{name}: Is a directory" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_job_and_leaves_no_process(place: Path, number: int, code: int) -> None:
    with running(place, "--json", JOB="waits") as process:
        wait_until((place / "out" / "agent.pid").exists)
        _read_until(process.stderr, "digits: training")
        process.send_signal(number)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert (place / "out" / "cancelled").exists()
    assert not any(is_alive(pid) for pid in pids(place / "out"))
    assert json.loads(output)["state"] == "cancelled"
    assert "elche: job j-1 was cancelled" in errors
    assert "Traceback" not in errors


def test_a_job_that_had_succeeded_before_ctrl_c_reached_it_is_no_interrupted_one(place: Path) -> None:
    """Exit code 130 beside "succeeded" and a whole model: `elche run ... && use the model` did not use it."""
    with running(place, "--json", JOB="succeeds as it is cancelled") as process:
        _read_until(process.stderr, "digits: training")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, json.loads(output)["state"]) == (0, "succeeded")


def test_a_checkpoint_that_does_not_come_after_ctrl_c_is_missed_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ended after 10 s of a long evaluation, and did not say that its training is lost."""
    monkeypatch.setattr(job_run, "CHECKPOINT_TIMEOUT_S", 0.01)
    one = job_run.LocalRun(path=Path("train.py"), options=JobOptions(), device="cpu", out=None, as_json=False)
    ended = JobResult(state=JobState.CANCELLED)
    job: Any = SimpleNamespace(checkpoint=bool, cancel=lambda: one.notifications.put(ended))
    assert one._save_and_cancel([job], lambda event: None, Interrupted(signal.SIGINT)) is ended
    assert "elche: no checkpoint was written in 0.01 s" in capsys.readouterr().err.splitlines()


def trained_until_ctrl_c(epoch: int) -> tuple[JobResult, list[str]]:
    """The result of a job of three epochs whose newest checkpoint is after `epoch` when Ctrl-C comes, and what was
    asked of it.
    """
    one = job_run.LocalRun(path=Path("train.py"), options=JobOptions(), device="cpu", out=None, as_json=False)
    asked: list[str] = []

    def checkpoint() -> None:
        one.notifications.put(JobView(job_id="j-1", num_epochs=3))
        one.notifications.put(Checkpoint(version=7, epoch=epoch))
        if epoch == 3:
            one.notifications.put(JobResult(state=JobState.SUCCEEDED))

    def cancel() -> None:
        asked.append("cancel")
        one.notifications.put(JobResult(state=JobState.CANCELLED))

    job: Any = SimpleNamespace(checkpoint=checkpoint, cancel=cancel)
    return one._save_and_cancel([job], one._record, Interrupted(signal.SIGINT)), asked


def test_a_job_that_has_trained_all_when_ctrl_c_comes_gets_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    """It was cancelled between its last round and its model: it had none, and `elche resume` had nothing to go on."""
    result, asked = trained_until_ctrl_c(3)
    assert (result.state, asked) == (JobState.SUCCEEDED, [])
    assert "elche: all epochs are trained: waiting for the model" in capsys.readouterr().err
    result, asked = trained_until_ctrl_c(2)
    assert (result.state, asked) == (JobState.CANCELLED, ["cancel"])


def test_after_a_round_of_which_a_part_was_written_there_is_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk where room is made a moment later: the run's record of rounds was damaged without a word, and
    `elche audit` and `elche replay` refused all of it.
    """
    one = job_run.LocalRun(
        path=Path("train.py"), options=JobOptions(), device="cpu", out=None, as_json=False, folder=tmp_path
    )
    num_written = iter([5, 2, 5])
    written: list[bytes] = []

    def write(data: bytes) -> int:
        written.append(data)
        return next(num_written)

    file: Any = SimpleNamespace(write=write)
    one._cadence = file
    for number in range(1, 4):
        one._record(RoundReport(round=number, recorded=b"round"))
    assert len(written) == 2
    assert "No space left on device; `elche replay` cannot repeat this run" in capsys.readouterr().err


def test_ctrl_c_during_the_check_starts_nothing(place: Path) -> None:
    with running(place, CHECK="hangs") as process:
        _read_until(process.stderr, "loading")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert errors == "elche: interrupted by SIGINT\n"
    assert not (place / "out").exists()


def test_a_checkpoint_that_was_refused_is_not_the_way_to_go_on(place: Path) -> None:
    options = JobOptions(resume="checkpoints/damaged")
    one = job_run.LocalRun(path=place / "digits.py", options=options, device="cpu", out=None, as_json=False)
    assert one._hint() == "to go on: elche resume checkpoints/damaged"
    assert one._hint(was_refused=True) == ""


def test_a_second_ctrl_c_kills_at_once(place: Path) -> None:
    """It does not wait for the agent, which ignores it, and gets more time here than this test has."""
    patience = (
        f"from elche_client.local.processes import ChildProcess as one\none.stop.__defaults__ = ({100 * LIMIT_S},)\n"
    )
    (place / "packages/sitecustomize.py").write_text(patience)
    with running(place, JOB="waits", AGENT="ignores SIGTERM") as process:
        wait_until((place / "out" / "agent.pid").exists)
        _read_until(process.stdout, "digits: training")
        process.send_signal(signal.SIGINT)
        wait_until((place / "out" / "asked").exists)

        def has_ended() -> bool:
            process.send_signal(signal.SIGINT)  # one that comes soon after the first is taken for the same
            return process.poll() is not None

        wait_until(has_ended)
        assert process.returncode == 130
    for pid in pids(place / "out"):
        wait_until(lambda pid: not is_alive(pid), pid)


def test_the_processes_end_when_the_command_is_killed(place: Path) -> None:
    with running(place, JOB="waits") as process:
        wait_until((place / "out" / "agent.pid").exists)
        _read_until(process.stdout, "digits: training")
        process.kill()
    for pid in pids(place / "out"):
        wait_until(lambda pid: not is_alive(pid), pid)


def test_a_folder_with_an_earlier_run_is_left_alone(place: Path) -> None:
    assert run(place, "--out", "out").returncode == 0
    before = (place / "out" / "record.json").read_text()
    again = run(place, "--out", "out")
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1].startswith("elche: out holds another run")
    assert (place / "out" / "record.json").read_text() == before


def test_a_folder_that_cannot_be_made(place: Path) -> None:
    done = run(place, "--out", "digits.py/out")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "elche: the folder digits.py/out cannot be created: Not a directory"


def test_without_a_worker_it_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from elche_client.cli.main import main

    monkeypatch.setattr("elche_client.local.check.find_spec", lambda name: None if name == "torch" else name)
    assert main(["run", str(place / "digits.py")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "elche: elche run needs the worker: pip install 'elche[all]' (torch is missing)"


def _read_until(stream: object, text: str) -> None:
    for line in stream:  # type: ignore[attr-defined]
        if text in line:
            return
    raise AssertionError(f"{text!r} was never written")

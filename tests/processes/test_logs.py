"""What ranks print, what their file is given, and the best weights, by a real coordinator and agent."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import safetensors.numpy

from elche.errors import InvalidJob
from elche_client import Client, JobState
from elche_client.events import EpochReport, JobView
from support.real_processes import Cluster, Command, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
PRINTS = """
import sys
rank = os.environ.get("ELCHE_RANK", "none")
print("loads with", sys.argv[1:], os.environ.get("FLAVOUR"), flush=True)
inner = train_step

def train_step(model, batch):
    if Path(__file__).with_suffix(".go").exists() or not Path(__file__).with_suffix(".wait").exists():
        print(f"a batch on {rank}")
    return inner(model, batch)

import dataclasses
job = dataclasses.replace(job, train_step=train_step)
"""
SECRET = "vanilla-ice-cream"


def ended(client: Client, job_id: str) -> JobView:
    return eventually(
        lambda: next((one for one in client.jobs() if one.job_id == job_id and one.state.has_ended), None), "it ends"
    )


def test_logs_are_followed_until_the_job_has_ended(
    cluster: Cluster, elche: Callable[..., Command], job_file: JobFile
) -> None:
    path = job_file("linear.py", PRINTS)
    path.with_suffix(".wait").touch()
    handle = cluster.client.submit(path, num_ranks=2, epochs=20)
    command = [sys.executable, "-m", "elche_client", "logs", handle.id, "-f", "--coordinator", cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cluster.mark.environment()) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() in ("rank 0 | loads with [] None\n", "rank 1 | loads with [] None\n")
        path.with_suffix(".go").touch()  # what is printed from now on comes too
        lines = follower.stdout.read().splitlines()
        assert follower.wait(400) == 0
    assert {"rank 0 | a batch on 0", "rank 1 | a batch on 1"} <= set(lines)
    assert handle.result().state is JobState.SUCCEEDED
    done = elche("logs", handle.id, "--rank", "1", "--coordinator", cluster.address)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "elche: this rank leaves: all samples are committed"
    written = list(handle.logs())
    assert {line.rank for line in written} == {0, 1}
    now = datetime.now(UTC)
    assert all(line.at and now - timedelta(minutes=5) < line.at <= now for line in written)
    with_times = elche("logs", handle.id, "--rank", "1", "-t", "--coordinator", cluster.address)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d elche: this rank .*", with_times.out.splitlines()[-1])
    missing = elche("logs", handle.id, "--rank", "7", "--coordinator", cluster.address)
    assert missing.code == 2
    assert "has no rank 7; it has 2, from 0" in missing.complaint


def test_logs_are_followed_on_when_the_coordinator_comes_back(
    mark: Mark, job_file: JobFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`elche logs -f` ended at the first broken connection."""
    numbered = PRINTS.replace('f"a batch on {rank}"', '"no", next(numbers)')
    path = job_file("linear.py", "import itertools\nnumbers = itertools.count()", numbered)
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address),
        Client(one.address, token="") as client,
    ):
        followed, seen = client.submit(path, num_ranks=1, epochs=100_000).logs(rank=0, follow=True), list[int]()

        def read(num_lines: int) -> None:
            for _ in range(num_lines):
                word, number, *_ = next(followed).text.split()
                seen.extend([int(number)] if word == "no" else [])

        read(20)
        one.process.kill()
        one.process.wait()
        with coordinator(mark, tmp_path, data=one.data, listen=one.address):
            while "retrying for 60 s" not in caplog.text:
                read(1)
            read(500)
        followed.close()  # type: ignore[attr-defined]
    assert seen == list(range(len(seen))), "each line comes once"


def test_logs_are_followed_into_the_next_process_of_a_rank(cluster: Cluster, job_file: JobFile) -> None:
    """`elche logs -f` said that it goes on until the job ends, and ended a rank's log with its process."""
    numbered = PRINTS.replace('f"a batch on {rank}"', '"no", os.getpid(), next(numbers)')
    path = job_file("linear.py", "import itertools\nnumbers = itertools.count()", numbered)
    handle = cluster.client.submit(path, num_ranks=2, epochs=100_000)
    followed, seen = handle.logs(rank=1, follow=True), dict[str, list[int]]()
    for line in followed:
        match line.text.split():
            case ["no", pid, number]:
                numbers = seen.setdefault(pid, [])
                numbers.append(int(number))
                if len(seen) == 2 and len(numbers) == 20:
                    break
                if len(numbers) == 20:
                    # It takes all slots: the other job waits for them in the queue.
                    cluster.client.submit(job_file(), num_ranks=2, epochs=1, priority=1).result()
    assert len(seen) == 2
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values()), "each line comes once"
    handle.cancel()
    for _line in followed:
        pass
    assert ended(cluster.client, handle.id).state is JobState.CANCELLED, "it is followed until its end"


def test_whoever_follows_leaves_when_he_likes(cluster: Cluster, job_file: JobFile) -> None:
    threads = Path(f"/proc/{cluster.agent.process.pid}/task")
    handle = cluster.client.submit(job_file("linear.py", PRINTS), num_ranks=1, epochs=10_000)
    next(handle.logs(follow=True))
    before = len(list(threads.iterdir()))
    for _ in range(10):
        lines = handle.logs(follow=True)
        assert next(lines).text
        lines.close()  # type: ignore[attr-defined]
    eventually(lambda: len(list(threads.iterdir())) <= before + 2, "nobody is read for any more")
    handle.cancel()
    assert ended(cluster.client, handle.id).state is JobState.CANCELLED
    assert list(handle.logs(rank=0))


def test_a_job_that_has_no_ranks_yet_has_no_logs(cluster: Cluster, job_file: JobFile) -> None:
    handle = cluster.client.submit(job_file(), num_ranks=99)
    with pytest.raises(InvalidJob, match="which is queued, have not started"):
        list(handle.logs())
    assert handle.cancel().is_made
    with pytest.raises(InvalidJob, match="its ranks were never started"):
        list(handle.logs(follow=True))


def test_a_host_that_is_gone_is_named_with_the_log(mark: Mark, job_file: JobFile, tmp_path: Path) -> None:
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        with agent(mark, tmp_path, one.address) as other:
            handle = client.submit(job_file(), num_ranks=1)
            handle.result()
            other.process.kill()
            other.process.wait()
        eventually(lambda: "agent-1 has disconnected" in one.log.read_text(), "the coordinator has seen it")
        with pytest.raises(
            InvalidJob, match=rf"host of rank 0 is not here any more; its log is .*{handle.id}/rank-0.log"
        ):
            list(handle.logs())


def test_arguments_and_environment_reach_the_file_and_stay_with_a_resumed_job(
    cluster: Cluster, elche: Callable[..., Command], job_file: JobFile
) -> None:
    path = job_file("linear.py", PRINTS)
    options = ["--ranks", "1", "--epochs", "2", "--checkpoint-every-epochs", "1", "--env", f"FLAVOUR={SECRET}"]
    done = elche("submit", str(path), "--coordinator", cluster.address, *options, "--", "--lr", "0.1")
    assert done.code == 0, done.err
    assert f"loads with ['--lr', '0.1'] {SECRET}" in done.err  # the check has loaded it here, with the same
    first = cluster.client.job(done.out.strip())
    first.result()
    second = first.resume(epochs=3)
    second.result()
    for handle in (first, second):
        assert f"loads with ['--lr', '0.1'] {SECRET}" in [line.text for line in handle.logs(rank=0)]
    listed = elche("jobs", "--json", "--coordinator", cluster.address)
    assert SECRET not in listed.out
    assert SECRET not in cluster.coordinator.log.read_text() + cluster.agent.log.read_text()


def test_a_variable_that_no_client_should_send_is_refused_by_the_coordinator(
    cluster: Cluster, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elche_client.options.check_environment", lambda environment: None)
    with pytest.raises(InvalidJob, match="LD_PRELOAD cannot be set for a job"):
        cluster.client.submit(job_file(), environment={"LD_PRELOAD": "/evil.so"})


def test_the_best_weights_are_fetched(
    cluster: Cluster, elche: Callable[..., Command], job_file: JobFile, tmp_path: Path
) -> None:
    path = job_file("linear.py", "import dataclasses", "job = dataclasses.replace(job, monitor='mse', epochs=3)")
    handle = cluster.client.submit(path, num_ranks=1)
    result = handle.result()
    (best,) = [one for one in result.checkpoints if one.is_best]
    done = elche("fetch", handle.id, "--best", "--coordinator", cluster.address)
    assert done.code == 0, done.err
    fetched, kept = tmp_path / "best.safetensors", Path(best.path) / "model.safetensors"
    assert fetched.read_bytes() == kept.read_bytes()
    assert safetensors.numpy.load_file(fetched)["weight"].shape == (1, 8)
    listed = elche("checkpoints", handle.id, "--coordinator", cluster.address)
    (line,) = [line for line in listed.out.splitlines() if " best " in line]
    assert best.path in line
    assert Path(best.path).name == f"epoch-{best.epoch:04d}-step-{best.global_step:08d}"
    (Path(result.model).parent / "best.safetensors").unlink()
    with pytest.raises(InvalidJob, match="cannot be read"):
        cluster.client.download(handle.id, tmp_path / "other", best=True)
    assert not (tmp_path / "other").exists()


def test_a_job_that_monitors_nothing_has_no_best_weights(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    handle = cluster.client.submit(job_file(), num_ranks=1, epochs=1)
    handle.result()
    with pytest.raises(InvalidJob, match="has no best checkpoint: that needs `monitor`"):
        cluster.client.download(handle.id, tmp_path / "none", best=True)


def test_what_changes_nothing_says_so_and_a_complete_job_is_not_resumed(cluster: Cluster, job_file: JobFile) -> None:
    handle = cluster.client.submit(job_file(), num_ranks=1, epochs=10_000, checkpoint_every_epochs=1)
    eventually(
        lambda: next(one for one in cluster.client.jobs() if one.job_id == handle.id).checkpoints, "a checkpoint"
    )
    assert handle.pause().is_made
    eventually(lambda: handle.pause().before is JobState.PAUSED, "it is paused")
    assert not handle.pause().is_made
    assert handle.pause(is_paused=False).is_made
    assert handle.cancel().is_made
    ended(cluster.client, handle.id)
    again = handle.cancel()
    assert (again.is_made, again.before) == (False, JobState.CANCELLED)
    assert not handle.pause().is_made
    done = cluster.client.submit(job_file(), num_ranks=1, epochs=2, checkpoint_every_epochs=1)
    done.result()
    with pytest.raises(InvalidJob, match=r"is complete, with 2 epochs: .* unless --epochs is more"):
        done.resume()
    with pytest.raises(InvalidJob, match="is complete"):
        done.resume(epochs=2)
    assert done.resume(epochs=3).result().epochs == 3


def test_what_lies_beside_the_file_is_not_sent_and_submit_says_so(
    cluster: Cluster, elche: Callable[..., Command], job_file: JobFile, tmp_path: Path
) -> None:
    (tmp_path / "my_models.py").write_text("SIZE = 1\n")
    path = job_file("linear.py", "import my_models")
    options = ["--ranks", "30", "--coordinator", cluster.address]
    done = elche("submit", str(path), *options)
    assert done.code == 0, done.err
    loads, note, *_ = [line for line in done.err.splitlines() if line.startswith("elche: ")]
    assert loads.startswith(f"elche: loading {path} here to check it; --no-check")
    assert note.startswith(f"elche: {path} imports my_models from its folder, and only linear.py is sent")
    quiet = elche("submit", str(path), *options, "--no-check")
    assert quiet.code == 0
    assert "my_models" not in quiet.err
    for job_id in (done.out.strip(), quiet.out.strip()):
        cluster.client.cancel(job_id)


def test_an_agent_waits_for_its_coordinator(mark: Mark, tmp_path: Path) -> None:
    with coordinator(mark, tmp_path) as one:
        address = one.address
    log = (tmp_path / "early.log").open("w+")
    command = [sys.executable, "-m", "elche_worker.agent", "--coordinator", address, "--devices", "cpu"]
    with subprocess.Popen(command, stderr=log, env=mark.environment(), cwd=tmp_path) as process:
        text = (tmp_path / "early.log").read_text
        try:
            eventually(lambda: "does not answer yet" in text() or process.poll() is not None, "it says that it waits")
            assert process.poll() is None, text()
            with coordinator(mark, tmp_path, listen=address):
                eventually(lambda: "connected as" in text(), "it attends")
                assert text().count("does not answer yet") == 1
                process.send_signal(signal.SIGTERM)
                assert process.wait(400) == 0
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
    log.close()


def test_a_watcher_sees_the_job_also_while_epochs_are_short(cluster: Cluster, job_file: JobFile) -> None:
    path = job_file("linear.py", "import dataclasses", "job = dataclasses.replace(job, batch_size=500, epochs=150)")
    handle = cluster.client.submit(path, num_ranks=1)
    num_epochs = num_views = 0
    for event in handle.watch():
        num_epochs += isinstance(event, EpochReport)
        num_views += isinstance(event, JobView) and 0 < num_epochs < 150
    assert num_epochs == 150
    assert num_views > 0, "reports that come more often than views left no occasion for one"

"""What Kubeflow's trainer is told, by a real HTTPS receiver."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elche_client.commands.certificates import Authority
from elche_client.display.kubeflow import CA, TOKEN, URL, Reporter
from elche_client.events import EpochReport, EvaluationReport, JobResult, JobState, JobView
from support.real_processes import eventually


@contextmanager
def receiver(
    folder: Path, *, refuses: int = 0, status: bytes = b""
) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    """The environment of a pod, and what the receiver has taken: it refuses the first ones, with this status line."""
    taken: list[dict[str, Any]] = []
    left = refuses

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal left
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_known = self.headers["Authorization"] == "Bearer of the pod"
            is_taken = is_known and left == 0
            if left and status:
                self.wfile.write(status)
                self.close_connection = True
                left -= 1
                return
            left = max(0, left - 1)
            if is_taken:
                taken.append(body["trainerStatus"])
            self.send_response(200 if is_taken else 503 if is_known else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    authority = Authority(folder / "certs")
    made = authority.server(["localhost"], expires=timedelta(days=1))
    (folder / "token").write_text("of the pod\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.folder / "tls.crt", made.folder / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        URL: f"https://localhost:{server.server_address[1]}/apis/trainer/status",
        CA: str(made.folder / "ca.crt"),
        TOKEN: str(folder / "token"),
    }
    try:
        yield environment, taken
    finally:
        server.shutdown()
        server.server_close()


def view(epoch: int, processed: int) -> JobView:
    return JobView(
        job_id="j",
        state=JobState.TRAINING,
        epoch=epoch,
        num_epochs=4,
        dataset_size=100,
        epoch_processed=processed,
        eta_s=61.6,
    )


def test_a_job_whose_epochs_are_complete_is_told_as_whole(tmp_path: Path) -> None:
    """Its last epoch is counted among the complete ones, and its samples are those of the view."""
    with receiver(tmp_path) as (environment, taken):
        reporter = Reporter(environment, every_s=0.05)
        reporter.note(view(4, 100))
        (only,) = eventually(lambda: list(taken), "it is told")
        reporter.close()
    assert only["progressPercentage"] == 100


def test_progress_metrics_and_the_end(tmp_path: Path) -> None:
    with receiver(tmp_path) as (environment, taken):
        reporter = Reporter(environment, every_s=0.05)
        reporter.note(JobView(job_id="j", state=JobState.STARTING))
        reporter.note(view(1, 50))
        (first,) = eventually(lambda: list(taken), "it is told")
        assert datetime.fromisoformat(first.pop("lastUpdatedTime")).tzinfo is not None
        assert first == {"progressPercentage": 37, "estimatedRemainingSeconds": 62}
        reporter.note(EvaluationReport(epoch=1, metrics={"accuracy": 0.987654321}))
        reporter.note(JobResult(state=JobState.SUCCEEDED))
        reporter.close()
        last = taken[-1]
        assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
        assert last["metrics"] == [{"name": "accuracy", "value": "0.987654"}]


@pytest.mark.parametrize("status", [b"", b"no HTTP\r\n\r\n"])
def test_what_was_not_taken_is_told_again(tmp_path: Path, status: bytes) -> None:
    with receiver(tmp_path, refuses=1, status=status) as (environment, taken):
        reporter = Reporter(environment, every_s=0.05)
        reporter.note(EpochReport(epoch=0, loss=1.5))
        eventually(lambda: reporter._is_new is False, "it was tried")
        reporter.note(view(2, 0))
        eventually(lambda: taken, "it is told")
        assert taken[-1]["metrics"] == [{"name": "loss", "value": "1.5"}]
        assert taken[-1]["progressPercentage"] == 50
        reporter.close()


def test_nobody_is_there(tmp_path: Path) -> None:
    """Training does not suffer from it."""
    with receiver(tmp_path) as (environment, taken):
        pass
    reporter = Reporter(environment, every_s=0.05)
    reporter.note(view(0, 1))
    reporter.close()
    assert not taken
    assert not reporter._thread.is_alive()


@pytest.mark.parametrize("missing", [TOKEN, CA])
def test_files_that_are_not_there(tmp_path: Path, missing: str) -> None:
    with receiver(tmp_path) as (environment, taken):
        reporter = Reporter(environment | {missing: str(tmp_path / "none")}, every_s=0.05)
        reporter.note(view(0, 1))
        reporter.close()
        assert not taken

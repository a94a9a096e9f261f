"""What the coordinator exports is what Prometheus' own checker accepts, with the figures of every rank."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from elche_client import Client, JobView

pytestmark = pytest.mark.system

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


def start(*command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-u", "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_until(process: "subprocess.Popen[str]", pattern: str) -> str:
    """The first group of the pattern in the process's next line that has it."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"the process ended without {pattern!r}")


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(control plane, URL of /metrics) of a coordinator with two CPU slots."""
    anywhere = "127.0.0.1:0"
    coordinator = start("elche_coordinator", "--listen", anywhere, "--http", anywhere, "--data", str(tmp_path))
    metrics = read_until(coordinator, r"metrics on (\S+)") + "/metrics"
    address = read_until(coordinator, r"listening on (\S+)")
    agent = start("elche_worker.agent", "--coordinator", address, "--devices", "cpu,cpu", "--work-dir", str(tmp_path))
    read_until(agent, r"connected as (\S+)")
    yield address, metrics
    for process in (agent, coordinator):
        process.terminate()
        process.wait(400)


def metrics_with(url: str, name: str) -> str:
    """The page, once it has the metric. Asserts that this takes less than a minute."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        page: str = urllib.request.urlopen(url, timeout=400).read().decode()
        if name in page:
            return page
    raise AssertionError(f"no {name} at {url}")


def test_promtool_accepts_the_metrics_of_a_running_job(addresses: tuple[str, str]) -> None:
    address, url = addresses
    with Client(address) as client:
        job = client.submit(DIGITS, num_ranks=2, epochs=2)
        next(event for event in job.watch() if isinstance(event, JobView) and event.num_rounds > 2)
        page = metrics_with(url, 'elche_rank_batch_seconds{device="cpu"')
        job.cancel()
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for rank in "01":
        for name in ("batches_total", "compute_seconds_total", "round_wait_seconds_total", "divergence_ratio"):
            assert re.search(rf'^elche_rank_{name}{{.*rank="{rank}"}} ', page, re.MULTILINE), name

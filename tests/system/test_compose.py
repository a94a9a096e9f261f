"""The compose files as a user starts them: a job trains in containers, one of them paused, killed, started again."""

import json
import re
import resource
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elche_client import Client, JobView
from elche_client.events import JobState
from support.docker_engine import BUILD_S, ROOT, Engine, docker_engine, wheels
from support.fleets import EPOCHS as MANY
from support.fleets import LINEAR, SLOWLY
from support.real_processes import eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400), pytest.mark.slow(reason="images are built and started")]

SERVICES = ("coordinator", "worker-1", "worker-2", "prometheus")
LIMIT_S = 400.0

HERE = """
# What this machine needs: no bridge to the world, any free port, no more locked memory than its container may have,
# and patience with its answers: other tests run beside these.
services:
  token: {{image: elche-test-coordinator}}
  client: {{image: elche-test-coordinator}}
  coordinator:
    image: elche-test-coordinator
    build: {{network: host}}
    ports: !override ["127.0.0.1::7717", "127.0.0.1::7718"]
    healthcheck: {{timeout: 30s, retries: 10}}
  worker-1:
    image: elche-test-worker
    build: {{network: host}}
    ulimits: {{memlock: {memlock}}}
    healthcheck: {{timeout: 30s, retries: 10}}
  worker-2:
    image: elche-test-worker
    ulimits: {{memlock: {memlock}}}
    healthcheck: {{timeout: 30s, retries: 10}}
  prometheus:
    ports: !override ["127.0.0.1::9090"]
"""


@dataclass(frozen=True, slots=True)
class Stack:
    """The services of the compose file, under a name of their own."""

    engine: Engine
    override: Path

    def compose(self, *arguments: str, is_needed: bool = True) -> str:
        files = ("-f", str(ROOT / "docker/compose.yaml"), "-f", str(self.override))
        command = ("compose", "--project-name", "elche-test", *files, *arguments)
        return self.engine.docker(*command, is_needed=is_needed, limit_s=BUILD_S)

    def elche(self, *arguments: str, is_needed: bool = True) -> str:
        """The command, as the manual tells a user to run it."""
        return self.compose("run", "--rm", "--no-TTY", "client", *arguments, is_needed=is_needed)

    def address(self, service: str, port: int) -> str:
        return self.compose("port", service, str(port))

    def inspect(self, service: str, what: str) -> str:
        container = self.compose("ps", "--all", "--quiet", service)
        return self.engine.docker("inspect", "--format", f"{{{{{what}}}}}", container)

    @property
    def token(self) -> str:
        return self.compose("exec", "--no-TTY", "coordinator", "cat", "/run/elche/token")

    def client(self) -> Client:
        return Client(self.address("coordinator", 7717), token=self.token)

    def values(self, query: str) -> list[float]:
        """What Prometheus answers, a value for each series."""
        url = f"http://{self.address('prometheus', 9090)}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=400) as answer:
            series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return [float(one["value"][1]) for one in series]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Everything but Grafana, healthy; nothing of it is left afterwards."""
    override, jobs = tmp_path_factory.mktemp("compose") / "here.yaml", tmp_path_factory.mktemp("jobs")
    jobs.chmod(0o755)  # for the client's user
    (jobs / "slowly.py").write_text(LINEAR.read_text() + SLOWLY)
    shutil.copy(ROOT / "examples" / "digits.py", jobs)
    override.write_text(HERE.format(memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    with docker_engine() as engine:
        stack = Stack(engine, override)
        remove = ("down", "--volumes", "--remove-orphans", "--timeout", "3")
        try:
            stack.compose(*remove)  # of a test that was killed
            with wheels() as url, pytest.MonkeyPatch.context() as patch:
                patch.setenv("PIP_FIND_LINKS", url)
                stack.compose("build", "coordinator", "worker-1")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ELCHE_JOBS", str(jobs))
                stack.compose("up", "--detach", "--wait", *SERVICES)
                yield stack
        finally:
            stack.compose(*remove, is_needed=False)


def submit(stack: Stack, file: str, *options: str) -> str:
    """The id of a job on both workers."""
    return stack.elche("submit", file, "--ranks", "2", *options).splitlines()[-1]


def view_when(stack: Stack, client: Client, job_id: str, condition: Callable[[JobView], object], what: str) -> JobView:
    """The first view of the job that fulfils the condition; fails when the job ends without, and says what was seen."""
    last: JobView | None = None

    def found() -> JobView | None:
        nonlocal last
        last = next(one for one in client.jobs() if one.job_id == job_id)
        if condition(last):
            return last
        assert not last.state.has_ended, f"{what}, but it {last.state}: {last.reason}"
        return None

    try:
        return eventually(found, what, LIMIT_S)
    except AssertionError:
        print(last, stack.compose("logs", "--tail", "30", *SERVICES[:3], is_needed=False), sep="\n")
        raise


def pause(stack: Stack, service: str) -> None:
    """Docker gives up where a busy container cannot be frozen at once."""

    def is_paused() -> bool:
        stack.compose("pause", service, is_needed=False)
        return stack.inspect(service, ".State.Paused") == "true"

    eventually(is_paused, f"{service} is paused")


def test_images_are_small_and_nobody_is_root(stack: Stack) -> None:
    def size_mb(name: str) -> float:
        return int(stack.engine.docker("image", "inspect", "--format", "{{.Size}}", name)) / 1e6

    def size_mb_of(step: str) -> float:
        layers = ("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", "elche-test-worker")
        lines = stack.engine.docker(*layers).splitlines()
        return sum(int(line.split()[0]) for line in lines if f"${step}" in line) / 1e6

    assert size_mb_of("LIBRARIES") > 100
    assert size_mb("elche-test-coordinator") < 330  # bytecode is 65 of them, psycopg for PostgreSQL 7
    # torch is 530 of them, g++ for torch.compile 115; scikit-learn, which the example needs, is not counted
    assert size_mb("elche-test-worker") - size_mb_of("LIBRARIES") < 1000
    for service in SERVICES:
        assert stack.compose("exec", "--no-TTY", service, "id", "-u") != "0", service
    find = "import importlib.util; print(importlib.util.find_spec('torch') is None)"
    assert stack.compose("exec", "--no-TTY", "coordinator", "python", "-c", find) == "True"


def test_a_worker_compiles_models(stack: Stack) -> None:
    few = "from torch._inductor import config; config.cpp.simdlen, config.compile_threads = 1, 1"
    compiled = f"import torch; {few}; print(torch.compile(lambda x: (x * 2).cos())(torch.zeros(3)).sum().item())"
    assert stack.compose("exec", "--no-TTY", "worker-1", "python", "-c", compiled) == "3.0"


def test_only_this_machine_gets_in_and_only_with_the_token(stack: Stack) -> None:
    files = [part for name in ("compose.yaml", "compose.gpu.yaml") for part in ("-f", str(ROOT / "docker" / name))]
    services = json.loads(stack.engine.docker("compose", *files, "config", "--format", "json"))["services"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 4
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}

    page = f"http://{stack.address('coordinator', 7718)}/metrics"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(page, timeout=400)
    token = stack.token
    request = urllib.request.Request(page, headers={"Authorization": f"Bearer {token}"})
    assert b"elche_agents" in urllib.request.urlopen(request, timeout=400).read()
    stack.compose("run", "--rm", "token")
    assert stack.token == token, "a second start has written another token"


def test_an_upgrade_loses_nothing_that_was_committed_before(stack: Stack) -> None:
    """What `up` does once all images are built anew. Compose may stop the coordinator before its workers."""
    job_id = submit(stack, "slowly.py", "--epochs", str(MANY))
    with stack.client() as client:
        before = view_when(stack, client, job_id, lambda view: view.epoch >= 2, "it trains")
        assert not before.checkpoints, "none was due"
    stack.compose("up", "--detach", "--wait", "--force-recreate", "coordinator", "worker-1", "worker-2")
    with stack.client() as client:
        after = view_when(stack, client, job_id, lambda view: view.num_rounds > before.num_rounds, "it goes on")
        assert after.checkpoints, "one was made before the coordinator stopped, or as its ranks left"
        assert after.checkpoints[0].version >= before.num_rounds, "it went back to no older one"
        client.job(job_id).cancel()


def test_a_killed_worker_fails_the_job_and_its_checkpoint_is_resumed(stack: Stack) -> None:
    job_id = submit(stack, "digits.py", "--epochs", "2", "--checkpoint-every-epochs", "1", "--on-rank-loss", "fail")
    with stack.client() as client:
        view_when(stack, client, job_id, lambda view: view.checkpoints, "a checkpoint is written")
        stack.compose("kill", "worker-2")
        failed = view_when(stack, client, job_id, lambda view: view.state is JobState.FAILED, "the job fails")
        [lost] = [rank.rank for rank in failed.ranks if rank.host == "worker-2"]
        assert re.search(rf"\brank {lost}\b.*\bworker-2\b", failed.reason), failed.reason
        assert failed.epoch == 1
    ranks = f'max_over_time(elche_rank_batches_total{{job="{job_id}"}}[10m]) > 0'
    eventually(lambda: len(stack.values(ranks)) == 2, "Prometheus saw both ranks", LIMIT_S)
    loss = f'max_over_time(elche_job_lost_ranks_total{{job="{job_id}"}}[10m])'
    eventually(lambda: stack.values(loss) == [1.0], "Prometheus saw that a rank was lost", LIMIT_S)
    for name in ("ElcheRankLost", "ElcheJobFailed"):
        fired = f'max_over_time(ALERTS{{alertname="{name}",alertstate="firing",job="{job_id}"}}[10m])'
        eventually(lambda fired=fired: 1.0 in stack.values(fired), f"{name} has fired", LIMIT_S)

    stack.compose("start", "worker-2")
    result = json.loads(stack.elche("resume", job_id, "--json").splitlines()[-1])
    assert result["state"] == "succeeded", result
    assert result["committed_samples"] == [result["dataset_size"]] * 2
    assert result["dropped"] == [0, 0]
    eventually(lambda: stack.inspect("worker-2", ".State.Health.Status") == "healthy", "the worker is healthy", LIMIT_S)

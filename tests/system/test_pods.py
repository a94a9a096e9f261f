"""The pods of the manifests run: secrets, volumes, names, probes, SIGTERM with grace; jobs count each sample once."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from elche_client import Client, JobHandle
from elche_client.commands.certificates import Authority
from support.docker_engine import build_images, docker_engine
from support.fleets import EPOCHS as MANY
from support.fleets import LINEAR, NUM_SAMPLES, SLOWLY, TOKEN, is_exact_so_far
from support.node import HOST, SUBNET, Node, Object, Pod, node, rendered, secret
from support.podman import Podman, podman
from support.postgresql import postgresql
from support.real_processes import eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(2400)]

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
IMAGES = {"elche-coordinator:latest": "elche-test-coordinator", "elche-worker:latest": "elche-test-worker"}
SPEED = 10.0
"""By which the times of liveness probes are divided."""


@pytest.fixture(scope="module")
def with_images() -> Iterator[Podman]:
    with podman() as command:
        with docker_engine() as engine:
            for name in build_images(engine):
                command.load(engine, name)
        yield command


@pytest.fixture
def here(with_images: Podman) -> Iterator[Node]:
    with node(with_images, IMAGES) as one:
        yield one


def set_up(here: Node, objects: list[Object], leader: Callable[[], Pod]) -> None:
    """As docs/clusters/kubernetes.md says: agents wait for a token, which the coordinator makes."""
    here.apply([secret("elche-token", token=TOKEN), *(one for one in objects if one["kind"] != "Deployment")])
    until_ready(leader())
    token = leader().execute("elche", "token", "make", "pool", "--role", "agent", "--expires", "never")
    here.apply([secret("elche-agent-token", token=token), *(one for one in objects if one["kind"] == "Deployment")])
    for pod in agents(here):
        until_ready(pod)


def agents(here: Node) -> list[Pod]:
    return [pod for name, pod in here.pods.items() if "agent" in name]


def until_ready(pod: Pod) -> None:
    eventually(lambda: pod.passes("readinessProbe"), f"{pod.name} is ready")


def train(client: Client, folder: Path, num_ranks: int = 2) -> JobHandle:
    path = folder / "linear.py"
    path.write_text(LINEAR.read_text() + SLOWLY)
    job = client.submit(path, num_ranks=num_ranks, min_ranks=1, epochs=MANY, folder=folder)
    eventually(lambda: client.get(job.id).epoch >= 2, "it trains")
    return job


def test_the_base(here: Node, tmp_path: Path) -> None:
    """An agent's pod is deleted while a job trains, another one's process is killed, and the coordinator hangs."""
    set_up(here, rendered(FOLDER / "base"), lambda: here.pods["elche-coordinator-0"])
    coordinator = here.pods["elche-coordinator-0"]

    def said(text: str) -> int:
        return coordinator.log().count(text)

    with Client(f"{coordinator.address}:7717", token=TOKEN, reconnect_s=60) as client:
        job = train(client, tmp_path)

        deleted, other = agents(here)
        took_s = here.delete(deleted)
        assert took_s < 25, "it has left within its grace"
        assert (said("has left"), said("is lost")) == (1, 0), "its work was committed"
        until_ready(here.add("elche-agent"))
        eventually(lambda: said("; 2 ranks in training") == 1, "another one trains")

        other.send(signal.SIGKILL)
        eventually(lambda: said("is lost") == 1, "it is lost")
        eventually(lambda: said("; 2 ranks in training") == 2, "it trains again")
        assert int(other.state("RestartCount")) == 1

        first = coordinator.state("State.Pid")
        assert coordinator.passes("livenessProbe", SPEED)
        coordinator.send(signal.SIGSTOP)
        assert coordinator.keep_alive(SPEED) == coordinator.spec_of()["livenessProbe"]["failureThreshold"]
        until_ready(coordinator)
        assert coordinator.state("State.Pid") != first
        epoch = client.get(job.id).epoch
        eventually(lambda: client.get(job.id).epoch > epoch + 2, "it goes on")
        is_exact_so_far(job)
        assert (said("has left"), said("is lost")) == (1, 1), "nobody was lost with the coordinator"


STANDBY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{folder}/base]
components: [{folder}/components/postgresql, {folder}/components/certificates]
"""


def test_two_coordinators_with_postgresql_and_certificates(here: Node, tmp_path: Path) -> None:
    """The one that leads is deleted while a job trains: the other leads at once. Then both are replaced."""
    place = "/".join([".."] * (len(tmp_path.parts) - 1)) + str(FOLDER)
    (tmp_path / "kustomization.yaml").write_text(STANDBY.format(folder=place))
    objects = rendered(tmp_path)
    (wanted,) = [one["spec"] for one in objects if one.get("spec", {}).get("dnsNames")]
    names = [*wanted["dnsNames"], *wanted["ipAddresses"]]
    holder = Authority(tmp_path / "certs").server(names, expires=timedelta(hours=1))
    files = {path.name: path.read_text() for path in holder.folder.iterdir()}

    def leader() -> Pod:
        sets = [pod for name, pod in here.pods.items() if "coordinator" in name]
        return eventually(lambda: next((pod for pod in sets if pod.leads()), None), "one leads")

    def elche(*words: str) -> str:
        env = {"ELCHE_TOKEN": TOKEN, "ELCHE_TLS": f"/here/certs/{holder.folder.name}"}
        env["ELCHE_COORDINATOR"] = "elche:7717"
        return here.run("elche-coordinator:latest", "elche", *words, folder=tmp_path, env=env)

    def epoch() -> int:
        return int(json.loads(elche("jobs", "--json"))[0]["epoch"])

    with postgresql(HOST, SUBNET) as server:
        store = [secret("elche-store", url=server.url), secret(wanted["secretName"], **files)]
        set_up(here, [*store, *objects], leader)
        (tmp_path / "linear.py").write_text(LINEAR.read_text() + SLOWLY)
        job = elche("submit", "linear.py", "--ranks", "2", "--epochs", str(MANY))
        eventually(lambda: epoch() >= 2, "it trains")
        first = leader()
        for pod in here.pods.values():
            until_ready(pod)  # who stands by, too
        took_s = here.delete(first)
        began_s = time.monotonic()
        second = leader()
        print(f"left in {took_s:.1f} s, and {time.monotonic() - began_s:.1f} s later {second.name} leads")
        assert second.name != first.name
        until_ready(here.add_of_set(first.name))
        assert second.leads(), "who comes back stands by"
        here.delete(second)
        assert leader().name == first.name
        until_ready(here.add_of_set(second.name))
        before = epoch()
        eventually(lambda: epoch() > before, "it trains on")
        over = epoch()
        elche("cancel", job)
        eventually(lambda: json.loads(elche("jobs", "--json"))[0]["state"] == "cancelled", "it has ended")
        env = {"ELCHE_TOKEN": TOKEN, "ELCHE_TLS": f"/here/certs/{holder.folder.name}"}
        watch = (
            f"elche watch {job} --json --coordinator elche:7717 || true"  # it says of a cancelled job that it failed
        )
        said = here.run("elche-coordinator:latest", "sh", "-c", watch, folder=tmp_path, env=env)
    committed = json.loads(said.splitlines()[-1])["committed_samples"]
    assert set(committed[:over]) == {NUM_SAMPLES}, committed
    assert max(committed) <= NUM_SAMPLES


def test_a_jobset(here: Node) -> None:
    """Its coordinator's pod is lost while it trains: another one goes on, and ends well when the job has."""
    objects = rendered(FOLDER / "jobset")
    (jobset,) = [one for one in objects if one["kind"] == "JobSet"]
    (watch,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    watch["command"] += ["--epochs", "3"]
    here.apply([secret("elche-token", token=TOKEN), *objects])
    pod = here.pods["train-coordinator-0-0"]
    eventually(lambda: "epoch 1" in pod.log(), "it trains")
    here.lose(pod)
    pod = here.add_to("train", "coordinator")
    eventually(lambda: pod.state("State.Status") == "exited", "the job has ended")
    assert pod.state("State.ExitCode") == "0"
    assert "was submitted with this key before" in pod.log()
    assert "stalled" not in pod.log("coordinator"), "at another address it was found in time"
    for one in agents(here):
        assert here.delete(one) < 10

"""A node of Kubernetes' without its API server: pods run in podman, which leaves out what is done here.

StatefulSets, Deployments and the Jobs of a JobSet become pods with the names that their controllers give them. Before
a pod's containers start its volumes get their `fsGroup`. Pods are found by their names within services. Probes are
made as the manifests say, and a container whose liveness fails is killed; podman starts it again.
"""

import base64
import copy
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.debian import next_release
from support.docker_engine import CACHE
from support.podman import Podman
from support.real_processes import eventually

NETWORK = "elche-test"
SUBNET = "10.77.10.0/24"
HOST = "10.77.10.254"
"""This host's address there."""
CRASHES = (128 + signal.SIGSEGV, 128 + signal.SIGABRT, 128 + signal.SIGBUS)
"""Exit codes of programs with bugs, which no test here asks for."""
STORED = ("Secret", "PersistentVolumeClaim")
Object = dict[str, Any]


def kustomize() -> str:
    """The command: this machine's, or that of Debian's next release."""
    if found := shutil.which("kustomize"):
        return found
    there = CACHE.with_name("elche-kustomize")
    if not (command := there / "files/usr/bin/kustomize").exists():
        next_release(there, "kustomize")
    return str(command)


def rendered(folder: Path) -> list[Object]:
    """The objects of a kustomization, about which kustomize must have no remark."""
    done = subprocess.run([kustomize(), "build", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return list(yaml.safe_load_all(done.stdout))


def secret(name: str, **values: str) -> Object:
    """As `kubectl create secret generic` makes it."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


@dataclass(slots=True)
class Pod:
    """A pod that runs, or has run."""

    name: str
    spec: Object
    podman: Podman
    address: str = ""
    made_s: float = field(default_factory=time.time)

    def container(self, name: str = "") -> str:
        """How podman knows one of its containers, by default the first."""
        return f"{self.name}-{name or self.spec['containers'][0]['name']}"

    def spec_of(self, container: str = "") -> Object:
        found: Object = next(one for one in self.spec["containers"] if container in ("", one["name"]))
        return found

    def port(self, made: Object) -> int:
        """The number of a probe's port, which may be named."""
        named = {one["name"]: one["containerPort"] for one in self.spec_of()["ports"]}
        return int(named.get(made["port"], made["port"]))

    def execute(self, *command: str) -> str:
        """What a command prints in its first container. Where that fails, how the container is."""
        try:
            return self.podman("exec", self.container(), *command)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.condition()}") from None

    def log(self, container: str = "") -> str:
        return self.podman("logs", self.container(container))

    def state(self, what: str, container: str = "") -> str:
        """A field of `podman inspect`."""
        return self.podman("inspect", "--format", f"{{{{.{what}}}}}", self.container(container))

    def condition(self, container: str = "") -> str:
        """How one of its containers is, with which exit codes it ended before it was started again, and its log."""
        name = self.container(container)
        status, code, is_killed = (self.state(f"State.{one}", container) for one in ("Status", "ExitCode", "OOMKilled"))
        ends = [code for ended, code in self.podman.ends_since(self.made_s) if ended == name]
        state = f"{status}, exit code {code}, killed for its memory: {is_killed}, has ended with {ends}"
        return f"--- {name}: {state}\n{self.log(container)[-4000:]}"

    def send(self, number: signal.Signals) -> None:
        """A signal to the first process of its first container, as the kernel would."""
        os.kill(int(self.state("State.Pid")), number)

    def passes(self, probe: str, speed: float = 1.0, container: str = "") -> bool:
        """Whether it passes a probe now, in its time divided by `speed`."""
        made = self.spec_of(container)[probe]
        limit_s = made.get("timeoutSeconds", 1) / speed
        if "exec" in made:
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self.podman("exec", self.container(container), *made["exec"]["command"], limit_s=limit_s)
                return True
            return False
        if "tcpSocket" in made:
            with suppress(OSError), socket.create_connection((self.address, self.port(made["tcpSocket"])), limit_s):
                return True
            return False
        if "httpGet" in made:
            return self.answers(made["httpGet"], limit_s) is not None
        with grpc.insecure_channel(f"{self.address}:{made['grpc']['port']}") as channel, suppress(grpc.RpcError):
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=limit_s)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False

    def answers(self, get: Object, limit_s: float = 10.0) -> str | None:
        """What it answers to a probe of this kind; None where the probe would fail."""
        url = f"{get.get('scheme', 'HTTP').lower()}://{self.address}:{self.port(get)}{get['path']}"
        unverified = ssl._create_unverified_context()  # as the kubelet's probes
        with suppress(OSError), urllib.request.urlopen(url, timeout=limit_s, context=unverified) as answer:
            text: str = answer.read().decode()
            return text
        return None

    def leads(self) -> bool:
        """Whether it is the coordinator that leads."""
        return self.answers(self.spec_of()["readinessProbe"]["httpGet"]) == "leads\n"

    def keep_alive(self, speed: float = 1.0) -> int:
        """Probes it until it has failed `failureThreshold` times in a row, and then kills the container. How often it
        was probed. All times are divided by `speed`.
        """
        probe, failed, made = self.spec_of()["livenessProbe"], 0, 0
        while failed < probe["failureThreshold"]:
            began_s, made = time.monotonic(), made + 1
            failed = 0 if self.passes("livenessProbe", speed) else failed + 1
            time.sleep(max(0.0, began_s + probe["periodSeconds"] / speed - time.monotonic()))
        self.send(signal.SIGKILL)
        return made


@dataclass(slots=True)
class Node:
    """The pods that run here, by name, and of which workload they are."""

    podman: Podman
    images: dict[str, str]
    """What images of the manifests are called here."""
    pods: dict[str, Pod] = field(default_factory=dict)
    templates: dict[str, Object] = field(default_factory=dict)
    """The Deployments' pods."""
    sets: dict[str, Object] = field(default_factory=dict)
    """The StatefulSets, by the names of their pods."""
    jobs: dict[tuple[str, str], Object] = field(default_factory=dict)
    """The pods of JobSets' jobs."""
    config_maps: list[Object] = field(default_factory=list)
    num_made: int = 0
    num_agents: int = 2
    """Of a JobSet's job no more than these."""

    def apply(self, objects: Iterable[Object]) -> None:
        """Makes what they say: first what pods need."""
        objects = list(objects)
        self.config_maps += [one for one in objects if one["kind"] == "ConfigMap"]
        stored = [one for one in objects if one["kind"] in STORED]
        self.podman("kube", "play", "-", stdin=yaml.safe_dump_all(stored))
        for one in objects:
            name, spec = one["metadata"]["name"], one.get("spec", {})
            match one["kind"]:
                case "StatefulSet":
                    for number in range(spec["replicas"]):
                        self.sets[f"{name}-{number}"] = spec
                        self.add_of_set(f"{name}-{number}")
                case "Deployment":
                    self.templates[name] = spec["template"]
                    for _ in range(spec["replicas"]):
                        self.add(name)
                case "JobSet":
                    for job in spec["replicatedJobs"]:
                        inner = job["template"]["spec"]
                        self.jobs[name, job["name"]] = inner["template"]["spec"]
                        for index in range(min(inner["parallelism"], self.num_agents)):
                            self.add_to(name, job["name"], index)

    def add(self, deployment: str) -> Pod:
        """One more pod of a Deployment, under a name that no other had."""
        self.num_made += 1
        return self._start(f"{deployment}-{self.num_made}", self.templates[deployment]["spec"], [])

    def add_to(self, jobset: str, job: str, index: int = 0) -> Pod:
        """A pod of one of a JobSet's jobs, with the name by which others find it."""
        name = f"{jobset}-{job}-0-{index}"
        return self._start(name, self.jobs[jobset, job], [f"{name}.{jobset}"])

    def add_of_set(self, name: str) -> Pod:
        """A pod of a StatefulSet, with its claims: the next one where it was deleted."""
        spec = self.sets[name]
        pod = copy.deepcopy(spec["template"]["spec"])
        for claim in spec.get("volumeClaimTemplates", ()):
            volume = claim["metadata"]["name"]
            pod["volumes"].append({"name": volume, "persistentVolumeClaim": {"claimName": f"{volume}-{name}"}})
        return self._start(name, pod, [f"{name}.{spec['serviceName']}", "elche"])

    def _start(self, name: str, spec: Object, names: list[str]) -> Pod:
        spec = copy.deepcopy(spec)
        for one in (*spec["containers"], *spec.get("initContainers", ())):
            one["image"] = self.images[one["image"]]
            one["imagePullPolicy"] = "Never"
            for mount in one.get("volumeMounts", ()):
                if mount["name"] in _emptied(spec):
                    mount["name"] += f"-{name}"
        for volume in spec["volumes"]:
            if "emptyDir" in volume:
                volume["name"] += f"-{name}"
        sidecars = spec.pop("initContainers", ())  # podman would wait for their end
        spec["containers"] += [{key: one[key] for key in one if key != "restartPolicy"} for one in sidecars]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**spec, "hostname": name}}
        aliases = ",".join(f"alias={one}" for one in names)
        network = f"{NETWORK}:{aliases}" if names else NETWORK
        given = yaml.safe_dump_all([*self.config_maps, pod])
        self.podman("kube", "play", "--start=false", "--network", network, "-", stdin=given)
        self._own(spec)
        infra = self.podman("pod", "inspect", "--format", "{{.InfraContainerID}}", name)
        self.podman("start", infra)
        where = f'{{{{(index .NetworkSettings.Networks "{NETWORK}").IPAddress}}}}'
        made = self.pods[name] = Pod(name, spec, self.podman, self.podman("inspect", "--format", where, infra))
        for sidecar in sidecars:
            self.podman("start", made.container(sidecar["name"]))
            eventually(lambda one=sidecar: made.passes("startupProbe", container=one["name"]), "it has started")
        self.podman("pod", "start", name)
        return made

    def _own(self, spec: Object) -> None:
        """What `fsGroup` asks for."""
        group = spec["securityContext"]["fsGroup"]
        for name in self.podman("volume", "ls", "--quiet").split():
            where = self.podman("volume", "inspect", "--format", "{{.Mountpoint}}", name)
            for path in (Path(where), *Path(where).rglob("*")):
                if path.lstat().st_gid != group:
                    os.chown(path, -1, group, follow_symlinks=False)
                    path.chmod(path.stat().st_mode | (path.stat().st_mode & 0o700) >> 3)

    def run(self, image: str, *command: str, folder: Path, env: Mapping[str, str]) -> str:
        """What a command prints in a pod of its own, whose working directory is a folder of this host's."""
        variables = [part for name, value in env.items() for part in ("--env", f"{name}={value}")]
        where = ("--network", NETWORK, "--volume", f"{folder}:/here", "--workdir", "/here", "--user", "0")
        program, *arguments = command
        return self.podman("run", "--rm", *where, *variables, "--entrypoint", program, self.images[image], *arguments)

    def delete(self, pod: Pod) -> float:
        """SIGTERM, and SIGKILL when its grace is over. How many seconds it took."""
        began_s = time.monotonic()
        self.podman("stop", *(pod.container(one["name"]) for one in pod.spec["containers"]))
        took_s = time.monotonic() - began_s  # not `pod stop`, which takes the network first
        self.podman("pod", "rm", "--force", pod.name)
        del self.pods[pod.name]
        return took_s

    def lose(self, pod: Pod) -> None:
        """It is gone without a word, as with its node."""
        self.podman("pod", "kill", "--signal", "KILL", pod.name)
        self.podman("pod", "rm", "--force", "--time", "0", pod.name)
        del self.pods[pod.name]

    def clear(self) -> None:
        """Removes all pods, and what they have written."""
        self.podman("pod", "rm", "--all", "--force", "--time", "1", is_needed=False)
        for what in ("volume", "secret"):
            self.podman(what, "rm", "--all", *(("--force",) if what == "volume" else ()), is_needed=False)
        self.podman("network", "rm", "--force", NETWORK, is_needed=False)


def _emptied(spec: Object) -> set[str]:
    return {one["name"] for one in spec["volumes"] if "emptyDir" in one}


@contextmanager
def node(podman: Podman, images: dict[str, str]) -> Iterator[Node]:
    """Nothing of it is left afterwards."""
    one, began_s = Node(podman, images), time.time()
    one.clear()
    podman("network", "create", "--subnet", SUBNET, "--gateway", HOST, NETWORK)
    try:
        yield one
    finally:
        for pod in one.pods.values():  # shown for a test that fails
            for container in pod.spec["containers"]:
                print(pod.condition(container["name"]))
        one.clear()
    crashed = [end for end in podman.ends_since(began_s) if end[1] in CRASHES]
    assert not crashed, f"they were started again, so that nobody has noticed: {crashed}"

"""What jobs leave is in the artifact store when the hosts that made it are gone, all of it or nothing."""

import hashlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from processes.test_restarted_workers import MONITORED, fetched

from elche.errors import InvalidJob
from elche_client import Client
from support.real_processes import Coordinator, Mark, agent, command, coordinator, eventually

JobFile = Callable[..., Path]
IMPORTS = "from dataclasses import replace"
CHECKPOINTED = "job = replace(job, checkpoint_every_epochs=1)"
WAITS = """
import os, time

def evaluate(model):
    while not os.path.exists(os.environ["GOES_ON"]):
        time.sleep(0.01)
    return {}

job = replace(job, evaluate=evaluate)
"""
HANGS = """
import os, sys, time

sync = os.fsync

def fsync(file):
    while "agent" in sys.argv[0] and os.path.exists(os.environ["HANGS"]):
        time.sleep(0.01)
    sync(file)

os.fsync = fsync
"""
"""Has a worker's disk hang, as one of the network does, while there is a file."""


LAB = """
import fsspec
from fsspec.implementations.local import LocalFileSystem

class Lab(LocalFileSystem):
    protocol = "lab"

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.removeprefix("lab://"))

fsspec.register_implementation("lab", Lab)
"""
"""A kind of URL that all processes of a test know."""


@contextmanager
def storing(
    mark: Mark, folder: Path, env: Mapping[str, str] | None = None, *, data: Path | None = None
) -> Iterator[tuple[Coordinator, Client, Path]]:
    """A coordinator with an artifact store, a client of it, and the store's folder."""
    (store := folder / "store").mkdir(exist_ok=True)
    env = {"ELCHE_ARTIFACTS": str(store), **(env or {})}
    with coordinator(mark, folder, data=data, env=env) as one, Client(one.address, token="") as client:
        yield one, client, store


def manifests(store: Path) -> list[Path]:
    """Of hosts, not of checkpoints."""
    return list(store.glob("*/*/manifest.json"))


def said(client: Client) -> str:
    (view,) = client.jobs()
    return view.artifacts


def metric(one: Coordinator, name: str) -> float:
    with urlopen(f"{one.page_url}/metrics", timeout=400) as page:
        lines = page.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@pytest.mark.parametrize(
    ("scheme", "by_job"),
    [
        pytest.param("", False, id="folder"),
        pytest.param("lab://", False, id="url", marks=pytest.mark.long(reason="beside one that the job names")),
        pytest.param("lab://", True, id="url that the job names"),
    ],
)
def test_what_a_job_has_left_outlives_its_host_and_its_folder(
    mark: Mark, tmp_path: Path, job_file: JobFile, scheme: str, by_job: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LAB)
    known, place = {"PYTHONPATH": str(tmp_path)}, f"{scheme}{tmp_path / 'store'}"
    path = job_file("linear.py", IMPORTS, MONITORED, CHECKPOINTED)
    (tmp_path / "one").mkdir()
    of_job = place if by_job else ""
    with storing(mark, tmp_path, {**known, "ELCHE_ARTIFACTS": "" if of_job else place}) as (one, client, store):
        with agent(mark, tmp_path / "one", one.address, env=known):
            handle = client.submit(path, num_ranks=2, epochs=1, artifacts=of_job)
            handle.result()
            before = fetched(one, client, handle.id, tmp_path)
            eventually(lambda: manifests(store), "it is stored")
            eventually(lambda: said(client) == f"{place}/{handle.id}", "it is said where")
        eventually(lambda: not client.hosts(), "the worker is gone")
        shutil.rmtree(tmp_path / "one")
        assert fetched(one, client, handle.id, tmp_path) == before
        page = f"{one.page_url}/api/jobs/{handle.id}"
        with urlopen(page, timeout=400) as shown:
            assert json.load(shown)["artifacts"] == f"{place}/{handle.id}"
        (manifest,) = manifests(store)
        files = json.loads(manifest.read_text())["files"]
        stored = {name: hashlib.sha256((manifest.parent / name).read_bytes()).hexdigest() for name in files}
        assert stored == {name: one["sha256"] for name, one in files.items()}
        assert {"model.safetensors", "best.safetensors", "rank-0.log", "rank-1.log", "record.json"} <= files.keys()
        assert json.loads((manifest.parent / "record.json").read_text())["result"]["outcome"] == "succeeded"
        assert metric(one, "elche_artifacts_waiting") == metric(one, "elche_artifact_failures_total") == 0
    (again := tmp_path / "again").mkdir()
    with coordinator(mark, again, data=one.data, env=known) as one, Client(one.address, token="") as client:
        assert fetched(one, client, handle.id, tmp_path) == before  # also without the setting
        with agent(mark, again, one.address, env=known):
            resumed = client.resume(handle.id, epochs=2)
            assert resumed.result().epochs == 2
            with urlopen(f"{one.page_url}/api/jobs/{resumed.id}", timeout=400) as shown:
                assert json.load(shown)["resume"] == f"{place}/{manifest.parent.relative_to(store)}/checkpoints"


@pytest.mark.parametrize("fault", ["it is not mounted", "it is full"])
def test_a_store_that_fails_is_said_and_tried_again_and_nothing_is_lost(
    mark: Mark, tmp_path: Path, job_file: JobFile, fault: str
) -> None:
    goes_on, path = tmp_path / "goes-on", job_file("linear.py", IMPORTS, WAITS)
    with storing(mark, tmp_path) as (one, client, store), agent(mark, tmp_path, one.address) as host:
        handle = client.submit(path, num_ranks=1, epochs=1, environment={"GOES_ON": str(goes_on)})
        eventually(lambda: client.get(handle.id).num_rounds, "it trains")
        with failing(store, host.process.pid, is_full=fault == "it is full"):
            goes_on.touch()
            handle.result()
            eventually(lambda: "not stored yet: " in said(client), "that is said of the job")
            why = {"it is full": "File too large", "it is not mounted": f"{store} is not a folder on this host"}
            assert why[fault] in said(client)
            assert "not all that it left is stored, which is tried again" in one.log.read_text()
            eventually(lambda: metric(one, "elche_artifact_failures_total") >= 2, "it is tried again, and counted")
            assert metric(one, "elche_artifacts_waiting") == 1
            assert not manifests(tmp_path)
            before = client.download(handle.id, tmp_path / "model.safetensors").read_bytes()
        eventually(lambda: said(client) == f"{store}/{handle.id}", "it is stored")
        (manifest,) = manifests(store)
        assert (manifest.parent / "model.safetensors").read_bytes() == before
        assert not list(store.rglob("*.draft"))
        assert metric(one, "elche_artifacts_waiting") == 0


def test_what_a_host_has_that_is_away_is_stored_when_its_folder_is_back(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    (first := tmp_path / "first").mkdir()
    (second := tmp_path / "second").mkdir()
    with storing(mark, tmp_path) as (one, client, store), agent(mark, first, one.address, devices="cpu"):
        store.rmdir()
        with agent(mark, second, one.address, devices="cpu"):
            eventually(lambda: len(client.hosts()) == 2, "both are there")
            handle = client.submit(job_file(), num_ranks=2, epochs=1)
            handle.result()
        eventually(lambda: len(client.hosts()) == 1, "one is gone")
        store.mkdir()
        eventually(lambda: said(client).startswith(f"{store}/{handle.id}; "), "what the other has is stored")
        away = f"not stored yet: {client.hosts()[0].host} is not connected, which has "
        eventually(lambda: away in said(client), "what the other has is missed")
        assert len(manifests(store)) == 1
        with agent(mark, second, one.address, devices="cpu"):
            eventually(lambda: said(client) == f"{store}/{handle.id}", "all is stored")
        logs = sorted(path.name for path in store.rglob("rank-*.log"))
        assert logs == ["rank-0.log", "rank-1.log"]
        assert len(list(store.rglob("record.json"))) == 1


def test_what_one_host_has_stored_stays_while_another_stores(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """It was taken for that of a job that is forgotten, so that only what the last host had was found."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    goes_on, path = tmp_path / "goes-on", job_file("linear.py", IMPORTS, WAITS)
    hangs = {name: tmp_path / f"{name}-hangs" for name in ("first", "second")}
    with storing(mark, tmp_path) as (one, client, store):
        with ExitStack() as stack:
            for name, file in hangs.items():
                (folder := tmp_path / name).mkdir()
                env, label = {"PYTHONPATH": str(tmp_path), "HANGS": str(file)}, f"name={name}"
                stack.enter_context(agent(mark, folder, one.address, "--label", label, devices="cpu", env=env))
            eventually(lambda: len(client.hosts()) == 2, "both are there")
            handle = client.submit(path, num_ranks=2, epochs=1, environment={"GOES_ON": str(goes_on)})
            eventually(lambda: client.get(handle.id).num_rounds, "it trains")
            for file in hangs.values():
                file.touch()
            goes_on.touch()
            model = Path(handle.result().model)
            of_model = model.relative_to(tmp_path).parts[0]
            hangs.pop(of_model).unlink()
            eventually(lambda: len(manifests(store)) == 1, "the host that has the model has stored it")
            again = client.submit(
                path, num_ranks=1, epochs=1, environment={"GOES_ON": str(goes_on)}, conditions=[f"name={of_model}"]
            )
            again.result()
            eventually(lambda: client.get(again.id).artifacts == f"{store}/{again.id}", "another job is stored")
            for file in hangs.values():
                file.unlink()
            eventually(lambda: client.get(handle.id).artifacts == f"{store}/{handle.id}", "all is stored")
            before = model.read_bytes()
        eventually(lambda: not client.hosts(), "both are gone")
        assert client.download(handle.id, tmp_path / "model.safetensors").read_bytes() == before
        assert {line.error for line in handle.logs()} == {""}


@contextmanager
def failing(store: Path, pid: int, *, is_full: bool) -> Iterator[None]:
    """The folder is not there; or no file of the worker can grow, as on a full disk but for the error's number."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    if is_full:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, most))
    else:
        store.rmdir()
    try:
        yield
    finally:
        store.mkdir(exist_ok=True)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


def test_a_damaged_file_is_refused_in_one_line(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        Client(one.address, token="") as client,
        agent(mark, tmp_path, one.address),
    ):
        handle = client.submit(job_file(), num_ranks=1, epochs=1)
        handle.result()
        assert said(client) == ""
    with storing(mark, tmp_path, data=one.data) as (one, client, store):
        with agent(mark, tmp_path, one.address):
            eventually(lambda: manifests(store), "what was there before the store was is stored")
        eventually(lambda: not client.hosts(), "the worker is gone")
        (model,) = (one for one in store.rglob("model.safetensors") if "checkpoints" not in one.parts)
        damaged = bytearray(model.read_bytes())
        damaged[-1] ^= 1
        model.write_bytes(damaged)
        fetch = ("elche_client", "fetch", handle.id, "model.safetensors", "--coordinator", one.address)
        refused = command(mark, *fetch, cwd=tmp_path)
        assert refused.code == 2
        watched = command(mark, "elche_client", "watch", handle.id, "--coordinator", one.address, cwd=tmp_path)
        assert "artifacts" in watched.out
        assert refused.complaint.endswith(
            f"{model} in the artifact store is damaged: its SHA-256 is not that of what was stored"
        )
        assert not list(tmp_path.glob("*model.safetensors*"))
        model.write_bytes(damaged[:-1])
        with pytest.raises(InvalidJob, match=f"it has {len(damaged) - 1} bytes and had {len(damaged)}"):
            client.download(handle.id, tmp_path / "model.safetensors")
        model.unlink()
        with pytest.raises(InvalidJob, match="cannot be read from the artifact store: No such file or directory"):
            client.download(handle.id, tmp_path / "model.safetensors")


def test_a_worker_that_is_told_to_leave_stores_first_and_a_cancelled_job_leaves_its_best_checkpoint(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    path, hangs = job_file("linear.py", IMPORTS, MONITORED, CHECKPOINTED), tmp_path / "hangs"
    (tmp_path / "one").mkdir()
    with storing(mark, tmp_path) as (one, client, store):
        env = {"PYTHONPATH": str(tmp_path), "HANGS": str(hangs)}
        with agent(mark, tmp_path / "one", one.address, env=env) as host:
            handle = client.submit(path, num_ranks=1, epochs=100_000)
            eventually(
                lambda: any(kept.is_best for kept in client.checkpoints(handle.id)), "a checkpoint is the best one"
            )
            hangs.touch()
            handle.cancel()
            eventually(lambda: list(store.rglob("*.draft")), "a file is being written")
            host.process.terminate()
            eventually(lambda: "leaves once jobs' artifacts are stored" in host.log.read_text(), "it leaves")
            hangs.unlink()
            assert host.process.wait() == 0
        eventually(lambda: said(client) == f"{store}/{handle.id}", "it is stored")
        shutil.rmtree(tmp_path / "one")
        best = next(kept for kept in client.checkpoints(handle.id) if kept.is_best)
        (stored,) = store.rglob(f"checkpoints/{Path(best.path).name}/model.safetensors")
        found = client.download(handle.id, tmp_path / "best.safetensors", best=True)
        assert found.read_bytes() == stored.read_bytes()
        assert {line.error for line in handle.logs()} == {""}


def test_a_worker_that_is_killed_while_it_stores_leaves_nothing_half(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    goes_on, hangs = tmp_path / "goes-on", tmp_path / "hangs"
    path = job_file("linear.py", IMPORTS, WAITS)
    with storing(mark, tmp_path) as (one, client, store):
        env = {"PYTHONPATH": str(tmp_path), "HANGS": str(hangs)}
        with agent(mark, tmp_path, one.address, env=env) as host:
            handle = client.submit(path, num_ranks=1, epochs=1, environment={"GOES_ON": str(goes_on)})
            eventually(lambda: client.get(handle.id).num_rounds, "it trains")
            hangs.touch()
            goes_on.touch()
            handle.result()
            eventually(lambda: list(store.rglob("*.draft")), "a file is being written")
            os.kill(host.process.pid, signal.SIGKILL)
            host.process.wait()
        assert [one.suffix for one in store.rglob("*") if one.is_file()] == [".draft"]
        eventually(lambda: not client.hosts(), "the worker is gone")
        with pytest.raises(InvalidJob, match="the host that has the model is not here any more"):
            client.download(handle.id, tmp_path / "model.safetensors")
        hangs.unlink()
        with agent(mark, tmp_path, one.address, env=env):
            eventually(lambda: said(client) == f"{store}/{handle.id}", "the next worker there stores it")
        assert not list(store.rglob("*.draft"))
        client.download(handle.id, tmp_path / "model.safetensors")

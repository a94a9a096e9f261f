"""Files of the artifact store: what is read is what was written, and nothing secret is said."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elche.artifacts import CHUNK_BYTES, MANIFEST, NOT_STORED, StoreFolder, _Folder, problem_of, reason_of
from elche.errors import InvalidJob
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator.archive.artifacts import MAX_AT_ONCE, Artifacts, _check
from elche_coordinator.config import CannotStart
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.services.submission import check_spec
from elche_worker.agent.artifacts import ArtifactWriter
from elche_worker.process.rank_files import RankFiles

LARGE = bytes(range(256)) * (CHUNK_BYTES // 128) + b"the end"


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StoreFolder:
    if request.param == "folder":
        return StoreFolder(str(tmp_path), "job/host")
    return StoreFolder(f"memory://{tmp_path.name}", "job/host")


def broken() -> Iterator[bytes]:
    yield b"one"
    raise OSError("no room")


def test_a_file_is_read_as_it_was_written_or_not_at_all(place: StoreFolder) -> None:
    place.begin()
    for name, data in {"large": LARGE, "checkpoints/1/empty": b""}.items():
        entry = place.write(name, (data[:1], data[1:]))
        assert b"".join(place.read(name, entry)) == data
        place.write(name, (b"x", data[1:]))
        parts = []
        with pytest.raises(InvalidJob, match=f"{name} in the artifact store is damaged"):
            parts += list(place.read(name, entry))
        assert parts == []
    place.write(MANIFEST, (b"{}",))
    place.begin()
    with pytest.raises(FileNotFoundError):
        list(place.read(MANIFEST))


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    place = StoreFolder(str(tmp_path), "job/host")
    entry = place.write("model", (b"before",))
    with pytest.raises(OSError, match="no room"):
        place.write("model", broken())
    assert b"".join(place.read("model", entry)) == b"before"
    assert [one.name for one in tmp_path.rglob("*") if one.is_file()] == ["model"]


def test_links_in_a_store_lead_nowhere(tmp_path: Path) -> None:
    """Jobs can change what their worker can: a link would have the coordinator read, or a worker write, elsewhere."""
    (other := tmp_path / "other").mkdir()
    (other / "secret").write_bytes(b"secret")
    (store := tmp_path / "store" / "job").mkdir(parents=True)
    (store / "host").symlink_to(other)
    (store / "here").mkdir()
    (store / "here" / "model").symlink_to(other / "secret")
    root = str(tmp_path / "store")
    for folder, name in (("job/host", "secret"), ("job/here", "model")):
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            list(StoreFolder(root, folder).read(name))
    with pytest.raises(NotADirectoryError):
        StoreFolder(root, "job/host").write("new", (b"new",))
    StoreFolder(root, "job/here").write("model", (b"model",))  # in place of the link
    assert {one.name: one.read_bytes() for one in other.iterdir()} == {"secret": b"secret"}


@pytest.mark.parametrize(
    "root", ["relative", "file://relative", "s3://key:hush@lab/models", "https://lab/models?sig=hush"]
)
def test_an_address_that_is_none_or_has_credentials_is_refused_and_not_repeated(root: str) -> None:
    problem = problem_of(root)
    assert problem
    assert "hush" not in problem
    with pytest.raises(CannotStart, match="--artifacts: "):
        artifacts(root, {})


def test_a_kind_of_url_that_is_not_known_is_refused_before_a_job_has_ended() -> None:
    with pytest.raises(CannotStart, match=r"--artifacts: .* fsspec knows no URL that begins with s4://"):
        artifacts("s4://lab/models", {})


@pytest.mark.parametrize(
    "place", ["relative", "s3://key:hush@lab/models", "simplecache::file:///etc", "/srv\0", "s4://lab"]
)
def test_a_job_cannot_name_what_is_no_store(place: str) -> None:
    with pytest.raises(InvalidJob, match="the artifact store ") as refused:
        check_spec(job_pb2.JobSpec(source="job = 1", artifacts=place))
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("place", ["/srv/elche", "file:///srv/elche"])
def test_a_confined_job_has_its_agent_write_to_no_folder_that_it_names(tmp_path: Path, place: str) -> None:
    """The agent may write where the job may not."""
    folders: Any = SimpleNamespace(find=lambda job_id: tmp_path)
    writer = ArtifactWriter(folders, SimpleNamespace(files=None), is_confined=True)  # type: ignore[arg-type]
    *_, answer = writer.answers(agent_pb2.StoreArtifacts(job_id="job", root=place, folder="job/host", is_of_job=True))
    assert answer.error == f"jobs are confined here (--confine) and may name a URL to store in, not {place}"


def test_a_store_of_which_every_second_open_fails_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt began with all files anew, so of many files hardly any attempt wrote all."""
    monkeypatch.setattr("elche_worker.agent.artifacts.AGAIN_S", 0.0)
    (folder := tmp_path / "job").mkdir()
    (store := tmp_path / "store").mkdir()
    for rank in range(4):
        (folder / f"rank-{rank}.log").write_bytes(LARGE)
    num_opens, writing = 0, _Folder.writing

    def failing(self: _Folder, name: str) -> Any:
        nonlocal num_opens
        num_opens += 1
        if num_opens % 2:
            raise OSError("the store is busy")
        return writing(self, name)

    monkeypatch.setattr(_Folder, "writing", failing)
    folders: Any = SimpleNamespace(find=lambda job_id: folder)
    processes: Any = SimpleNamespace(files=RankFiles(), has=lambda *_: False)
    writer = ArtifactWriter(folders, processes, is_confined=False)
    order = agent_pb2.StoreArtifacts(job_id="job", root=str(store), folder="host", ranks=range(4))
    *_, answer = writer.answers(order)
    assert not answer.error
    assert set(json.loads(answer.data)["files"]) == {f"rank-{rank}.log" for rank in range(4)}
    assert num_opens == 2 * 5, "each of four logs, and the manifest"
    monkeypatch.setattr(_Folder, "writing", Mock(side_effect=OSError("no room")))
    *_, answer = writer.answers(order)
    assert answer.error == f"{store} cannot be written: no room"


@pytest.mark.parametrize("root", ["/srv/elche", "file:///srv", "s3://lab/models", "abfs://models@lab.example/elche"])
def test_addresses_without_credentials(root: str) -> None:
    assert problem_of(root) == ""


def test_a_reason_is_one_line_without_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush-hush")
    assert reason_of(ValueError("refused:\n  hush-hush-hush is unknown")) == "refused: *** is unknown"
    assert reason_of(PermissionError(13, "Permission denied", "/srv")) == "Permission denied"


def artifacts(root: str, kept: dict[str, str]) -> Artifacts:
    store, nobody = SimpleNamespace(load_artifacts=lambda: kept), SimpleNamespace()
    catalogue: Any = SimpleNamespace(artifacts={}, manifest_bytes={})
    rest: Any = nobody
    any_store: Any = store
    return Artifacts(root, any_store, rest, catalogue, rest)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_file_that_goes_on_is_read_no_further_than_it_was_long(place: StoreFolder) -> None:
    """Whoever submits a job names its store: one that sent a manifest without end filled the coordinator's memory."""
    place.write(MANIFEST, [bytes(CHUNK_BYTES)] * 8)
    read = []
    with pytest.raises(InvalidJob, match=rf"it has {CHUNK_BYTES} bytes or more and had 2"):
        read += list(place.read(MANIFEST, {"bytes": 2, "sha256": ""}))
    assert read == []


def test_a_manifest_that_a_store_sends_is_compared_and_not_held(tmp_path: Path) -> None:
    place = StoreFolder(str(tmp_path), "job/host")
    place.write(MANIFEST, [b"{}"])
    _check(str(tmp_path), "job/host", "here", b"{}")
    (tmp_path / "job/host" / MANIFEST).open("r+b").truncate(64 << 20)
    before = bytes_read()
    with pytest.raises(InvalidJob, match="is not what here has written"):
        _check(str(tmp_path), "job/host", "here", b"{}")
    assert bytes_read() - before < 4 << 20


@pytest.mark.parametrize("url", ["dir:///srv", "reference:///srv", "generic://file:///srv"])
def test_a_url_of_which_something_is_lacking_is_refused(url: str) -> None:
    """fsspec raises a TypeError or an AttributeError."""
    with pytest.raises(InvalidJob, match="cannot be reached"):
        StoreFolder(url, "job/host")


def test_jobs_own_stores_that_hang_keep_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 jobs of one user, whose stores never answered, kept what all others leave from the coordinator's store, and
    the coordinator from ending.
    """
    owns = [f"own {number}" for number in range(2 * MAX_AT_ONCE)]
    these = artifacts(str(tmp_path), {})
    spec = {one: SimpleNamespace(artifacts=f"ftp://slow.example/{one}") for one in owns}
    more = {"job_ids": lambda: [*owns, "common"], "spec": spec.get}
    vars(these._catalogue).update(more)
    nobody: Any = SimpleNamespace(
        watchers=SimpleNamespace(on_ended=lambda told: None), agents=SimpleNamespace(hosts=list)
    )
    these._driver = nobody
    hung = threading.Event()

    async def hang(self: Artifacts, job_id: str, wait: Any) -> None:
        await self._in_thread(self._store_of(job_id), str)
        began.put_nowait(job_id)
        if job_id != "common":
            await self._in_thread(self._store_of(job_id), hung.wait)

    monkeypatch.setattr(Artifacts, "_store_job", hang)
    monkeypatch.setattr(Artifacts, "_lacking", lambda self, job_id: [job_id])

    async def story() -> list[str]:
        running = asyncio.create_task(these.run())
        try:
            found = [await asyncio.wait_for(began.get(), 20) for _ in range(MAX_AT_ONCE + 1)]
            assert {one.daemon for one in threading.enumerate() if one.name.startswith("artifacts")} == {True}
            return found
        finally:
            hung.set()
            running.cancel()

    began: asyncio.Queue[str] = asyncio.Queue()
    assert set(asyncio.run(story())) == {*owns[:MAX_AT_ONCE], "common"}


def test_the_end_of_a_stored_log(tmp_path: Path) -> None:
    lines = [b"2026-01-31T12:00:00Z one\n", b"2026-01-31T12:00:01Z two\rthree\n", b"2026-01-31T12:00:02Z four"]
    entry = StoreFolder(str(tmp_path), "job/host").write("rank-0.log", lines)
    part = {"root": str(tmp_path), "folder": "job/host", "files": {"rank-0.log": entry}, "missing": []}
    kept = {"job": json.dumps({"folder": part}), "damaged": "[1]"}
    found = artifacts("", kept)
    assert found._catalogue.manifest_bytes == {"job": len(kept["job"]), "damaged": 3}

    async def end(max_bytes: int, *, with_times: bool) -> bytes:
        parts = found.log_end((), "job", 0, max_bytes, "it is gone", with_times=with_times)
        return b"".join([data async for data in parts])

    assert asyncio.run(end(1 << 20, with_times=True)) == b"".join(lines)
    assert asyncio.run(end(1 << 20, with_times=False)) == b"one\ntwo\rthree\nfour"
    assert asyncio.run(end(len(lines[2]) + 1, with_times=False)) == b"four"
    with pytest.raises(InvalidJob, match="it is gone"):
        asyncio.run(anext(found.log_end((), "damaged", 0, 1, "it is gone")))


def test_what_is_to_be_stored_is_said_to_be_missing_from_the_end_on(tmp_path: Path) -> None:
    """Else it could be removed from its host while a store hangs in the first attempt."""
    these = artifacts(str(tmp_path), {})
    vars(these._catalogue).update(spec=lambda job_id: None)
    these._add(JobId("job"))
    assert these._catalogue.artifacts == {"job": NOT_STORED}
    del these._waiting["job"]
    these._update_text("job")
    assert these._catalogue.artifacts == {}, "a job without ranks has left nothing"

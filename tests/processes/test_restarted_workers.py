"""What a job has left can be fetched after its worker, the coordinator, or both were started again."""

import os
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from elche_client import Client
from elche_client.transport.draft import Draft
from support.real_processes import Coordinator, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]
MONITORED = 'job = replace(job, evaluate=lambda model: {"score": 1.0}, monitor="score", mode="max", restore="last")'


def fetched(
    one: Coordinator, client: Client, job_id: str, folder: Path
) -> tuple[bytes, bytes, bytes, list[str], bytes]:
    """The model by the client, also the best one, and by the page; the log by the client and by the page."""
    page = f"{one.page_url}/api/jobs/{job_id}"
    model = client.download(job_id, folder / "model.safetensors").read_bytes()
    best = client.download(job_id, folder / "best.safetensors", best=True).read_bytes()
    lines = [line.text for line in client.job(job_id).logs(rank=0)]
    with urlopen(f"{page}/model", timeout=400) as of_page, urlopen(f"{page}/log/0", timeout=100) as log:
        return model, best, of_page.read(), lines, log.read()


def test_an_ended_jobs_model_and_logs_outlive_its_worker_and_the_coordinator(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    path = job_file("linear.py", "from dataclasses import replace", MONITORED)
    with coordinator(mark, tmp_path) as one, Client(one.address, token="") as client:
        with agent(mark, tmp_path, one.address):
            handle = client.submit(path, num_ranks=1, epochs=1)
            handle.result()
            before = fetched(one, client, handle.id, tmp_path)
            assert before[0] == before[2]
            assert before[3]
        eventually(lambda: not client.hosts(), "the worker is gone")
        with agent(mark, tmp_path, one.address):
            eventually(client.hosts, "the next worker is there")
            assert fetched(one, client, handle.id, tmp_path) == before
    (again := tmp_path / "again").mkdir()
    with coordinator(mark, again, data=one.data) as one, Client(one.address, token="") as client:
        assert not client.hosts()
        with agent(mark, tmp_path, one.address):
            eventually(client.hosts, "a worker is there, when both have been started again")
            assert fetched(one, client, handle.id, tmp_path) == before
            (view,) = client.jobs()
            assert [rank.num_batches > 0 for rank in view.ranks] == [True]
            with agent(mark, tmp_path, one.address):
                eventually(lambda: "has the work folder of agent-" in one.log.read_text(), "that they share it is said")


def test_a_download_that_broke_off_goes_on_where_it_was(
    mark: Mark, tmp_path: Path, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        Client(one.address, token="") as client,
        agent(mark, tmp_path, one.address),
    ):
        handle = client.submit(job_file("linear.py"), num_ranks=1, epochs=1)
        handle.result()
        model = tmp_path / "work" / handle.id / "model.safetensors"
        model.write_bytes(os.urandom(5 << 20))
        (tmp_path / "mine").mkdir()
        offsets: list[int] = []
        add = Draft.add

        def until_the_third(draft: Draft, data: bytes, offset: int, sha256: str) -> None:
            if len(offsets) == 2:
                raise KeyboardInterrupt
            offsets.append(offset)
            add(draft, data, offset, sha256)

        monkeypatch.setattr(Draft, "add", until_the_third)
        with pytest.raises(KeyboardInterrupt):
            client.download(handle.id, tmp_path / "mine" / "model")
        monkeypatch.undo()
        for _ in range(2):  # with a part, and without one
            monkeypatch.setattr(Draft, "add", lambda *args: (offsets.append(args[2]), add(*args))[1])
            assert client.download(handle.id, tmp_path / "mine" / "model").read_bytes() == model.read_bytes()
            monkeypatch.undo()
        assert offsets[:3] == [0, 1 << 20, 2 << 20]
        assert offsets.count(0) == 2

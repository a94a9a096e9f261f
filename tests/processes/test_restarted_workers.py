"""What a job has left can be fetched after its worker, the coordinator, or both were started again."""

from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from elche_client import Client
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
    with urlopen(f"{page}/model", timeout=100) as of_page, urlopen(f"{page}/log/0", timeout=100) as log:
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

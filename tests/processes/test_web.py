"""The coordinator's HTTP side as a browser, a scraper and a stranger meet it."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from elche.errors import JobFailed
from elche_client import Client
from support.real_processes import Cluster, Command, Coordinator, Mark, agent, command, coordinator, eventually

JobFile = Callable[..., Path]
TOKEN = "correct horse battery"


def answer(url: str, headers: Mapping[str, str] | None = None, body: str | None = None) -> tuple[int, str]:
    """(status, text)"""
    request = urllib.request.Request(url, headers=dict(headers or {}), data=body.encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=400) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def post(url: str) -> tuple[int, dict[str, str]]:
    """(status, what was answered)"""
    status, text = answer(url, {"content-type": "application/json"}, "{}")
    return status, json.loads(text)


def told(url: str) -> "dict[str, object]":
    return json.loads(answer(url)[1])  # type: ignore[no-any-return]


def first_message(url: str) -> "dict[str, dict[str, object]]":
    """What a page is told first."""
    with urllib.request.urlopen(url, timeout=400) as stream:
        return json.loads(stream.readline().removeprefix(b"data: "))  # type: ignore[no-any-return]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator that takes its token from a file."""
    mark, folder = Mark(), tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "token").chmod(0o600)
    with coordinator(mark, folder, env={"ELCHE_TOKEN_FILE": str(folder / "token")}, listen="0.0.0.0:0") as one:
        one.address = one.address.replace("0.0.0.0", "127.0.0.1")
        yield one
        assert TOKEN not in one.log.read_text()
    mark.assert_none_left()


def test_health_needs_no_token(guarded: Coordinator) -> None:
    assert answer(f"{guarded.page_url}/healthz") == (200, "ok\n")


@pytest.mark.parametrize("headers", [{}, bearer(""), bearer("wrong"), bearer(TOKEN[:-1]), bearer("ä")])
def test_without_the_token_nothing_is_told(guarded: Coordinator, headers: dict[str, str]) -> None:
    encoded = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    status, text = answer(f"{guarded.page_url}/metrics", encoded)
    assert status == 401
    assert "ELCHE_TOKEN_FILE" in json.loads(text)["error"]


def test_a_token_in_the_url_is_none(guarded: Coordinator) -> None:
    assert answer(f"{guarded.page_url}/metrics?token={TOKEN.replace(' ', '%20')}")[0] == 401


def test_the_tokens_file_lets_a_scraper_in(guarded: Coordinator) -> None:
    status, text = answer(f"{guarded.page_url}/metrics", bearer(TOKEN))
    assert status == 200
    assert "elche_coordinator_streams" in text


def test_everybody_may_take_the_token_from_a_file(
    guarded: Coordinator, mark: Mark, tmp_path: Path, elche: Callable[..., Command]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    env = {"ELCHE_TOKEN_FILE": str(tmp_path / "token")}
    with agent(mark, tmp_path, guarded.address, env=env), Client(guarded.address, token=TOKEN) as client:
        assert client.jobs() == []
        assert elche("jobs", "--coordinator", guarded.address, env=env).code == 0
    (tmp_path / "token").unlink()
    assert "token cannot be read" in elche("jobs", "--coordinator", guarded.address, env=env).complaint
    arguments = ("--coordinator", guarded.address, "--devices", "cpu")
    assert "token cannot be read" in command(mark, "elche_worker.agent", *arguments, cwd=tmp_path, env=env).complaint


def test_beyond_loopback_http_wants_a_token_too(mark: Mark, tmp_path: Path) -> None:
    done = command(mark, "elche_coordinator", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0", cwd=tmp_path)
    assert done.code == 2
    assert "listening on 0.0.0.0 needs a token: set ELCHE_TOKEN" in done.complaint


def test_without_a_token_only_this_machines_name_is_answered(cluster: Cluster) -> None:
    url = cluster.coordinator.page_url
    assert answer(f"{url}/metrics")[0] == 200
    assert answer(f"{url}/metrics", {"host": "localhost:7718"})[0] == 200
    assert answer(f"{url}/metrics", {"host": "evil.example:7718"})[0] == 421


def test_a_page_of_somebody_elses_changes_nothing(cluster: Cluster) -> None:
    url = cluster.coordinator.page_url
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert answer(f"{url}/api/jobs/x/cancel", {"content-type": content_type}, "{}")[0] == 415


def test_what_is_not_there_is_said(cluster: Cluster) -> None:
    url, json_type = cluster.coordinator.page_url, {"content-type": "application/json"}
    assert "no job has the id 'x'" in answer(f"{url}/api/jobs/x")[1]
    assert answer(f"{url}/api/jobs/x/cancel", json_type, "{}")[0] == 404
    assert "no host x is connected" in answer(f"{url}/api/agents/x/drain", json_type, "{}")[1]
    assert answer(f"{url}/static/../app.py")[0] == 404
    assert answer(f"{url}/static/%2e%2e/app.py")[0] == 404
    for version in ("abc", "0.0.1", "9.9.9"):
        assert answer(f"{url}/metrics", {"accept": f"application/openmetrics-text; version={version}"})[0] == 200


def test_a_ranks_log_comes_from_its_host(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file("linear.py", "print('said by the file')"), num_ranks=1, epochs=1)
    assert job.result().committed_samples
    url = f"{cluster.coordinator.page_url}/api/jobs/{job.id}"
    assert "said by the file" in answer(f"{url}/log/0")[1]
    for rank in ("7", "4294967296", "9" * 5000, "-1", "x"):
        assert answer(f"{url}/log/{rank}") == (404, f'{{"error":"job {job.id} has no rank {rank[:20]!r}"}}')
    told = json.loads(answer(url)[1])
    assert told["state"] == "succeeded"
    texts = [one["text"] for one in told["events"] if one["kind"] == "epoch"]
    assert texts[0].startswith("epoch 1 is complete: loss ")


def test_a_failed_job_says_which_rank_and_goes_on_from_its_checkpoint(cluster: Cluster, job_file: JobFile) -> None:
    lines = [
        "def failing_step(model, batch):",
        "    if os.environ['ELCHE_RANK'] == '1' and Path(__file__).with_suffix('.break').exists():",
        "        raise ValueError('no such shape')",
        "    return train_step(model, batch)",
        "from dataclasses import replace",
        "job = replace(job, train_step=failing_step)",
    ]
    broken = job_file("linear.py", *lines)
    job = cluster.client.submit(broken, num_ranks=2, epochs=2000, checkpoint_every_epochs=1)
    url = f"{cluster.coordinator.page_url}/api/jobs/{job.id}"
    assert post(f"{url}/resume") == (409, {"error": f"job {job.id} has not ended; cancel it first, or let it go on"})
    eventually(lambda: told(url).get("checkpoints"), "a checkpoint is there")
    mark = broken.parent / "linear.break"
    mark.touch()
    with pytest.raises(JobFailed):
        job.result()
    about = told(url)
    assert (about["failed_rank"], about["can_resume"]) == (1, True)
    assert "no such shape" in str(about["error"])
    assert "in failing_step" in str(about["traceback"])
    assert about["command"] == f"elche submit {broken} --ranks 2 --checkpoint-every-epochs 1 --epochs 2000"
    mark.unlink()
    status, resumed = post(f"{url}/resume")
    assert status == 200
    again = f"{cluster.coordinator.page_url}/api/jobs/{resumed['job']}"
    eventually(lambda: told(again)["state"] == "training", "the new job trains")
    assert str(told(again)["resume"]) == resumed["checkpoint"]
    assert int(str(told(again)["epoch"])) > 0
    for text in ("", "two", "-1", "1e3", "10001", "9" * 5000, "%D9%A3"):
        status, said = post(f"{again}/scale?ranks={text}")
        assert status == 409, text
        assert "is not a number of ranks up to 10000" in said["error"]
    assert post(f"{again}/scale?ranks=0")[0] == 409
    assert told(again)["num_wanted"] == 2
    post(f"{again}/cancel")
    eventually(lambda: told(again)["ended"], "it ends")


def test_a_job_without_a_checkpoint_cannot_be_resumed(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file("broken.py", text="raise ValueError('no')"), num_ranks=1)
    with pytest.raises(JobFailed):
        job.result()
    status, said = post(f"{cluster.coordinator.page_url}/api/jobs/{job.id}/resume")
    assert (status, said["error"]) == (409, f"job {job.id} has no checkpoint to resume from; submit it again")


def test_a_model_is_downloaded_by_a_link_that_works_once(cluster: Cluster, job_file: JobFile, tmp_path: Path) -> None:
    job = cluster.client.submit(job_file("linear.py"), num_ranks=1, epochs=1)
    job.result()
    page, wanted = cluster.coordinator.page_url, cluster.client.download(job.id, tmp_path / "model").read_bytes()
    link = page + post(f"{page}/api/jobs/{job.id}/model")[1]["link"]
    with urllib.request.urlopen(link, timeout=400) as response:
        assert f"{job.id}.safetensors" in response.headers["content-disposition"]
        assert response.read() == wanted
    assert answer(link)[0] == 404
    with urllib.request.urlopen(f"{page}/api/jobs/{job.id}/model", timeout=400) as response:
        assert response.read() == wanted


def test_a_job_without_a_model_has_none_to_download(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file("broken.py", text="raise ValueError('no')"), num_ranks=1)
    with pytest.raises(JobFailed):
        job.result()
    url = f"{cluster.coordinator.page_url}/api/jobs/{job.id}/model"
    assert answer(url)[0] == 409
    assert "has no model" in post(url)[1]["error"]


def test_the_link_is_the_only_way_without_the_token(guarded: Coordinator) -> None:
    assert answer(f"{guarded.page_url}/download/guessed")[0] == 404
    assert answer(f"{guarded.page_url}/api/jobs/x/model")[0] == 401
    assert answer(f"{guarded.page_url}/api/jobs/x/model", {"content-type": "application/json"}, "{}")[0] == 401


def test_a_browser_that_leaves_ends_the_transfer(cluster: Cluster, job_file: JobFile) -> None:
    lines = [
        "class Large(nn.Linear):",
        "    def __init__(self):",
        "        super().__init__(8, 1)",
        "        self.register_buffer('rest', torch.zeros(12_000_000))",
        "from dataclasses import replace",
        "job = replace(job, model=Large)",
    ]
    large = job_file("linear.py", *lines)
    job = cluster.client.submit(large, num_ranks=1)
    job.result()
    page = cluster.coordinator.page_url.removeprefix("http://")
    host, _, port = page.partition(":")
    log_before = len(cluster.agent.log.read_text())
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET /api/jobs/{job.id}/model HTTP/1.1\r\nHost: {page}\r\n\r\n".encode())
        assert connection.recv(1024).startswith(b"HTTP/1.1 200")
    left = "the receiver of this file has gone"
    eventually(lambda: left in cluster.agent.log.read_text()[log_before:], "the agent is told")


def test_charts_of_a_job_that_runs_go_on_after_the_coordinator_was_killed(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        agent(mark, tmp_path, one.address),
        Client(one.address) as client,
    ):
        job = client.submit(job_file("linear.py"), num_ranks=2, epochs=5000)
        path = one.data / "recordings" / f"{job.id}.json"
        eventually(lambda: path.exists() and json.loads(path.read_text())["epochs"]["at"], "it is saved as it runs")
        one.process.kill()
        one.process.wait()
        before = json.loads(path.read_text())["epochs"]["at"]
        (tmp_path / "again").mkdir()
        with coordinator(mark, tmp_path / "again", data=one.data, listen=one.address) as two:
            series = eventually(
                lambda: (
                    (now := told(f"{two.page_url}/api/jobs/{job.id}/series"))["epochs"]["at"][len(before) :] and now  # type: ignore[index]
                ),
                "more epochs",
            )
            assert series["epochs"]["at"][: len(before)] == pytest.approx(before, abs=0.01)  # type: ignore[index]
            Client(one.address).job(job.id).cancel()


def test_the_stream_is_searched_and_comes_in_pages(cluster: Cluster, job_file: JobFile) -> None:
    queued = cluster.client.submit(job_file("found.py", text="raise ValueError('no')"), num_ranks=9)
    page = cluster.coordinator.page_url
    address = f"{page}/api/stream?text=found-&state=&page=x&host_page=-1&host_text=no+such"
    found = eventually(lambda: (told := first_message(address))["jobs"]["items"] and told, "it is in the list")
    assert [str(one["id"])[:6] for one in found["jobs"]["items"]] == ["found-"]  # type: ignore[attr-defined]
    assert found["hosts"]["items"] == []
    assert found["hosts"]["num_all"] == 1
    assert told(f"{page}/api/jobs?text=no+such+job")["items"] == []
    queued.cancel()

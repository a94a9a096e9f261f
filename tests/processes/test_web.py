"""The coordinator's HTTP side as a browser, a scraper and a stranger meet it."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from real_processes import Cluster, Command, Coordinator, Mark, agent, command, coordinator

from elche_client import Client

JobFile = Callable[..., Path]
TOKEN = "correct horse battery"


def answer(url: str, headers: Mapping[str, str] | None = None, body: str | None = None) -> tuple[int, str]:
    """(status, text)"""
    request = urllib.request.Request(url, headers=dict(headers or {}), data=body.encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


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
    assert "listening on 0.0.0.0 lets others in: set ELCHE_TOKEN" in done.complaint


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
    assert "no host attends as x" in answer(f"{url}/api/agents/x/drain", json_type, "{}")[1]
    assert answer(f"{url}/static/../app.py")[0] == 404
    assert answer(f"{url}/static/%2e%2e/app.py")[0] == 404


def test_a_ranks_log_comes_from_its_host(cluster: Cluster, job_file: JobFile) -> None:
    job = cluster.client.submit(job_file("linear.py", "print('said by the file')"), num_ranks=1, epochs=1)
    assert job.result().committed_samples
    url = f"{cluster.coordinator.page_url}/api/jobs/{job.id}"
    assert "said by the file" in answer(f"{url}/log/0")[1]
    assert answer(f"{url}/log/7")[0] == 409
    told = json.loads(answer(url)[1])
    assert told["state"] == "succeeded"
    texts = [one["text"] for one in told["happenings"] if one["kind"] == "epoch"]
    assert texts[0].startswith("epoch 1 is complete: loss ")

"""TLS: everything goes over it, certificates say who may do what, and are renewed while all of it runs."""

import json
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from elche.errors import Forbidden, NotAllowed, Unreachable
from elche.token import Role
from elche_client import Client, JobState
from elche_client.commands.certificates import Authority
from elche_client.commands.tokens import Tokens
from support.cutter import cutting
from support.real_processes import Command, Mark, agent, coordinator, eventually

OWN = "correct horse battery"
DAY = timedelta(days=1)
JobFile = Callable[..., Path]
HeldBack = Callable[[Path], Path]
Elche = Callable[..., Command]


def test_certificates_say_who_may_do_what(mark: Mark, tmp_path: Path, job_file: JobFile, elche: Elche) -> None:
    folders = {}
    for asked in (
        ("server", "gpu1.lab"),
        ("client", "pool", "--role", "agent"),
        ("client", "anna", "--role", "user"),
        ("client", "bob", "--role", "user"),
        ("client", "vera", "--role", "viewer"),
    ):
        done = elche("certs", *asked)
        assert done.code == 0, done.err
        folders[asked[1]] = str(tmp_path / done.out.strip())
    with (
        coordinator(mark, tmp_path, env={"ELCHE_TLS": folders["gpu1.lab"], "ELCHE_CLIENT_CERTIFICATES": "1"}) as one,
        agent(mark, tmp_path, one.address, env={"ELCHE_TLS": folders["pool"]}),
        Client(one.address, token="", tls=folders["anna"]) as anna,
        Client(one.address, token="", tls=folders["bob"]) as bob,
        Client(one.address, token="", tls=folders["vera"]) as vera,
    ):
        job = anna.submit(job_file("linear.py"), num_ranks=2, epochs=3, backend="cpu")
        assert job.result().state is JobState.SUCCEEDED
        with pytest.raises(Forbidden, match="needs the role user; vera has the role viewer"):
            vera.submit(job_file("linear.py"), num_ranks=1)
        with pytest.raises(Forbidden, match=f"job {job.id} is of anna"):
            bob.cancel(job.id)
        asks = ("jobs", "--coordinator", one.address)
        assert job.id in elche(*asks, env={"ELCHE_TLS": folders["vera"]}).out
        for tls in ("", str(tmp_path / "certs")):  # nothing, and an authority without a certificate of one's own
            refused = elche(*asks, env={"ELCHE_TLS": tls})
            assert refused.code == 2
            assert "if it asks for TLS, set ELCHE_TLS to a folder with its ca.crt" in refused.complaint
        audit = [json.loads(line) for line in (one.data / "audit.jsonl").read_text().splitlines()]
        assert {"anna (user)", "bob (user)", "vera (viewer)"} <= {line["who"] for line in audit}


def test_tokens_go_over_tls_and_the_page_is_encrypted(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Elche
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    server = ours.server(["10.99.0.1"], expires=DAY).folder
    theirs.server(["localhost"], expires=DAY)
    known = {"ELCHE_TOKEN": OWN, "ELCHE_TLS": str(tmp_path / "ours")}
    with (
        coordinator(mark, tmp_path, env={"ELCHE_TOKEN": OWN, "ELCHE_TLS": str(server)}) as one,
        agent(mark, tmp_path, one.address, env=known),
        Client(one.address, token=OWN, tls=str(tmp_path / "ours")) as client,
        Tokens(one.address, token=OWN, tls=str(tmp_path / "ours")) as tokens,
    ):
        job = client.submit(job_file("linear.py"), num_ranks=2, epochs=2)
        assert job.result().state is JobState.SUCCEEDED
        text = tokens.make("prometheus", Role.VIEWER, expires=DAY)[1]
        assert one.page_url.startswith("https://")
        request = urllib.request.Request(f"{one.page_url}/metrics", headers={"authorization": f"Bearer {text}"})
        context = ssl.create_default_context(cafile=tmp_path / "ours" / "ca.crt")
        with urllib.request.urlopen(request, timeout=400, context=context) as answer:
            assert "elche_" in answer.read().decode()
        for tls, why in ((str(tmp_path / "theirs"), "of another authority"), ("", "set ELCHE_TLS")):
            with Client(one.address, token=OWN, tls=tls) as lost, pytest.raises(Unreachable, match=why):
                lost.jobs()
        with Client(one.address, token="", tls=str(tmp_path / "ours")) as nobody, pytest.raises(NotAllowed):
            nobody.jobs()
        host, _, port = one.address.rpartition(":")
        assert host == "127.0.0.1"
        with Client(f"127.0.0.2:{port}", token=OWN, tls=str(tmp_path / "ours")) as lost, pytest.raises(Unreachable):
            lost.jobs()  # nothing listens there
        own = {"ELCHE_CONFIG": str(tmp_path / "contexts.toml")}
        elche("context", "add", "lab", "--coordinator", one.address, "--tls", str(tmp_path / "ours"), env=own)
        (tmp_path / "token").touch(mode=0o600)
        (tmp_path / "token").write_text(OWN)
        done = elche("jobs", env={**own, "ELCHE_CONTEXT": "lab", "ELCHE_TOKEN": OWN})
        assert job.id in done.out, done.err
    with coordinator(mark, tmp_path, data=tmp_path / "plain") as one:
        refused = elche("jobs", "--coordinator", one.address, env=known)
        assert "does not speak TLS: unset ELCHE_TLS" in refused.complaint


@pytest.mark.parametrize(
    ("more", "last"),
    [
        ((), "cpu"),
        pytest.param(("--interface", "lo"), "gloo", marks=pytest.mark.long(reason="core/test_backends.py shows it")),
    ],
)
def test_hosts_average_through_the_coordinator_unless_a_safe_network_is_named(
    mark: Mark, tmp_path: Path, held_back: HeldBack, more: tuple[str, ...], last: str
) -> None:
    tls = str(Authority(tmp_path / "certs").server(["localhost"], expires=DAY).folder)
    has_come = tmp_path / "has-come"
    (tmp_path / "elsewhere").mkdir()
    with (
        coordinator(mark, tmp_path, env={"ELCHE_TLS": tls}) as one,
        agent(mark, tmp_path, one.address, *more, env={"ELCHE_TLS": tls}),
        Client(one.address, token="", tls=tls) as client,
    ):
        job = client.submit(held_back(has_come), num_ranks=3, min_ranks=2, epochs=60)
        eventually(lambda: client.get(job.id).num_rounds, "two ranks on one host average")
        assert client.get(job.id).backend.startswith("gloo")
        with agent(mark, tmp_path / "elsewhere", one.address, *more, devices="cpu", env={"ELCHE_TLS": tls}):
            eventually(lambda: sum(rank.state == "training" for rank in client.get(job.id).ranks) == 3, "it has come")
            eventually(lambda: client.get(job.id).backend.startswith(last), f"they average by {last}")
            eventually(lambda: all(rank.num_batches for rank in client.get(job.id).ranks), "it has trained")
            has_come.touch()
            result = job.result()
        assert result.state is JobState.SUCCEEDED
        assert result.committed_samples == (500,) * 60


def served_until(address: str, authority: Path) -> float:
    """When the certificate ends that is presented at HOST:PORT, in seconds since 1970."""
    host, _, port = address.removeprefix("https://").rpartition(":")
    context = ssl.create_default_context(cafile=authority / "ca.crt")
    with (
        socket.create_connection((host, int(port)), timeout=400) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        found = wrapped.getpeercert()
    assert found is not None
    return ssl.cert_time_to_seconds(str(found["notAfter"]))


@pytest.mark.gate
def test_certificates_that_end_are_renewed_while_a_job_trains(mark: Mark, tmp_path: Path, held_back: HeldBack) -> None:
    authority, short = Authority(tmp_path / "certs"), timedelta(seconds=45)
    server = authority.server(["gpu1.lab"], expires=short)
    pool = authority.client("pool", "agent", expires=short)
    anna = authority.client("anna", "user", expires=short)
    has_ended = tmp_path / "has-ended"
    with (
        coordinator(mark, tmp_path, env={"ELCHE_TLS": str(server.folder), "ELCHE_CLIENT_CERTIFICATES": "1"}) as one,
        cutting(one.address) as way,
        agent(mark, tmp_path, way.address, env={"ELCHE_TLS": str(pool.folder)}) as other,
        Client(way.address, token="", tls=str(anna.folder), reconnect_s=30) as client,
    ):
        job = client.submit(held_back(has_ended), num_ranks=2, epochs=30, backend="cpu")
        eventually(lambda: job.id in {view.job_id for view in client.jobs() if view.ranks}, "it has ranks")
        results = []
        watching = threading.Thread(target=lambda: results.append(job.result()))
        watching.start()
        for holder in (("server", "gpu1.lab"), ("pool", "agent"), ("anna", "user")):
            if holder[0] == "server":
                authority.server([holder[1]], expires=DAY)
            else:
                authority.client(*holder, expires=DAY)
        page = one.page_url
        eventually(lambda: served_until(page, authority.folder) > time.time() + 3600, "the page presents the new one")
        eventually(lambda: time.time() > max(one.expires_at.timestamp() for one in (server, pool, anna)), "they end")
        way.cut()

        def is_back() -> bool:
            with suppress(Unreachable):  # a call that is on its way when the connection is cut
                view = client.get(job.id)
                assert not view.state.has_ended, view.reason
                return True
            return False

        eventually(is_back, "the client comes back")
        has_ended.touch()
        watching.join(400)
        (result,) = results
        assert result.state is JobState.SUCCEEDED
        assert result.committed_samples == (500,) * 30
        assert "is away" in other.log.read_text(), "the cut was felt"

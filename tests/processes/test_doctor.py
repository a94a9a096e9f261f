"""`elche doctor` finds what is wrong, and nothing where nothing is."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from elche.errors import Forbidden, InvalidJob
from elche.token import Role
from elche_client import Client
from elche_client.cli.main import cli
from elche_client.commands.certificates import Authority
from elche_client.commands.doctor import Finding, State, _averaging, of_coordinator
from elche_client.commands.tokens import Tokens
from support.cutter import cutting
from support.real_processes import Cluster, Command, Mark, coordinator

HERE = {"PYTHONPATH": str(Path(__file__).parents[1])}
OWN = "correct horse battery"
Elche = Callable[..., Command]
Doctor = Callable[..., dict[str, Finding]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """The findings of a coordinator by name, in an environment with these variables."""

    def run(address: str, **env: str) -> dict[str, Finding]:
        with monkeypatch.context() as patch:
            for name in ("ELCHE_TOKEN", "ELCHE_TLS"):
                patch.setenv(name, env.get(name, ""))
            return {one.name: one for one in of_coordinator(address)}

    return run


@contextmanager
def silent() -> Iterator[str]:
    """The address of something that listens, and accepts nobody: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, socket.socket() as first:
        first.connect(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_nothing_is_wrong(cluster: Cluster, elche: Elche) -> None:
    done = elche("doctor", "--coordinator", cluster.address)
    assert done.code == 0, done.out + done.err
    assert not [line for line in done.out.splitlines() if line.startswith(State.FAULT)]
    lines = {line[9:24].strip(): line for line in done.out.splitlines() if line.startswith("ok")}
    assert {
        "Python",
        "packages",
        "devices",
        "averaging",
        "disk",
        "address",
        "port",
        "access",
        "clock",
        "hosts",
    } <= lines.keys()
    assert "1 with 3 slots" in lines["hosts"]


def test_links_need_two_hosts_and_an_operator(cluster: Cluster, elche: Elche, mark: Mark, tmp_path: Path) -> None:
    done = elche("doctor", "--links", "--coordinator", cluster.address)
    assert done.code == 0
    assert "a link is between two hosts; hosts connected: 1" in done.out
    with coordinator(mark, tmp_path, env={"ELCHE_TOKEN": OWN}) as one:
        with Tokens(one.address, token=OWN) as tokens:
            _, text = tokens.make("anna", Role.USER, expires=timedelta(minutes=1))
        with Client(one.address, token=text) as client, pytest.raises(Forbidden, match="needs the role operator"):
            next(client.measure_links())
        with Client(one.address, token=OWN) as client, pytest.raises(InvalidJob, match="hosts connected: 0"):
            next(client.measure_links())
        noted = [json.loads(line) for line in (one.data / "audit.jsonl").read_text().splitlines()]
        outcomes = [line["outcome"] for line in noted if line["call"] == "MeasureLinks"]
        assert [outcome.partition(":")[0] for outcome in outcomes] == ["refused", "begun"]


def test_nobody_is_there(doctor: Doctor, elche: Elche, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        nobody = f"127.0.0.1:{one.getsockname()[1]}"
    found = doctor(nobody)
    assert (found["port"].state, "nothing listens" in found["port"].text) == ("fault", True)
    assert "start elche-coordinator" in found["port"].advice
    assert "access" not in found
    assert "is not known here" in doctor("no-such-host.invalid:7717")["address"].text
    assert "is not HOST:PORT" in doctor("7717")["address"].text
    (tmp_path / "file").touch()
    done = elche("doctor", "--json", "--coordinator", nobody, "--work-dir", str(tmp_path / "file" / "runs"))
    assert done.code == 1
    faults = {one["name"]: one["text"] for one in json.loads(done.out) if one["state"] == "fault"}
    assert faults.keys() == {"disk", "port"}
    assert "nothing can be written" in faults["disk"]


def test_a_coordinator_that_nobody_has_named_need_not_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`elche run` needs none, but where nothing else was wrong `elche doctor` found a fault."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        nobody = f"127.0.0.1:{one.getsockname()[1]}"
    monkeypatch.setattr("elche_client.transport.contexts.DEFAULT_ADDRESS", nobody)
    monkeypatch.setenv("ELCHE_CONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("ELCHE_COORDINATOR", raising=False)
    done = CliRunner().invoke(cli, ["doctor", "--json", "--work-dir", str(tmp_path)], standalone_mode=False)
    found = {one["name"]: one["state"] for one in json.loads(done.output)}
    assert (done.return_value, found["port"]) == (0, "warning"), done.output
    named = ["doctor", "--json", "--coordinator", nobody, "--work-dir", str(tmp_path)]
    assert CliRunner().invoke(cli, named, standalone_mode=False).return_value == 1


def test_several_coordinators_of_which_one_serves(cluster: Cluster, doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        nobody = f"127.0.0.1:{one.getsockname()[1]}"
    found = list(of_coordinator(f"{nobody},{cluster.address}"))
    assert all(one.state is State.OK for one in found), found
    assert [one.text.split(":")[-1] for one in found if "nothing listens" in one.text] == [
        " it is a standby, or is not running"
    ]
    assert doctor(f"no-such-host.invalid:1,{cluster.address}")["hosts"].state == "ok"
    assert doctor(f"{nobody},{nobody}")["port"].state == "fault"


def test_a_firewall_that_drops_everything(doctor: Doctor) -> None:
    with silent() as address:
        found = doctor(address)
    assert "does not answer within 3 s" in found["port"].text
    assert "firewall" in found["port"].advice


def test_large_packets_to_the_coordinator_are_lost(
    cluster: Cluster, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it called was short, so it found nothing wrong, and each upload stood still."""
    monkeypatch.setattr("elche_client.commands.doctor.CALL_LIMIT_S", 3.0)
    with cutting(cluster.address) as way:
        assert "network" not in doctor(way.address)
        way.swallows_from_bytes = 1400
        found = doctor(way.address)
    assert found["network"].state is State.FAULT
    assert "large packets to the coordinator are lost" in found["network"].text
    assert "access" not in found


def test_a_coordinator_that_lets_nobody_in_or_has_the_wrong_time(mark: Mark, tmp_path: Path, doctor: Doctor) -> None:
    with coordinator(
        mark, tmp_path, env={"ELCHE_TOKEN": OWN, "ELCHE_TEST_CLOCK_S": "90", **HERE}, module="support.wrong_clock"
    ) as one:
        wrong = doctor(one.address, ELCHE_TOKEN="wrong horse battery")
        assert "the token is wrong, expired or revoked" in wrong["access"].text
        right = doctor(one.address, ELCHE_TOKEN=OWN)
        assert "90 s ahead of" in right["clock"].text
        assert (right["access"].state, right["hosts"].state) == ("ok", "warning")
        assert right["hosts"].advice == f"elche-worker --coordinator {one.address}"


def test_certificates_that_do_not_fit(mark: Mark, tmp_path: Path, doctor: Doctor) -> None:
    day = timedelta(days=1)
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    server = ours.server(["gpu1.lab"], expires=day).folder
    stranger = theirs.client("anna", "user", expires=day).folder
    ended = ours.client("bob", "user", expires=-timedelta(minutes=1)).folder
    anna = ours.client("anna", "user", expires=day).folder
    env = {"ELCHE_TLS": str(server), "ELCHE_CLIENT_CERTIFICATES": "1"}
    with coordinator(mark, tmp_path, env=env) as one:
        found = doctor(one.address, ELCHE_TLS=str(anna))
        assert [found[name].state for name in ("own certificate", "TLS", "access")] == ["ok", "ok", "ok"], found
        assert "its certificate is refused" in doctor(one.address, ELCHE_TLS=str(stranger))["TLS"].text
        assert "it expired at" in doctor(one.address, ELCHE_TLS=str(ended))["own certificate"].text
        assert "if it asks for TLS" in doctor(one.address)["access"].text
        shutil.rmtree(stranger)
        assert "ca.crt is not there" in doctor(one.address, ELCHE_TLS=str(stranger))["certificates"].text
    with coordinator(mark, tmp_path, data=tmp_path / "plain") as one:
        assert "does not speak TLS" in doctor(one.address, ELCHE_TLS=str(anna))["TLS"].text


def test_a_coordinator_of_another_version(mark: Mark, tmp_path: Path, doctor: Doctor) -> None:
    with coordinator(
        mark, tmp_path, env={"ELCHE_TEST_VERSIONS": "7 9", **HERE}, module="support.another_version"
    ) as one:
        assert "upgrade it" in doctor(one.address)["access"].text


@pytest.mark.parametrize(
    ("told", "state", "said"),
    [
        ({"cuda": "12.8", "nccl": "2.27.3", "gloo": True}, "ok", "CUDA 12.8; NCCL 2.27.3 and gloo"),
        ({"cuda": "12.8", "nccl": "", "gloo": True}, "warning", "2 GPUs average slowly without NCCL"),
        ({"cuda": "", "nccl": "", "gloo": False}, "warning", "through the coordinator alone"),
    ],
)
def test_by_what_ranks_here_can_average(told: dict[str, object], state: str, said: str) -> None:
    found = _averaging({**told, "devices": [{"device": "cuda:0"}, {"device": "cuda:1"}]})
    assert (found.state, said in found.text) == (state, True), found

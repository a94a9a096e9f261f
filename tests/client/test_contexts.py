"""Coordinators by name: which one a command talks to, and with which token."""

import json
import os
import threading
from pathlib import Path

import pytest

from elche.errors import NotAllowed
from elche.network import DEFAULT_ADDRESS
from elche.tls import BadCertificate, Folder
from elche.token import read_token
from elche_client import Client
from elche_client.cli.main import main
from elche_client.transport import contexts
from elche_client.transport.contexts import Context, Contexts, InvalidContext

TOKEN = "a-token-of-32-characters-or-more"


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ELCHE_COORDINATOR", "ELCHE_CONTEXT", "ELCHE_TOKEN", "ELCHE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ELCHE_CONFIG", str(tmp_path / "elche" / "config.toml"))
    return tmp_path / "elche" / "config.toml"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "lab.token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def test_a_user_without_a_home_directory_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as any number: every command ended in a traceback."""
    monkeypatch.delenv("ELCHE_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert contexts.address() == DEFAULT_ADDRESS
    with pytest.raises(InvalidContext, match="no home directory to keep contexts in: set HOME"):
        contexts.save(Contexts())


@pytest.mark.parametrize("address", ["gpu1", "gpu1:0", "http://gpu1:7718", "gpu1:7717,"])
def test_what_is_no_address_is_not_kept(config: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's address was kept: each command after it said that the name "http" cannot be resolved."""
    assert main(["context", "add", "lab", "--coordinator", address]) == 2
    assert "is not HOST:PORT" in capsys.readouterr().err
    assert not config.exists()


def test_who_says_more_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert contexts.address() == DEFAULT_ADDRESS
    contexts.save(Contexts("lab", {"lab": Context("gpu1:7717"), "home": Context("nas:7717")}))
    assert contexts.address() == "gpu1:7717"
    monkeypatch.setenv("ELCHE_CONTEXT", "home")
    assert contexts.address() == "nas:7717"
    monkeypatch.setenv("ELCHE_COORDINATOR", "other:1")
    assert contexts.address() == "other:1"
    with Client() as client:
        assert client.address == "other:1"
    with Client("here:2") as client:
        assert client.address == "here:2"


def test_a_token_goes_to_its_own_coordinator_only(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts.save(Contexts("lab", {"lab": Context("gpu1:7717", str(token_file)), "home": Context("nas:7717")}))
    assert contexts.token_of("gpu1:7717") == TOKEN
    assert contexts.token_of("nas:7717") == ""
    monkeypatch.setenv("ELCHE_TOKEN", "another-token-of-the-environment")
    assert contexts.token_of("gpu1:7717") == "another-token-of-the-environment"
    monkeypatch.delenv("ELCHE_TOKEN")
    token_file.chmod(0o644)
    with pytest.raises(NotAllowed, match="chmod 600"):
        contexts.token_of("gpu1:7717")


def test_a_pipe_into_which_nobody_writes_is_not_waited_for(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command, the coordinator and workers hung without a word."""
    config.parent.mkdir()
    os.mkfifo(config, 0o600)
    assert contexts.load() == Contexts()
    with pytest.raises(NotAllowed, match="contains no token"):
        read_token({"ELCHE_TOKEN_FILE": str(config)})
    (tmp_path / "ca.crt").symlink_to(config)
    with pytest.raises(BadCertificate, match=r"ca\.crt is empty"):
        Folder(tmp_path, needs=("ca.crt",))


def test_a_token_may_come_from_another_program(tmp_path: Path) -> None:
    """As in `ELCHE_TOKEN_FILE=<(pass show elche)` of a shell: the program may be slow."""
    read, write = os.pipe()

    def fed(to: int) -> None:
        os.write(to, TOKEN.encode())
        os.close(to)

    writing = threading.Timer(0.05, fed, (write,))
    writing.start()
    assert read_token({"ELCHE_TOKEN_FILE": f"/dev/fd/{read}"}) == TOKEN
    writing.join()
    os.close(read)


def test_contexts_without_end_are_refused(config: Path) -> None:
    config.parent.mkdir()
    config.symlink_to("/dev/zero")
    with pytest.raises(InvalidContext, match="it has 1048576 characters or more; correct it, or remove it"):
        contexts.load()


def test_by_command(config: Path, token_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["context", "list"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["context", "add", "lab", "--coordinator", "gpu1:7717", "--token-file", str(token_file)]) == 0
    assert main(["context", "add", "home", "--coordinator", "[::1]:7717"]) == 0
    assert main(["context", "use", "home"]) == 0
    assert main(["context", "list"]) == 0
    assert capsys.readouterr().out == f"  lab  gpu1:7717  {token_file}\n* home  [::1]:7717\n"
    assert main(["context", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["current"], list(listed["contexts"])) == ("home", ["lab", "home"])
    assert TOKEN not in config.read_text(), "a file says where the token is, not what it is"
    assert main(["context", "remove", "home"]) == 0
    assert contexts.load().current == ""
    assert contexts.address() == DEFAULT_ADDRESS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["use", "lab"], "there is no context 'lab'; known are none: `elche context add NAME"),
        (["remove", "lab"], "there is no context 'lab'"),
        (["add", "a b", "--coordinator", "gpu1:7717"], "a context's name has letters"),
        (["add", "lab", "--coordinator", "gpu1"], "HOST:PORT"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not config.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("current = ", "cannot be read"),
        ("\0", "cannot be read"),
        ("current = 3", "current must be a string, not 3"),
        ("contexts = 3", "contexts must be tables"),
        ("[contexts.lab]\nport = 7", r"\[contexts.lab\] needs coordinator"),
        ("[contexts.lab]\ncoordinator = 7", "coordinator must be a string"),
    ],
)
def test_a_file_that_is_wrong_says_where(
    text: str, said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.parent.mkdir()
    config.write_text(text)
    with pytest.raises(InvalidContext, match=said) as raised:
        contexts.load()
    assert str(config) in str(raised.value)
    assert main(["jobs"]) == 2
    assert str(config) in capsys.readouterr().err
    assert main(["jobs", "--help"]) == 0


def test_a_name_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts.save(Contexts("", {"lab": Context("gpu1:7717")}))
    monkeypatch.setenv("ELCHE_CONTEXT", "lap")
    with pytest.raises(InvalidContext, match="no context 'lap'; known are lab"):
        contexts.address()

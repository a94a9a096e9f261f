"""What engines are asked: bad requests are refused in one line, and what is sent is what was meant."""

import subprocess
from pathlib import Path

import pytest

from elche_client.launchers import ENGINES, AgentFleet, BadFleet, launcher_of
from elche_client.launchers.slurm import script_of
from elche_client.launchers.ssh import SshHost, _files, hosts_of


def fleet(**changes: object) -> AgentFleet:
    return AgentFleet(**{"coordinator": "gpu1:7717", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "Pool", "a b", "-a", "a-", "a" * 41, "a;rm", "../a"])
def test_names_that_an_engine_would_not_take(name: str) -> None:
    with pytest.raises(BadFleet, match="lowercase letters"):
        fleet(name=name)


@pytest.mark.parametrize("number", [-1, 1001])
def test_numbers_of_agents(number: int) -> None:
    with pytest.raises(BadFleet, match="0 to 1000"):
        fleet(num_agents=number)


def test_the_command_is_for_a_shell() -> None:
    assert fleet(worker="~/venv/bin/elche-worker --share 2").command.startswith("~/venv/bin/elche-worker --share 2 ")
    assert "'gpu1:7717; rm'" in fleet(coordinator="gpu1:7717; rm").command


@pytest.mark.parametrize(
    ("engine", "target", "options", "why"),
    [
        ("ssh", "", (), "name the file"),
        ("ssh", "none.txt", (), r"cannot be read from .*none\.txt: No such file or directory$"),
        ("slurm", "here", (), "behind --|after --"),
        ("ray", "", ("--partition",), "takes no options"),
        ("nomad", "", (), "there is no engine"),
    ],
)
def test_engines_and_what_they_need(engine: str, target: str, options: tuple[str, ...], why: str) -> None:
    with pytest.raises(BadFleet, match=why):
        launcher_of(engine, target, options)


def test_the_command_knows_every_engine() -> None:
    from elche_client.cli import up

    assert up.ENGINES == ENGINES


# ssh


def test_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("anna@gpu1\n\n# none\n  gpu2 --devices cuda:0,cuda:1 --label zone=eu  # the second\n")
    assert hosts_of(path) == [SshHost("anna@gpu1"), SshHost("gpu2", "--devices cuda:0,cuda:1 --label zone=eu")]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "names no hosts"),
        (b"# a\n", "names no hosts"),
        (b"a\na\n", "twice"),
        (b"-oProxyCommand=x\n", "begins with"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_bad_files_of_hosts(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(content)
    with pytest.raises(BadFleet, match=why):
        hosts_of(path)


def test_ssh_takes_its_number_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("gpu1\n")
    with pytest.raises(BadFleet, match="the file says"):
        launcher_of("ssh", str(path), ()).up(fleet(num_agents=2))


@pytest.mark.parametrize("content", ["a token of sixteen\n", "a 'quoted' $(touch token-was-run) `x` \\n\n"])
def test_a_file_arrives_as_it_is(tmp_path: Path, content: str) -> None:
    """Through a shell, whatever is in it."""
    source, there = tmp_path / "source", tmp_path / "there"
    source.write_text(content)
    there.mkdir()
    subprocess.run(
        ["sh", "-s"], input="\n".join(_files(fleet(token_file=str(source)))), text=True, cwd=there, check=True
    )
    assert {path.name: path.read_text() for path in there.iterdir()} == {"token": content}


def test_certificates_are_sent_and_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(BadFleet, match=r"ca\.crt cannot be read"):
        _files(fleet(tls=str(tmp_path)))
    (tmp_path / "ca.crt").write_text("authority")
    assert [line.rpartition(" ")[2] for line in _files(fleet(tls=str(tmp_path)))] == ["tls", "tls/ca.crt"]


# Slurm


def test_slurm_needs_a_number() -> None:
    with pytest.raises(BadFleet, match="say how many"):
        launcher_of("slurm", "", ()).up(fleet())


def test_the_script_for_slurm() -> None:
    script = script_of(fleet(name="pool", gpus_per_agent=2, token_file="a b.token"), 3)
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {"--job-name=pool", "--array=1-3", "--gpus-per-node=2", "--requeue", "--signal=B:USR1@120"} <= {*options}
    assert f"export ELCHE_TOKEN_FILE='{Path('a b.token').resolve()}'" in script
    assert "--gpus" not in script_of(fleet(), 1)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)

"""Programs of versions that cannot work together say so, in one line that names the one to upgrade."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from support.real_processes import Command, Mark, coordinator

MODULE = "support.another_version"
OURS = version("elche")


@pytest.mark.parametrize(
    ("versions", "mend"),
    [
        (
            "3 4",
            f"elche {OURS} (protocol 2) is too old for the coordinator, which is elche {OURS} (protocol 3 to 4): up",
        ),
        ("1 1", f"the coordinator is elche {OURS} (protocol 1), and too old for elche {OURS} (protocol 2): upgrade"),
    ],
)
def test_who_is_of_another_version_gets_one_clear_line(
    mark: Mark, tmp_path: Path, elche: Callable[..., Command], versions: str, mend: str
) -> None:
    env = {"ELCHE_TEST_VERSIONS": versions, "PYTHONPATH": str(Path(__file__).parents[1])}
    with coordinator(mark, tmp_path, module=MODULE, env=env) as one:
        client = elche("jobs", "--coordinator", one.address)
        assert client.code == 2
        assert client.err.startswith(f"elche: {mend}"), client.err
        assert len(client.err.splitlines()) == 1
        command = [sys.executable, "-m", "elche_worker.agent", "--coordinator", one.address, "--devices", "cpu"]
        agent = subprocess.run(
            [*command, "--work-dir", str(tmp_path / "work")],
            capture_output=True,
            text=True,
            check=False,
            env=mark.environment(None),
        )
        assert agent.returncode == 2
        assert f"refuses this worker: {mend}" in agent.stderr.splitlines()[-1]

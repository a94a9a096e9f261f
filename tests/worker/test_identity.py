"""Agents know which agents of their host are dead: nobody holds the locks of their files any more."""

import os
from pathlib import Path

from elche_worker.agent.identity import FOLDER, AgentIdentity


def test_an_agent_finds_those_that_are_dead_and_leaves_the_living_alone(tmp_path: Path) -> None:
    first, second = AgentIdentity(tmp_path), AgentIdentity(tmp_path)
    assert first.gone == second.gone == []
    assert first._file is not None
    os.close(first._file)  # as the kernel does when a process ends
    third = AgentIdentity(tmp_path)
    assert third.gone == [first.name]
    assert AgentIdentity(tmp_path).gone == []


def test_files_of_other_hosts_and_those_that_are_not_named_yet_say_nothing(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name in ("another-host.0123456789abcdef", "0123456789abcdef.draft"):
        (folder / name).touch()
    assert AgentIdentity(tmp_path).gone == []
    assert sum(path.name != ".gitignore" for path in folder.iterdir()) == 3


def test_an_agent_without_a_folder_has_an_identity_all_the_same(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("not a folder")
    one, other = AgentIdentity(tmp_path), AgentIdentity(tmp_path)
    assert one.name != other.name
    assert one.gone == other.gone == []

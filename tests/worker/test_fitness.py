"""A host whose disk is full says so, and says when it is not any more."""

import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from elche.v1 import agent_pb2
from elche_worker.agent import fitness
from elche_worker.agent.agent import Agent
from elche_worker.agent.fitness import Fitness


def fill(folder: Path) -> None:
    """Nothing can be written there any more."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("no folder")


def test_each_change_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    looks = Fitness(tmp_path / "work", told.append)
    assert [looks.look(), looks.look(), told] == ["", "", []]
    fill(tmp_path / "work")
    problem = f"--work-dir {tmp_path / 'work'} cannot be written (File exists)"
    assert [looks.look(), looks.look(), told] == [problem, problem, [problem]]
    looks.tell_again()
    (tmp_path / "work").unlink()
    assert looks.look() == ""
    assert told == [problem, problem, ""]
    looks.tell_again()
    assert len(told) == 3, "there is no problem to tell"


def test_it_is_found_without_a_rank_that_is_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next job would be placed there first, and be told then."""
    monkeypatch.setattr(fitness, "LOOK_EVERY_S", 0.01)
    stopped, is_told = threading.Event(), threading.Event()
    looks = Fitness(tmp_path / "work", lambda problem: is_told.set())
    fill(tmp_path / "work")
    watching = threading.Thread(target=looks.watch, args=(stopped,))
    watching.start()
    try:
        assert is_told.wait(400)
    finally:
        stopped.set()
        watching.join(400)


def test_a_folder_that_does_not_answer_holds_up_only_who_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network disk: an agent that is back at its coordinator goes on."""
    told: list[str] = []
    looks = Fitness(tmp_path / "work", told.append)
    fill(tmp_path / "work")
    problem = looks.look()
    is_looking, answers, was_answered = threading.Event(), threading.Event(), []

    def hang(_: Path) -> str:
        is_looking.set()
        was_answered.append(answers.wait(60))
        return problem

    monkeypatch.setattr(fitness, "problem_of", hang)
    looking = threading.Thread(target=looks.look)
    looking.start()
    assert is_looking.wait(400)
    looks.tell_again()
    answers.set()
    looking.join(400)
    assert (told, was_answered) == ([problem, problem], [True])


def test_a_coordinator_that_takes_it_now_is_told(tmp_path: Path) -> None:
    """It was of the version before when the disk became full, and is upgraded."""
    agent = Agent("127.0.0.1:1", [agent_pb2.Slot(device="cpu")], tmp_path / "work")
    welcome = agent_pb2.AgentWelcome(agent_id="agent-1", store="store")
    agent._take_welcome(welcome)
    fill(tmp_path / "work")
    problem = agent._fitness.look()
    assert not agent._outbound._kept
    welcome.takes_fitness = True
    agent._take_welcome(welcome)
    (fitness_message,) = agent._outbound._kept
    assert fitness_message.host_fitness.problem == problem


@pytest.mark.parametrize("takes_fitness", [False, True])
def test_a_rank_that_cannot_be_started_is_reported_after_why(tmp_path: Path, takes_fitness: bool) -> None:
    """The other way round its job would be placed here again. Coordinators of the version before know only its end."""
    agent = Agent("127.0.0.1:1", [agent_pb2.Slot(device="cpu")], tmp_path / "work")
    agent._take_welcome(agent_pb2.AgentWelcome(agent_id="agent-1", store="store", takes_fitness=takes_fitness))
    fill(tmp_path / "work")
    agent._start_rank(agent_pb2.StartRank(job_id="job", rank=0, incarnation=1))
    *fitnesses, exited = (message for message in agent._outbound._kept)
    problem = f"--work-dir {tmp_path / 'work'} cannot be written (File exists)"
    assert [one.host_fitness.problem for one in fitnesses] == ([problem] if takes_fitness else [])
    assert (exited.rank_exited.not_started, exited.rank_exited.log_tail) == (True, problem)


def test_a_host_without_room_for_temporary_files_starts_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job there failed as PyTorch was imported, with `Artifact of type=precompile already registered`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    looks = Fitness(tmp_path / "work", lambda problem: None)
    problem = f"{tmp_path / 'full'}, for temporary files, cannot be written (No such file or directory)"
    assert looks.look() == problem
    (tmp_path / "full").mkdir()
    assert looks.look() == ""

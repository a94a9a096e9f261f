"""Who can deliver what an ended job left: whichever agent has its folder now, under whatever id."""

from elche_coordinator.core.messages.events import AgentJoined, AgentLost
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.spec import Slot
from support.stories import submitted
from support.watched import WatchedSimulation, ranks

JOB = JobId("job")
FIRST = AgentId("first")


def join(simulation: WatchedSimulation, agent_id: str, folder: str, *jobs: str, num_slots: int = 0) -> None:
    simulation.handle(
        AgentJoined(
            agent_id=AgentId(agent_id),
            host="lab",
            slots=(Slot(device="cpu"),) * num_slots,
            folder=folder,
            jobs=tuple(map(JobId, jobs)),
        )
    )


def ended(simulation: WatchedSimulation, folder: str) -> WatchedSimulation:
    """A job of two ranks has ended, on an agent with this work folder, and the agent is gone."""
    join(simulation, FIRST, folder, num_slots=2)
    simulation.handle(submitted(JOB, 2))
    simulation.run()
    assert simulation.core.fleet.holders(JOB, FIRST, folder) == [FIRST]
    simulation.handle(AgentLost(agent_id=FIRST))
    assert simulation.core.fleet.holders(JOB, FIRST, folder) == []
    return simulation


def test_what_a_job_left_is_known_by_the_work_folder_that_it_is_in(simulate):
    simulation = ended(simulate(ranks(5, 5), dataset_size=300), "folder")
    result, view = simulation.job.result, simulation.core.view(JOB, simulation.clock.now_s)
    assert (result.model_agent_id, result.model_folder) == (FIRST, "folder")
    assert [(rank.agent_id, rank.folder) for rank in view.ranks] == [(FIRST, "folder")] * 2


def test_the_next_agent_with_the_work_folder_has_it(simulate):
    core = (simulation := ended(simulate(ranks(5, 5), dataset_size=300), "folder")).core
    join(simulation, "another", "other folder")
    join(simulation, "next", "folder")
    assert core.fleet.holders(JOB, FIRST, "folder") == ["next"]


def test_of_a_folder_and_its_copy_the_one_that_holds_the_job_is_asked_and_of_others_whoever_tells_of_it(simulate):
    core = (simulation := ended(simulate(ranks(5, 5), dataset_size=300), "folder")).core
    join(simulation, "told", "moved", "other", JOB)
    assert core.fleet.holders(JOB, FIRST, "folder") == ["told"]
    join(simulation, "copy", "folder", "other")
    join(simulation, "original", "folder", JOB)
    assert core.fleet.holders(JOB, FIRST, "folder") == ["original", "copy", "told"]
    simulation.handle(AgentLost(agent_id=AgentId("original")))
    assert core.fleet.holders(JOB, FIRST, "folder") == ["copy", "told"]


def test_agents_without_ids_of_their_folders_are_not_taken_for_each_other(simulate):
    core = (simulation := ended(simulate(ranks(5, 5), dataset_size=300), "")).core
    join(simulation, "old", "")
    assert core.fleet.holders(JOB, FIRST, "") == []


def test_an_agent_that_has_got_the_id_of_another_is_not_taken_for_it(simulate):
    """After a coordinator of another version, agents got ids in another order: earlier models were out of reach."""
    core = (simulation := ended(simulate(ranks(5, 5), dataset_size=300), "folder")).core
    join(simulation, FIRST, "other folder")
    assert core.fleet.holders(JOB, FIRST, "folder") == []
    join(simulation, "second", "folder", JOB)
    assert core.fleet.holders(JOB, FIRST, "folder") == ["second"]

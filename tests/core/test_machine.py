"""The phases are tables: all of them can be reached, and what has no place is refused by name and changes nothing."""

import pytest

from elche_coordinator.core.messages.ids import AgentId, Incarnation, JobId, Rank
from elche_coordinator.core.records.machine import (
    DEPARTURES,
    JOB_PHASES,
    RANK_PHASES,
    Departure,
    DepartureTrigger,
    JobPhase,
    JobTrigger,
    Machine,
    RankPhase,
    RankTrigger,
    Refused,
)
from elche_coordinator.core.records.ranks import RankRecord

TABLES = [
    pytest.param(JOB_PHASES, JobPhase, JobTrigger, JobPhase.QUEUED, JobPhase.ENDED, id="job"),
    pytest.param(RANK_PHASES, RankPhase, RankTrigger, RankPhase.STARTING, RankPhase.EXITED, id="rank"),
]


def reachable(table, start):
    """All phases that some triggers lead to."""
    found, frontier = {start}, [start]
    while frontier:
        phase = frontier.pop()
        new = {to for (at, _), to in table.items() if at == phase} - found
        found |= new
        frontier += new
    return found


@pytest.mark.parametrize(("table", "phases", "triggers", "start", "end"), TABLES)
def test_every_phase_is_reached_and_leads_to_the_end(table, phases, triggers, start, end):
    assert reachable(table, start) == set(phases)
    assert all(end in reachable(table, phase) for phase in phases)


@pytest.mark.parametrize(("table", "phases", "triggers", "start", "end"), TABLES)
def test_every_trigger_has_a_place_and_the_end_is_the_end(table, phases, triggers, start, end):
    assert {trigger for _, trigger in table} == set(triggers)
    assert not any(at == end for at, _ in table)


@pytest.mark.parametrize(("table", "phases", "triggers", "start", "end"), TABLES)
def test_a_machine_moves_along_its_table_and_refuses_the_rest(table, phases, triggers, start, end):
    for phase in phases:
        for trigger in triggers:
            machine = Machine("job 7", table, phase)
            if (phase, trigger) in table:
                assert machine.accepts(trigger)
                machine.advance(trigger)
                assert machine.phase == table[phase, trigger]
            else:
                assert not machine.accepts(trigger)
                with pytest.raises(Refused) as refused:
                    machine.advance(trigger)
                assert str(refused.value) == f"job 7 is {phase}: {trigger} has no place there"
                assert machine.phase == phase


@pytest.mark.parametrize("phase", [p for p in JobPhase if p not in (JobPhase.STOPPING, JobPhase.ENDED)])
def test_an_outcome_is_decided_once_in_any_phase_before(phase):
    assert JOB_PHASES[phase, JobTrigger.OUTCOME_DECIDED] is JobPhase.STOPPING


def test_a_rank_can_exit_in_any_phase_once():
    assert {phase for phase, trigger in RANK_PHASES if trigger is RankTrigger.EXITED} == set(RankPhase) - {
        RankPhase.EXITED
    }


def record() -> RankRecord:
    return RankRecord(
        job_id=JobId("job"),
        rank=Rank(0),
        incarnation=Incarnation(1),
        agent_id=AgentId("a"),
        slot=0,
        host="host",
        device="cpu",
    )


def test_a_rank_goes_in_each_way_and_only_who_was_asked_may_stay_after_all():
    assert reachable(DEPARTURES, Departure.STAYS) == set(Departure)
    assert {trigger for _, trigger in DEPARTURES} == set(DepartureTrigger)
    back = {(at, trigger) for (at, trigger), to in DEPARTURES.items() if to is Departure.STAYS}
    assert back == {(Departure.LEAVING, DepartureTrigger.TAKEN_BACK)}


@pytest.mark.parametrize("departure", Departure)
def test_who_is_to_end_is_not_present_and_old_news_of_its_departure_changes_nothing(departure):
    one = record()
    one.departure = departure
    assert one.is_ending is not one.is_present
    assert one.is_present is (departure in (Departure.STAYS, Departure.LEAVING))
    for trigger in DepartureTrigger:
        one.departure = departure
        one.departs(trigger)
        assert one.departure is DEPARTURES.get((departure, trigger), departure)
    one.departure = departure
    one.life.advance(RankTrigger.EXITED)
    assert not one.is_present

"""Each event at each moment of a job: what comes of it is in a table, `transcripts/totality.txt`. None raises.

`pytest tests/core/test_totality.py --rewrite-transcripts` writes the table anew; read the diff before you keep it.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest

from elche.views import JobState
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.invariants import check_invariants
from elche_coordinator.core.messages.commands import Command, Publish
from elche_coordinator.core.messages.events import Event, RankEvent
from elche_coordinator.core.messages.ids import GenerationId, Incarnation, RoundId
from support.exhaustive import plain
from support.moments import Moment, given, moments
from support.watched import state_of

HEAD = """# Each event at each moment

What the coordinator's core does with each event, at moments in the life of a training with two ranks, and of loops of
the user's own, submitted and attached. Events are of rank 0's present process, its newest generation and its open
round. "taken": noted, and nothing is ordered. "ignored": nothing has changed. Events of another process of the rank, of
another generation or of a round that is not open change nothing anywhere.
"""


@pytest.fixture(scope="module")
def all_moments() -> list[Moment]:
    return list(moments())


def outcome(moment: Moment, event: Event) -> str:
    """What comes of it, in words."""
    core = moment.again()
    commands = core.handle(event, now_s=moment.now_s)
    check_invariants(core)
    refusals = list(dict.fromkeys(f"{one.state}; {one.why}" for one in core.last_refusals))
    told = [", ".join(f"{name} x {num}" if num > 1 else name for name, num in ordered(commands).items())]
    told += [f"refused: {', '.join(refusals)}"] if refusals else []
    if words := "; ".join(filter(None, told)):
        return words
    return "ignored" if plain(core) == plain(moment.again()) else "taken"


def ordered(commands: list[Command]) -> Counter[str]:
    kinds = (f"{type(one.report).__name__}" if isinstance(one, Publish) else type(one).__name__ for one in commands)
    return Counter(kinds)


def states(core: Coordinator) -> Any:
    """What of all jobs and hosts events may change."""
    hosts = [(host.agent_id, host.is_drained) for host in core.fleet.hosts()]
    return list(map(state_of, core.jobs.values())), hosts, dict(core.quotas)


def test_a_job_is_at_each_moment_in_a_state_that_clients_know(all_moments):
    """The page and refusals said "grouping", where clients said "starting"."""
    for moment in all_moments:
        core = moment.again()
        states = {view.state for job_id in core.jobs if (view := core.view(job_id, moment.now_s))}
        assert states <= set(JobState) - {JobState.UNKNOWN}, moment.name


def test_each_event_at_each_moment(all_moments, golden):
    table: dict[str, dict[str, list[str]]] = {}
    for moment in all_moments:
        for name, event in given(moment.again()).items():
            told = outcome(moment, event)
            table.setdefault(name, {}).setdefault(told, []).append(moment.name)
    lines = [HEAD]
    for name, outcomes in table.items():
        lines += [f"## {name}", "", *(f"- {', '.join(at)}: **{told}**" for told, at in outcomes.items()), ""]
    golden("totality", "\n".join(lines))


def test_no_event_is_left_out(all_moments):
    def kinds(union: Any) -> set[type]:
        return {kind for one in get_args(union) for kind in (kinds(one) if get_args(one) else {one})}

    assert {type(event) for event in given(all_moments[0].again()).values()} == kinds(Event)


def test_an_event_that_comes_again_does_no_harm(all_moments):
    for moment in all_moments:
        for event in given(moment.again()).values():
            core = moment.again()
            for _ in range(3):
                core.handle(event, now_s=moment.now_s)
                check_invariants(core)


def test_an_event_of_another_process_or_time_changes_nothing(all_moments):
    for moment in all_moments:
        for event in given(moment.again()).values():
            for stray in strays(event):
                core = moment.again()
                before = states(core)
                commands = core.handle(stray, now_s=moment.now_s)
                assert (commands, states(core)) == ([], before), (moment.name, stray)


def strays(event: Event) -> list[Event]:
    """The same event of other processes, generations and rounds."""
    if not isinstance(event, RankEvent):
        return []
    others: list[dict[str, object]] = [{"incarnation": Incarnation(number)} for number in (0, 99)]
    others += [{"generation": GenerationId(number)} for number in (0, 99) if hasattr(event, "generation")]
    is_of_round = hasattr(event, "round") and hasattr(event, "generation")
    others += [{"round": RoundId(10**6)}] if is_of_round else []
    return [replace(event, **changes) for changes in others]  # type: ignore[arg-type]

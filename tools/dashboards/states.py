"""States as numbers, texts and colours: Prometheus has them as labels, Grafana's timelines want values."""

import look

from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import JobPhase, RankPhase

# Greens work, blues prepare, purples finish, teal is done, greys wait, yellow is paused, orange ends, red has failed.
JOB_STATES = {
    "queued": "#6E7280",
    "starting": "#8AB8FF",
    "grouping": "#3274D9",
    "training": "#56A64B",
    "paused": "#FADE2A",
    "waiting": "#9FA7B3",
    "finishing": "#A352CC",
    "stopping": "#FF9830",
    "ended": "#6E7280",
    "succeeded": "#3FA7B5",
    "failed": "#E02F44",
    "cancelled": "#FFB357",
}
RANK_STATES = {
    "starting": "#8AB8FF",
    "ready": "#3274D9",
    "training": "#56A64B",
    "averaging": "#96D98D",
    "evaluating": "#A352CC",
    "finished": "#3FA7B5",
    "exited": "#6E7280",
    "lost": "#E02F44",
}
COLORS = JOB_STATES | RANK_STATES
CODES = {state: number for number, state in enumerate(COLORS, start=1)}
TEXTS = {str(number): (state, COLORS[state]) for state, number in CODES.items()}
STATE = look.set_to(mappings=[one.to_json() for one in look.shows(TEXTS)], **look.COLORED)
"""Properties of a table's column of states."""

assert {*JobPhase, *Outcome} <= JOB_STATES.keys(), "a new state of jobs needs a colour"
assert {*RankPhase} <= RANK_STATES.keys(), "a new state of ranks needs a colour"


def coded(metric: str, matchers: str, states: dict[str, str], by: str) -> str:
    """A query for the state's number, one series for each value of the labels `by`."""
    parts = [f'{metric}{{{_and(matchers)}state="{state}"}} * {CODES[state]}' for state in states]
    return f"max by ({by}) ({' or '.join(parts)}) > 0"


def _and(matchers: str) -> str:
    return f"{matchers}, " if matchers else ""

"""Draws docs/phases.md from the phase tables of the core, or checks that it is fresh."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from fresh import ROOT, write

from elche_coordinator.core.records.machine import DEPARTURES, JOB_PHASES, RANK_PHASES

TARGET = ROOT / "docs" / "phases.md"


def draw(table: Mapping[tuple[Any, Any], StrEnum]) -> str:
    """The table as a Mermaid state diagram."""
    first = next(iter(table))[0]
    lines = [f"    [*] --> {_name(first)}"]
    lines += [f"    {_name(phase)} --> {_name(after)}: {trigger}" for (phase, trigger), after in table.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def _name(phase: StrEnum) -> str:
    return phase.value.replace(" ", "_")


def page() -> str:
    """The whole page."""
    return (
        "# Phases\n\nDrawn from the tables in `coordinator/elche_coordinator/core/records/machine.py` by "
        "`make generated`; "
        "a trigger that a phase does not show is refused and changes nothing.\n\n"
        f"## A job\n\n{draw(JOB_PHASES)}\n\n## A rank\n\n{draw(RANK_PHASES)}\n\n"
        "## A rank's departure\n\nWhether, and how, a rank that has not exited is to go.\n\n"
        f"{draw(DEPARTURES)}\n"
    )


if __name__ == "__main__":
    write(TARGET, page())

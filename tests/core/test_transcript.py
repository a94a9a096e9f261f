"""Golden transcripts: what comes in and what goes out, readable. `--rewrite-transcripts` writes them anew."""

from dataclasses import fields

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.messages.commands import (
    Command,
    Publish,
    SendFormGroup,
    SendLease,
    SendOutcome,
    SendShutdown,
    SendSyncNow,
    StartRank,
    StopRank,
)
from elche_coordinator.core.messages.events import BatchesTrained, Event, RankExited, ResultReceived, RoundEntered
from elche_coordinator.core.messages.reports import Report
from support.watched import Step, WatchedSimulation, ranks


def told(step: Step) -> list[str]:
    """One line for the event, one for each command."""
    lines = [f"{step.at_s:8.3f}  {of_event(step.event)}"]
    return lines + [f"          -> {of_command(command)}" for command in step.commands]


def of_event(event: Event) -> str:
    rank = f" {event.rank}" if hasattr(event, "rank") else ""
    match event:
        case BatchesTrained():
            more = f": {event.local_step} batches, {event.num_processed} samples"
        case RoundEntered():
            more = f": round {event.round}"
        case ResultReceived():
            rows = ", ".join(f"cut {row.cut} weight {row.weight}" for row in event.header)
            more = f": round {event.round} ({rows})"
        case RankExited():
            more = f": code {event.exit_code}"
        case _:
            more = ""
    return f"{type(event).__name__}{rank}{more}"


def of_command(command: Command) -> str:
    match command:
        case SendSyncNow():
            return f"SendSyncNow {command.rank}: round {command.round} after step {command.after_step}"
        case SendLease():
            lease = command.lease
            return f"SendLease {command.rank}: epoch {lease.epoch} [{lease.offset}, {lease.offset + lease.size})"
        case SendOutcome():
            chores = f", evaluate epoch {command.evaluate.epoch}" if command.evaluate is not None else ""
            chores += ", save the final state" if command.save_final else ""
            return f"SendOutcome {command.rank}: version {command.version}, step {command.global_step}{chores}"
        case Publish():
            return f"Publish {of_report(command.report)}"
        case SendFormGroup():
            return f"SendFormGroup {command.rank}: {command.position} of {command.world_size}"
        case SendShutdown():
            return f"SendShutdown {command.rank}: {command.reason}"
        case StartRank() | StopRank():
            return f"{type(command).__name__} {command.rank}"


def of_report(report: Report) -> str:
    shown = ("outcome", "error", "epoch", "version", "rank_batches", "committed", "metrics", "samples", "is_back")
    named = sorted((field.name for field in fields(report) if field.name in shown), key=lambda name: name != "outcome")
    parts = [f"{name} {getattr(report, name)}" for name in named]
    return f"{type(report).__name__}: {', '.join(parts)}"


def transcript(simulation: WatchedSimulation) -> str:
    return "\n".join(line for step in simulation.core.steps for line in told(step)) + "\n"


@pytest.mark.parametrize("policy", POLICIES)
def test_two_unequal_ranks(simulate, golden, policy):
    size = 80 if policy == "sync" else 3_000
    options = {"latency_ms": 0.0, "has_evaluation": True, "dataset_size": size, "policy": policy}
    simulation = simulate(ranks(25, 57.5), **options)
    simulation.run()
    golden(f"two unequal ranks, {policy}", transcript(simulation))


def test_a_rank_that_is_killed(simulate, golden):
    simulation = simulate(ranks(25, 57.5), dataset_size=3_000, latency_ms=0.0)
    simulation.run_until(lambda: len(simulation.rounds) == 3)
    simulation.kill(1)
    simulation.run()
    golden("a rank is killed", transcript(simulation))

"""Plans of jobs: the coordinator's simulator is asked for them in a process of its own, and they are shown."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from elche.errors import ElcheError, InvalidJob
from elche.formatting import duration
from elche.plan import MAX_DEVICES, DevicePlan, Plan, PlanRequest
from elche_client.display.formatting import percent, quantity, si
from elche_client.display.record import to_json
from elche_client.display.summary import plain_table, wide_console

RECORD = "record.json"
MODULE = "elche_coordinator.planning"
BAR_WIDTH = 40
PARTS = (("training", "█", "#"), ("waiting", "░", "."), ("averaging", "▒", "="), ("lost to failures", "·", "x"))
"""Parts of a device's time, each with its character, and that for a terminal without Unicode."""
ASSUMED = (
    "Assumed: all batches have the same size and take the given times. An averaging takes the time of a ring "
    "all-reduce on the link. Its computation, evaluations, checkpoints and the memory of activations are not counted."
)
PROPERTIES = ("bound_fraction", "sent_bytes_per_hour")


def show(request: PlanRequest, added_ms: Sequence[float], *, as_json: bool) -> int:
    """Prints the plan, and with added devices that of all besides it. Raises `InvalidJob` and `ElcheError`."""
    requests = [request]
    if added_ms:
        requests.append(replace(request, batch_ms=(*request.batch_ms, *added_ms)))
    plans = make_plans(requests)
    if as_json:
        click.echo(to_json(document(plans)))
        return 0
    console = wide_console()
    console.print(panel(plans, with_unicode=console.encoding.startswith("utf")))
    return 0


def times_like(name: str, address: str) -> tuple[float, ...]:
    """Milliseconds per batch of each rank of a job at a coordinator, or of the run in a folder. Raises `InvalidJob`
    when there are none.
    """
    from elche_client.commands.naming import known_as_folder

    if "/" in name and not Path(name).is_dir():
        raise InvalidJob(f"there is no folder {name}: name the folder of a run that has ended, or a job")
    if Path(name).is_dir():
        with known_as_folder(name):
            times = _times_in(Path(name))
    else:
        times = _times_at(name, address)
    if not times or not all(times):
        raise InvalidJob(f"{name} does not say what a batch takes on each rank: give --ranks, such as 25ms,57ms")
    if len(times) > MAX_DEVICES:
        raise InvalidJob(f"{name} has {len(times)} ranks, which are too many to simulate: at most {MAX_DEVICES}")
    return times


def _times_in(folder: Path) -> tuple[float, ...]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return tuple(float(one["ms_per_batch"]) for one in record["ranks"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        raise InvalidJob(f"{folder} has no {RECORD} of a run that has ended: give --ranks, such as 25ms,57ms") from None


def _times_at(job: str, address: str) -> tuple[float, ...]:
    from elche_client.client import Client
    from elche_client.commands.naming import find

    with Client(address) as client:
        views = client.jobs()
        job_id = find(job, views)
        (view,) = [one for one in views if one.job_id == job_id]
        return tuple(one.ms_per_batch for one in view.ranks)


def make_plans(requests: Sequence[PlanRequest]) -> list[Plan]:
    """The plans, made at the same time. Raises `InvalidJob` and `ElcheError`."""
    command = [sys.executable, "-P", "-m", MODULE]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in requests]
    try:
        for process, request in zip(processes, requests, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(request)))
            process.stdin.close()
            # `communicate` flushes the pipe if there is one, and raises ValueError for a closed one.
            process.stdin = None
        return [_plan_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            # Reads the pipes to their end, closes them, and takes the exit code: no zombie is left.
            process.communicate()


def _plan_of(process: "subprocess.Popen[str]") -> Plan:
    answer, errors = process.communicate()
    if process.returncode == 0:
        return Plan.of(json.loads(answer))
    last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    if process.returncode == 2:
        raise InvalidJob(last[0])
    raise ElcheError(f"the simulation of the plan has failed: {last[0]}")


def document(plans: Sequence[Plan]) -> dict[str, Any]:
    """Returns the value that `--json` prints."""
    plan, *with_added = [_document(one) for one in plans]
    if not with_added:
        return plan
    return {**plan, "with_added": with_added[0], "gain_batches_per_s": _gain(plans)}


def _document(plan: Plan) -> dict[str, Any]:
    document = asdict(plan) | {name: getattr(plan, name) for name in PROPERTIES}
    document["memory"]["total"] = plan.memory.total
    return document


def _gain(plans: Sequence[Plan]) -> float:
    return plans[1].batches_per_s - plans[0].batches_per_s


def panel(plans: Sequence[Plan], *, with_unicode: bool) -> RenderableType:
    """The figures of one plan, or of two side by side; a bar for each device of the last; and what is assumed."""
    table = plain_table()
    table.add_column("")
    for title in ("plan", "with the added")[: len(plans)]:
        table.add_column(title if len(plans) > 1 else "", justify="right", no_wrap=True)
    for label, shown in _ROWS:
        cells = [shown(plan) for plan in plans]
        if any(cells):
            table.add_row(Text(label, style="dim"), *(Text(cell) for cell in cells))
    parts: list[RenderableType] = [table, Text()]
    if len(plans) > 1:
        parts += [Text(_gain_line(plans), style="bold"), Text()]
    parts += [_picture(plans[-1], with_unicode=with_unicode), Text(), Text(ASSUMED, style="dim")]
    return Group(*parts)


def _gain_line(plans: Sequence[Plan]) -> str:
    gain = _gain(plans)
    alone = plans[1].bound_batches_per_s - plans[0].bound_batches_per_s
    sign, more = ("+", "more") if gain >= 0 else ("-", "less")
    return (
        f"{sign}{quantity(abs(gain), 'batches/s')}: {percent(abs(gain) / plans[0].batches_per_s)} {more}; "
        f"the added would make {quantity(alone, 'batches/s')} alone"
    )


def _bytes(value: float) -> str:
    return f"{si(value)}B" if " " in si(value) else f"{si(value)} B"


_ROWS: tuple[tuple[str, Callable[[Plan], str]], ...] = (
    ("throughput", lambda plan: quantity(plan.batches_per_s, "batches/s")),
    ("bound: the sum of the devices", lambda plan: quantity(plan.bound_batches_per_s, "batches/s")),
    ("of the bound", lambda plan: percent(plan.bound_fraction)),
    ("an epoch", lambda plan: duration(plan.epoch_s) if plan.epoch_s is not None else ""),
    ("rounds per minute", lambda plan: si(plan.rounds_per_minute)),
    ("an averaging", lambda plan: duration(plan.averaging_s)),
    ("sent per round, by all", lambda plan: _bytes(plan.sent_bytes_per_round)),
    ("sent per hour, by all", lambda plan: _bytes(plan.sent_bytes_per_hour)),
    (
        "a failure costs the job",
        lambda plan: duration(plan.loss_per_failure_s) if plan.loss_per_failure_s is not None else "",
    ),
    ("memory of each device, activations aside", lambda plan: _bytes(plan.memory.total)),
    ("  parameters", lambda plan: _bytes(plan.memory.parameters)),
    ("  gradients", lambda plan: _bytes(plan.memory.gradients)),
    ("  optimizer", lambda plan: _bytes(plan.memory.optimizer)),
    ("  averaging, held", lambda plan: _bytes(plan.memory.rounds)),
    ("  averaging, while one is made", lambda plan: _bytes(plan.memory.while_averaging)),
)


def _picture(plan: Plan, *, with_unicode: bool) -> RenderableType:
    """Draws the parts of each device's time; devices that are alike have one bar."""
    table = plain_table()
    for title in ("ms/batch", "devices", "where the time goes", *(name for name, *_ in PARTS), "batches/s"):
        table.add_column(title, justify="left" if title == "where the time goes" else "right", no_wrap=True)
    for batch_ms in dict.fromkeys(one.batch_ms for one in plan.devices):
        alike = [one for one in plan.devices if one.batch_ms == batch_ms]
        parts = _parts(alike)
        table.add_row(
            f"{batch_ms:.4g}",
            str(len(alike)),
            Text(bar(parts, with_unicode=with_unicode)),
            *(percent(part) for part in parts),
            si(sum(one.batches_per_s for one in alike)),
        )
    names = "   ".join(f"{_character(at, with_unicode=with_unicode)} {name}" for at, (name, *_) in enumerate(PARTS))
    return Group(table, Text(names, style="dim"))


def _parts(devices: Sequence[DevicePlan]) -> list[float]:
    rows = [(one.training, one.waiting, one.averaging, one.lost) for one in devices]
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _character(at: int, *, with_unicode: bool) -> str:
    return PARTS[at][1 if with_unicode else 2]


def bar(parts: Sequence[float], *, with_unicode: bool = True) -> str:
    """A bar of `BAR_WIDTH` characters for parts that add up to 1."""
    ends = [round(BAR_WIDTH * sum(parts[: at + 1])) for at in range(len(parts))]
    starts = [0, *ends[:-1]]
    return "".join(
        _character(at, with_unicode=with_unicode) * (end - start)
        for at, (start, end) in enumerate(zip(starts, ends, strict=True))
    )

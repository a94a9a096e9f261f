"""The file of a sweep, and its trials, which may depend on those that have ended."""

import hashlib
import itertools
import json
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from elche.errors import InvalidJob
from elche.settings import SETTINGS
from elche_client.options import JobOptions, read_source

MAX_TRIALS = 1000
"""Most trials of one sweep."""
METHODS = ("grid", "random", "halving", "optuna")
PLACES = ("settings", "arguments", "environment")
"""Places of parameters: settings of the job, arguments of its file, environment variables."""
MAX_AT_ONCE = 100
"""Most trials that are submitted at the same time."""
OF_THE_JOB = ("job", "folder", "ranks", "priority", "project", "conditions")
KEYS = (*OF_THE_JOB, "metric", "mode", "method", "trials", "at_once", "seed", "halving", *PLACES)

Values = dict[tuple[str, str], Any]
"""Values by (place, name)."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`."""

    least: float
    most: float
    is_log: bool
    is_whole: bool

    def at(self, fraction: float) -> float | int:
        """The number at a fraction, from 0 to 1, of the range."""
        if self.is_whole:
            return min(int(self.most), math.floor(self.least + fraction * (self.most - self.least + 1)))
        if self.is_log:
            return float(f"{self.least * (self.most / self.least) ** fraction:.6g}")
        return float(f"{self.least + fraction * (self.most - self.least):.6g}")


Space = tuple[Any, ...] | Range
"""Space of one parameter: choices, or a range."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of values, for a number of epochs."""

    number: int
    values: Values
    rung: int = 0
    epochs: int | None = None
    """Number of epochs; None: the job's."""

    @property
    def key(self) -> tuple[int, int]:
        """(number, rung)."""
        return self.number, self.rung


Results = Mapping[tuple[int, int], float | None]
"""Metrics of ended trials by key; None for a failed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep, from its file."""

    id: str
    """Hash of the sweep's and the job's file, by which an interrupted sweep finds its trials."""
    job: Path
    source: str
    """The job's file as it was read: that of all trials, whatever becomes of the file meanwhile."""
    spaces: dict[tuple[str, str], Space]
    metric: str = "loss"
    is_max: bool = False
    method: str = "grid"
    trials: int = 10
    at_once: int = 4
    """Number of trials that Optuna proposes before it knows their results."""
    seed: int = 0
    ranks: int = 1
    priority: int = -1
    project: str = ""
    conditions: tuple[str, ...] = ()
    folder: str | None = None
    first_epochs: int = 1
    factor: int = 3
    rungs: int = 3
    fixed: Values = field(default_factory=dict)

    def options(self, trial: Trial, resume: str = "") -> JobOptions:
        """The options of a trial's job. Raises `InvalidJob` for an invalid value."""
        values = {**self.fixed, **trial.values}
        settings = {name: _setting(name, value) for (place, name), value in values.items() if place == "settings"}
        if trial.epochs is not None:
            settings |= {"epochs": trial.epochs, "checkpoint_every_epochs": self.first_epochs}
        words = [(name, value) for (place, name), value in values.items() if place == "arguments"]
        return JobOptions(
            num_ranks=self.ranks,
            settings=settings,
            name=f"{self.job.stem[:150]}-{trial.number}",
            priority=self.priority,
            project=self.project,
            conditions=self.conditions,
            arguments=tuple(word for name, value in words for word in (name, str(value))),
            environment={name: str(value) for (place, name), value in values.items() if place == "environment"},
            resume=resume,
        )

    def ranked(self, results: Results, keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Keys of trials that have not failed, the best first."""
        sign = -1 if self.is_max else 1
        found = [(sign * value, key) for key in keys if (value := results.get(key)) is not None]
        return [key for _, key in sorted(found)]


def read_sweep(path: Path) -> Sweep:
    """Reads a sweep from a YAML or TOML file. Raises `InvalidJob`, which names the fault."""
    text = read_source(path)
    try:
        table = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # YAML has dates that there are not
        raise InvalidJob(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    try:
        return _sweep(path, text, table)
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidJob(f"{path}: {error}") from None


def _sweep(path: Path, text: str, table: Any) -> Sweep:
    if not isinstance(table, dict) or "job" not in table:
        raise ValueError("a sweep is a table with `job: train.py`, and its parameters")
    if unknown := [str(name) for name in table if name not in KEYS]:
        raise ValueError(f"there is no {unknown[0]!r}; known are {', '.join(sorted(KEYS))}")
    job = path.parent / str(table["job"])
    method = _one_of("method", table.get("method", "grid"), METHODS)
    spaces, fixed = _parameters(table)
    halving, conditions, folder = table.get("halving") or {}, table.get("conditions") or [], table.get("folder")
    if not isinstance(halving, dict):
        raise ValueError(f"halving is a table, such as {{epochs: 1, factor: 3, rungs: 3}}, not {halving!r}")
    if not isinstance(conditions, list):
        raise ValueError(f"conditions is a list, such as [device=cuda], not {conditions!r}")
    if folder is not None and not isinstance(folder, str):
        raise ValueError(f"folder is a path or none, not {folder!r}")
    source = read_source(job)
    digest = hashlib.sha256(json.dumps([text, source]).encode()).hexdigest()[:16]
    sweep = Sweep(
        id=digest,
        job=job,
        source=source,
        spaces=spaces,
        fixed=fixed,
        metric=str(table.get("metric", "loss")),
        is_max=_one_of("mode", table.get("mode", "min"), ("min", "max")) == "max",
        method=method,
        trials=_whole("trials", table.get("trials", 10), 1, MAX_TRIALS),
        at_once=_whole("at_once", table.get("at_once", 4), 1, MAX_AT_ONCE),
        seed=_whole("seed", table.get("seed", 0), 0, 2**31),
        ranks=_whole("ranks", table.get("ranks", 1), 1, 1000),
        priority=_whole("priority", table.get("priority", -1), -1000, 1000),
        project=str(table.get("project", "")),
        conditions=tuple(map(str, conditions)),
        folder=folder if folder in (None, "none") else str(path.parent / folder),
        first_epochs=_whole("halving: epochs", halving.get("epochs", 1), 1, 10**6),
        factor=_whole("halving: factor", halving.get("factor", 3), 2, 100),
        rungs=_whole("halving: rungs", halving.get("rungs", 3), 1, 20),
    )
    if method == "halving" and ("settings", "epochs") in {**spaces, **fixed}:
        raise ValueError("the halving says how many epochs there are: leave out settings: epochs")
    trials(sweep)
    _check_values(sweep)
    return sweep


def _parameters(table: dict[str, Any]) -> tuple[dict[tuple[str, str], Space], Values]:
    """The settings and arguments that vary, and those with one value, by place and name."""
    spaces: dict[tuple[str, str], Space] = {}
    fixed: Values = {}
    for place in PLACES:
        for name, value in (table.get(place) or {}).items():
            found = _space(f"{place}: {name}", value)
            if found is None:
                fixed[place, str(name)] = value
            else:
                spaces[place, str(name)] = found
    if not spaces:
        raise ValueError("nothing varies: give a setting or an argument a list of values, or min and max")
    return spaces, fixed


def _check_values(sweep: Sweep) -> None:
    """Raises `InvalidJob` for a value that is invalid in any trial."""
    ends = {name: (one.at(0), one.at(1)) if isinstance(one, Range) else one for name, one in sweep.spaces.items()}
    first = {name: some[0] for name, some in ends.items()}
    for name, some in ends.items():
        for value in some:
            sweep.options(Trial(0, {**first, name: value}))


def trials(sweep: Sweep) -> list[Trial]:
    """The trials that are known beforehand: all of a grid, or a number of random ones."""
    epochs = sweep.first_epochs if sweep.method == "halving" else None
    if sweep.method == "grid":
        ranges = [name for (_, name), space in sweep.spaces.items() if isinstance(space, Range)]
        if ranges:
            raise ValueError(f"{ranges[0]} is a range, of which a grid has no points: list them, or use method: random")
        choices = [space for space in sweep.spaces.values() if not isinstance(space, Range)]
        if (num := math.prod(map(len, choices))) > MAX_TRIALS:
            raise ValueError(f"the grid has {num} points, more than {MAX_TRIALS}: use method: random")
        points = itertools.product(*choices)
        return [Trial(at, dict(zip(sweep.spaces, point, strict=True))) for at, point in enumerate(points)]
    dice = random.Random(sweep.seed)
    return [Trial(at, _drawn(sweep.spaces, dice), 0, epochs) for at in range(sweep.trials)]


def _drawn(spaces: Mapping[tuple[str, str], Space], dice: random.Random) -> Values:
    return {
        name: space.at(dice.random()) if isinstance(space, Range) else space[dice.randrange(len(space))]
        for name, space in spaces.items()
    }


def halved(sweep: Sweep, results: Results) -> Iterator[Trial]:
    """All trials of successive halving so far: of each complete rung the best go on."""
    rung = trials(sweep)
    for number in range(sweep.rungs):
        yield from rung
        if number == sweep.rungs - 1 or any(trial.key not in results for trial in rung):
            return
        best = sweep.ranked(results, [trial.key for trial in rung])[: max(1, len(rung) // sweep.factor)]
        values = {trial.number: trial.values for trial in rung}
        epochs = sweep.first_epochs * sweep.factor ** (number + 1)
        rung = [Trial(at, values[at], number + 1, epochs) for at, _ in sorted(best)]


def _space(where: str, value: Any) -> Space | None:
    """The space of a parameter; None if it is constant."""
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{where} is an empty list")
        return tuple(value)
    if not isinstance(value, dict):
        return None
    if set(value) - {"min", "max", "log"} or not {"min", "max"} <= set(value):
        raise ValueError(f"{where} is a list of values, or {{min: 0.001, max: 0.1, log: true}}, not {value}")
    least, most = (float(value[name]) for name in ("min", "max"))
    is_log, is_whole = bool(value.get("log")), all(isinstance(value[name], int) for name in ("min", "max"))
    if not math.isfinite(most - least) or least >= most or (is_log and least <= 0):
        above = ", and above 0" if is_log else ""
        raise ValueError(f"{where}: min must be below max{above}, not {least:g} and {most:g}")
    return Range(least, most, is_log, is_whole and not is_log)


def _setting(name: str, value: Any) -> object:
    if name not in SETTINGS:
        raise InvalidJob(f"there is no setting {name!r}; known are {', '.join(SETTINGS)}")
    return SETTINGS[name].parse(value) if isinstance(value, str) else value


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is a whole number from {least} to {most}, not {value!r}")
    return value


def _one_of(name: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
    return str(value)

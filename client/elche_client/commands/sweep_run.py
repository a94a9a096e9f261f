"""`elche sweep`: submits the trials of a sweep as jobs, follows them, and shows the best.

Every trial has a key made of the sweep's files. So the command may be stopped and run again: it finds the submitted
trials, which go on meanwhile.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elche.errors import InvalidJob, JobFailed, UnknownJob, Unreachable
from elche_client.client import RECONNECT_S, Client, JobHandle
from elche_client.commands.interrupts import interrupted
from elche_client.commands.sweep import Results, Sweep, Trial, halved, read_sweep, trials
from elche_client.display.formatting import figure, printable
from elche_client.display.notices import print_notice
from elche_client.display.panel import STATE_STYLES
from elche_client.display.record import to_json
from elche_client.display.summary import plain_table, wide_console
from elche_client.events import JobResult, JobState, JobView
from elche_client.transport.bundle import Bundle, packed
from elche_client.transport.upload import folder_of

POLL_S = 1.0
"""Seconds between two looks at the trials, at least."""
POLL_COST = 20
"""Least pause between two looks, as a multiple of the time that a look takes."""


Search = Callable[[Results], Sequence[Trial]]
"""Returns all trials so far, with those to submit next, by the results of those that have ended."""


class Optuna:
    """Asks Optuna's TPE sampler for trials.

    Trial n is proposed when all up to n - `at_once` have ended; Optuna gets exactly their results, in order. So a sweep
    that is run again has the same trials.
    """

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            raise InvalidJob("method: optuna needs the package optuna: pip install 'elche[optuna]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep = sweep
        self._spaces = {name: _distribution(optuna, space) for name, space in sweep.spaces.items()}
        self._study = optuna.create_study(
            direction="maximize" if sweep.is_max else "minimize", sampler=optuna.samplers.TPESampler(seed=sweep.seed)
        )
        self._failed = optuna.trial.TrialState.FAIL
        self._asked: list[Any] = []
        self._trials: list[Trial] = []
        self._num_told = 0

    def trials(self, results: Results) -> Sequence[Trial]:
        """All trials so far, including those that can be proposed now."""
        while len(self._trials) < self._sweep.trials:
            while self._num_told <= len(self._trials) - self._sweep.at_once:
                if (self._num_told, 0) not in results:
                    return self._trials
                value = results[self._num_told, 0]
                self._study.tell(self._asked[self._num_told], value, state=self._failed if value is None else None)
                self._num_told += 1
            asked = self._study.ask({str(name): space for name, space in self._spaces.items()})
            values = {name: asked.params[str(name)] for name in self._spaces}
            self._asked.append(asked)
            self._trials.append(Trial(len(self._trials), values))
        return self._trials


def _distribution(optuna: Any, space: Any) -> Any:
    if isinstance(space, tuple):
        return optuna.distributions.CategoricalDistribution(space)
    if space.is_whole:
        return optuna.distributions.IntDistribution(int(space.least), int(space.most))
    return optuna.distributions.FloatDistribution(space.least, space.most, log=space.is_log)


class Runner:
    """Submits and follows the trials of a sweep."""

    def __init__(self, client: Client, sweep: Sweep, search: Search, kept: ExitStack) -> None:
        """`kept` keeps the folder as it is when the first trial is submitted: later ones are of the same code."""
        self._client, self._sweep, self._search, self._kept = client, sweep, search, kept
        self._sent: tuple[Path | None, Bundle | None] | None = None
        self.jobs: dict[tuple[int, int], JobHandle] = {}
        self.trials: dict[tuple[int, int], Trial] = {}
        self.views: dict[str, JobView] = {}
        self.results: dict[tuple[int, int], float | None] = {}
        self.poll_s = POLL_S

    @property
    def is_done(self) -> bool:
        """True if all trials have ended."""
        return len(self.results) == len(self.jobs)

    @property
    def is_without_effect(self) -> bool:
        """True if three or more trials of the same length have all the same metric: their values change nothing."""
        found = [value for (_, rung), value in self.results.items() if rung == 0 and value is not None]
        return len(found) > 2 and len(set(found)) == 1

    def step(self) -> None:
        """Submits new trials, and updates all."""
        for trial in self._search(self.results):
            if trial.key not in self.jobs:
                self.trials[trial.key] = trial
                self.jobs[trial.key] = self._submit(trial)
        self._look()

    def _look(self) -> None:
        began_s = time.monotonic()
        listed = {view.job_id: view for view in self._client.jobs()}
        self.poll_s = max(POLL_S, POLL_COST * (time.monotonic() - began_s))
        for key, job in self.jobs.items():
            if key in self.results:
                continue
            try:
                view = self.views[job.id] = listed.get(job.id) or self._client.get(job.id)
            except UnknownJob:
                print_notice(f"job {job.id} is no longer known to the coordinator: its trial counts as failed")
                self.results[key] = None
                continue
            if view.state.has_ended:
                self.results[key] = self._value(job, view)

    def _submit(self, trial: Trial) -> JobHandle:
        sweep = self._sweep
        resume = ""
        if trial.rung:
            before = self.views[self.jobs[trial.number, trial.rung - 1].id]
            if not before.checkpoints:
                raise JobFailed(f"job {before.job_id} has written no checkpoint from which its trial could go on")
            resume = before.checkpoints[-1].path.rpartition("/")[0]
        folder, bundle = self._sent = self._sent or self._pack()
        return self._client.submit_options(
            sweep.job,
            sweep.options(trial, resume),
            folder,
            key=self._key(trial),
            source=sweep.source,
            bundle=bundle,
        )

    def _pack(self) -> tuple[Path | None, Bundle | None]:
        """The folder of all trials and what it has now. Which one it is depends on what the file imports."""
        folder = folder_of(self._sweep.job, self._sweep.folder)
        return folder, None if folder is None else self._kept.enter_context(packed(folder))

    def _key(self, trial: Trial) -> str:
        return f"{self._sweep.id}-{trial.number}-{trial.rung}"

    def find(self) -> None:
        """Updates trials that an earlier command has submitted; submits none."""
        before = -1
        while len(self.results) > before:
            before = len(self.results)
            for trial in self._search(self.results):
                if trial.key not in self.jobs and (job := self._client.find(self._key(trial))) is not None:
                    self.trials[trial.key], self.jobs[trial.key] = trial, job
            self._look()

    def _value(self, job: JobHandle, view: JobView) -> float | None:
        name = self._sweep.metric
        metrics = next((one.metrics for one in job.watch() if isinstance(one, JobResult)), {})
        value = metrics.get(name, view.loss if name == "loss" else None)
        if view.state is JobState.SUCCEEDED and value is None:
            known = ", ".join(metrics) or "nothing"
            print_notice(f"job {job.id} has no metric {name}: it evaluates {known}")
        elif view.state is JobState.FAILED:
            print_notice(f"job {job.id} has failed: {view.reason}")
        # NaN is neither smaller nor larger than any number: with it, sorting the trials would give no order.
        return value if view.state is JobState.SUCCEEDED and value == value else None

    def ranked(self) -> list[tuple[int, int]]:
        """The newest rung of each trial: the highest rungs first, then by metric, those without one last."""
        newest = {number: (number, rung) for number, rung in sorted(self.jobs)}
        by_rung = sorted({rung for _, rung in newest.values()}, reverse=True)
        good = [
            key
            for rung in by_rung
            for key in self._sweep.ranked(self.results, [one for one in newest.values() if one[1] == rung])
        ]
        return good + [key for key in newest.values() if key not in good]

    def rows(self) -> list[dict[str, Any]]:
        """All trials, the best first."""
        found = []
        for key in self.ranked():
            view = self.views.get(self.jobs[key].id)
            values = {name: value for (_, name), value in self.trials[key].values.items()}
            found.append(
                {
                    "trial": key[0],
                    "values": values,
                    "epochs": self.trials[key].epochs,
                    "state": view.state if view else JobState.UNKNOWN,
                    self._sweep.metric: self.results.get(key),
                    "job_id": self.jobs[key].id,
                }
            )
        return found

    def table(self) -> Table:
        """The rows as a table for people."""
        table = plain_table()
        names = [name for _, name in self._sweep.spaces]
        for title in ("trial", *names, "epochs", self._sweep.metric, "state", "job"):
            table.add_column(printable(title), justify="left" if title in ("state", "job") else "right", no_wrap=True)
        for row in self.rows():
            value = row[self._sweep.metric]
            table.add_row(
                str(row["trial"]),
                *(Text(printable(str(row["values"][name]))) for name in names),
                str(row["epochs"] or ""),
                "" if value is None else figure(value),
                Text(row["state"], style=STATE_STYLES.get(row["state"], "yellow")),
                Text(printable(row["job_id"])),
            )
        return table


def sweep(path: Path, address: str, *, as_json: bool, cancels: bool) -> int:
    """Runs a sweep to its end, or cancels its open trials. Exit code 1 if no trial has succeeded."""
    definition = read_sweep(path)
    with Client(address) as client, ExitStack() as kept:
        runner = Runner(client, definition, _search(definition), kept)
        if cancels:
            return _cancel(client, runner)
        if not _follow(runner):
            print_notice("its jobs go on; run the command again to see them, or with --cancel to stop them")
            return 130
    if as_json:
        click.echo(to_json(runner.rows()))
    else:
        wide_console().print(runner.table())
    best = next(iter(runner.ranked()), None)
    if best is None or runner.results.get(best) is None:
        print_notice("no trial has succeeded")
        return 1
    if runner.is_without_effect:
        print_notice(
            f"all trials have the same {definition.metric}: does {definition.job.name} use the values? "
            "It gets `arguments` in sys.argv"
        )
    print_notice(f"the best is trial {best[0]}; its model: elche fetch {runner.jobs[best].id}")
    return 0


def _search(definition: Sweep) -> Search:
    if definition.method == "halving":
        return lambda results: list(halved(definition, results))
    if definition.method == "optuna":
        return Optuna(definition).trials
    fixed = trials(definition)
    return lambda results: fixed


def _follow(runner: Runner) -> bool:
    """Follows the trials until all have ended; returns False if it is interrupted before."""
    console = Console(stderr=True, highlight=False)
    reached_s = lost_s = -math.inf
    with interrupted() as stop, Live(console=console, auto_refresh=False, transient=True) as live:
        while not stop.is_set():
            before = len(runner.results)
            try:
                runner.step()
                reached_s = time.monotonic()
            except Unreachable as error:  # it is started again, say; trials have keys, and are not submitted twice
                if time.monotonic() - reached_s >= RECONNECT_S:
                    raise
                if reached_s > lost_s:
                    print_notice(f"{error}; retrying for {RECONNECT_S:.0f} s")
                lost_s = time.monotonic()
                stop.wait(POLL_S)
                continue
            if console.is_terminal:
                live.update(runner.table(), refresh=True)
            elif len(runner.results) > before:
                print_notice(f"{len(runner.results)} of {len(runner.jobs)} trials have ended")
            if runner.is_done and len(runner.results) == before:
                return True  # no further trials
            if len(runner.results) == before:
                stop.wait(runner.poll_s)
    return False


def _cancel(client: Client, runner: Runner) -> int:
    """Cancels the open trials."""
    runner.find()
    going = [view for view in runner.views.values() if not view.state.has_ended]
    for view in going:
        client.cancel(view.job_id)
    click.echo(f"{len(going)} of {len(runner.jobs)} trials are cancelled")
    return 0

"""`elche chaos`: breaks parts of a job at random moments while it trains, and reports what that cost."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import click

import elche_audit
from elche.errors import ElcheError, Forbidden, Unreachable
from elche.formatting import duration
from elche_client.client import Client
from elche_client.commands.naming import of_job
from elche_client.display.formatting import printable
from elche_client.display.notices import print_notice
from elche_client.display.output import exit_code_of
from elche_client.display.record import to_json
from elche_client.events import Fault, JobResult, JobView, MembershipReport, RankView, RoundReport
from elche_client.local.notifications import (
    Interrupted,
    NotificationQueue,
    Shown,
    forward_signals,
    next_notification,
    start_watch,
)

RECONNECT_S = 600.0
"""Seconds for which a killed coordinator is waited for."""
STOPPED_S = (1.0, 15.0)
"""Shortest and longest time for which a rank is stopped, or the disk is full."""
NO_AUDIT = "audit: none here; of a job with --audit true, `elche audit` proves it by the folders of its hosts"
NOT_YET = "audit: once the job has ended, `elche audit` proves it by the folders of its hosts"
WORDS = {
    Fault.RANK: "killed",
    Fault.STOP: "stopped",
    Fault.NETWORK: "its connections cut",
    Fault.AGENT: "its worker killed",
    Fault.COORDINATOR: "killed",
    Fault.DISK: "its disk full",
}
OF_COORDINATOR = frozenset({Fault.COORDINATOR, Fault.DISK})
"""Faults of the coordinator; the others are of a rank."""
LASTING = frozenset({Fault.STOP, Fault.DISK})
"""Faults that last for a time."""


@dataclass
class Course:
    """What has become of a job while its parts were broken. Times are in seconds since `Chaos.run` began."""

    view: JobView | None = None
    result: JobResult | None = None
    commits_s: list[float] = field(default_factory=list)
    num_rounds: int = 0
    lost_s: dict[int, float] = field(default_factory=dict)
    """By rank: the time at which it was lost."""
    num_lost: int = 0
    back_after_s: list[float] = field(default_factory=list)

    def add(self, event: Shown, at_s: float) -> None:
        """Records an event of the job, received at this time."""
        match event:
            case JobView():
                self.view = event
                if event.num_rounds > self.num_rounds:  # a view may come before its round's report, or after an absence
                    self._commit(event.num_rounds, at_s)
                for rank in event.ranks:
                    if (
                        rank.state == "training"
                    ):  # the report of its return may have been missed while the watch was away
                        self._return(rank.rank, at_s)
            case RoundReport():
                if event.round > self.num_rounds:
                    self._commit(event.round, at_s)
            case MembershipReport(is_back=True):
                self._return(event.rank, at_s)
            case MembershipReport():
                self.num_lost += 1
                self.lost_s[event.rank] = at_s
            case JobResult():
                self.result = event

    def _return(self, rank: int, at_s: float) -> None:
        if (lost_s := self.lost_s.pop(rank, None)) is not None:
            self.back_after_s.append(at_s - lost_s)

    def _commit(self, number: int, at_s: float) -> None:
        self.num_rounds = number
        self.commits_s.append(at_s)

    @property
    def victims(self) -> list[RankView]:
        """The ranks that a fault may hit."""
        return [rank for rank in self.view.ranks if rank.state != "exited"] if self.view else []

    @property
    def folders(self) -> list[Path]:
        """The job's folders on this machine that have the files of an audit."""
        logs = {Path(rank.log_path).parent for rank in self.view.ranks if rank.log_path} if self.view else set()
        return sorted(folder for folder in logs if (folder / "audit").is_dir())


class Chaos:
    """Breaks parts of one job. With the same seed the same kinds of faults come after the same times."""

    def __init__(self, client: Client, job_id: str, *, mtbf_s: float, faults: Sequence[Fault], seed: int) -> None:
        self._client, self._job_id = client, job_id
        self._faults, self._mtbf_s = faults, mtbf_s
        self._dice = random.Random(seed)
        self.course = Course()
        self.counts: Counter[Fault] = Counter()
        self.num_missed = 0
        """Faults that have hit nothing, such as a rank that was gone."""

    def run(self, limit_s: float) -> None:
        """Breaks things until the job ends, or for this many seconds. Raises what a watch raises, and `Interrupted`."""
        notifications: NotificationQueue = SimpleQueue()
        start_watch(self._client.job(self._job_id), notifications.put)
        began_s = time.monotonic()
        next_s = self._dice.expovariate(1 / self._mtbf_s)
        with forward_signals(notifications):
            while self.course.result is None:
                now_s = time.monotonic() - began_s
                if now_s >= limit_s:
                    return
                try:
                    event = next_notification(notifications, timeout_s=max(0.0, min(next_s, limit_s) - now_s))
                except TimeoutError:
                    if next_s < limit_s:
                        self._break_something()
                        # From the planned time, not from now: the time that a call takes would shift all later faults.
                        next_s += self._dice.expovariate(1 / self._mtbf_s)
                    continue
                self.course.add(event, time.monotonic() - began_s)  # type: ignore[arg-type]  # there are no processes

    def _break_something(self) -> None:
        fault, seconds = self._dice.choice(self._faults), self._dice.uniform(*STOPPED_S)
        # Drawn in any case, as is the time: if draws depended on the ranks there are, equal seeds would give other
        # faults.
        place = self._dice.random()
        victims = self.course.victims
        if not victims and fault not in OF_COORDINATOR:
            self.num_missed += 1
            return
        victim = None if fault in OF_COORDINATOR else victims[int(place * len(victims))]
        try:
            host = self._client.inject(self._job_id, fault, rank=victim.rank if victim else 0, seconds=seconds)
        except Forbidden:
            raise
        except ElcheError as error:  # an earlier fault has ended the rank, or the coordinator
            self.num_missed += 1
            why = "the coordinator does not answer" if isinstance(error, Unreachable) else str(error)
            print_notice(f"{fault}: nothing was broken: {why}")
            return
        self.counts[fault] += 1
        whom = f"rank {victim.rank}" if victim else "the coordinator"
        how_long = f" for {duration(seconds)}" if fault in LASTING else ""
        print_notice(printable(f"{whom} on {host}: {WORDS[fault]}{how_long}"))

    def report(self) -> dict[str, Any]:
        """The report, as a JSON object: faults, and what they cost."""
        course, result = self.course, self.course.result
        gaps = [after_s - before_s for before_s, after_s in pairwise(course.commits_s)]
        return {
            "job_id": self._job_id,
            "state": str(result.state if result else course.view.state if course.view else "unknown"),
            "error": result.error if result else "",
            "faults": {str(fault): number for fault, number in sorted(self.counts.items())},
            "missed": self.num_missed,
            "rounds": len(course.commits_s),
            "between_rounds_s": _middle_and_most(gaps),
            "ranks_lost": course.num_lost,
            "ranks_back": len(course.back_after_s),
            "back_after_s": _middle_and_most(course.back_after_s),
            "committed_samples": list(result.committed_samples) if result else [],
            "dataset_size": result.dataset_size if result else 0,
            "discarded_samples": result.discarded_samples if result else 0,
        }


def _middle_and_most(times_s: Sequence[float]) -> dict[str, float] | None:
    return {"median": round(median(times_s), 3), "longest": round(max(times_s), 3)} if times_s else None


def lines_of(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    kinds = ", ".join(f"{number} {fault}" for fault, number in report["faults"].items()) or "none"
    lines = [
        f"job {report['job_id']}: {report['state']}",
        *([f"error: {report['error']}"] if report["error"] else []),
        f"faults: {kinds}" + (f"; {report['missed']} more hit nothing" if report["missed"] else ""),
        f"rounds: {report['rounds']}" + _times(", between two of them", report["between_rounds_s"]),
        f"ranks: lost {report['ranks_lost']} times, back {report['ranks_back']} times"
        + _times(", after", report["back_after_s"]),
    ]
    if report["committed_samples"]:
        epochs = ", ".join(f"{number} x {size}" for size, number in Counter(report["committed_samples"]).items())
        in_vain = report["discarded_samples"]
        lines.append(f"samples: {epochs} committed (epochs x samples), of {report['dataset_size']}; {in_vain} left out")
    return lines


def _times(what: str, found: dict[str, float] | None) -> str:
    return f"{what} {duration(found['median'])} (median), {duration(found['longest'])} (longest)" if found else ""


def run(
    job: str, address: str, *, mtbf_s: float, faults: Sequence[Fault], seed: int, limit_s: float, as_json: bool
) -> int:
    """Breaks parts of a job until it ends or the time is over, and prints the report. Returns the exit code: that of
    the job, or 1 if the audit refutes it.
    """
    with Client(address, reconnect_s=RECONNECT_S) as client:
        job_id, _ = of_job(client, job, client.get)
        client.inject(job_id, None)  # raises where faults are not allowed, or the job has ended
        chaos = Chaos(client, job_id, mtbf_s=mtbf_s, faults=faults, seed=seed)
        print_notice(f"job {job_id}: a fault each {duration(mtbf_s)} on average, of {', '.join(faults)}; seed {seed}")
        try:
            chaos.run(limit_s)
        except Interrupted as interrupted:
            _print(chaos, as_json=as_json)
            print_notice("the job goes on")
            return interrupted.exit_code
        except ElcheError:
            if chaos.counts:
                _print(chaos, as_json=as_json)
            raise
    is_refuted = _print(chaos, as_json=as_json)
    code = exit_code_of(chaos.course.result) if chaos.course.result else 0
    return code or int(is_refuted)


def _print(chaos: Chaos, *, as_json: bool) -> bool:
    """Prints the report; returns True if the audit of the job's files here refutes it."""
    report, folders = chaos.report(), chaos.course.folders
    verdict = elche_audit.judge(*folders) if folders and chaos.course.result else None
    if as_json:
        audit = elche_audit.document(verdict) if verdict else None
        click.echo(to_json({**report, "audit": audit}, indent=1))
    else:
        click.echo("\n".join(map(printable, lines_of(report))))
        why = NO_AUDIT if chaos.course.result else NOT_YET
        click.echo("\n".join(f"audit: {printable(line)}" for line in elche_audit.lines(verdict)) if verdict else why)
    return verdict is not None and elche_audit.exit_code(verdict) == 1

"""Distribution of jobs' reports: to watchers, the log, and registered actions."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

from elche.logs import fields
from elche.v1 import job_pb2
from elche_coordinator import codec
from elche_coordinator.core.messages import reports
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.limits.budgets import MAX_REPORTS_BYTES, MAX_REPORTS_BYTES_OF_CALLER, Held
from elche_coordinator.loop_health import LoopHealth
from elche_coordinator.streams.report_text import describe_report
from elche_coordinator.streams.send_queue import MAX_WAITING, MAX_WATCHED_BYTES, SendQueue

log = logging.getLogger(__name__)

WatchQueue = SendQueue[job_pb2.WatchJobResponse]

MAX_LOGGED = 500
"""Most characters of metrics or a path in the log: a rank may report a thousand names of 200, and often."""


class Watchers:
    """Queues of jobs' watchers, and actions for reports and ends of jobs. Used on the event loop only."""

    def __init__(self, health: LoopHealth) -> None:
        self._health = health
        self._queues: dict[str, list[WatchQueue]] = {}
        self.num_watchers = 0
        """Present watchers of all jobs."""
        self._held = Held("reports", MAX_REPORTS_BYTES_OF_CALLER, MAX_REPORTS_BYTES)
        self._on_ended: list[Callable[[JobId], None]] = []
        self._on_published: list[Callable[[JobId, reports.Report], None]] = []

    def watch(self, job_id: str, caller: str = "") -> WatchQueue:
        """A queue that gets the reports of the job from now on. It ends if it has too much, or the caller's queues."""
        queue = WatchQueue(MAX_WAITING, MAX_WATCHED_BYTES, partial(self._held.change, caller))
        self._queues.setdefault(job_id, []).append(queue)
        self.num_watchers += 1
        return queue

    def unwatch(self, job_id: str, queue: WatchQueue) -> None:
        """Removes the queue of a watcher that has left."""
        queue.drop()
        self._queues[job_id].remove(queue)
        self.num_watchers -= 1
        if not self._queues[job_id]:
            del self._queues[job_id]

    def on_ended(self, action: Callable[[JobId], None]) -> None:
        """Registers an action to be called with every job that ends."""
        self._on_ended.append(action)

    def on_published(self, action: Callable[[JobId, reports.Report], None]) -> None:
        """Registers an action to be called with every report of a job."""
        self._on_published.append(action)

    def publish(self, job_id: JobId, report: reports.Report) -> None:
        """Sends a report to all watchers and actions, and logs it."""
        for action in self._on_published:
            try:
                action(job_id, report)
            # One action that fails must keep the report neither from the others nor from the watchers.
            except Exception:
                log.exception("job=%s %s could not be recorded; this is a bug", job_id, type(report).__name__)
        try:
            if queues := self._queues.get(job_id):  # a round's report of a thousand ranks takes long to make
                message = codec.watch_message(report)
                for queue in queues:
                    self._health.messages["watcher", "out"] += 1
                    queue.put(message)
        finally:
            self._log(job_id, report)

    def _log(self, job_id: JobId, report: reports.Report) -> None:
        """Logs a report. Also ends the job's watching, even if its watchers could not be reached."""
        match report:
            case reports.EpochReport():
                loss = "-" if report.loss is None else f"{report.loss:.4g}"
                log.info("job=%s epoch=%d loss=%s %.1f s", job_id, report.epoch, loss, report.duration_s)
            case reports.EvaluationReport():
                log.info("job=%s epoch=%d metrics=%s", job_id, report.epoch, str(report.metrics)[:MAX_LOGGED])
            case reports.StallReport():
                text = describe_report(replace(report, stacks=""))
                log.warning("job=%s %s", job_id, text, extra=fields(rank=report.rank))
            case reports.MembershipReport():
                level = logging.INFO if report.is_back else logging.WARNING
                log.log(level, "job=%s %s", job_id, describe_report(report), extra=fields(rank=report.rank))
            case reports.Checkpoint():
                of_round = fields(round=report.version)
                log.info(
                    "job=%s checkpoint=%s %.1f s", job_id, report.path[:MAX_LOGGED], report.duration_s, extra=of_round
                )
            case reports.JobResult():
                self._end(job_id, report)
            case reports.UserEvent() if not report.is_of_user:
                text = describe_report(report)[:MAX_LOGGED]
                log.warning("job=%s %s", job_id, text, extra=fields(rank=report.rank))
            case reports.RoundReport() | reports.UserEvent():
                pass  # not logged: there may be many a second
            case _:
                assert_never(report)

    def _end(self, job_id: JobId, result: reports.JobResult) -> None:
        of = fields(round=result.rounds, **({} if result.failed_rank is None else {"rank": result.failed_rank}))
        log.info("job=%s %s %s", job_id, result.outcome, result.error, extra=of)
        for queue in self._queues.get(job_id, ()):
            queue.close()
        for action in self._on_ended:
            action(job_id)

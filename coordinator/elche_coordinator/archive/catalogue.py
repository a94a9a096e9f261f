"""The catalogue of jobs: those of this run, from the core, and those that ended before it, from their records."""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

from elche.errors import UnknownJob
from elche_coordinator.archive.history import History
from elche_coordinator.core.describe import JobDetails, JobView
from elche_coordinator.core.messages.events import JobsForgotten
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.driver import Driver
from elche_coordinator.limits.sharing import crowded_out

log = logging.getLogger(__name__)

MAX_ENDED_BYTES = 512 << 20
"""Most bytes of jobs that have ended: their records, files and manifests, `JOB_BYTES` each, and `RANK_BYTES` for each
rank.
"""
JOB_BYTES = 40 << 10
"""Memory of a job that has ended, without its ranks: measured with 2, 16 and 64 ranks, some 35 kB."""
RANK_BYTES = 4 << 10
"""Memory of a rank of a job that has ended: measured, 3.3 kB."""


class JobCatalogue:
    """Queries on jobs of this run and of earlier ones."""

    def __init__(self, driver: Driver, history: History) -> None:
        self._driver = driver
        self._core = driver.core
        self._history = history
        self.artifacts: dict[str, str] = {}
        """By job that has ended, where its artifacts are, or why not yet."""
        self._views_with_artifacts: dict[str, tuple[JobView, JobView]] = {}
        """By job, its last view as the core has it, and the same with its artifacts: all are asked for each second."""
        self.manifest_bytes: dict[str, int] = {}
        """By job whose artifacts are stored, the size of what is known of their files."""

    def submitted_as(self, key: str) -> str | None:
        """The job that was submitted with the key; None when none was."""
        return self._core.keys.get(key) or self._history.keys.get(key)

    def job_ids(self) -> list[str]:
        """All jobs, oldest first."""
        return [*self._history.jobs, *self._core.job_ids()]

    def past_views(self) -> list[JobView]:
        """The jobs that had ended before this run, oldest first."""
        return [self._with_artifacts(job.view) for job in self._history.jobs.values()]

    def present_views(self) -> list[JobView]:
        """The jobs of this run as they are now, oldest first; why and how long queued ones wait may be older."""
        views = (self._present_view(job_id, self._core.recent_view) for job_id in self._core.job_ids())
        return [self._with_artifacts(view) for view in views if view is not None]

    def is_past(self, job_id: str) -> bool:
        """True if the job had ended before this run, so that some of its figures are not available."""
        return job_id in self._history.jobs

    def view(self, job_id: str) -> JobView | None:
        """One job as it is now; None when it is not known."""
        view = self._present_view(JobId(job_id), self._core.view)
        if view is None and (past := self._history.jobs.get(job_id)) is not None:
            view = past.view
        return None if view is None else self._with_artifacts(view)

    def known_view(self, job_id: str) -> JobView:
        """One job as it is now. Raises `UnknownJob`."""
        view = self.view(job_id)
        if view is None:
            raise UnknownJob(job_id)
        return view

    def details(self, job_id: str) -> JobDetails | None:
        """A job's submission and outcome; None for an unknown job."""
        if (past := self._history.jobs.get(job_id)) is not None:
            return JobDetails(spec=past.spec, result=past.result)
        return self._core.details(JobId(job_id), self._driver.now_s)

    def result(self, job_id: str) -> JobResult | None:
        """The job's result; None before it is durable, and for an unknown job."""
        if (past := self._history.jobs.get(job_id)) is not None:
            return past.result
        return None if job_id in self._driver.ending else self._core.result(JobId(job_id))

    def spec(self, job_id: str) -> JobSpec | None:
        """The job's present spec, whose number of ranks may have been changed; None for an unknown job."""
        past = self._history.jobs.get(job_id)
        return self._core.spec(JobId(job_id)) if past is None else past.spec

    def owner(self, job_id: str) -> str:
        """The user who has submitted the job; empty for an unknown job."""
        return "" if (spec := self.spec(job_id)) is None else str(spec.submitted_by)

    def submission(self, job_id: str) -> JobSpec:
        """The job's submission, without rounds to repeat. Raises `KeyError` before it is durable."""
        return self._history.submission(job_id)

    def bundles_in_use(self) -> set[str]:
        """Names of the folders of jobs that have not ended."""
        living = (job_id for job_id in self._core.job_ids() if self._core.result(job_id) is None)
        return {spec.bundle for job_id in living if (spec := self._core.spec(job_id)) is not None}

    def forget_oldest(self, keep_jobs: int) -> int:
        """Forgets ended jobs beyond `keep_jobs` or `MAX_ENDED_BYTES`, each the oldest of the user who has most; returns
        the number forgotten.
        """
        sizes = self._sizes()
        if len(self.job_ids()) <= keep_jobs and sum(sizes.values()) <= MAX_ENDED_BYTES:
            return 0
        recent = self._core.recent_view
        present = (self._present_view(one, recent) for one in self._core.job_ids() if self.result(one) is not None)
        views = [view for view in present if view is not None]
        # By their ends: the core has jobs in the order of submission.
        views.sort(key=lambda view: view.ended_s or 0.0)
        ended = [*self._history.jobs, *(view.job_id for view in views)]
        many = crowded_out(((one, self.owner(one), 1) for one in ended), keep_jobs)
        for one in many:
            sizes[one] = 0
        large = crowded_out(((one, self.owner(one), sizes[one]) for one in ended if sizes[one]), MAX_ENDED_BYTES)
        old = tuple(map(JobId, [*many, *large]))
        if old:
            self._history.forget(old)
            for job_id in old:
                self.artifacts.pop(job_id, None)
                self._views_with_artifacts.pop(job_id, None)
                self.manifest_bytes.pop(job_id, None)
            self._driver.handle(JobsForgotten(job_ids=old))
            if large:
                gc.collect()  # a job's objects refer to each other, and the collector looks seldom
            why = f": {len(large)} since records and files take over {MAX_ENDED_BYTES >> 20} MiB" if large else ""
            log.info("%d jobs are forgotten, of %d that have ended%s", len(old), len(ended), why)
        return len(old)

    def _sizes(self) -> dict[str, int]:
        """Approximate sizes in bytes of the jobs that have ended. A user's file counts with the newest job that has it,
        since forgetting that one frees it. Also has `sources` forget the files that no job has.
        """
        sizes = {one: self._size_bytes(one) for one in self.job_ids() if self.result(one) is not None}
        newest = {spec.source_hash: one for one in sizes if (spec := self.spec(one)) is not None}
        self._driver.sources.keep(newest)
        for name, one in newest.items():
            sizes[one] += self._driver.sources.size_bytes(name)
        return sizes

    def _size_bytes(self, job_id: str) -> int:
        """Approximate size in memory of a job that has ended, without its file."""
        result = self.result(job_id)
        num_bytes = self._driver.writer.row_bytes.get(job_id) or self._history.row_bytes.get(job_id, 0)
        num_bytes += JOB_BYTES + self.manifest_bytes.get(job_id, 0)
        return num_bytes + (RANK_BYTES * len(result.ranks) if result is not None else 0)

    def _with_artifacts(self, view: JobView) -> JobView:
        """The view with the job's artifacts; the same object while both are the same, since it may be sent often."""
        if not (told := self.artifacts.get(view.job_id, "")):
            return view
        plain, shown = self._views_with_artifacts.get(view.job_id, (None, view))
        if plain is not view or shown.artifacts != told:
            shown = replace(view, artifacts=told)
            self._views_with_artifacts[view.job_id] = view, shown
        return shown

    def _present_view(self, job_id: JobId, view: Callable[[JobId, float], JobView | None]) -> JobView | None:
        """The job's view; one of id and state only if describing it fails, so that others are still shown."""
        try:
            return view(job_id, self._driver.now_s)
        except Exception:
            log.exception("job=%s cannot be described; this is a bug", job_id)
            return self._core.view_without_figures(job_id, "its figures cannot be shown")

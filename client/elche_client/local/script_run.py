"""`elche run` of a script with its own training loop: one process per device, and a coordinator that shows them."""

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from elche.errors import ElcheError
from elche.processors import environment_of_ranks
from elche.tls import VARIABLE as TLS_VARIABLE
from elche.token import VARIABLE
from elche.torchrun import environment_of_rank, free_port
from elche_client.client import Client, JobHandle
from elche_client.display.notices import print_notice
from elche_client.display.output import exit_code_of
from elche_client.display.progress import ProgressDisplay, make_progress
from elche_client.events import JobResult, JobState, JobView
from elche_client.local.check import check_devices
from elche_client.local.job_run import CANCEL_TIMEOUT_S, RECONNECT_S, LocalRun, make_folder, require_installed
from elche_client.local.notifications import (
    Interrupted,
    Notification,
    ProcessExited,
    ProcessOutput,
    next_notification,
    start_watch,
)
from elche_client.local.processes import ChildProcess, ProcessError, exit_error, signal_name
from elche_client.options import check_loop, read_source

RUNNER = "elche_worker.trainer"
POLL_S = 0.2
"""Seconds between two looks at the processes."""
PEERS_GRACE_S = 5.0
"""Seconds for the other processes to exit after one has failed."""


@dataclass(slots=True, kw_only=True)
class ScriptRun(LocalRun):
    """One `elche run` of a script with its own training loop."""

    _running: dict[str, ChildProcess] = field(default_factory=dict)
    """The rank processes that have not exited, by name."""
    _failed: ProcessExited | None = None
    """The first process that exited with an error."""
    _lost: ProcessExited | None = None
    """The first process that failed while the job trained; the job decides if the others go on."""
    _jobs: dict[str, JobHandle] = field(default_factory=dict)
    """Jobs found so far, oldest first: one for each trainer that the script has set up."""
    _results: dict[str, JobResult] = field(default_factory=dict)
    """Results of those whose end was shown."""
    _come: dict[str, JobResult] = field(default_factory=dict)
    """Results that have come, by the watching threads."""
    _look_s: float = -math.inf
    """Time on the monotonic clock of the next look for jobs."""
    _give_up_s: float = math.inf
    """Time on the monotonic clock at which the others are stopped, once one or the job has failed."""

    def _train(self) -> tuple[JobResult, int]:
        source = read_source(self.path)
        require_installed()
        options = self.options
        check_loop(self.path, options)
        coordinator = self._begin_coordinator()
        devices = check_devices(
            options.num_ranks, device=self.device, notifications=self.notifications, processes=self.processes
        )
        self.folder = make_folder(self.out, Path(options.name or self.path.stem).name)
        self._write_command(self.folder, source, replace(options, num_ranks=len(devices)))
        self._start_log_tail(self.folder)
        address = self._start_coordinator(coordinator, self.folder)
        self._start_ranks(self.folder, address, devices)
        try:
            with (
                Client(address, token=self.token, tls="", reconnect_s=RECONNECT_S) as client,
                make_progress(on_stderr=self.as_json, as_events=self.as_events) as progress,
            ):
                return self._follow_loop(client, progress)
        except ElcheError as error:
            raise self._explain_ranks(error) from error

    def _start_ranks(self, folder: Path, address: str, devices: tuple[str, ...]) -> None:
        port, given = free_port(), os.environ | self.options.environment
        for rank in range(len(devices)):
            environment = {
                **self.options.environment,
                **environment_of_rank(rank, devices, port, os.environ),
                "ELCHE_COORDINATOR": address,
                VARIABLE: self.token,
                TLS_VARIABLE: "",
                "ELCHE_CHECKPOINT_DIR": str((folder / "checkpoints").resolve()),
                "ELCHE_RESUME": self.options.resume or given.get("ELCHE_RESUME", ""),
                **environment_of_ranks(len(devices), given),
                "ELCHE_SLOW": str(self.options.slow_factors.get(rank, 1.0)),
            }
            name, log = f"rank {rank}", folder / f"rank-{rank}.log"
            arguments = [str(os.getpid()), str(self.path), *self.options.arguments]
            process = ChildProcess(
                name,
                RUNNER,
                arguments,
                self.notifications,
                log=log,
                environment=environment,
                folder=self.working_folder,
            )
            self.processes.add(process)
            self._running[name] = process
        who = "1 rank runs" if len(devices) == 1 else f"{len(devices)} ranks run"
        print_notice(f"{who} {self.path.name}; progress is shown from Trainer.setup on")

    def _follow_loop(self, client: Client, progress: ProgressDisplay) -> tuple[JobResult, int]:
        """Shows the jobs as which the script attaches itself. Returns when all its processes have exited."""
        try:
            while self._running or self._open_jobs:
                self._find_jobs(client)
                if time.monotonic() > self._give_up_s:
                    break
                with suppress(TimeoutError):
                    notification = next_notification(self.notifications, timeout_s=POLL_S)
                    if isinstance(notification, ProcessExited):
                        if notification.process in self._running:  # a job may have been attached since the last look
                            self._find_jobs(client, at_once=True)
                        self._note_end(notification)
                    elif not isinstance(notification, ProcessOutput):
                        self._show(notification, progress)
                        if isinstance(notification, JobResult):
                            # By identity: results of two jobs may be equal.
                            self._results |= {job: one for job, one in list(self._come.items()) if one is notification}
                            self._end_soon(is_over=notification.state is not JobState.SUCCEEDED)
        except Interrupted as interrupted:
            result = self._cancel_loop(interrupted, progress)
            has_ended = not (
                self._running or self._failed or self._lost
            )  # by itself: the script may do more than train
            return result, 0 if result.state is JobState.SUCCEEDED and has_ended else interrupted.exit_code
        return self._judge()

    @property
    def _open_jobs(self) -> list[JobHandle]:
        """Jobs that have not ended, oldest first: a script need not close a trainer before it sets up the next one.
        From any thread.
        """
        # A copy, made at once: the main thread may add a job while a watching thread is in this loop.
        return [job for job_id, job in list(self._jobs.items()) if job_id not in self._results]

    def _find_jobs(self, client: Client, *, at_once: bool = False) -> None:
        """Finds and watches new jobs of the script."""
        if not at_once and time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + POLL_S
        for job in client.jobs():
            if job.job_id not in self._jobs:
                self.record.job_id = job.job_id
                self._jobs[job.job_id] = client.job(job.job_id)
                start_watch(self._jobs[job.job_id], partial(self._take_in, job.job_id))

    def _take_in(self, job_id: str, notification: Notification) -> None:
        """Puts what is to be shown of a job into the queue: of several open ones only the newest one's views."""
        if isinstance(notification, JobResult):
            # Before it is put into the queue: whoever takes it from there looks here for its job.
            self._come[job_id] = notification
        if not isinstance(notification, JobView) or job_id == self._open_jobs[-1].id:
            self.notifications.put(notification)

    def _judge(self) -> tuple[JobResult, int]:
        """The result of the run: that of the first job that has failed, or else of the newest one, unless a process
        has failed after it.
        """
        results = [self._results[job_id] for job_id in self._jobs if job_id in self._results]
        failed = [one for one in results if one.state is not JobState.SUCCEEDED]
        if failed or (results and self._failed is None):
            result = (failed or results[::-1])[0]
            return result, exit_code_of(result)
        if (ended := self._failed or self._lost) is not None:
            raise exit_error(ended)
        print_notice(f"{self.path} has exited without using a Trainer: there is no job to show")
        return JobResult(state=JobState.SUCCEEDED), 0

    def _note_end(self, ended: ProcessExited) -> None:
        """Notes the exit of a rank process. After the first failure the others get `PEERS_GRACE_S` to exit; while the
        job trains, its result decides.
        """
        if ended.process not in self._running:
            raise exit_error(ended)  # the coordinator
        del self._running[ended.process]
        for process in self._running.values():
            process.tell(ended.process.removeprefix("rank "))
        if ended.code and self._open_jobs:
            self._lost = self._lost or ended
            if ended.code < 0:  # a killed process prints no message itself
                print_notice(f"{ended.process} was killed by {signal_name(-ended.code)}")
        elif ended.code:
            self._failed = self._failed or ended
            self._end_soon(is_over=True)

    def _end_soon(self, *, is_over: bool) -> None:
        """Gives the remaining processes `PEERS_GRACE_S` to exit."""
        if is_over:
            self._give_up_s = min(self._give_up_s, time.monotonic() + PEERS_GRACE_S)

    def _cancel_loop(self, interrupted: Interrupted, progress: ProgressDisplay) -> JobResult:
        """The newest job's result, once a checkpoint is written and all processes have exited."""
        jobs = self._open_jobs
        with suppress(ElcheError, TimeoutError):
            if jobs:
                self._save_and_cancel(jobs, lambda event: self._show(event, progress), interrupted)
                while self._running:
                    notification = next_notification(self.notifications, timeout_s=CANCEL_TIMEOUT_S)
                    if isinstance(notification, ProcessExited):
                        self._note_end(notification)
        cancelled = JobResult(state=JobState.CANCELLED, error=str(interrupted))
        result = next((self._come[job.id] for job in reversed(jobs) if job.id in self._come), cancelled)
        return replace(result, error=cancelled.error) if result.state is JobState.CANCELLED else result

    def _explain_ranks(self, error: ElcheError) -> ElcheError:
        """The error to show: the exit of the first rank process that failed, if one has."""
        ended = self._failed or self._lost
        return error if isinstance(error, ProcessError) or ended is None else exit_error(ended)

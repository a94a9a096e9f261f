"""Reports a job's progress to Kubeflow's trainer, from a pod of a TrainJob, whose status then shows it (KEP-2779)."""

import json
import os
import threading
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any

from elche.tls import client_context
from elche_client.events import EpochReport, EvaluationReport, Event, JobResult, JobState, JobView

URL = "KUBEFLOW_TRAINER_STATUS_URL"
CA = "KUBEFLOW_TRAINER_STATUS_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_STATUS_TOKEN"
"""Environment variables that the controller sets if the cluster has this feature: an address, and two files."""
EVERY_S = 5.0
"""Least time in seconds between two reports."""
LIMIT_S = 5.0
"""Seconds for the controller to answer. Figures that it does not take are sent with the next ones."""


class Reporter:
    """Sends the newest figures to the controller on a thread, at most every few seconds."""

    def __init__(self, environment: Mapping[str, str] = os.environ, *, every_s: float = EVERY_S) -> None:
        self._url = environment[URL]
        self._ca = environment.get(CA) or None
        self._token_file = environment.get(TOKEN, "")
        self._every_s = every_s
        self._changed = threading.Condition()
        self._status: dict[str, Any] = {}
        self._metrics: dict[str, str] = {}
        self._is_new = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kubeflow", daemon=True)
        self._thread.start()

    def note(self, event: Event) -> None:
        """Records the progress in an event."""
        match event:
            case JobView() if event.num_epochs and event.dataset_size:
                done = event.epoch * event.dataset_size + event.epoch_processed
                percentage = min(100, 100 * done // (event.num_epochs * event.dataset_size))
                changes: dict[str, Any] = {"progressPercentage": percentage}
                if event.eta_s is not None:
                    changes["estimatedRemainingSeconds"] = max(0, round(event.eta_s))
            case EpochReport():
                changes = {"metrics": self._with({"loss": event.loss, **event.scalars})}
            case EvaluationReport():
                changes = {"metrics": self._with(event.metrics)}
            case JobResult() if event.state is JobState.SUCCEEDED:
                changes = {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
                changes["metrics"] = self._with(event.metrics)
            case _:
                return
        with self._changed:
            self._status |= changes | {"lastUpdatedTime": datetime.now(UTC).isoformat()}
            self._is_new = True
            self._changed.notify()

    def _with(self, metrics: Mapping[str, float | None]) -> list[dict[str, str]]:
        """All known metrics, with new ones added."""
        self._metrics |= {name: f"{value:.6g}" for name, value in metrics.items() if value is not None}
        return [{"name": name, "value": text} for name, text in self._metrics.items()]

    def close(self) -> None:
        """Sends the remaining figures, and waits for that."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        # One report may be under way, and one is left to send.
        self._thread.join(2 * LIMIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_new or self._is_closed)
                status, is_new, self._is_new = dict(self._status), self._is_new, False
            if is_new:
                with suppress(OSError, ValueError, HTTPException):
                    self._report(status)
            with self._changed:
                if self._is_closed and not self._is_new:
                    return
                # New figures do not end this wait, or there would be a report for each event; they are sent together
                # after it.
                self._changed.wait_for(lambda: self._is_closed, self._every_s)

    def _report(self, status: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        if self._token_file:  # read each time: the kubelet renews the file
            headers["Authorization"] = f"Bearer {Path(self._token_file).read_text(encoding='utf-8').strip()}"
        request = urllib.request.Request(self._url, json.dumps({"trainerStatus": status}).encode(), headers)
        context = client_context(self._ca) if self._url.startswith("https:") else None
        urllib.request.urlopen(request, timeout=LIMIT_S, context=context).close()

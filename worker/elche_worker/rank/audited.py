"""Translates what a replica does into records of its audit file, in jobs with `audit`."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from elche.extent import Extent
from elche.header import header_digest
from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.reduction import AverageResult
from elche_worker.data.lease_loader import LoadedBatch
from elche_worker.rank.acts import JoinGeneration, UseResult
from elche_worker.session.launch import Launch
from elche_worker.telemetry.audit import AuditLog

OUTCOMES = {"succeeded": 1, "ended early": 2, "failed": 3, "cancelled": 4}
"""The number of each outcome of a job in the file."""


def start_of(
    launch: Launch, extent: Extent, options: AveragingOptions, *, resumed: str, version: int, samples: int
) -> dict[str, Any]:
    """The head of the file: the process, the training, and the checkpoint that it resumes from; or ""."""
    return {
        "job": launch.job_id,
        "rank": launch.rank,
        "incarnation": launch.incarnation,
        "resume": resumed,
        "version": version,
        "samples": samples,
        "dataset_size": extent.dataset_size,
        "batch_size": extent.batch_size,
        "epochs": extent.epochs,
        "drop_last": extent.drop_last,
        "max_steps": extent.max_steps,
        "nonfinite": options.nonfinite,
        "outliers": options.outliers,
        "members": launch.group_size,
        "device": launch.device,
        "label": launch.label,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "warms_up": launch.warms_up,
        "file_name": launch.file_name,
        "source": source_digest(launch.source),
        "settings": launch.settings,
        "arguments": launch.arguments,
        "code": launch.module or launch.bundle,
    }


def source_digest(source: str) -> str:
    """The digest by which the copy of the job's file is named."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def keep_source(folder: Path, source: str) -> None:
    """Keeps a copy of the job's file for replays beside the audit files, once for all ranks."""
    path = folder / f"job-{source_digest(source)}.py"
    draft = folder / f".{path.name}.{os.getpid()}"
    with suppress(OSError):
        if not path.exists():
            draft.write_text(source, encoding="utf-8")
            draft.replace(path)


class Audited:
    """Writes one rank's work to its audit file. Without a `log`, in jobs without `audit`, it writes nothing."""

    def __init__(self, log: AuditLog | None, options: AveragingOptions) -> None:
        self.log = log
        self._options = options

    def batch(self, batch: LoadedBatch, *, step: int, is_skipped: bool) -> None:
        """Adds a batch, the rank's number `step`."""
        if self.log is not None:
            where = {"lease": batch.lease, "epoch": batch.epoch, "offset": batch.offset, "size": batch.size}
            self.log.batch(**where, step=step, is_skipped=is_skipped)

    def entered(self, row: Row) -> None:
        """Adds a round that is entered, with this rank's row of its header."""
        if self.log is not None:
            self.log.entered(
                attempt=row.attempt,
                generation=row.generation,
                round_id=row.round,
                version=row.version,
                cut=row.cut,
                step=row.local_step,
                weight=row.weight,
            )

    def received(self, averaged: AverageResult, *, round_id: int, digest: int | None) -> None:
        """Adds a round's result."""
        if self.log is None:
            return
        rows = averaged.rows
        self.log.received(
            generation=rows[0].generation,
            round_id=round_id,
            version=averaged.version,
            samples=averaged.samples,
            left_out=sum(row.weight for row, is_out in zip(rows, self._options.discarded(rows), strict=True) if is_out),
            num_rows=len(rows),
            is_left_out=averaged.is_discarded,
            is_finite=averaged.is_finite,
            header=header_digest(rows),
            digest=digest,
            level=averaged.level,
        )

    def lost(self, *, generation: int, round_id: int, has_header: bool) -> None:
        """Adds that a round has no result here."""
        if self.log is not None:
            self.log.lost(generation=generation, round_id=round_id, has_header=has_header)

    def joined(self, act: JoinGeneration) -> None:
        """Adds that the next rounds are those of another generation."""
        if self.log is not None:
            self.log.joined(
                attempt=act.attempt,
                generation=act.generation,
                position=act.position,
                world_size=act.world_size,
                is_relayed=act.backend == "cpu",
            )

    def used(self, act: UseResult) -> None:
        """Adds that a round's result is evaluated, if it is."""
        if self.log is not None and act.evaluates:
            self.log.evaluated(round_id=act.round, epoch=act.epoch, offset=act.offset, size=act.size)

    def committed(self, *, round_id: int, version: int, global_step: int) -> None:
        """Adds that a round is committed."""
        if self.log is not None:
            self.log.committed(round_id=round_id, version=version, global_step=global_step)

    def end(self, step: int, outcome: str) -> None:
        """Adds the job's outcome if it is decided, and that the process ends in order; closes the file."""
        if self.log is not None:
            if outcome in OUTCOMES:
                self.log.decided(OUTCOMES[outcome])
            self.log.end(step)

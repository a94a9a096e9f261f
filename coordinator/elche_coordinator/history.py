"""Jobs of earlier runs of the coordinator, as their records have them."""

from typing import Any

from elche_coordinator.core.describe import JobView, Particulars
from elche_coordinator.core.reports import Checkpoint, JobResult, Outcome, RankResult
from elche_coordinator.core.spec import JobSpec
from elche_coordinator.records import Record, Records


class History:
    """What ended before this process began. A job that was running then has failed, and its record says so."""

    def __init__(self, records: Records) -> None:
        loaded = records.load()
        lost = {job_id: _closed(record) for job_id, record in loaded.items() if record.get("result") is None}
        if lost:
            records.write(lost)
        self._records = {**loaded, **lost}
        self._views = [_view(job_id, record) for job_id, record in self._records.items()]

    @property
    def last_incarnation(self) -> int:
        """The highest incarnation that was given out."""
        ranks: list[Any] = [record["ranks"] for record in self._records.values()]
        return max((incarnation for table in ranks for incarnation, _ in table.values()), default=0)

    def views(self) -> list[JobView]:
        """All its jobs, oldest first."""
        return self._views

    def view(self, job_id: str) -> JobView | None:
        """One job; None when it is not known."""
        record = self._records.get(job_id)
        return _view(job_id, record) if record else None

    def resumable(self, job_id: str) -> tuple[JobSpec, tuple[Checkpoint, ...]] | None:
        """What the job was, and its checkpoints; None when it is not known."""
        record = self._records.get(job_id)
        return (_spec(record), _result(record).checkpoints) if record else None

    def particulars(self, job_id: str) -> Particulars | None:
        """What was asked of a job, and what came of it; None when it is not known."""
        record = self._records.get(job_id)
        return Particulars(spec=_spec(record), result=_result(record)) if record else None

    def result(self, job_id: str) -> JobResult | None:
        """How the job ended; None when it is not known."""
        record = self._records.get(job_id)
        return _result(record) if record else None


def _closed(record: Record) -> Record:
    training: Any = record.get("training") or {}
    checkpoints = training.get("checkpoints", [])
    what = "resume it" if checkpoints else "submit it again"
    error = f"the coordinator stopped while the job ran; {what}"
    result = {"outcome": Outcome.FAILED, "error": error, "checkpoints": checkpoints}
    return {**record, "reason": error, "result": result}


def _spec(record: Record) -> JobSpec:
    fields: Any = record["spec"]
    slow_factors = {int(rank): factor for rank, factor in fields["slow_factors"].items()}
    return JobSpec(**{**fields, "slow_factors": slow_factors, "replay": ()})


def _result(record: Record) -> JobResult:
    fields: Any = record["result"]
    ranks = tuple(RankResult(**rank) for rank in fields.get("ranks", ()))
    checkpoints = tuple(Checkpoint(**one) for one in fields.get("checkpoints", ()))
    return JobResult(**{**fields, "outcome": Outcome(fields["outcome"]), "ranks": ranks, "checkpoints": checkpoints})


def _total(result: JobResult) -> int:
    kept = result.dataset_size - max(result.dropped_samples, default=0)
    return kept * len(result.committed_samples)


def _view(job_id: str, record: Record) -> JobView:
    result = _result(record)
    spec: Any = record["spec"]
    submitted_at: Any = record["submitted_at"]
    return JobView(
        job_id=job_id,
        name=spec["name"],
        state=result.outcome,
        reason=str(record["reason"]),
        epoch=max(0, min(result.epochs, len(result.committed_samples) - 1)),
        num_epochs=len(result.committed_samples),
        dataset_size=result.dataset_size,
        samples_per_s=result.samples_per_s,
        num_rounds=result.rounds,
        metrics=result.metrics,
        progress_fraction=sum(result.committed_samples) / total if (total := _total(result)) else 0.0,
        submitted_at=submitted_at,
        checkpoints=result.checkpoints,
    )

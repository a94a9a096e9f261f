"""What happens to a job, in words for people: the page and the timeline say it alike."""

from typing import assert_never

from elche_coordinator.core.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    JobResult,
    Report,
    RoundReport,
    UserEvent,
)


def in_words(report: Report) -> str:
    """One line."""
    match report:
        case RoundReport():
            return f"round {report.round}: {report.samples} samples, averaging {report.sync_ms:.1f} ms"
        case EpochReport():
            loss = "" if report.loss is None else f"loss {report.loss:.4g}, "
            return f"epoch {report.epoch + 1} is complete: {loss}{report.duration_s:.1f} s"
        case EvaluationReport():
            figures = ", ".join(f"{name} {value:.4g}" for name, value in report.metrics.items())
            return f"evaluation after epoch {report.epoch + 1}: {figures}"
        case Checkpoint():
            return f"checkpoint of version {report.version}: {report.path}"
        case UserEvent():
            dropped = f" ({report.num_dropped} events before it were too many)" if report.num_dropped else ""
            return f"rank {report.rank}: {report.text}{dropped}"
        case JobResult():
            return f"{report.outcome}: {report.error}" if report.error else str(report.outcome)
        case _:
            assert_never(report)

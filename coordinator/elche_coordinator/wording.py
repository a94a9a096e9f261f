"""What happens to a job, in words for people: the page and the timeline say it alike."""

from typing import assert_never

from elche_coordinator.core.messages.reports import (
    Checkpoint,
    EpochReport,
    EvaluationReport,
    JobResult,
    Report,
    RoundReport,
    StallReport,
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
            what = "of the last model" if report.is_final else f"after epoch {report.epoch + 1}"
            return f"evaluation {what}: {figures}"
        case StallReport():
            who = f"rank {report.rank} on {report.host} ({report.device})"
            if report.is_over:
                return f"{who} goes on, after {report.silent_s:.1f} s without a batch"
            if report.stacks:
                return f"{who} is stalled; its threads:\n{report.stacks}"
            usual = f"its batches took {report.usual_ms:.3g} ms" if report.usual_ms else "it has made none yet"
            return f"{who} is stalled: no batch for {report.silent_s:.1f} s; {usual}"
        case Checkpoint():
            return f"checkpoint of version {report.version}: {report.path}"
        case UserEvent():
            dropped = f" ({report.num_dropped} events before it were too many)" if report.num_dropped else ""
            return f"rank {report.rank}: {report.text}{dropped}"
        case JobResult():
            model = f"; the model is the {report.model_is}" if report.model_is and report.best_epoch is not None else ""
            return f"{report.outcome}: {report.error}" if report.error else f"{report.outcome}{model}"
        case _:
            assert_never(report)

"""The text of a report, as the page, the timeline and the log show it."""

from typing import assert_never

from elche.formatting import membership_text, stall_text
from elche_coordinator.core.messages import reports


def describe_report(report: reports.Report) -> str:
    """One line of text; of a stalled rank, the stacks of its threads follow."""
    match report:
        case reports.RoundReport():
            return f"round {report.round}: {report.samples} samples, averaging {report.sync_ms:.1f} ms"
        case reports.EpochReport():
            loss = "" if report.loss is None else f"loss {report.loss:.4g}, "
            return f"epoch {report.epoch + 1} is complete: {loss}{report.duration_s:.1f} s"
        case reports.EvaluationReport():
            figures = ", ".join(f"{name} {value:.4g}" for name, value in report.metrics.items())
            what = "of the last model" if report.is_final else f"after epoch {report.epoch + 1}"
            return f"evaluation {what}: {figures}"
        case reports.StallReport():
            threads = f"; its threads:\n{report.stacks}" if report.stacks else ""
            return f"{stall_text(report)}{threads}"
        case reports.MembershipReport():
            return membership_text(report.text, report.num_ranks)
        case reports.Checkpoint():
            return f"checkpoint of version {report.version}: {report.path}"
        case reports.UserEvent():
            dropped = f" ({report.num_dropped} events before it were dropped)" if report.num_dropped else ""
            return f"rank {report.rank}: {report.text}{dropped}"
        case reports.JobResult():
            model = f"; the model is the {report.model_is}" if report.model_is and report.best_epoch is not None else ""
            return f"{report.outcome}: {report.error}" if report.error else f"{report.outcome}{model}"
        case _:
            assert_never(report)

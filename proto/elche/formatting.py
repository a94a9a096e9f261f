"""Texts of durations and reports, equal in the coordinator and its clients."""

import math
import re
from collections.abc import Sequence

from elche.reports import StallReport

AROUND = re.compile(r"^(\[rank\d+\]:)?[\s\u2500-\u257f]+|[\s\u2500-\u257f]+$")
"""What surrounds words: torch's prefix for ranks, and the frames that typer and rich draw."""
PARTING = re.compile(
    r"(\[rank\d+\]:)?\[[DIWE]\d{4} |terminate called without an active exception|.*resource_tracker|warnings\.warn\("
)
"""What libraries print while a process ends, after its reason: PyTorch's log lines except fatal ones, as of process
groups that nobody has destroyed, the end of threads, and warnings of semaphores that are left."""


def duration(seconds: float) -> str:
    """Formats as "850 ms", "38.2 s", "3 min 20 s", "2 h 05 min", "3 d 04 h"; "-" for an invalid duration."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24:02} h"


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text with more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}\n[...]\n{text[-most // 2 :]}"


def last_words(lines: Sequence[str]) -> str:
    """The last line that has words, alone: what a process that has failed said last, as an exception's text. What
    libraries print as it ends counts only if there is nothing else.
    """
    found = [words for line in lines if (words := AROUND.sub("", line))]
    return next((words for words in reversed(found) if not PARTING.match(words)), found[-1] if found else "")


def membership_text(text: str, num_ranks: int) -> str:
    """One line about a rank that is lost or has joined, with the number of ranks that train now, if any do."""
    return f"{text}; {num_ranks} rank{'' if num_ranks == 1 else 's'} in training" if num_ranks else text


def stall_text(report: StallReport) -> str:
    """One line about a stalled rank, without its threads' stacks."""
    who = f"rank {report.rank} on {report.host} ({report.device})"
    if report.is_over:
        return f"{who} goes on after {duration(report.silent_s)} without a batch"
    usual = f"its batches took {report.usual_ms:.3g} ms" if report.usual_ms else "it has made none yet"
    return f"{who} is stalled: no batch for {duration(report.silent_s)}; {usual}"

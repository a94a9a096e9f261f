"""An audit's outcome as text and as JSON values."""

from dataclasses import asdict
from typing import Any

from elche_audit.verdict import Verdict


def exit_code(verdict: Verdict) -> int:
    """0 if the run is proven, 1 if it is refuted, 2 if it cannot be judged."""
    return 1 if verdict.violations else 2 if verdict.missing else 0


def document(verdict: Verdict) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"verdict": ("proven", "refuted", "undecided")[exit_code(verdict)], **asdict(verdict)}


def lines(verdict: Verdict) -> list[str]:
    """The outcome for people."""
    return [
        *(f"refuted: {line}" for line in verdict.violations),
        *(f"cannot be judged: {line}" for line in verdict.missing),
        *_thrown(verdict),
        *(f"note: {line}" for line in verdict.notes),
        _conclusion(verdict),
    ]


def _thrown(verdict: Verdict) -> list[str]:
    return [
        f"not in the model: {one.samples} samples ({one.batches} batches) of rank {one.rank}, "
        f"incarnation {one.incarnation}: {one.reason}"
        for one in verdict.thrown
    ]


def _conclusion(verdict: Verdict) -> str:
    read = f"{verdict.num_files} files of ranks, {verdict.num_batches} batches, {verdict.num_rounds} rounds"
    read += f", {verdict.num_checkpoints} checkpoints"
    if verdict.violations:
        return f"{verdict.job} is refuted by {len(verdict.violations)} violations ({read})"
    if verdict.missing:
        return f"{verdict.job or 'the run'} cannot be judged: missing or damaged files: {len(verdict.missing)} ({read})"
    return f"{verdict.job} is proven: {_claim(verdict)} ({read})"


def _claim(verdict: Verdict) -> str:
    samples, total = sum(verdict.epoch_samples), sum(verdict.epoch_sizes)
    if verdict.is_complete:
        text = f"each of {total} samples of {len(verdict.epoch_sizes)} epochs is in version {verdict.version} once"
    else:
        text = f"{samples} of {total} samples are in version {verdict.version}, each once; the job {_ended(verdict)}"
    if verdict.model_is not in ("", "last"):
        text += f"; its model is the {verdict.model_is}"
    if verdict.left_out:
        text += f", except {verdict.left_out} that were left out of averages"
    if verdict.skipped_batches:
        text += f"; {verdict.skipped_samples} samples of {verdict.skipped_batches} batches were skipped as None"
    return text


def _ended(verdict: Verdict) -> str:
    return "has ended early" if verdict.state == "succeeded" else f"was {verdict.state}"

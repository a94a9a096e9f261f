"""Stores the best model beside the last one, or replaces it, when the job ends."""

import os
import shutil
from pathlib import Path

from elche_worker.model.checkpoint import load
from elche_worker.model.state import save_weights
from elche_worker.session.launch import BEST, LAST


def keep_best(model_path: Path, checkpoint: str, *, restores: bool) -> None:
    """Stores the best model, from its checkpoint, beside the last one at `model_path`; with `restores` at `model_path`,
    and the last one beside it.

    Without a checkpoint, the last model is the best one. Raises `InvalidJob` or `OSError` when the best model cannot be
    read or written; the last one then stays at `model_path`.
    """
    best = model_path.with_name(BEST)
    if not checkpoint:
        _link(model_path, best)
        return
    loaded = load(checkpoint)
    save_weights(loaded.model, best, loaded.frozen)
    if restores:
        _link(model_path, model_path.with_name(LAST))
        _link(best, model_path)


def _link(source: Path, target: Path) -> None:
    """Hard-links the file, or copies it where there are no links. `target` is complete or not there."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.hardlink_to(source)
    except OSError:
        shutil.copy(source, draft)
    draft.replace(target)
    draft.unlink(missing_ok=True)  # `replace` does nothing when both are links to the same file

"""Checkpoints of a user-owned loop: model, optimizer, random numbers, and its position in the epoch."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from elche.errors import InvalidJob, Misuse
from elche.manifest import MANIFEST, DamagedCheckpoint, checkpoints_in, read_manifest, tell_damaged
from elche.output import notice
from elche_worker.model.checkpoint import (
    About,
    CheckpointData,
    CheckpointTarget,
    Loaded,
    extra_of,
    load,
    other_buffers,
    weights_of,
)
from elche_worker.model.tensors import copied
from elche_worker.session.script import script_path
from elche_worker.trainer.attachment import Attachment
from elche_worker.trainer.optimizers import Optimizers

KEPT = 3
"""Number of newest checkpoints that are kept."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a loop."""

    num_steps: int = 0
    epoch: int = 0
    """The present epoch, or the next one."""
    done: int = 0
    """Samples of this epoch that all ranks together have trained; 0 in a loop that takes its batches itself."""
    epoch_steps: int = 0
    """Steps made in this epoch."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The state of a checkpoint besides model and optimizers."""

    position: Position
    plan: dict[str, Any]
    random: dict[str, Any]
    """Random number generators, for `Resumption`."""
    registered: dict[str, Any]
    """State by the name under which the script has registered it."""
    begun: dict[str, Any]
    """`Resumption.begun`; empty in older checkpoints."""
    frozen: list[str] | None
    """Names of parameters that were not trained; None in older checkpoints."""
    rates: list[float] | None
    """The learning rates with which its loop began; None in older checkpoints."""
    others: str
    """The optimizers' options in which the checkpoint differs from the script, in words."""


class Saver:
    """Writes a loop's checkpoints on a thread, from copies. Only rank 0 has one."""

    def __init__(self, place: str, name: str, number: int) -> None:
        self.place = place
        self._name = name
        self._number = number
        """The trainer's number among those of the script."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None
        self._written: list[str] = []
        """Folders that this loop has written, and so may remove."""
        self._last_step = -1

    def save(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        position: Position,
        plan: dict[str, Any],
        kept: Mapping[str, Any],
        num_ranks: int,
        attachment: Attachment,
    ) -> None:
        """Copies the state and starts writing it; reports the outcome later, on another thread. Waits for the previous
        checkpoint, so that only one copy is in memory. A step is saved only once. `kept` is stored with it.
        """
        if position.num_steps == self._last_step:
            return
        self._last_step = position.num_steps
        if self._writing is not None:
            self._writing.result()
        state = {
            "optimizer": copied(optimizers.state_dict()),
            "stepped": optimizers.names(model),
            "buffers": other_buffers(model),
            "extra": copied(extra_of(model)),
            "plan": copied(plan),
            **copied(kept),
        }
        data = CheckpointData(weights_of(model), state)
        about = About(
            job=self._name,
            file_name=str(script_path()),
            source=_source(),
            num_ranks=num_ranks,
            tensors=_tensors(model),
        )
        self._writing = self._thread.submit(self._write, data, about, position, attachment)

    def _write(self, data: CheckpointData, about: About, position: Position, attachment: Attachment) -> None:
        started_s = time.perf_counter()
        name = self._free_name(f"step-{position.num_steps:08d}")
        loop = {**asdict(position), "trainer": self._number}
        try:
            target = CheckpointTarget(self.place)
            path, size_bytes = target.write(name, data, about, {"loop": loop})
            self._written.append(name)
            while len(self._written) > KEPT:
                target.remove(self._written.pop(0))
        except Exception as error:  # training goes on, whatever the storage raises
            reason = f"the checkpoint {self.place}/{name} cannot be written: {error}"
            notice(reason)
            attachment.report_not_saved(position.num_steps, reason)
            return
        attachment.report_saved(position.num_steps, path, size_bytes, time.perf_counter() - started_s)

    def _free_name(self, wanted: str) -> str:
        """Returns an unused name: an earlier run may have left a checkpoint of the same step."""
        names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
        return next(name for name in names if "://" in self.place or not (Path(self.place) / name).exists())

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        self._thread.shutdown(wait=True)


def restore(path: str, model: nn.Module, optimizers: Optimizers, number: int | None) -> Restored | None:
    """Restores model and optimizers from a checkpoint, or the newest in a folder; returns its other state.

    With `number`, only from a checkpoint of the script's trainer of this number; returns None if there is none.

    Raises `Misuse` for one that is incomplete, of another model, or not of a loop.
    """
    try:
        loaded = load(path) if number is None or "://" in path else _load_own(Path(path), number)
        if loaded is None or (number is not None and not _is_of(loaded.manifest, number)):
            return None
        loaded.check_model(_tensors(model))
    except InvalidJob as error:
        raise Misuse(str(error)) from None
    loop = loaded.manifest["training"].get("loop")
    if loop is None:
        raise Misuse(
            f"the checkpoint {loaded.path} is of a job, not of a loop of your own: `elche resume` goes on with it"
        )
    try:
        loaded.restore_model(model)
        present = optimizers.names(model)
        saved = loaded.state.get("stepped", present)
        others = optimizers.load_state_dict(loaded.state["optimizer"], loaded.path, saved, present)
    except InvalidJob as error:
        more = ""
        if "groups had" in str(error):
            more = (
                ". If the script adds groups to the optimizer as it trains, let it add those before Trainer.setup "
                "when it is resumed (ELCHE_RESUME is set)"
            )
        raise Misuse(f"{error}{more}") from None
    except (RuntimeError, ValueError, KeyError) as error:
        text = str(error).splitlines()[0]
        raise Misuse(f"the checkpoint {loaded.path} does not fit: {text}") from None
    position = Position(loop["num_steps"], loop["epoch"], loop["done"], loop.get("epoch_steps", 0))
    state = loaded.state
    own = state.get("registered", {}), state.get("begun", {}), state.get("frozen"), state.get("rates")
    return Restored(position, state["plan"], state["random"], *own, others)


def _load_own(path: Path, number: int) -> Loaded | None:
    """The newest whole checkpoint of the script's trainer of this number; None if there is none. Raises
    `DamagedCheckpoint` if it may be a damaged one.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    found = checkpoints_in(path, damaged.__setitem__)
    written, loaded = [one for one in found if _is_of(read_manifest(one), number)], None
    while written and loaded is None:
        try:
            loaded = load(str(written[-1]))
        except DamagedCheckpoint as error:
            damaged[written.pop()] = error
    tell_damaged(damaged, written, notice)
    return loaded


def _is_of(manifest: Mapping[str, Any], number: int) -> bool:
    """False if another trainer of the script has written the checkpoint: its model is that of another fold, say."""
    return bool(manifest["training"].get("loop", {}).get("trainer", number) == number)


def is_there(path: str) -> bool:
    """True if the path is a checkpoint, or a folder with one."""
    folder = Path(path)
    return (folder / MANIFEST).is_file() or any(folder.glob(f"*/{MANIFEST}"))


def _source() -> str:
    """The script's source, stored for reference."""
    try:
        return script_path().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _tensors(model: nn.Module) -> list[str]:
    described = []
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            described.append(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {kind}")
    return described

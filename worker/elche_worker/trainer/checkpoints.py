"""The checkpoints of a user-owned loop: their place, when one is due, and the one from which it resumes."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from elche.errors import InvalidJob, Misuse
from elche.output import notice
from elche_worker.collectives.world import World
from elche_worker.device.rng import capture_rng_state
from elche_worker.model.checkpoint import extra_of
from elche_worker.model.savable import check_savable, check_state
from elche_worker.model.tensors import copied, flattened
from elche_worker.trainer.attachment import Attachment
from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.optimizers import Optimizers
from elche_worker.trainer.resumption import Resumption
from elche_worker.trainer.saving import Position, Restored, Saver, is_there, restore


@dataclass(frozen=True, slots=True)
class AtStep:
    """State at the end of a step that a checkpoint stores: later, the next batch may have been drawn already."""

    random: dict[str, Any]
    """Random numbers."""
    loaders: dict[str, Any]
    """State of registered loaders and samplers, by name."""


class LoopCheckpoints:
    """The checkpoints of one loop."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, config: TrainerConfig, world: World) -> None:
        self._model = model
        self._optimizers = optimizers
        self._world = world
        self._name = config.name or Path(sys.argv[0]).stem
        self._every_minutes = config.checkpoint_every_minutes
        self.place = config.checkpoint_dir or os.environ.get("ELCHE_CHECKPOINT_DIR", "")
        """Folder or URL of checkpoints; "" if not configured."""
        self.number = 1
        """This trainer's number among those of the script."""
        self.resumption = Resumption(world)
        self._loader: Mapping[str, Any] = {}
        """The loader's state in the checkpoint, until its epoch begins."""
        self._registered: dict[str, Any] = {}
        """Objects of the script whose state is in checkpoints."""
        self._states: dict[str, Any] = {}
        """State in the loaded checkpoint that no registered object has received yet."""
        self._received: set[str] = set()
        """Names of the registered objects that have received their state."""
        self._settings: list[dict[str, Any]] = []
        """The optimizers' settings in the loaded checkpoint."""
        self._rates = optimizers.rates
        """The learning rates with which the script has built its optimizers."""
        self._frozen: list[str] | None = None
        """Parameters that were frozen in the loaded checkpoint, until the first step."""
        self._has_hinted = self._has_said_turns = False
        self._sizes: dict[str, list[int]] = {}
        """The sizes that the script has given to the buffers that checkpoints have."""
        self._begins_anew = False
        """True in a resumed script if the checkpoint is of another of its trainers."""
        self._problem = ""
        """Why no training could go on from a checkpoint of this model and its optimizers; empty if one can."""
        self._saver: Saver | None = None
        self._saved_s = time.monotonic()

    def check(self) -> None:
        """Raises `Misuse` if checkpoints are configured without a place. Says so if none could be resumed from."""
        if self.has_interval and not self.place:
            raise Misuse("checkpoint_every_minutes needs a place: give checkpoint_dir, or set ELCHE_CHECKPOINT_DIR")
        try:
            flattened(extra := extra_of(self._model), {}, where="the model's extra state")
            check_savable(self._model, self._optimizers, extra)
            check_state([*self._optimizers])
            self._sizes = _sizes_of_buffers(self._model)
        except (InvalidJob, ValueError) as error:
            self._problem = str(error)
            if self.place:
                self._notice(f"this loop makes no checkpoints: {error}")

    def check_beside(self, other: "LoopCheckpoints") -> None:
        """Called when this loop and another one train in turn. Says that a script cannot go on with both from one
        checkpoint; raises `Misuse` in one that has gone on with one of them.
        """
        numbers = " and ".join(map(str, sorted((self.number, other.number))))
        way = (
            "give one Trainer.setup both models, such as nn.ModuleDict({'g': g, 'd': d}), and their optimizers as a "
            "dict: step(optimizer='g') steps one of them"
        )
        if self._begins_anew != other._begins_anew:
            raise Misuse(
                f"trainers {numbers} of this script train in turn, and only one of them goes on from the checkpoint: "
                f"{way}. To go on with what each has saved last, set ELCHE_RESUME to the folder of all checkpoints"
            )
        if self.place and self.place == other.place and not (self._has_said_turns or other._has_said_turns):
            self._has_said_turns = True
            self._notice(
                f"trainers {numbers} of this script train in turn, and a checkpoint is of one of them, so that "
                f"`elche resume` cannot go on with both: {way}"
            )

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def has_interval(self) -> bool:
        """True if checkpoints are made at intervals."""
        return self._every_minutes is not None

    def take_due(self) -> bool:
        """True once per interval, on rank 0 only."""
        if self._every_minutes is None or self._world.rank:
            return False
        is_due = time.monotonic() - self._saved_s >= self._every_minutes * 60
        if is_due:
            self._saved_s = time.monotonic()
        return is_due

    def register(self, objects: Mapping[str, Any]) -> None:
        """See `Trainer.register_state`."""
        for name, one in objects.items():
            if name in self._registered:
                raise Misuse(f"register_state: there is a state {name!r} already: give it another name")
            if not all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
                raise Misuse(f"register_state: {name!r} is a {type(one).__name__}, without state_dict, load_state_dict")
            try:
                flattened(copied(one.state_dict()), {})
            except ValueError as error:
                raise Misuse(f"register_state: {name!r}: {error}") from None
            self._registered[name] = one
            if name in self._states:
                self._give_state(name)
            elif self.resumption.position is not None:
                self._notice(f"the checkpoint has no state of {name!r}, which starts fresh")

    def check_states(self) -> None:
        """Raises `Misuse` if the loop trains on without having registered an object whose state is in its
        checkpoint. Says at the first step if it trains other parameters than the checkpoint's.
        """
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            changed = sorted(set(frozen) ^ set(_frozen_in(self._model)))
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                was, is_now = ("frozen", "trained") if changed[0] in frozen else ("trained", "frozen")
                self._notice(
                    f"{changed[0]}{more}: {was} when the checkpoint was made, {is_now} now. If the script freezes or "
                    "unfreezes parameters in a certain epoch, let it do so when it is resumed after that, too"
                )
        for name in self._states:
            raise Misuse(
                f"the checkpoint has the state of {name!r}, and the script has registered nothing of that name: call "
                f"trainer.register_state({name}=...) before the first step"
            )

    def _give_state(self, name: str) -> None:
        self._received.add(name)
        self._registered[name].load_state_dict(self._states.pop(name))
        self._optimizers.set_settings(self._settings)  # a schedule sets the first learning rate as it is made

    @property
    def _loaders(self) -> list[str]:
        """Names of registered loaders and samplers."""
        return [name for name, one in self._registered.items() if hasattr(one, "__iter__")]

    @property
    def has_loader(self) -> bool:
        """True if a registered loader goes on from its state in the loaded checkpoint."""
        return any(name in self._received for name in self._loaders)

    def at_step(self) -> AtStep:
        """The state at the end of this step, for a checkpoint."""
        loaders = {name: self._registered[name].state_dict() for name in self._loaders}
        return AtStep(capture_rng_state(), copied(loaders))

    def _notice(self, text: str) -> None:
        if not self._world.rank:
            notice(text)

    def refuse(self, num_steps: int, attachment: Attachment, reason: str) -> None:
        """Reports why no checkpoint is made."""
        if not self._world.rank:
            self._notice(f"no checkpoint of step {num_steps}: {reason}")
            attachment.report_not_saved(num_steps, reason)

    def save(
        self,
        position: Position,
        plan: dict[str, Any],
        attachment: Attachment,
        place: str = "",
        at_step: AtStep | None = None,
    ) -> None:
        """Starts writing, on rank 0, with the state `at_step`, or the present one. Raises `Misuse` without a place."""
        place = place or self.place
        if not place:
            raise Misuse("save() needs a place: give TrainerConfig(checkpoint_dir=...) or set ELCHE_CHECKPOINT_DIR")
        self._saved_s = time.monotonic()
        if self._problem:
            self.refuse(position.num_steps, attachment, self._problem)
            return
        if self._world.rank:
            return
        if not self._registered and not self._has_hinted and self._optimizers.have_schedule:
            self._has_hinted = True
            self._notice(
                "a learning rate schedule steps an optimizer of this loop, and checkpoints are without its state: "
                "trainer.register_state(schedule=...) has it in them"
            )
        self._note_other_sizes()
        if self._saver is None or self._saver.place != place:
            self._saver = Saver(place, self._name, self.number)
        at_step = at_step or self.at_step()
        self._saver.save(
            self._model,
            self._optimizers,
            position,
            plan,
            {
                "random": at_step.random,
                # Loaders as of the step's end: by now they may have given out the next batch.
                "registered": {name: one.state_dict() for name, one in self._registered.items()} | at_step.loaders,
                "begun": self.resumption.begun,
                "frozen": _frozen_in(self._model),
                "rates": self._rates,
            },
            self._world.size,
            attachment,
        )

    def _note_other_sizes(self) -> None:
        """Says once which buffer has changed its size: the script makes it of the former one when it is resumed."""
        now = _sizes_of_buffers(self._model)
        name = next((one for one, size in self._sizes.items() if now.get(one, size) != size), None)
        if name is None:
            return
        self._notice(
            f"the model's buffer {name} was {self._sizes[name]} when training began and is {now[name]} now, so that "
            "this script cannot go on from its checkpoints: give it its full size before Trainer.setup, or "
            "register_buffer(..., persistent=False), with which no checkpoint has it"
        )
        self._sizes = now

    def load(self, path: str, *, only_own: bool) -> tuple[Position, dict[str, Any]] | None:
        """Restores model and optimizer; returns the checkpoint's position and plan, or None for an empty folder.

        `only_own`: None also where there are only checkpoints of other trainers of the script, such as another fold's.
        """
        wanted = "://" in path or not Path(path).is_dir() or is_there(path)
        if not any(found for (found,) in self._world.gather_numbers([float(wanted)])):
            return None
        problem, restored = "", None
        try:
            restored = restore(path, self._model, self._optimizers, self.number if only_own else None)
        except (Misuse, OSError) as error:
            problem = str(error)
        self._world.agree(problem)
        self._check_same(path, restored)
        if not isinstance(restored, Restored):
            self._notice(f"{path} has no checkpoint of this script's trainer {self.number}, which begins at the start")
            self._begins_anew = True
            return None
        self.resumption.load(restored)
        self._loader = restored.plan.get("data", {})
        self._states, self._settings = dict(restored.registered), self._optimizers.settings()
        self._frozen = restored.frozen
        self._note_other_settings(restored)
        for name in self._registered:
            if name in self._states:
                self._give_state(name)
            else:
                self._notice(f"the checkpoint has no state of {name!r}, which starts fresh")
        return restored.position, restored.plan

    def _check_same(self, path: str, restored: Restored | None) -> None:
        """Raises `Misuse` on every rank if one has found another checkpoint, as where its host's newest is damaged."""
        step = -1 if restored is None else restored.position.num_steps
        steps = [int(step) for (step,) in self._world.gather_numbers([float(step)])]
        other = next((rank for rank, one in enumerate(steps) if one != steps[0]), None)
        if other is not None:
            named = ["none" if steps[rank] < 0 else f"one of step {steps[rank]}" for rank in (0, other)]
            raise Misuse(
                f"the ranks find different checkpoints at {path}: rank 0 {named[0]}, rank {other} {named[1]}; name one "
                "that all have"
            )

    def _note_other_settings(self, restored: Restored) -> None:
        """Says which optimizer options of the script have no effect: the checkpoint's count, as with PyTorch."""
        others = [restored.others] if restored.others else []
        if restored.rates not in (None, self._rates):
            others.append(f"the rates of a loop that began with lr={_listed(restored.rates)}")
            others[-1] += f" (the script has {_listed(self._rates)}; trainer.set_lr() sets another)"
        if others:
            self._notice(f"the optimizer goes on as in the checkpoint, with {', '.join(others)}")

    def take_loader(self) -> Mapping[str, Any]:
        """The loader's state in the checkpoint. Returned once."""
        loader, self._loader = self._loader, {}
        return loader

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        if self._saver is not None:
            self._saver.close()


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _sizes_of_buffers(model: nn.Module) -> dict[str, list[int]]:
    """The sizes of the buffers of a `state_dict`, by name."""
    kept = model.state_dict().keys()
    return {name: [*one.shape] for name, one in model.named_buffers() if name in kept}


def _frozen_in(model: nn.Module) -> list[str]:
    """Names of the parameters that are not trained."""
    return [name for name, one in model.named_parameters() if not one.requires_grad]

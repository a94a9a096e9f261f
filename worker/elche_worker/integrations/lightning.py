"""PyTorch Lightning on several devices: a callback averages gradients, while Lightning sees a single device."""

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elche.errors import Misuse
from elche.output import notice
from elche_worker.integrations.reporting import Reporting, leave_resume_to_framework, of_rank_0
from elche_worker.trainer import Trainer, TrainerConfig

if TYPE_CHECKING or "pytorch_lightning" in sys.modules or find_spec("lightning") is None:
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl  # the same, in another package
if TYPE_CHECKING or pl.__name__ == "pytorch_lightning":
    from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
    from pytorch_lightning.utilities import rank_zero_only
else:
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
    from lightning.pytorch.utilities import rank_zero_only

WRITTEN = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
"""Attributes in which a `ModelCheckpoint` keeps the checkpoints that it has written."""


class ElcheCallback(pl.Callback):
    """Averages gradients over the processes of torchrun or `elche run` before each step; Lightning clips afterwards.

    Each process must have equally many batches of equally many samples, as a `DistributedSampler` gives them. Reports
    each batch's loss, and after each validation the module's metrics, to a coordinator.
    Lightning's trainer needs `devices=1` (or `[local_rank]`), `plugins=[LightningEnvironment()]`. Only rank 0 writes
    checkpoints and logs; after `fit` all ranks know its `best_model_path`. `on_rank_loss` is that of `TrainerConfig`.
    """

    def __init__(self, *, on_rank_loss: str = "continue") -> None:
        self._on_rank_loss = on_rank_loss
        self._elche: Trainer | None = None
        self._reporting: Reporting | None = None
        self._is_averaged = False
        self._on_step: list[RemovableHandle] = []
        """The optimizers' hooks that finish their steps."""
        self._is_asked = False
        """True if a checkpoint was asked for in this step, at the coordinator."""
        self._rank = int(os.environ.get("RANK", "0"))

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Tells Lightning which process this is, so that one alone writes: it sees a single device."""
        if trainer.world_size == 1:
            _take_rank(trainer, self._rank)
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])  # an attribute that it has without a type
        finders = [one for one in callbacks if isinstance(one, BatchSizeFinder | LearningRateFinder)]
        if finders and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            what = type(finders[0]).__name__
            raise Misuse(f"{what} would find another value in each process: use it in one, and set what it has found")

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Joins the processes; their models start as rank 0's."""
        if trainer.world_size != 1:
            raise Misuse("Lightning must see one device: give Trainer devices=1 and plugins=[LightningEnvironment()]")
        if trainer.precision == "16-mixed":  # unscaled before this callback: ranks may differ in overflow
            raise Misuse('ElcheCallback cannot average with precision="16-mixed": use "bf16-mixed"')
        way = "trainer.fit(..., ckpt_path=...) and a checkpoint of Lightning's"
        leave_resume_to_framework(trainer.global_step, way)
        # One step for each batch, as Lightning counts them: no El Che.
        config = TrainerConfig(max_anchor=0, device=str(pl_module.device), on_rank_loss=self._on_rank_loss)
        self._elche = Trainer.setup(pl_module, trainer.optimizers, config)
        self._elche._iterations.on_asked = self._ask
        self._on_step = [one.register_step_post_hook(self._finish) for one in trainer.optimizers]
        self._reporting = Reporting(self._elche, max(0, trainer.max_epochs or 0))

    def _ask(self) -> None:
        self._is_asked = True

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reports the previous epoch."""
        assert self._reporting is not None
        self._reporting.begin_epoch(trainer.current_epoch)

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """Averages gradients, before clipping."""
        assert self._elche is not None
        key = next(key for key, one in self._elche._optimizers.by_key.items() if one is optimizer)
        self._elche.average_gradients(optimizer=key)
        self._is_averaged = True

    def _finish(self, *_: Any) -> None:
        """Called when the optimizer has been stepped; several times in a batch, in a manual optimization."""
        assert self._elche is not None
        if self._is_averaged:
            self._is_averaged = False
            self._elche.finish_step()

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports the loss, and saves a checkpoint if one is asked for."""
        if self._reporting is not None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._reporting.record({"loss": loss})
        if self._elche is not None:
            self._rank = self._elche.rank  # changes when a lower one has died
            _take_rank(trainer, self._rank)
            if self._is_asked:
                self._is_asked = False
                self._save(trainer, self._elche._checkpoints.place)

    def _save(self, trainer: "pl.Trainer", place: str) -> None:
        """Saves a checkpoint of Lightning besides that of elche, which lacks Lightning's position."""
        path = f"{place}/lightning-step-{trainer.global_step:08d}.ckpt"
        trainer.save_checkpoint(path)
        if self._rank == 0:
            notice(f"Lightning's own checkpoint is {path}: trainer.fit(..., ckpt_path=...) goes on from it")

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reports the metrics that the module has logged."""
        if self._reporting is not None:  # else it is Lightning's sanity check before training
            self._reporting.evaluated(trainer.callback_metrics)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reports the last epoch."""
        if self._reporting is not None:
            self._reporting.end()

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Takes over from rank 0 which checkpoints it has written, and leaves the process group."""
        if self._elche is None:
            return
        kept = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        told = of_rank_0(self._elche, [{name: getattr(one, name) for name in WRITTEN} for one in kept])
        for one, written in zip(kept, told, strict=False):
            for name, value in written.items():
                setattr(one, name, value)
        self._close(None)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Reports the error to the other processes and the coordinator."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        elche, self._elche, self._reporting, self._is_averaged = self._elche, None, None, False
        while self._on_step:
            self._on_step.pop().remove()
        if elche is not None:
            elche.close(error)


def _take_rank(trainer: "pl.Trainer", rank: int) -> None:
    """Makes Lightning's `global_rank` and `is_global_zero` those of this process."""
    if trainer.global_rank == rank and trainer.is_global_zero == (rank == 0):
        return
    strategy: Any = trainer.strategy
    kind = type(strategy)
    if not hasattr(kind, "is_one_of_several"):  # Lightning's own says that it is always the first
        is_first = property(lambda self: self.global_rank == 0)
        strategy.__class__ = type(kind.__name__, (kind,), {"is_global_zero": is_first, "is_one_of_several": True})
    strategy.global_rank = rank
    setattr(rank_zero_only, "rank", rank)  # noqa: B010  # an attribute that it has without a type

"""PyTorch Lightning on several devices: a callback averages gradients, while Lightning sees a single device."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from elche.errors import Misuse
from elche_worker.integrations.reporting import Reporting, check_begins_anew
from elche_worker.trainer import Trainer, TrainerConfig

if TYPE_CHECKING or "pytorch_lightning" in sys.modules or find_spec("lightning") is None:
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl  # the same, in another package


class ElcheCallback(pl.Callback):
    """Averages gradients over the processes of torchrun or `elche run` before each step; Lightning clips afterwards.

    Each process must have equally many batches of equally many samples, as a `DistributedSampler` gives them, and the
    model one optimizer. Reports each batch's loss, and after each validation the module's metrics, to a coordinator.
    Lightning's trainer needs `devices=1` (or `[local_rank]`), `plugins=[LightningEnvironment()]`.
    """

    def __init__(self) -> None:
        self._elche: Trainer | None = None
        self._reporting: Reporting | None = None
        self._is_averaged = False

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Joins the processes; their models start as rank 0's."""
        if trainer.world_size != 1:
            raise Misuse("Lightning must see one device: give Trainer devices=1 and plugins=[LightningEnvironment()]")
        if trainer.precision == "16-mixed":  # unscaled before this callback: ranks may differ in overflow
            raise Misuse('ElcheCallback cannot average with precision="16-mixed": use "bf16-mixed"')
        if len(trainer.optimizers) != 1:
            raise Misuse(f"ElcheCallback needs a model with one optimizer, and this one has {len(trainer.optimizers)}")
        check_begins_anew("trainer.fit(..., ckpt_path=...) and a checkpoint of Lightning's")
        # One step for each batch, as Lightning counts them: no El Che.
        config = TrainerConfig(max_anchor=0, device=str(pl_module.device))
        self._elche = Trainer.setup(pl_module, trainer.optimizers[0], config)
        self._reporting = Reporting(self._elche, max(0, trainer.max_epochs or 0))

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reports the previous epoch."""
        assert self._reporting is not None
        self._reporting.begin_epoch(trainer.current_epoch)

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """Averages gradients, before clipping."""
        assert self._elche is not None
        self._elche.average_gradients()
        self._is_averaged = True

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports the loss, and finishes the step, unless gradients are accumulated over more batches."""
        if self._reporting is not None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._reporting.record({"loss": loss})
        if self._elche is not None and self._is_averaged:
            self._is_averaged = False
            self._elche.finish_step()

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reports the metrics that the module has logged."""
        if self._reporting is not None:  # else it is Lightning's sanity check before training
            self._reporting.evaluated(trainer.callback_metrics)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Leaves the process group."""
        if self._reporting is not None:
            self._reporting.end()
        self._close(None)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Reports the error to the other processes and the coordinator."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        if self._elche is not None:
            self._elche.close(error)

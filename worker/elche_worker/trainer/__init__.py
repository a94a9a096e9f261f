"""User-owned training loops: one process per device, and `step()` instead of `optimizer.step()`.

`trainer` is the interface. An epoch: `data` splits the user's loader, `plans` says which samples each rank trains in
each step, `epochs` gives out the batches, `forward` passes them to the model. A step: `stepping` (with `share` and
`averager`) averages gradients; a rank that dies in it is left out by `together`. Before training, `checks`, `samples`
and `same_batches` refuse what would train wrongly; during it, `noted`, `other_optimizers` and `comparison` notice it.
Checkpoints: `checkpoints` (where and when, after whole `iterations`), `saving`, `resumption`. At a coordinator:
`attached`, which passes on operators' `requests`. Outputs of all ranks: `capture`, `gathering`, `scattering`. `ddp` is
an interface of its own, for loops with several models.
"""

from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.data import Batch
from elche_worker.trainer.forward import LossContext
from elche_worker.trainer.gathering import Gathered
from elche_worker.trainer.trainer import Trainer

__all__ = ["Batch", "Gathered", "LossContext", "Trainer", "TrainerConfig"]

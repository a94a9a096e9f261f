"""Hugging Face's `Trainer` on several devices: a callback averages gradients, while `Trainer` sees a single device."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from elche.errors import Misuse
from elche_worker.collectives.consistency import begin_as_rank_0
from elche_worker.integrations.reporting import Reporting, leave_resume_to_framework, of_rank_0
from elche_worker.trainer import Trainer, TrainerConfig

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
"""Environment variables by which Hugging Face would detect the other processes and average by itself."""


class ElcheCallback(TrainerCallback):
    """Averages gradients over the processes of torchrun or `elche run` before each step, and clips the average.

    Make it before `TrainingArguments`, and train each process's `part` of the data. Only rank 0 logs and saves, as
    `Trainer.is_world_process_zero()` says, too. With `load_best_model_at_end` all ranks end with rank 0's model.
    Reports its logs, every `logging_steps` and at least once per epoch, and evaluations' metrics to a coordinator.
    `on_rank_loss` is that of `TrainerConfig`.
    """

    def __init__(self, *, on_rank_loss: str = "continue") -> None:
        self._on_rank_loss = on_rank_loss
        self._places = {name: os.environ.pop(name) for name in PLACES if name in os.environ}
        self.rank = int(self._places.get("RANK", "0"))
        self.world_size = int(self._places.get("WORLD_SIZE", "1"))
        self._local_rank = int(self._places.get("LOCAL_RANK", "0"))
        if self._places:
            self._see_own_gpu(self._local_rank)
        self._elche: Trainer | None = None
        self._reporting: Reporting | None = None
        self._has_loss = False
        """True if Hugging Face has logged a loss in this epoch."""
        self._is_asked = False
        """True if a checkpoint was asked for in this step, at the coordinator."""
        self._max_norm = 0.0
        self._norm: torch.Tensor | None = None
        """Norm of the latest averaged gradients, before they were clipped."""
        self._clipped: TrainingArguments | None = None
        """The arguments whose `max_grad_norm` this callback has taken, while gradients of a step are computed."""

    def _see_own_gpu(self, index: int) -> None:
        """Hides other GPUs, all of which Hugging Face would otherwise use."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(index)] if visible is None else visible.split(",")[index : index + 1]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)

    def part(self, dataset: "Dataset[Any]") -> "Dataset[Any]":
        """This process's samples: every `world_size`-th, so that all have equally many batches."""
        count: int = len(dataset)  # type: ignore[arg-type]
        return Subset(dataset, range(self.rank, count - count % self.world_size, self.world_size))

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Tells Hugging Face which process this is, so that one alone writes: it sees a single process."""
        self._take_rank(args, state)

    def _take_rank(self, args: TrainingArguments, state: TrainerState) -> None:
        """Makes the `process_index` of arguments and state those of this process."""
        if args.world_size == 1 and args.distributed_state is not None:
            # Not of Accelerate's own state, which all its objects share: its loader of an iterable data set would wait
            # for the first process to send batches.
            shared, own = args.distributed_state, object.__new__(type(args.distributed_state))
            own.__dict__ = {**vars(shared), "process_index": self.rank, "local_process_index": self._local_rank}
            args.distributed_state = own
            state.is_world_process_zero = args.process_index == 0
            state.is_local_process_zero = args.local_process_index == 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Joins the processes; their models start as rank 0's."""
        if args.world_size != 1 or args.n_gpu > 1:
            raise Misuse("make ElcheCallback before TrainingArguments, which otherwise distribute the training")
        if args.fp16:  # gradients are unscaled before a callback sees them, overflow and all
            raise Misuse("ElcheCallback cannot average with fp16: use bf16")
        way = "trainer.train(resume_from_checkpoint=...) and a checkpoint of Hugging Face's"
        leave_resume_to_framework(state.global_step, way)
        model: nn.Module = named["model"]
        optimizer: Optimizer = named["optimizer"]
        self._leave()  # a training that was interrupted, in a notebook
        self._take_rank(args, state)  # other arguments have reset it
        os.environ.update(self._places)
        # One step for each batch, as Hugging Face counts them: no El Che.
        # The only GPU that this process sees, whatever its LOCAL_RANK.
        device = "cuda:0" if args.device.type == "cuda" else str(args.device)
        config = TrainerConfig(max_anchor=0, device=device, on_rank_loss=self._on_rank_loss)
        self._elche = Trainer.setup(model, getattr(optimizer, "optimizer", optimizer), config)
        self._elche._iterations.on_asked = self._ask
        for name in self._places:
            del os.environ[name]
        self._reporting = Reporting(self._elche, math.ceil(state.num_train_epochs))

    def _ask(self) -> None:
        self._is_asked = True

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Reports the previous epoch."""
        assert self._reporting is not None
        self._reporting.begin_epoch(math.floor((state.epoch or 0) + 1e-6))  # resumed, it is within its epoch
        self._has_loss = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Reports what is logged while training. `grad_norm` becomes that of the averaged gradients."""
        if self._norm is not None and logs and "grad_norm" in logs:
            for logged in (logs, state.log_history[-1]):
                logged["grad_norm"] = self._norm.item()
        if self._reporting is not None and logs:
            self._has_loss |= "loss" in logs
            self._reporting.record({name: one for name, one in logs.items() if _is_of_training(name)})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Reports the metrics of an evaluation while training."""
        if self._reporting is not None and metrics:
            self._reporting.evaluated({name: one for name, one in metrics.items() if _is_of_model(name)})

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Turns off Hugging Face's clipping, which would come before the average: `on_pre_optimizer_step` clips. Only
        for as long, since `args` are saved with checkpoints.
        """
        self._give_back()
        self._clipped = args
        self._max_norm, args.max_grad_norm = args.max_grad_norm or 0.0, 0.0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Averages gradients, then clips them."""
        assert self._elche is not None
        self._give_back()
        self._elche.average_gradients()
        # Without a limit it clips nothing, and returns the norm all the same.
        self._norm = nn.utils.clip_grad_norm_(self._elche.model.parameters(), self._max_norm or math.inf)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Clears gradients. A checkpoint that was requested at the coordinator is made by Hugging Face, since elche's
        own lacks the position in the data. Only rank 0 logs and saves.
        """
        assert self._elche is not None
        self._elche.finish_step()
        is_asked, self._is_asked = self._is_asked, False
        control.should_save |= is_asked
        if self._elche.rank != self.rank:  # a lower one has died
            self.rank = self._elche.rank
            self._take_rank(args, state)
        self._be_quiet(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Only rank 0 logs and saves. With a coordinator, each epoch is logged at least once."""
        if self._reporting is not None and self._reporting.is_attached and not self._has_loss:
            control.should_log = True
        self._be_quiet(control)

    def _be_quiet(self, control: TrainerControl) -> None:
        if self.rank:
            control.should_save = control.should_log = False

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        """Takes over the best model from rank 0, and leaves the process group."""
        if self._elche is not None and self._reporting is not None:
            self._reporting.end()
            if args.load_best_model_at_end:
                self._take_best(self._elche, state)
        self._leave()

    def _take_best(self, elche: Trainer, state: TrainerState) -> None:
        """Gives all ranks the best model: only rank 0 has saved checkpoints, and has loaded the best of them."""
        state.best_model_checkpoint = of_rank_0(elche, state.best_model_checkpoint)
        elche._together.run(lambda: begin_as_rank_0(elche.model, elche._world), "takes the best model", give=None)

    def _give_back(self) -> None:
        """Restores `max_grad_norm`."""
        if self._clipped is not None:
            self._clipped.max_grad_norm, self._clipped = self._max_norm, None

    def _leave(self) -> None:
        """Ends elche's part of a training."""
        elche, self._elche, self._reporting = self._elche, None, None
        self._give_back()
        if elche is not None:
            elche.close()


def _is_of_model(name: str) -> bool:
    """True if a metric measures the model: no time, no speed, and not the epoch."""
    return name != "epoch" and not name.endswith(("_runtime", "_per_second"))


def _is_of_training(name: str) -> bool:
    """True if a logged number measures trained batches; evaluations and the learning rate are reported otherwise."""
    is_other = name.startswith(("eval_", "train_")) or name in ("learning_rate", "total_flos")
    return _is_of_model(name) and not is_other

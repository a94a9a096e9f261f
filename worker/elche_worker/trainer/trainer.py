"""User-owned loops on one device or many: one process per device, and `step()` instead of `optimizer.step()`.

Each rank computes gradients of its own samples; `step()` averages them, weighted by samples, so that the optimizer gets
the gradient of all samples together. With a loader attached, elche also decides which samples each rank gets: a share
of every batch by speed, or, on unequal devices, whole batches by El Che's cadence.

`Trainer` is the facade over the parts of a loop: `Forward` (outputs and losses), `Stepper` (averaging and steps),
`Data` (which samples), `ProgressTracker` (where the loop is), `LoopCheckpoints` and the coordinator's `Attachment`.
"""

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from elche.errors import Misuse, PeerLost
from elche.output import add_flush, notice
from elche_worker.collectives.consistency import begin_as_rank_0, check_alike
from elche_worker.collectives.world import World
from elche_worker.device.transfer import to_device
from elche_worker.model.savable import take_form
from elche_worker.session.script import is_run, settle, when_known
from elche_worker.session.submitted import is_submitted, take_launch
from elche_worker.trainer.attached import attach, attach_submitted, checked_metrics, coordinator_address
from elche_worker.trainer.checkpoints import AtStep, LoopCheckpoints
from elche_worker.trainer.checks import (
    check_is_main,
    check_same_config,
    check_shares,
    module_of,
    problem_of,
    problem_of_synced,
)
from elche_worker.trainer.clock import StepClock
from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.data import Batch, Data, check_loader, wire
from elche_worker.trainer.epochs import EpochBatches, LoopEpochs
from elche_worker.trainer.fleet import RankDevices
from elche_worker.trainer.forward import Forward, LossContext
from elche_worker.trainer.gathering import Gathered, weighted_mean
from elche_worker.trainer.iterations import Iterations
from elche_worker.trainer.optimizers import Given, Key, Optimizers
from elche_worker.trainer.progress import ProgressTracker
from elche_worker.trainer.requests import failure_of
from elche_worker.trainer.scattering import scattered
from elche_worker.trainer.stepping import LEAST_SHARE, Stepper
from elche_worker.trainer.together import Together
from elche_worker.user.loading import LOOP_IN_JOB, check_not_loading

BEGAN_APART = (
    "the ranks' models had different initial values; now all have rank 0's. If the script has another network (a "
    "target, a teacher) that it draws without a seed, or has copied from the model before Trainer.setup, that one "
    "still differs between ranks: call torch.manual_seed() at the script's beginning, or copy trainer.model after "
    "Trainer.setup"
)

_open: "list[Trainer]" = []
"""The trainers of this process that are not closed."""
_latest: "list[Trainer]" = []
"""The one that has made the latest step; empty before the first."""
_numbers = count(1)
"""Numbers of the script's trainers, equal on all ranks: a checkpoint is of one of them."""


class Trainer:
    """A model and its optimizer, or several, in a user-owned loop. `Trainer.setup` makes one."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, config: TrainerConfig, world: World) -> None:
        """Use `setup`."""
        self._model = model
        self._optimizers = optimizers
        self._config = config
        self._world = world
        self._fleet = RankDevices(world)
        self._progress = ProgressTracker()
        self._forward = Forward(model, self._progress.add_loss)
        self._together = Together(world)
        # A function: the stepper is made below, and the position changes with every step.
        self._together.where = lambda: self._progress.where(self._stepper.num_given)
        parts = self._forward, self._progress, self._together
        self._stepper = Stepper(model, optimizers, config, world, *parts, is_mixed=self._fleet.is_mixed)
        self._checkpoints = LoopCheckpoints(model, optimizers, config, world)
        self._iterations = Iterations(
            model,
            optimizers,
            world,
            self._progress,
            self._checkpoints,
            self._together,
            self._save,
            self.close,
            self._stepper.comparison.compare,
        )
        self._data: Data | None = None
        self._epochs = LoopEpochs(self._progress, self._checkpoints, self._stepper, self._iterations, self._check_open)
        self._is_closed = False
        self._has_stepped = False
        self._pid = os.getpid()
        """The process of the loop. One that the script forks inherits the trainer, and must not end or use it: neither
        connections nor threads outlive a fork.
        """

    @classmethod
    def setup(
        cls,
        model: nn.Module,
        optimizer: Given,
        config: TrainerConfig | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Self:
        """Moves the model to this process's device; with several processes, copies rank 0's model to all. A model in
        eval mode is put into train mode; single modules in eval mode stay so. Gradients are cleared. Under torchrun or
        `elche run` the processes find each other; a single process trains as without elche.

        With a list or dict of optimizers, as a GAN has, `step(optimizer=...)` steps one of them, `step()` all.

        Ranks divide each batch of `epoch` by their speed, so that the loop learns as on one device. El Che, several
        batches per step, is on only if the config asks for it (`TrainerConfig`). Prints a line on stderr with the
        devices found.

        With a coordinator (`TrainerConfig.coordinator`, or ELCHE_COORDINATOR) the loop appears there as a job. With
        ELCHE_RESUME it goes on from that checkpoint: `epoch` then gives what is left.

        Raises `Misuse` on every rank when models differ between ranks, or a rank cannot take part.
        """
        check_not_loading(LOOP_IN_JOB)
        check_is_main()
        add_flush()
        settle(is_caught=True)
        for former in [one for one in _open if one._shares_parameters_with(model)]:
            former.close()  # the script goes on with the model; both would send each gradient
        chosen = config or TrainerConfig()
        world = World.join(process_group, chosen.device)
        with world.calling("calls Trainer.setup()"):
            # A problem of one rank is raised on all: alone it would leave the others waiting in the next collective.
            world.agree(problem_of(model, optimizer))
            take_form(model)
            # Of a search for the learning rate, say: without elche the loop's `zero_grad()` may come before `backward`.
            for parameter in model.parameters():
                parameter.grad = None
            model.to(world.device)
            optimizers = Optimizers(optimizer)
            optimizers.follow_parameters()
            check_alike(model, world)
            check_same_config(chosen, world)
            began_apart = begin_as_rank_0(model, world)
            trainer = cls(model, optimizers, chosen, world)
            if world.size > 1:
                # Not by itself where devices differ, as in the reference: with the learning rate of one device a loop
                # learns much less in steps of several batches than from as many samples in steps of one.
                has_el_che = chosen.has_el_che and config is not None
                world.agree(problem_of_synced(model, world.device.type, has_el_che=has_el_che))
                trainer._stepper.begin(has_el_che=has_el_che)
            # Not in any case: `train()` would also switch modules that are to stay in eval mode, such as a frozen
            # teacher.
            if not model.training:
                model.train()
            if world.rank == 0:
                notice(trainer._fleet.summary)
                if began_apart:
                    notice(BEGAN_APART)
            trainer._checkpoints.number = next(_numbers)
            resumed = os.environ.get("ELCHE_RESUME", "")
            if resumed:
                trainer._load(resumed, only_own=True)
            trainer._attach_coordinator(resumed)
        atexit.register(trainer._close_at_exit)
        _open.append(trainer)
        return trainer

    @classmethod
    def setup_head(
        cls,
        head: Any,
        optimizer: Given,
        config: TrainerConfig | None = None,
        *,
        module: str = "",
        process_group: dist.ProcessGroup | None = None,
    ) -> Self:
        """`setup` for an object that holds the module besides what else it needs, such as a tokenizer or a loss.

        `module` names the attribute; without it the object must hold exactly one module. The object stays as it is:
        use its own methods in your loop, then `step()`.
        """
        return cls.setup(module_of(head, module), optimizer, config, process_group=process_group)

    def _attach_coordinator(self, resumed: str) -> None:
        address = "" if is_submitted() else coordinator_address(self._config, self._world)
        self._checkpoints.check()
        launch = take_launch()
        policy = "El Che, over batches of epoch()" if self.has_el_che else "a step after every batch"
        if launch is not None:
            attachment = attach_submitted(launch, self._config, self._world, policy=policy)
        elif address:
            where = {"policy": policy, "checkpoint_dir": self._checkpoints.place, "resumed": resumed}
            attachment = attach(address, self._config, self._world, **where)
        else:
            if is_submitted() and self._world.rank == 0:
                notice("the job shows this script's first Trainer; this one is not shown")
            return
        self._progress.attachment = self._together.attachment = attachment
        self._together.on_regrouped, self._together.untrained = self._rejoin, self._stepper.untrained
        self._stepper.clock = StepClock(self._world.device, keeps_intervals=self._config.timeline)

    def _rejoin(self) -> None:
        """Called when a rank has died and the others have a new group."""
        self._fleet.keep(self._world.members)
        self._stepper.averager.rejoin()

    # What it is

    @property
    def model(self) -> nn.Module:
        """The model that was given, on its device."""
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was given; the first of several."""
        return self._optimizers.first

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self._world.device

    @property
    def rank(self) -> int:
        """This process's rank, from 0 without gaps: it changes when a lower one dies."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of processes, each with a device; fewer when some have died."""
        return self._world.size

    @property
    def is_distributed(self) -> bool:
        """True if there is more than one process."""
        return self._world.size > 1

    @property
    def has_el_che(self) -> bool:
        """True if ranks train several batches per step, in proportion to their speed."""
        return self._stepper.el_che is not None

    @property
    def is_mixed(self) -> bool:
        """True if devices are of different models."""
        return self._fleet.is_mixed

    @property
    def devices(self) -> list[str]:
        """Each rank's device; [] on one process."""
        return self._fleet.names if self.is_distributed else []

    @property
    def chunk_ratios(self) -> list[float]:
        """Each rank's share of a batch, sum 1; [] on one process."""
        return self._stepper.ratios if self.is_distributed else []

    @property
    def throughput(self) -> list[float]:
        """Each rank's samples per ms, smoothed, 0 where not measured; [] on one process."""
        return self._stepper.planner.throughput if self.is_distributed else []

    @property
    def shard_sizes(self) -> list[int]:
        """Samples of each rank in the latest batches; [] on one process and before the first."""
        return list(self._stepper.last_sizes)

    @property
    def batch_counts(self) -> list[int]:
        """Batches of each rank per step, under El Che; else []."""
        return self._stepper.el_che.batch_counts if self._stepper.el_che is not None else []

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameters."""
        for group in (group for one in self._optimizers for group in one.param_groups):
            group["lr"] = lr

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The model's output; arguments are moved to the device."""
        self._begin_forward()
        arguments, named = to_device(arguments, self.device), to_device(named, self.device)
        return self._model(*arguments, **named)

    def forward_scattered(self, *inputs: Any, **named: Any) -> Any:
        """The model's output of a whole batch, of which each rank computes its share by `chunk_ratios`.

        Every rank calls it, with the same batch: tensors with a row for each sample. Every rank gets the outputs of the
        whole batch, a tensor, in the batch's order. If the loss is a mean over samples, `backward` and `step()` then
        make the step of the whole batch. `trainer(x)` computes all of `x` on this rank alone.
        """
        self._begin_forward()
        if not self.is_distributed:
            return self(*inputs, **named)
        if self._stepper.share.plan is not None and torch.is_grad_enabled():
            raise Misuse("batches of epoch() are this rank's part already: forward_batch(batch) is for them")
        output, self._stepper.last_sizes = self._together.run(
            lambda: scattered(self._world, self._model, inputs, named, self._stepper.ratios),
            "calls forward_scattered()",
            give=None,
        )
        return output

    def _begin_forward(self) -> None:
        self._check_open()
        if self._model.training:
            self._checkpoints.resumption.begin()

    # Data

    def set_data_loader(
        self,
        loader: "DataLoader[Any]",
        *,
        forward_input: str | None = None,
        names: Sequence[str] | None = None,
        inputs: Sequence[str] | None = None,
    ) -> None:
        """Splits the loader's batches among the ranks. Give the whole loader on every rank, as for one device.

        `forward_input` names the field of a batch that is the model's first argument in `forward_batch`; other fields
        that are named as arguments of its `forward` (or, for a forward that does not say, in `inputs`) go there too,
        the rest are targets. Leave it out if the loop calls the model itself. `names` names the fields of batches that
        are tuples. The order of samples is that of rank 0's sampler.

        Raises `Misuse` on every rank for what cannot be split, and for unknown names.
        """
        self._check_open()
        problem, wiring = check_loader(loader), None
        try:
            wiring = None if problem else wire(loader, self._model, forward_input, names, inputs)
        except Misuse as error:  # `Data.agreed` raises it, on every rank: others would wait for one that raised here
            problem = str(error)
        data = Data.agreed(loader, self._world, names, self._stepper.planner, self._together, problem)
        self._data, self._forward.wiring = data, wiring
        self._stepper.expect_given_batches()

    @property
    def data_num_batches(self) -> int:
        """Batches of an epoch, of all ranks together. Under El Che a step has several of them."""
        return self._require_data().num_batches

    @property
    def data_batch_size(self) -> int:
        """Samples per batch: shared by all ranks, or, under El Che, each rank's own."""
        return self._require_data().batch_size

    def epoch(self, epoch: int) -> EpochBatches:
        """This rank's batches of an epoch, one for each `step()`. Every rank gets equally many.

        After `load` it omits what the checkpoint has completed: earlier epochs, and the beginning of its own. Raises
        what the data set raises. It has a length, as for a progress bar, except under El Che.
        """
        resumed = self._checkpoints.resumption.position
        return EpochBatches(self._batches(epoch), lambda: self._epochs.count(self._require_data(), epoch, resumed))

    def _batches(self, epoch: int) -> Iterator[Batch]:
        self._check_open()
        yield from self._epochs.batches(self._require_data(), epoch)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs to train, up to `count`, without those that the loaded checkpoint has
        completed. Reports their number to the coordinator."""
        self._check_open()
        yield from self._epochs.numbers(count)

    def shares(self, batch_size: int, num_steps: int | None = None) -> Iterator[int]:
        """Yields, for each iteration of a loop that makes its batches itself, the number of this rank's samples among
        `batch_size`, at least 2, by the ranks' measured speed. `step()` then makes the step of all `batch_size`, if the
        loss is a mean over samples. Ends when the loop has made `num_steps`, including those before a resume.

        Every rank takes all of them. Raises `Misuse` for fewer than 2 samples per rank, or if there is a loader.
        """
        self._check_open()
        if self._data is not None:
            raise Misuse("shares() is for batches of your own, and set_data_loader has given a loader: use epoch()")
        self._together.run(lambda: check_shares(batch_size, num_steps, LEAST_SHARE, self._world), "calls shares()")
        yield from self._epochs.shares(self._world, batch_size, num_steps)

    def forward_batch(self, batch: Batch) -> Any:
        """The model's output of a batch of `epoch`; of several batches end to end (dimension 0).

        With a loss function, also loss and backward, batch by batch, so that one graph is alive at a time; the output
        then has no graph. Without one, all graphs are kept, and backward is yours. Raises `Misuse` for other batches.
        """
        self._check_open()
        if not isinstance(batch, Batch):
            raise Misuse(
                f"forward_batch takes a batch of trainer.epoch(), not a {type(batch).__name__}: call the model"
            )
        return self._forward.run(batch)

    def set_loss_fn(self, loss_fn: Callable[[LossContext], torch.Tensor] | None) -> None:
        """`forward_batch` then computes the loss of each batch, its mean over samples, and calls backward."""
        self._check_open()
        if loss_fn is not None and not callable(loss_fn):
            raise Misuse(f"set_loss_fn needs a function of a LossContext, not {type(loss_fn).__name__}")
        self._forward.loss_fn = loss_fn

    @property
    def has_loss_fn(self) -> bool:
        """True if `forward_batch` computes the loss, and calls backward."""
        return self._forward.loss_fn is not None

    def capture(self, *, tags: Sequence[str] = (), traces: Sequence[str] = ()) -> None:
        """Captures the outputs of the named modules (as in `named_modules`) from now on; replaces earlier names.

        Raises `Misuse` for a name that the model does not have.
        """
        self._check_open()
        self._forward.set_capture(tags, traces)

    @property
    def tags(self) -> dict[str, Any]:
        """The last output of each module in the latest forward pass, as part of the autograd graph."""
        return self._forward.capture.tags

    @property
    def traces(self) -> dict[str, list[Any]]:
        """The outputs of each module in the latest forward pass, call by call, as part of the autograd graph."""
        return self._forward.capture.traces

    def mean(self, metrics: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
        """The mean over ranks of numbers that each has, such as metrics of its part of an evaluation; equal on every
        rank.

        `weight` is how much this rank's numbers count, such as their number of samples; with 0 they do not. Every rank
        calls it, and those that count give the same names, in any order. Raises `Misuse` otherwise.
        """
        self._check_open()
        numbers = checked_metrics(metrics, "mean()")
        return self._together.run(lambda: weighted_mean(self._world, numbers, weight), "calls mean()")

    def gather(self) -> Gathered:
        """Outputs, targets, tags and traces of all that `forward_batch` has seen on all ranks since the last step.

        Every rank must call it, between `forward_batch` and `step`. Outputs, tags and traces must be tensors with a
        sample per row; other targets stay behind.
        """
        self._check_open()
        return self._together.run(lambda: self._forward.gather(self._world), "calls gather()", give=None)

    # Steps

    def step(self, samples: int | None = None, *, optimizer: Key | None = None) -> None:
        """Replaces `optimizer.step(); optimizer.zero_grad()`: averages gradients and buffers, then does both.

        In a loop over a loader of your own all ranks have equal weight, unless each gives `samples`, the number of
        samples of which its gradient is the mean; at every step then, or never. With 0 on all ranks nothing happens.

        `optimizer` selects one of several, by name or number: only its gradients are averaged and cleared. Clear the
        others that backward has left with their optimizer's `zero_grad()`, as without elche.
        """
        keys = self._optimizers.keys_of(optimizer)
        averaged = self._stepper.averager.averaged
        if not averaged:
            self.average_gradients(samples, optimizer=optimizer)
        elif optimizer is not None and keys != averaged:
            raise Misuse(f"the gradients that are averaged are of {averaged}: step these first")
        self._stepper.apply()
        self.finish_step()

    def average_gradients(self, samples: int | None = None, *, optimizer: Key | None = None) -> None:
        """The first part of `step`, for loops that unscale, clip or inspect the averaged gradients.

        Then call `step`; or step the optimizer yourself, as by `scaler.step(optimizer)`, and call `finish_step`.
        """
        self._check_open()
        keys = self._optimizers.keys_of(optimizer)
        if len(keys) < len(self._optimizers.by_key) and self.has_loss_fn:
            raise Misuse("a loss function makes gradients of all optimizers: step(), or call backward in your own loop")
        self._optimizers.check_not_accumulating(keys)
        self._take_turn()
        self._iterations.begin_step()
        summed = self._stepper.average(samples, keys, self._iterations.take_requests)
        if summed is not None:
            self._iterations.consensus.put(summed)
        if self._data is not None and self._data.members != self._stepper.planner.members:
            self._data.plan_again(self._stepper.planner, self._stepper.share.take_lost())

    def _take_turn(self) -> None:
        """Called before each step. Finds trainers that train in turn, as the two networks of a GAN, though a checkpoint
        is of one of them: says it once, and raises `Misuse` if only one of them goes on from a checkpoint.
        """
        other = _latest[0] if _latest else self
        _latest[:] = [self]
        if other is not self and self._has_stepped:
            self._checkpoints.check_beside(other._checkpoints)
        self._has_stepped = True

    def finish_step(self) -> None:
        """The last part of `step`: clears the gradients and begins the next step."""
        self._check_open()
        stepped = self._stepper.averager.averaged
        self._stepper.finish()
        self._iterations.end_step(stepped)
        self._stepper.clock.begin_step()

    @property
    def num_steps(self) -> int:
        """Steps made, including those before a resume. A loop that counts steps itself starts counting here."""
        self._checkpoints.resumption.ask()
        return self._progress.num_steps

    @property
    def num_epoch_steps(self) -> int:
        """Steps made in the present epoch, including those before a resume. A loop over a loader of its own resumes
        within the epoch by skipping as many batches; the loader's order must follow from the epoch's number or from
        torch's, numpy's or Python's random numbers, which the checkpoint restores.
        """
        self._checkpoints.resumption.ask_epoch_steps()
        return self._progress.epoch_steps

    # Reports and checkpoints

    def report(self, **metrics: Any) -> None:
        """Reports the epoch's held-out metrics to the coordinator, if there is one; those of rank 0 count."""
        self._check_open()
        numbers = checked_metrics(metrics)
        if self._world.rank == 0:
            self._progress.attachment.report_metrics(self._progress.evaluated_epoch, numbers)

    def save(self, place: str = "") -> None:
        """Starts writing a checkpoint into a new folder in `place`, by default the config's `checkpoint_dir`, while
        training goes on. Rank 0 writes; call it on every rank, at the end of an iteration. The newest 3 are kept.

        Raises `Misuse` if no place is given.
        """
        self._check_open()
        self._save(None, place)
        self._iterations.note_saved()

    def _save(self, at_step: AtStep | None, place: str = "") -> None:
        plan = self._stepper.planner.to_json()
        if self._data is not None:
            plan["data"] = self._data.state(is_within=bool(self._progress.done))
        self._checkpoints.save(self._progress.position, plan, self._progress.attachment, place, at_step)

    def register_state(self, **objects: Any) -> None:
        """Adds the state of these objects, such as a learning rate schedule, to checkpoints, by name. Call it on every
        rank, before the first step; in a resumed loop, it loads the objects' state from the checkpoint.

        An object has `state_dict()`, of plain values and tensors, and `load_state_dict()`. Rank 0's state is stored. A
        loader or sampler (with `__iter__`) goes on after the batch of the last step. Raises `Misuse` for an object
        without these methods.
        """
        self._check_open()
        self._checkpoints.register(objects)

    def load(self, path: str) -> None:
        """Resumes from a checkpoint, or the newest in a folder, on any number of ranks: model, optimizer, and what
        `epoch` gives. Every rank reads it. Does nothing for an empty folder, so that a script can always call it.

        Raises `Misuse` on every rank for a checkpoint that is incomplete or of another model.
        """
        self._check_open()
        self._load(path, only_own=False)

    def _load(self, path: str, *, only_own: bool) -> None:
        loaded = self._together.run(lambda: self._checkpoints.load(path, only_own=only_own), "calls load()", give=None)
        if loaded is not None:
            position, plan = loaded
            self._progress.restore(position)
            self._stepper.restore(plan)

    # Its end

    def close(self, error: BaseException | None = None) -> None:
        """Ends the loop (`error`: what it raised) and its process group. Idempotent; called at the script's end.

        Raises `Misuse`, on at least one rank, when the ranks' models have come to differ since they were last compared.
        """
        if self._is_closed or self._is_forked:
            return
        # First: what follows may raise, and the exit handler calls `close` again.
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        if self in _open:
            _open.remove(self)
        if self in _latest:
            _latest.clear()
        differing = None
        if error is None:
            self._together.end()
            error = differing = self._stepper.comparison.compare_at_end()
        elif not isinstance(error, PeerLost):
            self._world.publish_end("")  # the others need not wait for its model
        self._iterations.close(error)
        self._checkpoints.close()
        if error is None:
            self._stepper.tell_if_never_stepped()
            self._stepper.report(is_last=True)
        if isinstance(error, Exception):
            self._leave_raising(error)
        else:
            self._progress.attachment.leave(error)
        self._forward.capture.close()
        self._stepper.close()
        self._world.close()
        if differing is not None:
            raise differing

    def _leave_raising(self, error: Exception) -> None:
        """Ends the loop of a script that may catch the error: cross validation goes on to the next fold, Optuna to the
        next trial. If the others go on in this loop, they hear that this rank does not.
        """
        leave, is_told = self._progress.attachment.leave, not is_run()
        if is_told:  # nobody sees whether the script catches it before its next trainer
            leave(error)

        def tell(is_caught: bool) -> None:
            if is_caught:
                self._together.end(f"goes on after {type(error).__name__}: {error},")
            if not is_told:
                leave(error, is_caught=is_caught)

        when_known(tell)

    def _close_at_exit(self) -> None:
        try:
            self.close(failure_of(getattr(sys, "last_value", None)))
        except Misuse as error:
            notice(error)
            sys.stdout.flush()
            os._exit(1)  # what an exit handler raises does not change the exit code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(failure_of(error))

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_open(self) -> None:
        if self._is_forked:
            raise Misuse(
                "a process that the script has forked uses the trainer, but only the process that has set it up can: "
                "let forked processes end by os._exit()"
            )
        if self._is_closed:
            raise Misuse(
                "this trainer is closed, by close(), the end of its `with`, or a later Trainer.setup with parameters "
                "of its model; set up another with Trainer.setup(model, optimizer)"
            )

    def _shares_parameters_with(self, model: Any) -> bool:
        """True if another loop with this model would send gradients that this one sends, too."""
        own = {id(one) for one in self._model.parameters()} if self.is_distributed else set()
        return isinstance(model, nn.Module) and any(id(one) in own for one in model.parameters())

    def _require_data(self) -> Data:
        if self._data is None:
            raise Misuse("there is no data: call set_data_loader(loader, forward_input=...) first")
        return self._data

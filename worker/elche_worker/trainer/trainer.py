"""Your own training loop, on one device or many: one process per device, and `step()` in place of the optimizer's.

Each rank computes gradients of its own samples; `step()` averages them, weighted by samples, so that what the optimizer
sees is the gradient of all samples together. With a loader attached, elche also decides which samples those are: a
share of every batch by speed, or, on unlike devices, whole batches by El Che's cadence.
"""

import atexit
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from elche import timeline
from elche.balance import shard_sizes
from elche.errors import Misuse
from elche_worker.collectives.consistency import begin_as_rank_0, broadcast, check_alike
from elche_worker.collectives.gradients import Gradients
from elche_worker.collectives.world import World, memory_of, model_name
from elche_worker.device.discovery import summary
from elche_worker.device.transfer import to_device
from elche_worker.telemetry.timing import new_timer
from elche_worker.trainer.attached import attach, checked_metrics
from elche_worker.trainer.capture import Capture, Caught, detached, joined
from elche_worker.trainer.checkpoints import LoopCheckpoints
from elche_worker.trainer.checks import check_same_config, check_same_loader, module_of, problem_of
from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.data import Batch, Data, Fields, Wiring, check_loader, wire
from elche_worker.trainer.gathering import Gathered, gather
from elche_worker.trainer.optimizers import Given, Key, Optimizers
from elche_worker.trainer.plans import Balance, Cadence, Planner, Step
from elche_worker.trainer.progress import ProgressTracker, RequestConsensus, Requests
from elche_worker.trainer.scattering import scattered
from elche_worker.user.device import Device


@dataclass(frozen=True, slots=True)
class LossContext:
    """What a loss function gets of one batch; everything is live, as autograd has it."""

    output: Any
    """The model's."""
    batch: Fields
    tags: dict[str, Any]
    """The last output of each module that `capture(tags=...)` names."""
    traces: dict[str, list[Any]]
    """The outputs, call by call, of each module that `capture(traces=...)` names."""


class Cancelled(SystemExit):
    """Somebody has ended the loop at the coordinator. Raised by `step` on every rank; ends the script unless caught."""


class Trainer:
    """A model and its optimizer, or several, in a loop of your own. `Trainer.setup` makes one."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, config: TrainerConfig, world: World) -> None:
        """Use `setup`."""
        self._model = model
        self._optimizers = optimizers
        self._config = config
        self._world = world
        self._devices = world.gather_texts(str(world.device))
        described = json.dumps([model_name(world.device), memory_of(world.device)])
        self._models = [json.loads(text) for text in world.gather_texts(described)]
        self.is_mixed = len({name for name, _ in self._models}) > 1
        """Whether devices are of different models."""
        self._gradients: dict[Key, Gradients] = {}
        """By optimizer; the only one's are all of the model's. Empty on one process."""
        self._step_hooks: list[RemovableHandle] = []
        self._planner: Planner = Balance(world.rank, world.size, config)
        self._data: Data | None = None
        self._wiring: Wiring | None = None
        self._loss_fn: Callable[[LossContext], torch.Tensor] | None = None
        self._capture = Capture(model)
        self._caught: Caught | None = None
        self._timer = new_timer(world.device)
        self._timed_sizes: deque[int] = deque()
        """Samples of the batches whose times are not known yet."""
        self._is_timing = False
        self._giving: object | None = None
        """Stands for the epoch that gives batches."""
        self._plan: Step | None = None
        """What was given out by `epoch` since the last step."""
        self._stepped_plan: Step | None = None
        """What was given out before a step of one of several optimizers: the others' steps are of it, too."""
        self._count = 0.0
        """Batches whose gradients the loss function has added up since then, in units of the first one's size."""
        self._unit = 0
        """Samples of that first batch."""
        self._last_sizes: list[int] = []
        self._sync_ms = 0.0
        self._averaged: list[Key] = []
        """The optimizers whose gradients are averaged, and that are to be stepped."""
        self._has_gradients = True
        """Whether any rank has any, for this step."""
        self._told_samples: int | None = None
        """How many samples this step's gradient is the mean of, where the loop says so."""
        self._tells_samples: bool | None = None
        """Whether it does; None before the first step."""
        self._batch_ms: list[float] = []
        self._is_closed = False
        self._progress = ProgressTracker(None)
        self._consensus = RequestConsensus(world.device)
        self._checkpoints = LoopCheckpoints(model, optimizers, config, world)
        self._step_started_s = time.perf_counter()
        self._slow_factor = float(os.environ.get("ELCHE_SLOW") or 1)

    @classmethod
    def setup(
        cls,
        model: nn.Module,
        optimizer: Given,
        config: TrainerConfig | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Self:
        """Brings the model to this process's device and into train mode; with several processes, makes all models
        rank 0's. Under torchrun or `elche run` the processes find each other; on one process it adds nothing.

        With a list or dict of optimizers, as a GAN has, `step(optimizer=...)` steps one of them, `step()` all.

        El Che (several batches per step) is on where devices differ, and wherever a config is given, unless that has
        `max_anchor=0`. Says in one line on stderr what it found.

        With a coordinator (`TrainerConfig.coordinator`, or ELCHE_COORDINATOR) the loop appears there as a job. With
        ELCHE_RESUME it goes on from that checkpoint: `epoch` then gives what is left.

        Raises `Misuse` on every rank when models differ between ranks, or a rank cannot take part.
        """
        chosen = config or TrainerConfig()
        world = World.join(process_group, chosen.device)
        world.agree(problem_of(model, optimizer))
        model.to(world.device)
        optimizers = Optimizers(optimizer)
        for one in optimizers:
            if one.state:
                one.load_state_dict(one.state_dict())  # follows the parameters to the device
        check_alike(model, world)
        check_same_config(chosen, world)
        begin_as_rank_0(model, world)
        trainer = cls(model, optimizers, chosen, world)
        if world.size > 1:
            trainer._begin(has_el_che=chosen.has_el_che and (config is not None or trainer.is_mixed))
        model.train()
        trainer._introduce()
        resumed = os.environ.get("ELCHE_RESUME", "")
        if resumed:
            trainer.load(resumed)
        trainer._attach_coordinator(resumed)
        atexit.register(trainer._close_at_exit, os.getpid())
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
        """`setup` for an object that holds the module beside what else it needs, such as a tokenizer or a loss.

        `module` names the attribute; without it the object must hold exactly one module. The object stays as it is:
        use its own methods in your loop, then `step()`.
        """
        return cls.setup(module_of(head, module), optimizer, config, process_group=process_group)

    def _begin(self, *, has_el_che: bool) -> None:
        if has_el_che:
            self._planner = Cadence(self._world.size, self._config)
        named = dict(self._model.named_parameters())
        for key, one in self._optimizers.by_key.items():
            stepped = set(self._optimizers.parameters_of([key]))
            own = {name: parameter for name, parameter in named.items() if parameter in stepped}
            self._gradients[key] = Gradients(
                own if self._optimizers.are_several else named,
                self._world,
                # backward does not say which of several optimizers will be stepped
                overlaps=self._config.overlap and not self._optimizers.are_several,
                num_requests=RequestConsensus.NUM_REQUESTS,
            )
            self._step_hooks += [
                one.register_step_pre_hook(self._check_before),
                one.register_step_post_hook(lambda optimizer, *_: self._check_averaged(optimizer)),
            ]
        self._weigh(1 / self._world.size)

    def _weigh(self, fraction: float | None) -> None:
        """How much this step's gradients will count, as far as it is known."""
        for gradients in self._gradients.values():
            gradients.weigh(fraction)

    def _check_before(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not any(arguments) and not any(named.values()):  # else a closure makes the gradients, and may average them
            self._check_averaged(optimizer)

    def _check_averaged(self, optimizer: Optimizer) -> None:
        if not any(self._optimizers.by_key[key] is optimizer for key in self._averaged):
            raise Misuse(
                "the optimizer is stepped with gradients of this rank alone: call trainer.step() in its place, or "
                "trainer.average_gradients() before it and trainer.finish_step() after it"
            )

    def _attach_coordinator(self, resumed: str) -> None:
        """Finds the coordinator, and where checkpoints go."""
        config = self._config
        name = config.name or Path(sys.argv[0]).stem or "loop"
        address = config.coordinator or os.environ.get("ELCHE_COORDINATOR", "")
        if len(set(self._world.gather_texts(str(bool(address))))) > 1:
            raise Misuse("some ranks have a coordinator and some have none: set ELCHE_COORDINATOR for all, or for none")
        self._checkpoints.check()
        if not address:
            return
        policy = "El Che" if self.has_el_che else "shares of every batch" if self.is_distributed else "one device"
        self._progress.attachment = attach(
            address,
            self._world,
            name=name,
            policy=policy,
            checkpoint_dir=self._checkpoints.place,
            resumed=resumed,
            timeline=config.timeline,
        )
        self._timer = new_timer(self._world.device, keeps_intervals=config.timeline)

    def _introduce(self) -> None:
        if self._world.rank == 0:
            named = zip(self._devices, self._models, strict=True)
            what = summary([Device(device=one, model=model, memory_bytes=memory) for one, (model, memory) in named])
            how = "; El Che sets the cadence: several batches per step (max_anchor=0: one, shared)"
            how = "" if self._world.size == 1 else how if self.has_el_che else "; every batch is shared"
            print(f"elche: {what}{how}", file=sys.stderr)

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
        """This process's number."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Processes, and devices."""
        return self._world.size

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one."""
        return self._world.size > 1

    @property
    def has_el_che(self) -> bool:
        """Whether ranks train several batches per step, each as many as it is fast."""
        return isinstance(self._planner, Cadence)

    @property
    def devices(self) -> list[str]:
        """Each rank's device; [] on one process."""
        return self._devices if self.is_distributed else []

    @property
    def chunk_ratios(self) -> list[float]:
        """Each rank's share of a batch, sum 1; [] on one process."""
        return self._planner.ratios if self.is_distributed else []

    @property
    def throughput(self) -> list[float]:
        """Each rank's samples per ms, smoothed, 0 where not measured; [] on one process."""
        return self._planner.throughput if self.is_distributed else []

    @property
    def shard_sizes(self) -> list[int]:
        """Samples of each rank in the latest batches; [] on one process and before the first."""
        return list(self._last_sizes)

    @property
    def batch_counts(self) -> list[int]:
        """Batches of each rank per step, under El Che; else []."""
        return self._planner.el_che.batch_counts if isinstance(self._planner, Cadence) else []

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameters."""
        for group in (group for one in self._optimizers for group in one.param_groups):
            group["lr"] = lr

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The model's output; arguments are brought to the device. `model(...)` does the same for what is there."""
        self._check_open()
        arguments, named = to_device(arguments, self.device), to_device(named, self.device)
        return self._model(*arguments, **named)

    def forward_scattered(self, *inputs: Any, **named: Any) -> Any:
        """The model's output of a whole batch, of which each rank computes its share by `chunk_ratios`.

        Every rank calls it, with the same batch: tensors with a row for each sample. All get all outputs, a tensor, in
        the batch's order. A loss of it that is a mean over samples, `backward` and `step()` then make the step of the
        whole batch. `trainer(x)` computes all of what it is given, and tells nobody.
        """
        self._check_open()
        if not self.is_distributed:
            return self(*inputs, **named)
        if self._plan is not None and torch.is_grad_enabled():
            raise Misuse("batches of epoch() are this rank's part already: forward_batch(batch) is for them")
        ratios = self.chunk_ratios
        output, self._last_sizes = scattered(
            self._world, self._model, inputs, named, lambda num_rows: shard_sizes(ratios, num_rows)
        )
        return output

    # Data

    def set_data_loader(
        self,
        loader: "DataLoader[Any]",
        *,
        forward_input: str,
        names: Sequence[str] | None = None,
        inputs: Sequence[str] | None = None,
    ) -> None:
        """Splits the loader's batches among the ranks. Give the whole loader on every rank, as for one device.

        `forward_input` names the field of a batch that is the model's first argument; other fields that are named as
        arguments of its `forward` (or, for a forward that does not say, in `inputs`) go there too, the rest are
        targets. `names` names the fields of batches that are tuples. The order of samples is that of rank 0's sampler.

        Raises `Misuse` on every rank for what cannot be split, and for unknown names.
        """
        self._check_open()
        problem, wiring = check_loader(loader), None
        try:
            wiring = None if problem else wire(loader, self._model, forward_input, names, inputs)
        except Misuse as error:
            problem = str(error)
        self._world.agree(problem)
        self._wiring = wiring
        self._data = Data(loader, self._world, names, self._planner)
        facts = [self._data.num_samples, self._data.batch_size, loader.num_workers, loader.prefetch_factor or 0]
        check_same_loader(facts, self._world)
        self._planner.fit(self._data.num_batches)

    @property
    def data_num_batches(self) -> int:
        """Batches of an epoch, of all ranks together. Under El Che a step has several of them."""
        return self._attached.num_batches

    @property
    def data_batch_size(self) -> int:
        """Samples per batch: shared by all ranks, or, under El Che, each rank's own."""
        return self._attached.batch_size

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """What this rank trains of an epoch, up to the next `step()` each time. Every rank gets as many.

        After `load` it gives what the checkpoint has not behind it: nothing of earlier epochs, and the rest of its own.
        Raises what the data set raises.
        """
        self._check_open()
        data, progress, checkpoints = self._attached, self._progress, self._checkpoints
        resumed = checkpoints.resumed
        if resumed is not None and epoch < resumed.epoch:
            return
        checkpoints.resumed = None
        start = resumed.done if resumed is not None and epoch == resumed.epoch else 0
        progress.begin_epoch(epoch, start)
        progress.epoch_size, progress.batch_size = data.num_samples, data.batch_size
        checkpoints.restore_rng_state(self.num_steps)
        order = data.restore(checkpoints.take_loader())
        waited_s = time.perf_counter()
        self._forget_batches()
        giving = self._giving = object()
        for batch, step in data.epoch(epoch, start, order if start else None):
            self._check_open()
            if self._giving is not giving:
                raise Misuse(f"epoch {epoch} was left for another: take its batches before you begin that")
            progress.note_wait(waited_s)
            self._begin_batch(batch, step)
            yield batch
            self._stop_timing()
            waited_s = time.perf_counter()
        self._giving = None
        progress.end_epoch()

    def _forget_batches(self) -> None:
        """Those of an epoch that was left for another, since the last step, are not trained."""
        if self._giving is None or self._plan is None:
            return
        if self._is_timing:
            self._timer.drop()
            self._timed_sizes.pop()
            self._is_timing = False
        self._begin_step()

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are to be trained, up to `count`; those that a checkpoint has behind it are
        left out. Says to others how many there will be."""
        self._check_open()
        progress, resumed = self._progress, self._checkpoints.resumed
        self._checkpoints.restore_rng_state(self.num_steps)
        progress.num_epochs = count
        for epoch in range(resumed.epoch if resumed is not None else 0, count):
            progress.begin_epoch(epoch, resumed.done if resumed is not None and resumed.epoch == epoch else 0)
            yield epoch
            self._checkpoints.resumed = None
            if progress.epoch == epoch:
                progress.end_epoch()

    def _begin_batch(self, batch: Batch, step: Step) -> None:
        if self.is_distributed:
            self._last_sizes = step.samples
        is_first = self._plan is None
        self._stepped_plan = None
        self._plan = step if self._plan is None else self._plan.with_next(step)
        if self._gradients:
            is_known = is_first and self._told_samples is None and not self.has_el_che
            self._weigh(self._fraction() if is_known else None)
        self._timed_sizes.append(batch.size)
        self._timer.start()
        self._is_timing = True

    def _stop_timing(self) -> None:
        if self._is_timing:
            self._timer.stop()
            self._is_timing = False

    def forward_batch(self, batch: Batch) -> Any:
        """The model's output of a batch of `epoch`; of several batches end to end (dimension 0).

        With a loss function, also loss and backward, batch by batch, so that one graph is alive at a time; the output
        then has no graph. Without one, all graphs are kept, and backward is yours.
        """
        self._check_open()
        self._caught = self._caught or Caught()
        outputs = []
        for part, size in zip(batch.parts, batch.sizes, strict=True):
            if batch.size and not self._unit:
                self._unit = size
            weight = size / self._unit if batch.size else 0.0
            outputs.append(self._forward(part, weight, counts=bool(batch.size)))
        return joined(outputs)

    def _forward(self, part: Fields, weight: float, *, counts: bool) -> Any:
        """One batch; with a loss function nothing of its graph is left behind."""
        wiring, caught = self._wiring, self._caught
        assert wiring is not None
        assert caught is not None
        output = wiring.call(self._model, part)
        if self._loss_fn is not None:
            self._backward(LossContext(output, part, self._capture.tags, self._capture.traces), weight)
            self._count += weight
        if counts:
            caught.add({name: part[name] for name in wiring.targets}, output, self._capture)
        if self._loss_fn is None:
            return output
        self._capture.detach()
        return detached(output)

    def _backward(self, context: LossContext, weight: float) -> None:
        assert self._loss_fn is not None
        loss = self._loss_fn(context)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            without = ", without a gradient" if isinstance(loss, torch.Tensor) and not loss.requires_grad else ""
            raise Misuse(f"the loss function must return a scalar with a gradient, not {got}{without}")
        if weight:
            self._progress.add_loss(loss)
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]

    def set_loss_fn(self, loss_fn: Callable[[LossContext], torch.Tensor] | None) -> None:
        """`forward_batch` then computes the loss of each batch, its mean over samples, and calls backward."""
        self._check_open()
        if loss_fn is not None and not callable(loss_fn):
            raise Misuse(f"set_loss_fn needs a function of a LossContext, not {type(loss_fn).__name__}")
        self._loss_fn = loss_fn

    @property
    def has_loss_fn(self) -> bool:
        """Whether `forward_batch` computes the loss, and calls backward."""
        return self._loss_fn is not None

    def capture(self, *, tags: Sequence[str] = (), traces: Sequence[str] = ()) -> None:
        """From now on the outputs of the named modules (as `named_modules` has them) are caught. Replaces what was.

        Raises `Misuse` for a name that the model does not have.
        """
        self._check_open()
        capture = Capture(self._model, tags, traces)
        self._capture.close()
        self._capture = capture

    @property
    def tags(self) -> dict[str, Any]:
        """By module, its last output in the latest forward pass, live."""
        return self._capture.tags

    @property
    def traces(self) -> dict[str, list[Any]]:
        """By module, its outputs in the latest forward pass, call by call, live."""
        return self._capture.traces

    def mean(self, metrics: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
        """The mean over ranks of numbers that each has, such as of its part of an evaluation; alike on every rank.

        `weight` says how much this rank's count, such as how many samples they are of; 0: nothing. Every rank calls it,
        with the same names.
        """
        self._check_open()
        numbers = checked_metrics(metrics)
        own = [weight, *(value * weight if weight else 0.0 for value in numbers.values())]
        total, *sums = (sum(column) for column in zip(*self._world.gather_numbers(own), strict=True))
        if not total:
            raise Misuse("mean() needs a weight above 0 on at least one rank")
        return {name: value / total for name, value in zip(numbers, sums, strict=True)}

    def gather(self) -> Gathered:
        """Outputs, targets, tags and traces of all that `forward_batch` has seen on all ranks since the last step.

        Every rank must call it, between `forward_batch` and `step`. Outputs, tags and traces must be tensors with a
        sample per row; other targets stay behind.
        """
        self._check_open()
        if self._caught is None:
            raise Misuse("gather() has nothing to gather: call it after forward_batch and before step")
        return gather(self._world, self._caught, self._capture, self._wiring.targets if self._wiring else ())

    # Steps

    def step(self, samples: int | None = None, *, optimizer: Key | None = None) -> None:
        """In place of `optimizer.step(); optimizer.zero_grad()`: averages gradients and buffers, then does both.

        In a loop over a loader of your own every rank counts alike, unless each says how many `samples` its gradient
        is the mean of; at every step then, or never. With none on any rank nothing happens.

        Of several optimizers, `optimizer` is the one that is meant, by its name or number: only its gradients are
        averaged, and cleared. Clear what else backward has left, with that optimizer's `zero_grad()`, as without elche.
        """
        keys = self._optimizers.keys_of(optimizer)
        if not self._averaged:
            self.average_gradients(samples, optimizer=optimizer)
        elif optimizer is not None and keys != self._averaged:
            raise Misuse(f"the gradients that are averaged are of {self._averaged}: step these first")
        if self._has_gradients:
            if self._config.max_grad_norm is not None and not self._has_cadence:
                stepped = self._optimizers.parameters_of(self._averaged)
                nn.utils.clip_grad_norm_(stepped, self._config.max_grad_norm)
            for key in self._averaged:
                self._optimizers.by_key[key].step()
        self.finish_step()

    def average_gradients(self, samples: int | None = None, *, optimizer: Key | None = None) -> None:
        """The first part of `step`, for loops that do something with the averaged gradients: unscale, clip, look.

        Then call `step`; or step the optimizer yourself, and call `finish_step`.
        """
        self._check_open()
        if self._averaged:
            raise Misuse("the gradients of this step are averaged already: call step() next, or finish_step()")
        keys = self._optimizers.keys_of(optimizer)
        if len(keys) < len(self._optimizers.by_key) and self._loss_fn is not None:
            raise Misuse("a loss function makes gradients of all optimizers: step(), or call backward in your own loop")
        self._check_samples(samples)
        self._averaged = keys
        self._told_samples = samples
        if self._slow_factor > 1:
            self._slow_down()
        self._stop_timing()
        self._batch_ms = self._take_times()
        if not self._gradients:
            self._normalise()
            if self._may_request:
                self._consensus.put(torch.tensor(self._take_requests()))
            return
        told = self._tell()
        fraction = self._fraction() if samples is None else self._fraction_of(samples)
        self._has_gradients = fraction is not None
        if fraction is None:
            return
        started_s = time.perf_counter()
        self._normalise()
        self._average(fraction)
        broadcast(list(self._model.buffers()), self._world)
        self._sync_ms = (time.perf_counter() - started_s) * 1000
        self._progress.note(timeline.WAIT_ROUND, started_s, self._progress.num_steps)
        if told is not None and self._plan is not None:
            self._planner.learn(self._plan, told)

    def _average(self, fraction: float) -> None:
        requests: Sequence[float] = self._take_requests() if self._may_request else ()
        for key in self._averaged:
            sums = self._gradients[key].finish(fraction, requests)
            if requests:
                self._consensus.put(sums)
            requests = ()

    def _check_samples(self, samples: int | None) -> None:
        """Ranks say how many samples they have at every step, or none does at any: else they would wait for each other
        in different places."""
        if samples is not None and samples < 0:
            raise Misuse(f"samples is {samples}; it must be at least 0")
        if self._tells_samples is None:
            told = [bool(tells) for (tells,) in self._world.gather_numbers([float(samples is not None)])]
            if len(set(told)) > 1:
                raise Misuse("some ranks say how many samples they have, and some do not: step(samples=...) on all")
            self._tells_samples = samples is not None
        elif self._tells_samples != (samples is not None):
            raise Misuse("give step(samples=...) at every step, or never")

    def finish_step(self) -> None:
        """The last part of `step`: gradients are cleared, and the next step begins."""
        self._check_open()
        is_same_batch = self._plan is None and self._stepped_plan is not None
        self._progress.add_step(
            self._plan, self._world.rank, self._told_samples, self._batch_ms, self._sync_ms, is_same_batch=is_same_batch
        )
        stepped, plan = self._averaged, self._plan or self._stepped_plan
        self._begin_step(stepped)
        self._stepped_plan = plan if len(stepped) < len(self._optimizers.by_key) else None
        self._say_where()
        self._apply_requests(self._consensus.take())
        self._step_started_s = time.perf_counter()

    def _slow_down(self) -> None:
        """Stands for a slower device: the step takes `ELCHE_SLOW` times as long as it did."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        time.sleep((time.perf_counter() - self._step_started_s) * (self._slow_factor - 1))

    def _say_where(self, *, is_last: bool = False) -> None:
        anchor = self._planner.el_che.anchor if isinstance(self._planner, Cadence) else 1
        self._progress.report(anchor, float(self._optimizers.first.param_groups[0]["lr"]), is_last=is_last)

    def _take_times(self) -> list[float]:
        """Compute times in ms of what has ended; of a loop over a loader of its own, the host's."""
        if self._plan is None:
            return [] if self._stepped_plan else [(time.perf_counter() - self._step_started_s) * 1000]
        times = self._timer.finish() if self.has_el_che else self._timer.take()
        if not self.is_distributed:
            self._timed_sizes.clear()
        if self._config.timeline and self._progress.attachment and self._progress.attachment.timeline:
            for started_s, ended_s in self._timer.take_intervals():
                self._progress.attachment.timeline.add(timeline.BATCH, started_s, ended_s, self._progress.epoch)
        return times

    def _begin_step(self, stepped: Sequence[Key] = ()) -> None:
        """Nothing is there of a step yet. Where some of several optimizers were stepped, gradients of others stay."""
        if stepped and len(stepped) < len(self._optimizers.by_key):
            for parameter in self._optimizers.parameters_of(stepped):
                parameter.grad = None
        else:
            self._model.zero_grad(set_to_none=True)
        self._averaged = []
        self._has_gradients = True
        self._plan = None
        self._caught = None
        self._count = 0.0
        self._unit = 0
        self._capture.forget()
        for gradients in self._gradients.values():
            gradients.begin()
        self._weigh(None if self._told_samples is not None else 1 / self._world.size)

    @property
    def _has_cadence(self) -> bool:
        """Whether this step has as many batches as El Che says; not in a loop over a loader of its own."""
        return self.has_el_che and (self._plan or self._stepped_plan) is not None

    def _tell(self) -> list[list[float]] | None:
        """What ranks have measured, when it is time to tell each other."""
        if self._plan is None:
            return None
        timed = [(self._timed_sizes.popleft(), ms) for ms in self._batch_ms]
        measured = self._planner.measure(self._plan, timed, self._sync_ms)
        return None if measured is None else self._world.gather_numbers(measured)

    def _normalise(self) -> None:
        """Gradients that the loss function has added up become their mean; they are clipped before."""
        if self._has_cadence and self._config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._optimizers.parameters_of(self._averaged), self._config.max_grad_norm)
        if self._count and self._count != 1.0:
            gradients = [one.grad for one in self._model.parameters() if one.grad is not None]
            torch._foreach_mul_(gradients, 1 / self._count)

    def _fraction(self) -> float:
        """How much this rank's gradient counts: its part of the samples given out, or as much as any other's."""
        plan = self._plan or self._stepped_plan
        samples = [1] * self._world.size if plan is None else plan.samples
        return samples[self._world.rank] / sum(samples)

    def _fraction_of(self, samples: int) -> float | None:
        total = sum(count for (count,) in self._world.gather_numbers([samples]))
        return samples / total if total else None

    @property
    def num_steps(self) -> int:
        """Steps made."""
        return self._progress.num_steps

    # What people ask for, and checkpoints

    def report(self, **metrics: Any) -> None:
        """Tells a coordinator, if there is one, the epoch's held-out metrics; those of rank 0 count."""
        self._check_open()
        numbers = checked_metrics(metrics)
        if self._progress.attachment is not None and self._world.rank == 0:
            self._progress.attachment.tell_metrics(self._progress.evaluated_epoch, numbers)

    def save(self, place: str = "") -> None:
        """Begins to write a checkpoint into a folder of its own in `place`, by default the config's `checkpoint_dir`,
        while training goes on. Rank 0 writes; call it on every rank, between steps. The newest 3 stay.

        Raises `Misuse` when nobody has said where.
        """
        self._check_open()
        plan = self._planner.to_json()
        if self._data is not None:
            plan["data"] = self._data.state(is_within=bool(self._progress.done))
        self._checkpoints.save(self._progress.position, plan, self._progress.attachment, place)

    def load(self, path: str) -> None:
        """Goes on from a checkpoint, or the newest in a folder of them, on any number of ranks: model, optimizer, and
        what `epoch` gives. Every rank reads it. Nothing of an empty folder, so that a script can always ask for it.

        Raises `Misuse` on every rank for one that is not whole, or of another model.
        """
        self._check_open()
        loaded = self._checkpoints.load(path)
        if loaded is not None:
            position, plan = loaded
            self._progress.restore(position)
            self._planner.restore(plan)

    @property
    def _may_request(self) -> bool:
        """Whether anybody may want something of the loop; alike on all ranks."""
        return self._progress.attachment is not None or self._checkpoints.has_rhythm

    def _take_requests(self) -> tuple[float, float, float]:
        """What this rank wants all to do: end, make a checkpoint, pause."""
        attachment = self._progress.attachment
        end, checkpoint, pause = attachment.operator.take_requests() if attachment else (0.0, 0.0, 0.0)
        return end, max(checkpoint, float(self._checkpoints.take_due())), pause

    def _apply_requests(self, requests: Requests) -> None:
        """Does what all ranks have agreed to do after this step."""
        attachment = self._progress.attachment
        if requests.checkpoint:
            if self._checkpoints.place:
                self.save()
            elif attachment is not None:
                attachment.tell_not_saved(self.num_steps, "the loop has no checkpoint_dir: set ELCHE_CHECKPOINT_DIR")
        if attachment is None:
            return
        if requests.cancel:
            reason = attachment.operator.cancelled or "another rank was told so"
            self.close()
            raise Cancelled(f"elche: the loop is ended: {reason}")
        if requests.pause:
            attachment.wait_while_paused()

    # Its end

    def close(self, error: BaseException | None = None) -> None:
        """Says that the loop is over (`error`: what it raised), takes its hooks off the model, and leaves the process
        group if it was made here. Twice is as once. At the script's end it is done by itself."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        self._checkpoints.close()
        if self._progress.attachment is not None:
            if error is None:
                self._say_where(is_last=True)
            self._progress.attachment.leave(error)
        self._capture.close()
        for hook in self._step_hooks:
            hook.remove()
        for gradients in self._gradients.values():
            gradients.close()
        self._world.close()

    def _close_at_exit(self, pid: int) -> None:
        if os.getpid() == pid:
            self.close(_failure(getattr(sys, "last_value", None)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_failure(error))

    def _check_open(self) -> None:
        if self._is_closed:
            raise Misuse("this trainer is closed; set up another with Trainer.setup(model, optimizer)")

    @property
    def _attached(self) -> Data:
        if self._data is None:
            raise Misuse("there is no data: call set_data_loader(loader, forward_input=...) first")
        return self._data


def _failure(error: BaseException | None) -> BaseException | None:
    """What a script has failed of: neither of its cancellation, nor of an exit in order."""
    if isinstance(error, Cancelled) or (isinstance(error, SystemExit) and not error.code):
        return None
    return error

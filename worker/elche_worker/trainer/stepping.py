"""One optimizer step of all ranks: gradients are normalised, averaged by share, clipped and applied."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from elche import timeline
from elche.errors import Misuse
from elche.output import notice
from elche_worker.collectives.consistency import broadcast, buffers_beside
from elche_worker.collectives.sparse import clip_norm, packed, unpacked
from elche_worker.collectives.world import World
from elche_worker.trainer.averager import GradientAverager
from elche_worker.trainer.clock import StepClock
from elche_worker.trainer.comparison import Comparison
from elche_worker.trainer.config import TrainerConfig, check_has_effect
from elche_worker.trainer.forward import Forward
from elche_worker.trainer.leftovers import Leftovers
from elche_worker.trainer.noted import (
    begin_noting,
    check_not_unscaled,
    check_not_wrapped,
    check_unscaled,
    forget_noted,
    is_any_clipped,
)
from elche_worker.trainer.optimizers import Key, Optimizers, make_step
from elche_worker.trainer.other_optimizers import OtherOptimizers
from elche_worker.trainer.plans import Balance, CadencePlan, Planner, Step, part_of
from elche_worker.trainer.progress import ProgressTracker
from elche_worker.trainer.requests import NUM_MARKS, RequestConsensus, mark, marks_differ
from elche_worker.trainer.same_batches import SameBatches
from elche_worker.trainer.share import StepShare
from elche_worker.trainer.summed_loss import SummedLoss
from elche_worker.trainer.together import Together

LEAST_SHARE = 2
"""Fewest samples of a rank in a batch of `shares`, or of a model with BatchNorm: BatchNorm raises for a single one."""
_steppers: "WeakSet[Stepper]" = WeakSet()
"""Those of this process: a batch that one loop has been given may be used by another, too."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """Result of averaging a step's gradients."""

    requests: torch.Tensor | None
    """The requests, summed over all ranks; None if no rank had samples, or requests are not exchanged."""
    has_gradients: bool
    """True if any rank had samples. If none had, gradients are not averaged and no optimizer is stepped."""
    measurements: list[list[float]] | None
    """The ranks' measurements, for the planner, one list per rank; None when none were exchanged in this step."""


class Stepper:
    """Makes the steps of a loop, and times the batches that are given out between them."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        config: TrainerConfig,
        world: World,
        forward: Forward,
        progress: ProgressTracker,
        together: Together,
        *,
        is_mixed: bool = False,
    ) -> None:
        self._model = model
        self._num_began = world.size
        self._optimizers = optimizers
        self._config = config
        self._world = world
        self._forward = forward
        self._progress = progress
        self._together = together
        self.planner: Planner = Balance(world.rank, world.size, config)
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            self.planner.least = LEAST_SHARE
        self.clock = StepClock(world.device)
        self.averager = GradientAverager(model, optimizers, world)
        self.share = StepShare(world)
        self._same_batches = SameBatches(world)
        self.last_sizes: list[int] = []
        """Samples of each rank in the latest batches."""
        self._restored: Mapping[str, Any] = {}
        """The plan of the checkpoint that was loaded."""
        self._expects_given = False
        """True if there is a loader whose batches elche gives out."""
        self.num_given = 0
        """Batches that elche has given out to each rank."""
        self._given_in = 0
        """The thread that has taken the latest of them."""
        self._num_stepped = 0
        """`num_given` at the latest step."""
        self._taken_ahead = ""
        """Warning to print at a second step that no batch was taken for: the first one had all those of an epoch."""
        self._takes_own: bool | None = None
        """True if the latest step used batches that the loop took itself; None before the first."""
        self._has_warned = False
        self._has_gradients = True
        """True if any rank has samples in this step."""
        self._has_warned_of_changed = self._has_warned_of_stretched_batch = False
        self._rates_at: tuple[int, list[float]] = (-1, [])
        """Epoch and learning rates of the latest step of several batches."""
        self.comparison = Comparison(model, optimizers, world, progress, together, is_mixed=is_mixed)
        note_stepped = self.comparison.note_changed
        self._others = OtherOptimizers(model, optimizers, world, self.averager, note_stepped=note_stepped)
        self._leftovers = Leftovers(optimizers, tells=not world.rank)
        self._summed_loss = SummedLoss(tells=world.size > 1 and not world.rank)
        begin_noting()
        _steppers.add(self)
        self._is_normalised = False
        self._is_finished = True
        """True if the latest averaged step was applied by the optimizer."""
        self._adopted: Any = None
        """Model and optimizer states after the present step, received from a rank that has already made it; None else.
        They replace this rank's own in `finish`.
        """
        self._batch_ms: list[float] = []
        """Times in ms of this step's batches, or one time of the whole step in a loop over its own loader."""
        self._sync_ms = 0.0
        """Time in ms of the last averaging on the host."""

    @property
    def el_che(self) -> CadencePlan | None:
        """The planner, where ranks train several batches per step; else None."""
        return self.planner if isinstance(self.planner, CadencePlan) and not self._takes_own else None

    @property
    def ratios(self) -> list[float]:
        """Each remaining rank's share of a batch, sum 1."""
        planned, members = self.planner, self._world.members
        return part_of(planned.ratios, [planned.members.index(number) for number in members])

    def begin(self, *, has_el_che: bool) -> None:
        """Prepares steps of several processes."""
        if has_el_che:
            self.planner = CadencePlan(self._world.size, self._config)
        self.averager.begin(overlaps=self._config.overlap, num_requests=RequestConsensus.NUM_REQUESTS + NUM_MARKS)

    # Batches

    def expect_given_batches(self) -> None:
        """Called when a loader was set."""
        if self._expects_given:  # another one, as for each epoch
            return
        self._expects_given = True
        how = (
            "each rank trains several batches per step, by its speed (El Che), so that an epoch has fewer steps than "
            "on one device. With TrainerConfig(max_anchor=0) a step is of one batch, which ranks divide"
        )
        self._notice(how if self.el_che is not None else "ranks divide every batch by their speed")

    def _take_own_batch(self, *, is_weighted: bool) -> None:
        """Called when the next step uses a batch that the loop took itself; `is_weighted`: it says how many samples."""
        if self._takes_own is None and not is_weighted and any(one.share.known for one in _steppers if one is not self):
            self._notice(
                "a step is made without a batch of this Trainer, while another one has given out its own: all ranks "
                "count alike in it, whatever their samples. If it is of the same batch, give step(samples=batch.size)"
            )
        if self._takes_own is None and not self._expects_given:
            check_has_effect(self._config, has_shares=bool(self.last_sizes))
            self._notice("a step after every batch of the loop's own")
        elif self._takes_own is False and not self._has_warned:
            self._has_warned = True
            self._notice(
                "a step is made without a batch of epoch() or shares() since the one before: all ranks count alike in "
                "it, whatever their samples. Take each batch after the step before it, or give step(samples=...)"
            )
        self._takes_own = True

    def _notice(self, how: str) -> None:
        if self._world.size > 1 and self._world.rank == 0:
            notice(how)

    def untrained(self) -> str:
        """Warning of data that nobody trains since ranks have died, if the loop takes its batches itself; else ""."""
        members = self._world.members
        lost = [str(number) for number in range(self._num_began) if number not in members]
        if not lost or not self._takes_own or self.last_sizes:  # elche has split the batches, and splits them again
            return ""
        who = f"{'rank' if len(lost) == 1 else 'ranks'} {', '.join(lost)}"
        return (
            f"this loop takes its batches itself, so nobody trains what {who} would have taken: if each rank has a "
            f"part of the data, about {len(lost) / self._num_began:.0%} of it is not trained until the loop is started "
            f"again, on {self._num_began} ranks"
        )

    def share_batches(self, batch_size: int) -> Iterator[Step]:
        """Yields steps without end, of batches of the loop's own, split by the ranks' speeds. Collective."""
        check_has_effect(self._config, has_shares=True)
        if not isinstance(self.planner, Balance):
            self.planner = Balance(self._world.rank, self._world.size, self._config)
            self.planner.members = self._world.members
            self.planner.restore(self._restored)
        self.planner.least = LEAST_SHARE
        return self.planner.steps(sys.maxsize, batch_size, 0)

    def restore(self, plan: Mapping[str, Any]) -> None:
        """Restores the planner from its state in a checkpoint."""
        self._restored = plan
        self.planner.restore(plan)

    def begin_batch(self, num_samples: int, step: Step) -> None:
        """Records a batch that is given out; this rank's part of `step` has `num_samples` that count."""
        is_first, self._takes_own, self._taken_ahead = self.share.plan is None, False, ""
        self.num_given, self._given_in = self.num_given + 1, get_ident()
        self.share.add(step)
        if self._world.size > 1:
            self.last_sizes = step.among(self._world.members).samples
            if self.el_che is None:
                self._summed_loss.begin_batch(num_samples, sum(self.last_sizes))
            # The weight is unknown during backward if more batches may follow (El Che), or if the loop gives `samples`,
            # which it does at the step.
            is_known = is_first and self.share.samples is None and self.el_che is None
            self.averager.weigh(self.share.planned_fraction() if is_known else None)
        self.clock.begin_batch(num_samples)

    def end_epoch(self, epoch: int) -> None:
        """Called when the batches of an epoch have all been given out."""
        if self.num_given - self._num_stepped > 1 and not self._has_any_gradient:
            self._taken_ahead = (
                f"all batches of epoch {epoch} were taken before a step was made with the first of them, as "
                f"list(trainer.epoch({epoch})) does: from that step on a checkpoint says that the whole epoch is "
                "trained, and each step counts as many samples. Take each batch after the step before it"
            )

    def tell_if_never_stepped(self) -> None:
        """Called when a loop ends that has raised nothing: says so if it made gradients, and trained with none."""
        if self.num_given and not self._num_stepped and self._has_any_gradient and self._world.rank == 0:
            notice("the loop made no step, so the model is as it was: call trainer.step() after backward()")

    @property
    def has_only_looked(self) -> bool:
        """True if batches were given out since the last step, and none was trained: an evaluation, or statistics."""
        return self.share.plan is not None and not self._has_any_gradient

    @property
    def _has_any_gradient(self) -> bool:
        return any(one.grad is not None for one in self._model.parameters())

    def forget_batches(self) -> None:
        """Forgets the batches of an epoch that was left before they were trained."""
        if self.share.plan is not None:
            self.clock.drop_batch()
            self._begin_step()
        self.leave_batch()

    def leave_batch(self) -> None:
        """Called when the loop has left the batch that was given out last. If it has not stepped yet, its gradients
        count in a later step (gradient accumulation).
        """
        self.share.leave()
        if self.share.plan is None:
            self._weigh()

    # The step

    def average(
        self, samples: int | None, keys: list[Key], take_requests: Callable[[], Sequence[float]]
    ) -> torch.Tensor | None:
        """Averages gradients and broadcasts buffers; returns the ranks' requests, summed, if there are any. Collective.

        Raises `Misuse` if this step's gradients are averaged already, and what `Together.run` raises.
        """
        if self.averager.averaged:
            raise Misuse("the gradients of this step are averaged already: call step() next, or finish_step()")
        if self.share.known is not None and self._given_in != get_ident():
            raise Misuse(
                "batches are taken in another thread than the one that calls step(), so that a step counts those that "
                "are fetched ahead, as many as the threads' timing makes them: take them where they are trained. elche "
                "fetches ahead itself, as far as DataLoader(num_workers=..., prefetch_factor=...) says"
            )
        if not self._takes_own and self.share.known is None:
            self._take_own_batch(is_weighted=samples is not None)
        if self._taken_ahead and self.num_given == self._num_stepped:  # the second of the steps
            if self._world.rank == 0:
                notice(self._taken_ahead)
            self._taken_ahead = ""
        self.share.set_samples(samples)
        if self._world.size > 1:
            check_not_wrapped(self._model)
            check_not_unscaled(self._optimizers.by_key[key] for key in keys)
        self.averager.averaged = keys
        self._leftovers.check(keys)
        self.clock.slow_down()
        self.clock.end_batch()
        self._batch_ms = self._take_times()
        self._warn_of_changed(keys, are_changed=self.averager.find_changed())
        # Before `run`, which may average again after a loss: a request that is taken is cleared.
        measured, requests = self._measure(), take_requests()
        self._is_normalised = False
        requests = [*requests, *mark(self.num_given, self._place_of(keys))]
        averaged = self._together.run(
            lambda: self._average(measured, requests), self._call(keys), give=self._give, take=self._take
        )
        self.comparison.num_averaged += 1
        self.share.settle()
        self._is_finished = False
        self._has_gradients = averaged.has_gradients and self._adopted is None
        self._others.check_step()
        return averaged.requests

    def _warn_of_changed(self, keys: list[Key], *, are_changed: bool) -> None:
        """Says once that gradients were clipped, or changed otherwise, before they are averaged."""
        is_clipped = is_any_clipped(self._optimizers.parameters_of(keys))
        if self._has_warned_of_changed or not (is_clipped or are_changed):
            return
        self._has_warned_of_changed = True
        if is_clipped:
            self._notice(
                "gradients are clipped before they are averaged, so that each rank clips its own. To clip the average, "
                "as one device would, call trainer.average_gradients() before they are clipped, and step() after it"
            )
        else:
            self._notice(
                "gradients are changed after backward and before they are averaged, so that each rank changes its own. "
                "Where that is more than a multiplication (clamp_, sign, noise), call trainer.average_gradients() "
                "before it, and step() after it"
            )

    def _warn_of_stretched_batch(self) -> None:
        """Says once that a schedule is stepped once per step of several batches: it would be over late or never."""
        if self._has_warned_of_stretched_batch or not self._has_cadence or not self._optimizers.have_schedule:
            return
        before, self._rates_at = self._rates_at, (self._progress.epoch, self._optimizers.rates)
        num_batches = sum(self.share.known.batches) if self.share.known is not None else 0
        if num_batches > 1 and before[0] == self._progress.epoch and before[1] != self._optimizers.rates:
            self._has_warned_of_stretched_batch = True
            self._notice(
                f"the learning rate changes from step to step, and under El Che a step has several batches (here "
                f"{num_batches}, of all ranks): a schedule that counts batches must be stepped once for each of them "
                "(docs/tutorials/loop.md), or it ends late; or share each batch, by TrainerConfig(max_anchor=0)"
            )

    def _place_of(self, keys: list[Key]) -> int:
        """Index of these optimizers for `mark`."""
        return 0 if len(keys) > 1 else list(self._optimizers.by_key).index(keys[0])

    def _call(self, keys: list[Key]) -> str:
        """Description of this step for `Calls`, equal on every rank."""
        return f"calls step({f'optimizer={keys[0]!r}' if len(keys) < len(self._optimizers.by_key) else ''})"

    def _average(self, measured: list[float] | None, requests: Sequence[float]) -> Averaged:
        """Averages with the remaining ranks. `Together` calls it again, with fewer ranks, after a loss: so nothing
        before `replace` may change gradients or plan in a way that a repetition would apply twice.
        """
        self._follow_members()
        if self._world.size == 1:
            self._normalise()
            has_samples = self.share.planned_fraction() is not None
            return Averaged(torch.tensor(requests) if requests else None, has_samples, None)
        self.comparison.check()
        if not self._expects_given:
            stepped = self._optimizers.parameters_of(self.averager.averaged)
            self._same_batches.compare(stepped, self.comparison.num_averaged)
        self.share.agree()
        measurements = None if measured is None else self._world.gather_numbers(measured)
        fraction = self.share.fraction()
        if fraction is None:
            return Averaged(None, has_gradients=False, measurements=None)
        started_s = time.perf_counter()
        self._normalise()
        summed = self.averager.average(fraction, requests)
        if summed is not None and summed.device.type == "cpu" and marks_differ(summed.tolist()):  # on a GPU found later
            self._together.check_calls()
        broadcast(self._free_buffers(), self._world)
        self.averager.replace()  # last: nothing after it can fail and be repeated
        self._sync_ms = (time.perf_counter() - started_s) * 1000
        self._progress.add_span(timeline.WAIT_ROUND, started_s, self._progress.num_steps)
        self._learn(measurements)
        return Averaged(summed, has_gradients=True, measurements=measurements)

    def close(self) -> None:
        """Nothing is compared any more; the averager's hooks are removed."""
        self.comparison.close()
        _steppers.discard(self)
        self._others.close()
        self._leftovers.close()
        self._summed_loss.close()
        self.averager.close()

    def _free_buffers(self) -> list[torch.Tensor]:
        """The buffers that may be written when the present optimizers are stepped, since no live graph needs them."""
        keys = self.averager.averaged
        others = [key for key in self._optimizers.by_key if key not in keys]
        parameters_of = self._optimizers.parameters_of
        return buffers_beside(self._model, parameters_of(keys), parameters_of(others))

    def _learn(self, measurements: list[list[float]] | None) -> None:
        if measurements is not None and self.share.plan is not None:
            self.planner.learn(self.share.plan, measurements)

    def _follow_members(self) -> None:
        """Removes ranks that have died from the plan: their part of this step is trained later, by others."""
        if self.planner.members != self._world.members:
            self.planner = self.planner.keep(self._world.members)
            self.share.keep()

    def _give(self, averaged: Averaged) -> dict[str, Any]:
        """This rank's last step, for a rank that has not averaged it: the model after the step if this rank has applied
        it, else the averaged gradients. All ranks must end with the same model, and the step cannot be averaged again.
        """
        requests = averaged.requests.tolist() if averaged.requests is not None else None
        given: dict[str, Any] = {
            "requests": requests,
            "told": averaged.measurements,
            "has_gradients": averaged.has_gradients,
        }
        if self._is_finished:
            given["model"] = [*self._tensors()]
            given["optimizers"], given["stepped"] = self._optimizers.moments(), self._optimizers.names(self._model)
        else:
            given["gradients"] = [packed(parameter.grad) for parameter in self._averaged_parameters()]
        return given

    def _take(self, given: dict[str, Any]) -> Averaged:
        """Takes in another rank's `_give`: averaged gradients, or model and optimizer states, which `finish` adopts."""
        stepped = self._averaged_parameters()
        if "model" in given:
            self._adopted = given
            for parameter in stepped:
                if parameter.grad is not None:  # a loop that steps by itself makes a step of zeros, before `_adopt`
                    parameter.grad.zero_()
        else:
            for parameter, gradient in zip(stepped, given["gradients"], strict=True):
                parameter.grad = unpacked(gradient)
        self._learn(given["told"])
        requests = torch.tensor(given["requests"]) if given["requests"] is not None else None
        return Averaged(requests, given["has_gradients"], given["told"])

    @torch.no_grad()
    def _adopt(self) -> None:
        """Replaces model and optimizer states by those of a rank that has made this step."""
        given, self._adopted = self._adopted, None
        for own, other in zip(self._tensors(), given["model"], strict=True):
            own.copy_(other)
        self._optimizers.set_moments(given["optimizers"], given["stepped"], self._optimizers.names(self._model))

    def _averaged_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged, in the model's order: an optimizer's may differ among ranks, and
        the order of a sum changes its last bits.
        """
        averaged = set(self._optimizers.parameters_of(self.averager.averaged))
        return [one for one in self._model.parameters() if one in averaged]

    def _tensors(self) -> list[torch.Tensor]:
        parameters = [*self._model.parameters()]
        return [one.detach() for one in (*parameters, *buffers_beside(self._model, parameters, []))]

    def apply(self) -> None:
        """Clips the averaged gradients and steps their optimizers; does nothing if no rank had samples."""
        if not self._has_gradients:
            return
        if self._config.max_grad_norm is not None and not self._has_cadence:
            clip_norm(self._averaged_parameters(), self._config.max_grad_norm)
        for key in self.averager.averaged:
            check_unscaled(self._optimizers.by_key[key])
            make_step(self._optimizers.by_key[key])

    def finish(self) -> None:
        """Counts the step, clears its gradients, and begins the next one."""
        if self._adopted is not None:
            self._adopt()
        forget_noted()
        self._warn_of_stretched_batch()
        self._is_finished, self._num_stepped = True, self.num_given
        self._progress.add_step(
            self.share.plan,
            self._world.number,
            self.share.samples,
            self._batch_ms,
            self._sync_ms,
            is_same_batch=self.share.is_same_batch,
        )
        stepped = self.averager.averaged
        self._begin_step(stepped, keeps_batches=len(stepped) < len(self._optimizers.by_key))
        self._leftovers.note_step(stepped)
        self.report()

    def report(self, *, is_last: bool = False) -> None:
        """Reports the loop's progress to the coordinator, at most once per interval."""
        anchor = self.el_che.el_che.anchor if self.el_che is not None else 1
        learning_rate = self._optimizers.first.param_groups[0].get("lr")  # not every optimizer has one
        self._progress.report(anchor, None if learning_rate is None else float(learning_rate), is_last=is_last)

    def _begin_step(self, stepped: Sequence[Key] = (), *, keeps_batches: bool = False) -> None:
        """Resets per-step state. Where some of several optimizers were stepped, gradients of the others stay."""
        if stepped and keeps_batches:
            for parameter in self._optimizers.parameters_of(stepped):
                parameter.grad = None
        else:
            self._model.zero_grad(set_to_none=True)
        self._has_gradients = True
        self.share.begin_step()
        self._forward.begin_step()
        self.averager.begin_step()
        self._weigh()

    def _weigh(self) -> None:
        """Sets the weight of the next gradients if it is known before backward, so that they can be sent during it."""
        is_known = self.share.samples is None and self.el_che is None
        self.averager.weigh(self.share.planned_fraction() if is_known else None)

    def _take_times(self) -> list[float]:
        """Times in ms of batches that have ended, or of the whole step on the host in a loop over its own loader."""
        if self.share.plan is None:
            return [] if self.share.is_same_batch else self.clock.take_step_ms()
        times = self.clock.take_batch_ms(waits=self.el_che is not None)
        if self._world.size == 1:
            self.clock.forget_sizes()
        if self._config.timeline:
            for started_s, ended_s in self.clock.take_intervals():
                self._progress.attachment.add_span(timeline.BATCH, started_s, ended_s, self._progress.epoch)
        return times

    @property
    def _has_cadence(self) -> bool:
        """True if El Che chose this step's number of batches; not in a loop over its own loader."""
        return self.el_che is not None and self.share.known is not None

    def _measure(self) -> list[float] | None:
        """This rank's measurements for all ranks to exchange; None if the planner needs none now."""
        if self.share.plan is None or self._world.size == 1:
            return None
        timed = self.clock.take_sizes(self._batch_ms)
        return self.planner.measure(self.share.plan, timed, self._sync_ms)

    def _normalise(self) -> None:
        """Divides accumulated gradients by their number of batches. Under El Che each rank's sum is clipped before.
        Idempotent within a step, since averaging is repeated after the loss of a rank.
        """
        if self._is_normalised:
            return
        self._is_normalised = True
        if self._has_cadence and self._config.max_grad_norm is not None:
            clip_norm(self._averaged_parameters(), self._config.max_grad_norm)
        self._forward.divide_gradients()

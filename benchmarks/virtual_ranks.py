"""Trains a job on ranks in the simulator's virtual time alone: real batches, and rounds as elche would make them.

The coordinator's core decides on leases and rounds as in a real run; a rank's batch takes as long as is said, and costs
only its computation here. So four unequal ranks take no longer than one device, nothing depends on how busy the machine
is, and a run is repeated bit for bit. What it leaves out: NCCL, gloo and replica groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from random import Random
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset
from virtual_means import ByWork, Ema, apart

from elche.extent import Extent
from elche.settings import BLOCKING_ANCHOR, OVERLAPPED_ANCHOR, AgreedSettings
from elche_coordinator.core.messages.events import Event, ResultReceived
from elche_coordinator.core.messages.ids import RoundId
from elche_coordinator.core.messages.spec import HeaderRow
from elche_coordinator.simulator.collective import Parameters, RoundEntry
from elche_coordinator.simulator.simulation import RankModel, Simulation
from elche_coordinator.simulator.synthetic import SyntheticRank
from elche_worker import Progress, TrainingJob
from elche_worker.collectives.codecs import BLOCK, CODECS
from elche_worker.collectives.gains import (
    Rows,
    Spread,
    gain_part,
    most_gain,
    moved_by_all,
)
from elche_worker.collectives.header import AveragingOptions
from elche_worker.collectives.outliers import StepWatch
from elche_worker.data.dataset import AsItIs, Shuffled
from elche_worker.device.rng import seed_all
from elche_worker.model.bounds import BoundsWatch, bounds_of
from elche_worker.model.layout import STATISTIC
from elche_worker.model.step import Built, merge_of
from elche_worker.outer import Average, OuterOptimizer

FAST_MS = 20.0
MOMENTS = ("exp_avg", "exp_avg_sq")
SYNC_MS = 5.0


@dataclass(frozen=True, slots=True)
class Course:
    """How far a training has come, after a round."""

    fraction: float
    """Of its samples."""
    factor: float
    """Of the learning rate."""
    divergences: tuple[float, ...]
    """Of the rounds so far: the relative distance of the fast rank from the result."""
    anchor: int
    """Of the last round."""


Schedule = Callable[[Course], int]
"""The anchor of the rounds to come."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How ranks are averaged; by default as in elche."""

    averaging: str = "overlapped"
    policy: str = "cadence"
    outer: OuterOptimizer | ByWork = field(default_factory=Average)
    ema: float = 0.0
    """Decay of an average over rounds, which is what is evaluated."""
    optimizer_state: str = "local"
    """Or "averaged", and corrected as parameters are; or "replaced" by the result."""
    moments: tuple[str, ...] = MOMENTS
    """Which of them."""
    lr_scale_ratio: float = 0.0
    weighting: str = "auto"
    merge: str = "auto"
    """As elche chooses, or "adascale", or "mean", or directions and norms "apart", by rows or of the "whole"."""
    gain_part: float | None = None
    """Part of the gains above 1 that rounds take; None: as elche does."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the coordinator."""
    compress: str | None = None
    forgets: int = 0
    """Rounds after each of which compression has lost its errors, as by a resume; 0: it never does."""
    outliers: str = "skip"
    """What is done with steps that are far longer than a rank's steps before: left out, or "keep"."""
    faults: float = 0.0
    """How likely a batch of the second rank begins with a wrong number: one of its parameters is 1e4 times what it was.
    """
    schedule: Schedule | None = None
    """The anchor by the course of the training; None: as the coordinator has it."""

    def part_of_gain(self, merge: str, most: float) -> float:
        """Part of a gain above 1, of which `most` is the largest."""
        if self.gain_part is not None:
            return self.gain_part
        return gain_part(merge, most, overlaps=self.averaging == "overlapped")


@dataclass(frozen=True, slots=True)
class Point:
    """A result on the way."""

    at_s: float
    """Virtual time since training began."""
    samples: int
    metrics: dict[str, float]
    num_left_out: int = 0
    """How often a rank was left out of a round until then."""


class InShards(TensorDataset):
    """Samples in parts that are read in order, such as files: `elche_worker.Shards`, with all samples at hand."""

    def __init__(self, sizes: Sequence[int], *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.sizes = tuple(sizes)


class ModelParts:
    """What rounds do with the tensors of a model, by the setting `buffers`."""

    def __init__(self, model: torch.nn.Module, buffers: str) -> None:
        self.trained = [one for one in model.parameters() if one.requires_grad]
        of_model = [] if buffers == "local" else list(model.named_buffers())
        is_averaged = [buffers == "average" and name.rpartition(".")[2].startswith(STATISTIC) for name, _ in of_model]
        self.statistics = [one for (_, one), is_so in zip(of_model, is_averaged, strict=True) if is_so]
        """Averaged, too."""
        sent = [one for (_, one), is_so in zip(of_model, is_averaged, strict=True) if not is_so]
        self.sent = [*(one for one in model.parameters() if not one.requires_grad), *sent]
        """What all take from the source."""
        self.own = [one for _, one in model.named_buffers()] if buffers == "local" else []
        """What stays as it is on each rank; a result is evaluated with that of the first."""

    @property
    def num_trained(self) -> int:
        return sum(one.numel() for one in self.trained)

    def set_trained(self, values: torch.Tensor) -> None:
        vector_to_parameters(values.clone(), self.trained)  # a copy, else ranks share their storage

    def copies(self) -> list[torch.Tensor]:
        """Of what is not averaged."""
        return [one.detach().clone() for one in (*self.sent, *self.own)]

    @torch.no_grad()
    def take(self, copies: Sequence[torch.Tensor], *, with_own: bool) -> None:
        """Sets what is not averaged to `copies` of another rank."""
        num = len(copies) if with_own else len(self.sent)
        for one, copy in zip((*self.sent, *self.own)[:num], copies[:num], strict=True):
            one.copy_(copy)


def copy_flat(tensors: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Copies flat values to the tensors, one after the other."""
    at = 0
    with torch.no_grad():
        for one in tensors:
            one.copy_(values[at : at + one.numel()].view(one.shape))
            at += one.numel()


class World:
    """What the ranks of one run share."""

    def __init__(self, job: TrainingJob, way: Way, *, num_ranks: int, seed: int, num_points: int) -> None:
        self.job, self.way, self.num_ranks, self.seed = job, way, num_ranks, seed
        dataset = job.dataset()
        assert isinstance(dataset, TensorDataset)
        self.tensors = dataset.tensors
        self.num_samples = len(dataset) * job.epochs
        self.shard_sizes = dataset.sizes if isinstance(dataset, InShards) else ()
        self._order = AsItIs() if self.shard_sizes else Shuffled(len(dataset), seed)
        self._indices: dict[int, list[int]] = {}
        self.points: list[Point] = []
        self._entries: dict[tuple[int, int], dict[int, tuple[HeaderRow, torch.Tensor, list[torch.Tensor]]]] = {}
        self._errors: list[torch.Tensor] = []
        self.num_left_out = 0
        self._are_out: list[bool] = []
        """Of the last round, by rank."""
        self._results: dict[tuple[int, int], torch.Tensor] = {}
        self.sent: list[torch.Tensor] = []
        """What is not averaged (`ModelParts.copies`), of the last round's source."""
        self.source = 0
        self.last: torch.Tensor | None = None
        self._moments: list[torch.Tensor] = []
        self._num_steps = 0
        self._spread: Spread | None = None
        self._bounds = [BoundsWatch() for _ in range(num_ranks)]
        self._ema = Ema(way.ema) if way.ema else None
        self._samples = 0
        self._num_points = num_points
        self._divergences: list[float] = []
        self.simulation: Simulation | None = None
        self.model = self.new_model()
        self.parts = ModelParts(self.model, job.buffers)
        assert isinstance(job.batch_size, int)
        extent = Extent(dataset_size=len(dataset), batch_size=job.batch_size, epochs=job.epochs)
        chosen = merge_of(job, Built(self.model, job.optimizer(self.model)), extent)
        self.merge = chosen if way.merge == "auto" else way.merge

    def indices(self, epoch: int) -> list[int]:
        """Of the epoch's samples, in order."""
        if epoch not in self._indices:
            self._indices[epoch] = self._order.indices(epoch, 0, len(self.tensors[0]))
        return self._indices[epoch]

    def new_model(self) -> torch.nn.Module:
        seed_all(self.seed)
        return self.job.model()

    def enter(
        self,
        key: tuple[int, int],
        rank: int,
        weight: int,
        values: torch.Tensor,
        sent: list[torch.Tensor],
        *,
        is_usual: bool,
    ) -> None:
        row = HeaderRow(weight=weight, cut=0, local_step=0, compute_us=0, unusual=not is_usual)
        self._entries.setdefault(key, {})[rank] = (row, values, sent)

    def result(self, key: tuple[int, int], num_trained: int, now_s: float) -> torch.Tensor:
        """The result of a round that all have entered; its first `num_trained` values are the parameters, the last ones
        statistics.
        """
        if key in self._results:
            return self._results[key]
        entered = sorted(self._entries.pop(key).items())
        entries = [entry for _, entry in entered]
        rows = [row for row, _, _ in entries]
        options = AveragingOptions(weighting=self.way.weighting, merge=self.merge, outliers=self.way.outliers)
        weights, are_out = [float(weight) for weight in options.weights(rows)], options.discarded(rows)
        self.num_left_out += sum(are_out)
        self.source, (_, _, self.sent) = entered[are_out.index(False) if False in are_out else 0]
        is_first = not any(weights)
        if is_first:
            weights[0] = 1.0
        shares = [weight / sum(weights) for weight in weights]
        average = torch.stack([share * values for share, (_, values, _) in zip(shares, entries, strict=True)]).sum(0)
        if self.way.compress is not None and not is_first:
            average[:num_trained] = self._small_average(shares, [values[:num_trained] for _, values, _ in entries])
        trained = average[:num_trained]
        if self.last is None:
            self.last = trained.clone()
            self._moments = [torch.zeros_like(trained) for _ in range(self.way.outer.num_moments())]
        num_samples = sum(row.weight for row in rows)
        if not is_first:
            brought = [values[:num_trained] for _, values, _ in entries]
            if self.merge in ("adascale", "rows") and len(entries) > 1:
                self._go_further(trained, weights, brought)
            elif self.merge in ("apart", "whole"):
                shapes = [(one.shape[0], one.shape[1:].numel()) for one in self.parts.trained]
                apart(trained, self.last, shares, brought, shapes if self.merge == "apart" else [(1, num_trained)])
            self._num_steps += 1
            self._outer(num_samples).step(self.last, trained, self._moments, self._num_steps)
        self.last.copy_(trained)
        self._results, self._are_out = {key: average}, are_out
        self._samples += num_samples
        exported = trained if self._ema is None else self._ema.add(trained, self._work(num_samples))
        self._note(exported, average, now_s)
        return average

    def _work(self, num_samples: int) -> float:
        """Of a round: batches of a rank at the job's learning rate."""
        batch_size = self.job.batch_size
        assert isinstance(batch_size, int)
        now = Progress(samples=self._samples, total_samples=self.num_samples, batch_size=batch_size)
        factor = self.job.schedule(now) if self.job.schedule is not None else 1.0
        return factor * num_samples / batch_size / self.num_ranks

    def _outer(self, num_samples: int) -> OuterOptimizer:
        if not isinstance(self.way.outer, ByWork):
            return self.way.outer
        to_come = (self.num_samples - self._samples) / max(num_samples, 1) - 1
        return self.way.outer.at(self._work(num_samples), to_come)

    def _small_average(self, shares: list[float], brought: list[torch.Tensor]) -> torch.Tensor:
        """The average of compressed changes, with error feedback; the last errors are those of the sum."""
        assert self.last is not None
        length, codec = len(self.last), CODECS[self.way.compress or ""]()
        padding = -length % BLOCK
        is_resumed = self.way.forgets > 0 and self._num_steps % self.way.forgets == 0
        if not self._errors or is_resumed:
            self._errors = [torch.zeros(1, length + padding) for _ in range(len(brought) + 1)]

        def sent(change: torch.Tensor, index: int) -> torch.Tensor:
            values = change + self._errors[index]
            received = codec.decode(*codec.encode(values.view(1, -1, BLOCK))).view(1, -1)
            self._errors[index] = values - received
            return received

        total = torch.zeros(1, length + padding)
        for index, (share, values) in enumerate(zip(shares, brought, strict=True)):
            if share > 0:
                total += share * sent(pad(values - self.last, (0, padding)).unsqueeze(0), index)
        return self.last + sent(total, -1).view(-1)[:length]

    def is_out(self, rank: int) -> bool:
        """Whether the rank was left out of the last round."""
        return self._are_out[rank]

    def _go_further(self, mean: torch.Tensor, weights: list[float], steps: list[torch.Tensor]) -> None:
        rows = Rows([one.shape for one in self.parts.trained])
        if self._spread is None:
            self._spread = Spread.empty(rows.num_rows, mean.device)
        assert self.last is not None
        squares = [
            rows.squares(one, self.last) * (weight / sum(weights)) for weight, one in zip(weights, steps, strict=True)
        ]
        brought = torch.stack(squares).sum(0)
        self._spread.learn()
        by_all = moved_by_all([one / weight for one, weight in zip(squares, weights, strict=True) if weight])
        of_mean = rows.squares(mean, self.last) * (brought > 0)
        self._spread.add_round(brought, of_mean, by_all, self.way.part_of_gain(self.merge, most_gain(weights)))
        said = [
            bounds.say("float32", list(rows.parts(one)), one.device)
            for bounds, one in zip(self._bounds, steps, strict=True)
        ]
        if (most := most_gain(weights)) > 1.0:
            rows.go_further(mean, self.last, self._spread.gains(most), bounds_of(torch.stack(said).sum(0)))

    def schedule_rounds(self, divergence: float) -> None:
        """Sets the anchor of the rounds to come, once for each round."""
        assert self.simulation is not None
        assert self.way.schedule is not None
        self._divergences.append(divergence)
        policy, fraction = self.simulation.training.policy, self._samples / self.num_samples
        now = Progress(
            samples=self._samples, total_samples=self.num_samples, batch_size=self.simulation.settings.batch_size
        )
        factor = self.job.schedule(now) if self.job.schedule is not None else 1.0
        anchor = self.way.schedule(Course(fraction, factor, tuple(self._divergences), policy.anchor))
        learned = policy.to_json()["el_che"]
        assert isinstance(learned, dict)
        policy.restore({"el_che": {**learned, "anchor": anchor, "floor_anchor": anchor}})

    def _note(self, trained: torch.Tensor, average: torch.Tensor, now_s: float) -> None:
        is_over = self._samples >= self.num_samples
        if is_over or self._samples * self._num_points >= (len(self.points) + 1) * self.num_samples:
            assert self.job.evaluate is not None
            self.parts.set_trained(trained)
            copy_flat(
                self.parts.statistics, average[len(average) - sum(one.numel() for one in self.parts.statistics) :]
            )
            self.parts.take(self.sent, with_own=True)
            self.model.eval()
            with torch.no_grad():
                self.points.append(Point(now_s, self._samples, dict(self.job.evaluate(self.model)), self.num_left_out))


class TrainingRank(SyntheticRank):
    """A rank of the simulator that trains a model beside the books of its samples."""

    def __init__(self, *arguments: Any, world: World, send: Callable[[Event], None], **options: Any) -> None:
        self._world = world
        super().__init__(*arguments, send=self._with_divergence(send), **options)
        self._model = world.new_model()
        self._parts = ModelParts(self._model, world.job.buffers)
        self._built = Built(self._model, world.job.optimizer(self._model))
        self._optimizers = self._built.all_optimizers
        self._scale = 1 + world.way.lr_scale_ratio * (world.num_ranks - 1)
        self._base = [group["lr"] * self._scale for group in self._groups]
        seed_all(world.seed + int(self.address["rank"]))
        self._rng = torch.get_rng_state()
        self._result_samples = self._cut = self._entered_cut = 0
        self._divergence: float | None = None
        self._snapshot = torch.empty(0)
        self._watch, self._dice = StepWatch(), Random(world.seed)
        self._was_out = False

    def _with_divergence(self, send: Callable[[Event], None]) -> Callable[[Event], None]:
        return lambda event: send(
            replace(event, divergence=self._divergence) if isinstance(event, ResultReceived) else event
        )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _moments(self) -> list[torch.Tensor]:
        if self._world.way.optimizer_state == "local":
            return []
        states = [
            optimizer.state[one]
            for one in self._parts.trained
            for optimizer in self._optimizers
            if one in optimizer.state
        ]
        return [state[name] for name in self._world.way.moments for state in states if name in state]

    def _values(self) -> torch.Tensor:
        others = [one.reshape(-1) for one in (*self._moments(), *self._parts.statistics)]
        return torch.cat([parameters_to_vector(self._parts.trained).detach(), *others])

    def _set_values(self, values: torch.Tensor) -> None:
        self._parts.set_trained(values[: self._parts.num_trained])
        copy_flat([*self._moments(), *self._parts.statistics], values[self._parts.num_trained :])

    def _finish_batch(self, duration_s: float) -> None:
        lease = self._leases[0]
        self._train(lease.epoch, lease.offset, min(self._batch_size, lease.size))
        super()._finish_batch(duration_s)

    def _train(self, epoch: int, offset: int, size: int) -> None:
        job, world = self._world.job, self._world
        now = Progress(
            samples=self._result_samples + self._processed - self._cut,
            total_samples=world.num_samples,
            batch_size=job.batch_size if isinstance(job.batch_size, int) else size,
        )
        factor = job.schedule(now) if job.schedule is not None else 1.0
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * factor
        self._fail_at_random()
        indices = world.indices(epoch)[offset : offset + size]
        self._model.train()
        batch = [one[indices] for one in world.tensors]
        with torch.random.fork_rng():
            torch.set_rng_state(self._rng)
            if job.manual_optimization:
                job.train_step(self._model, batch, self._built.optimizers)
            else:
                loss = job.train_step(self._model, batch)
                assert isinstance(loss, torch.Tensor)
                loss.backward()
            self._rng = torch.get_rng_state()
        if job.manual_optimization:
            return
        if job.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parts.trained, job.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _fail_at_random(self) -> None:
        if int(self.address["rank"]) != 1 or self._dice.random() >= self._world.way.faults:
            return
        tensors = self._parts.trained
        with torch.no_grad():
            flat = self._dice.choice(tensors).view(-1)
            flat[self._dice.randrange(len(flat))].mul_(1e4)

    def _enter(self, round_id: RoundId) -> None:
        key = (int(self._generations[round_id]), int(round_id))
        self._snapshot = self._values()
        self._entered_cut = self._processed
        last = self._world.last
        norm = nan if last is None else float((self._snapshot[: len(last)] - last).norm())
        is_usual = self._watch.is_usual(norm, self.local_step)
        sent = self._parts.copies()
        self._world.enter(key, int(self.address["rank"]), self._weight, self._snapshot, sent, is_usual=is_usual)
        super()._enter(round_id)

    def _apply(
        self,
        round_id: RoundId,
        header: tuple[HeaderRow, ...],
        result: Parameters,
        entry: RoundEntry,
        collective_s: float,
    ) -> None:
        trained = self._parts.num_trained
        key = (int(entry.generation), int(round_id))
        values = self._world.result(key, trained, self.clock.now_s)
        change = values - self._snapshot
        self._divergence = float(change[:trained].norm() / values[:trained].norm())
        rank = int(self.address["rank"])
        is_out = self._world.is_out(rank)
        self._watch.learn(is_averaged=not is_out)
        if is_out:  # a rank waits for such a result; if it comes again, its moments are spoilt
            for optimizer in self._optimizers if self._was_out else ():
                optimizer.state.clear()
            self._set_values(values)
        else:
            corrected = values if self.local_step == entry.row.local_step else self._values() + change
            is_replaced = self._world.way.optimizer_state == "replaced"
            kept = trained if is_replaced else len(values) - sum(one.numel() for one in self._parts.statistics)
            self._set_values(torch.cat([corrected[:kept], values[kept:]]))
        has_newer = self.local_step != entry.row.local_step and not is_out
        if rank != self._world.source or not has_newer:
            self._parts.take(self._world.sent, with_own=False)
        self._was_out = is_out
        self._cut = self._entered_cut
        self._result_samples += sum(row.weight for row in header)
        if self._world.way.schedule is not None and rank == 0:
            self._world.schedule_rounds(self._divergence)
        super()._apply(round_id, header, result, entry, collective_s)


def train(job: TrainingJob, way: Way, speeds: list[float], *, seed: int, num_points: int = 10) -> list[Point]:
    """One run on ranks that are so many times slower than the fast one; the results on the way, the last one last."""
    world = World(job, way, num_ranks=len(speeds), seed=seed, num_points=num_points)
    settings = AgreedSettings(
        **{
            "epochs": job.epochs,
            "batch_size": job.batch_size,
            "seed": seed,
            "dataset_size": len(world.tensors[0]),
            "shard_sizes": world.shard_sizes,
            "averaging": way.averaging,
            "anchor": OVERLAPPED_ANCHOR if way.averaging == "overlapped" else BLOCKING_ANCHOR,
            "policy": way.policy,
            "on_rank_loss": "continue",
            **way.settings,
        }
    )
    simulation = Simulation(
        settings=settings,
        ranks=[RankModel(batch_ms=FAST_MS * speed, jitter_fraction=0.02) for speed in speeds],
        sync_ms=SYNC_MS,
        seed=seed,
        check=False,
        new_rank=lambda *arguments, **options: TrainingRank(*arguments, world=world, **options),
    )
    world.simulation = simulation
    result = simulation.run()
    assert not result.error, result.error
    return world.points

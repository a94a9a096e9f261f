"""The computation of a round's result: the average, compressed or not, and the outer step on it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import nan
from typing import Any, cast

import torch

from elche_worker.collectives.codecs import CODECS, Codec
from elche_worker.collectives.compression import Compression
from elche_worker.collectives.gains import (
    SQUARES,
    Rows,
    Spread,
    gain_part,
    mean_squares,
    most_gain,
)
from elche_worker.collectives.header import AveragingOptions, Row, check_together
from elche_worker.collectives.levels import LevelChoice, codec_of, level_of
from elche_worker.collectives.operations import CollectiveFailed, Collectives, ValueCollectives
from elche_worker.collectives.outer_state import OuterState
from elche_worker.collectives.staged import where
from elche_worker.model.bounds import Bounds, BoundsWatch, bounds_of
from elche_worker.model.layout import Kind, Layout
from elche_worker.model.tensors import Piece, local_of, placed
from elche_worker.outer import Average
from elche_worker.user.events import record_event


@dataclass(frozen=True, slots=True)
class AverageResult:
    """The outcome of a collective. The averaged values are in the layout's flat buffers."""

    rows: list[Row]
    """The header, in order of position."""
    broadcast_bytes: torch.Tensor
    """The source's bytes: buffers that are not averaged, and frozen parameters where they differed."""
    collective_ms: float
    """Time from entry to result."""
    sent_bytes: int = 0
    """Payload sent by this rank."""
    distance: tuple[float, float] | None = None
    """L2 norms over trained parameters: of (rank's values - result), and of the result. None when not measured."""
    is_discarded: bool = False
    """True if this rank's values were left out of the average (`nonfinite="skip"`, `outliers="skip"`)."""
    is_finite: bool = True
    """True if this rank's values were finite."""
    state: bytes = b""
    """The source's state besides the model, for a rank that joins; empty on other ranks."""
    is_source: bool = False
    """True if `broadcast_bytes` are this rank's."""
    level: int = 0
    """With `compress="auto"`, the level of compression that the source has set."""

    @property
    def version(self) -> int:
        """The result's version, if the round commits."""
        return max(row.version for row in self.rows) + 1

    @property
    def samples(self) -> int:
        """Samples of all ranks in this result: those in the newest version, and those that the ranks add. Equal on
        every rank, and unaffected by ranks that have died or just joined, so that schedules can depend on it.
        """
        newest = max(self.rows, key=lambda row: row.version)
        return newest.samples + sum(row.weight for row in self.rows)

    @property
    def divergence(self) -> float | None:
        """L2 distance of the rank's values from the result, relative to the result's norm: 0 if the norm is at most
        1e-10, NaN if the values are not finite, None if not measured.
        """
        if self.distance is None:
            return None
        changed, size = self.distance
        return 0.0 if size <= 1e-10 else changed / size


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that the source broadcasts: buffers that are not averaged, and frozen parameters where ranks differ."""

    buffers: torch.Tensor
    frozen_digest: int
    frozen: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, layout: Layout) -> "Sent":
        """From copies of the layout's tensors as they are now."""
        frozen = layout.frozen_bytes()
        return cls(layout.buffer_bytes(), layout.frozen_digest(), lambda: frozen)

    @classmethod
    def lazily(cls, layout: Layout, copies: Mapping[str, torch.Tensor] | None = None) -> "Sent":
        """Reads the frozen parameters only when they are sent, which is seldom: they may be large."""
        return cls(layout.buffer_bytes(copies), layout.frozen_digest(), layout.frozen_bytes)


@dataclass(frozen=True, slots=True)
class Handed:
    """State besides the model that ranks which join receive from the source."""

    memories: dict[Kind, OuterState]
    """Empty unless a rank has joined."""
    state: bytes
    """The argument of `Averaging.start` on the source; empty on ranks that have not just joined."""


@dataclass(frozen=True, slots=True)
class SpreadOfRound:
    """The ranks' figures on a round's steps, summed over the ranks, for merges other than "mean"."""

    most_gain: float
    """Upper bound of all gains, by the ranks' weights: the number of ranks, if all have the same weight."""
    squares: Sequence[torch.Tensor]
    """Of each kind the mean of the squared norms of the ranks' steps, by row."""
    by_all: Sequence[torch.Tensor]
    """Of each kind True for rows that all ranks with weight have moved."""
    bounds: Sequence[Bounds]
    """Of each kind the bounds that any rank sees."""


class Reduction:
    """Computes the result of a round: the average, compressed or not, and the outer step on it."""

    def __init__(self, layout: Layout, options: AveragingOptions, *, agree: Callable[[bool], bool] = bool) -> None:
        """`agree` returns True if all processes of the rank have a round's result: all take it, or none."""
        self._agree = agree
        self._layout = layout
        self._options = options
        self._memories: dict[Kind, OuterState] = {}
        self._loaded: dict[Kind, Mapping[str, Any]] = {}
        """Memories of a checkpoint, kept until the first round, in which all ranks have the last result."""
        self._loaded_mean: Mapping[str, torch.Tensor] = {}
        """The moving average (`ema`) of the checkpoint, by name."""
        self._compression: Compression | None = None
        self._unsent: list[Compression] = []
        """Compression of earlier generations, whose errors this rank has still to send. The present one cannot take
        them over: which rank sums which part of the values differs between generations.
        """
        self._sends_unsent = False
        """True if the round in progress sends the errors in `_unsent`."""
        self._watch = BoundsWatch()
        self.bounds: dict[Kind, Bounds] = {}
        """Of each kind the bounds of trained parameters in the latest round; empty where rounds make only the mean."""
        self.has_header = False
        """True if the latest round's header was received."""
        self._header_s = 0.0
        """Time at which it was, by `time.perf_counter`."""
        self._choice = LevelChoice() if options.compress == "auto" else None

    @property
    def _merges_by_rows(self) -> bool:
        return self._options.merge != "mean"

    @property
    def _has_memory(self) -> bool:
        options = self._options
        return self.has_outer_step or options.compress is not None or self._merges_by_rows or options.decay is not None

    @property
    def num_copies(self) -> int:
        """Values that it holds at most for each averaged value."""
        num_errors = 0 if self._options.compress is None else 3  # with two ranks; with more ranks it is less
        return num_errors + (1 + self._options.outer.num_moments() if self._has_memory else 0)

    @torch.no_grad()
    def step_norm(self) -> float:
        """L2 norm of the step from the last result to the values in the flat buffers, for a sharded model of this
        process's part; NaN while there is no last result, or none is kept.
        """
        squares = []
        for kind, memory in self._memories.items():
            trained = self._layout.flat_buffers[kind][: self._layout.num_trained(kind)]
            sizes = [entry.size for entry in self._layout.trained(kind)]
            parts = zip(torch.split(trained, sizes), torch.split(memory.last.to(trained.device), sizes), strict=True)
            squares += [torch.linalg.vector_norm(part - last).double() ** 2 for part, last in parts]
        return float(torch.stack(squares).sum().sqrt()) if squares else nan

    @property
    def has_outer_step(self) -> bool:
        """True if an outer optimizer changes the average."""
        return not isinstance(self._options.outer, Average)

    @property
    def follows_one(self) -> bool:
        """True if a round of a single rank changes kept state: an outer optimizer's, or a moving average."""
        return self.has_outer_step or self._options.decay is not None

    def run(self, group: Collectives, row: Row, sent: Sent | None = None, state: bytes = b"") -> AverageResult:
        """Runs a round on the layout's flat buffers; `state` goes to ranks that join.

        Raises `CollectiveFailed`, `RoundAborted` or `RanksDiffer`; memory and model are then unchanged.
        """
        started_s, sent_bytes = time.perf_counter(), group.sent_bytes
        sent = sent or Sent.lazily(self._layout)
        try:
            row = replace(row, frozen=sent.frozen_digest)
            if self._choice is not None and not row.level:  # a replay has the level of the recorded round
                row = replace(row, level=self._choice.level)
            rows, handed, spread, is_first, raw = self._collect(group, row, sent, state)
        except Exception:
            self._agree(False)  # `_agree` is collective: the others of the replica group wait in it
            raise
        if not self._agree(True):
            raise CollectiveFailed("another process of this replica group did not get its part of the result")
        # From here on nothing can fail: kept state changes only once every process has the whole result.
        # Before the step: a newcomer makes it from what it has just received, as the others from what they had.
        self._memories.update(handed.memories)
        self._step(spread, is_first=is_first, num_samples=sum(one.weight for one in rows))
        ended_s = time.perf_counter()
        is_source = group.position == self._options.source(rows)
        is_exact = is_first or _has_newcomers(rows)
        level = self._learn_level(rows, ended_s - self._header_s, is_exact=is_exact, is_source=is_source)
        elapsed_ms = (ended_s - started_s) * 1000
        is_out, is_finite = self._options.discarded(rows)[group.position], bool(rows[group.position].finite)
        sent_bytes = group.sent_bytes - sent_bytes
        return AverageResult(rows, raw, elapsed_ms, sent_bytes, None, is_out, is_finite, handed.state, is_source, level)

    def of_one(self, row: Row, elapsed_ms: float) -> AverageResult:
        """The result of a rank alone, its own values; only where not `follows_one`. Keeps no last result: the next step
        with others begins at the rank's values of that time. Gains and compression errors stay.
        """
        self._loaded |= self._kept()
        self._memories = {}
        is_out = self._options.discarded([row])[0]
        nothing = torch.empty(0, dtype=torch.uint8)
        return AverageResult([row], nothing, elapsed_ms, is_discarded=is_out, is_finite=bool(row.finite))

    def _collect(
        self, group: Collectives, row: Row, sent: Sent, state: bytes
    ) -> tuple[list[Row], Handed, SpreadOfRound | None, bool, torch.Tensor]:
        """Runs a round's collectives. Returns the header's rows, what newcomers receive, the report on the steps, True
        if no rank brought samples, and the source's bytes.
        """
        self.has_header = False
        group.begin(row.round)
        rows = [Row(*tensor.tolist()) for tensor in group.all_gather(torch.tensor(astuple(row)))]
        self.has_header, self._header_s = True, time.perf_counter()
        # Before any value is sent: with tensors of different sizes NCCL's next collective would hang, or corrupt data.
        check_together(rows)
        source = self._options.source(rows)
        weights = self._options.weights(rows)
        is_first = not any(weights)
        handed = Handed({}, b"")
        spread: SpreadOfRound | None = None
        raw = sent.buffers
        if is_first:
            weights[source] = 1  # without samples anywhere, as in the first round, the result is the source's model
        if group.size > 1:
            values = where(group, self._layout.device)
            # Before the steps are measured: what was not sent yet is a part of this rank's step.
            self._send_unsent(group, 0.0 if is_first else weights[group.position] / sum(weights))
            if self._merges_by_rows and not is_first:
                spread = self._exchange_spread(values, weights)
            has_newcomers = _has_newcomers(rows)
            # Compression sends differences from the last result, which newcomers do not have.
            self._average(values, weights, None if is_first or has_newcomers else self._codec(rows[source].level))
            if any(one.frozen != rows[source].frozen for one in rows):
                raw = torch.cat([raw, sent.frozen()])
            if raw.numel():
                values.broadcast(raw, source)
            if has_newcomers:
                given = self._handed_state(values, source, state)
                is_new = row.version != rows[source].version
                handed = Handed(self._handed_memories(values, source), given if is_new else b"")
        group.finish()
        return rows, handed, spread, is_first, raw

    def _codec(self, wanted: int) -> Codec | None:
        """The codec of a round whose source has set this level; None: nothing is compressed."""
        compress = self._options.compress
        if compress is None:
            return None
        return CODECS[compress]() if self._choice is None else codec_of(level_of(wanted))

    def _learn_level(self, rows: Sequence[Row], averaging_s: float, *, is_exact: bool, is_source: bool) -> int:
        """The round's level; 0 if none is chosen. Learns which the next one should have; the source says why."""
        if self._choice is None or len(rows) < 2:
            return 0
        level = level_of(rows[self._options.source(rows)].level)
        why = self._choice.learn(level, rows, self._header_s, averaging_s, is_exact=is_exact)
        # Each rank has measured times of its own, and the source's choice alone counts.
        if why and is_source:
            record_event(why)
        return level

    def _average(self, group: ValueCollectives, weights: list[int], codec: Codec | None) -> None:
        """Averages the flat buffers over the ranks, in place."""
        own, total = weights[group.position], float(sum(weights))
        for kind, flat in self._layout.flat_buffers.items():
            num_small = self._layout.num_trained(kind) if codec is not None and kind == "float32" else 0
            if codec is not None and num_small:
                self._average_small(group, flat[:num_small], [weight / total for weight in weights], codec)
            exact = flat[num_small:]
            if exact.numel():
                exact.mul_(own) if own else exact.zero_()  # not `mul_(0)`: NaN and infinity times 0 are NaN
                group.all_reduce(exact)
                # By a tensor: CUDA multiplies by the reciprocal of a Python number, which rounds otherwise than a CPU's
                # division.
                exact.div_(torch.full((), total, dtype=exact.dtype, device=exact.device))

    def _send_unsent(self, group: Collectives, fraction: float) -> None:
        """Adds the compression errors of earlier generations to this rank's values. `fraction` is its weight in the
        average; with 0 the values would be lost, so the errors stay for a later round.
        """
        compression = self._compression
        if compression is not None and compression.generation != group.generation:
            self._unsent.append(compression)
            self._compression = None
        self._sends_unsent = fraction > 0
        if self._unsent and self._sends_unsent:
            flat = self._layout.flat_buffers["float32"]
            for one in self._unsent:
                one.add_unsent(flat[: self._layout.num_trained("float32")], fraction)

    def _average_small(self, group: ValueCollectives, flat: torch.Tensor, fractions: list[float], codec: Codec) -> None:
        last = self._memory("float32", flat).last
        if self._compression is None:
            self._compression = Compression(flat.numel(), group)
        flat.sub_(last)
        self._compression.average(flat, fractions, group, codec=codec)
        flat.add_(last)

    def _exchange_spread(self, group: ValueCollectives, weights: list[int]) -> SpreadOfRound:
        """Sums over the ranks, of each row, the squared norms of the steps, by the ranks' weights; and the bounds."""
        squares, bounds = [], []
        for kind, flat in self._layout.flat_buffers.items():
            trained = flat[: self._layout.num_trained(kind)]
            squares.append(self._rows(kind).squares(trained, self._memory(kind, trained).last))
            seen = self._watch.say(kind, list(self._rows(kind).parts(trained)), trained.device)
            bounds.append(seen if weights[group.position] else torch.zeros_like(seen))
        mean, by_all = mean_squares(torch.cat(squares), [weight / sum(weights) for weight in weights], group)
        seen = torch.cat(bounds)
        if seen.numel():
            group.all_reduce(seen)
        sizes = [len(one) for one in squares]
        found = [bounds_of(one) for one in torch.split(seen, [len(one) for one in bounds])]
        self.bounds = dict(zip(self._layout.flat_buffers, found, strict=True))
        return SpreadOfRound(most_gain(weights), torch.split(mean, sizes), torch.split(by_all, sizes), found)

    def _go_further(self, kind: Kind, trained: torch.Tensor, memory: OuterState, spread: SpreadOfRound) -> None:
        """Multiplies the ranks' mean step, which is in `trained`, by each row's gain."""
        rows, at = self._rows(kind), list(self._layout.flat_buffers).index(kind)
        memory.spread.learn()
        moved = spread.squares[at] > 0  # where no rank moved, the mean differs from the last result by rounding only
        of_mean = rows.squares_alike(trained, memory.last) * moved
        part = gain_part(self._options.merge, spread.most_gain, overlaps=self._options.overlaps)
        memory.spread.add_round(spread.squares[at].clone(), of_mean, spread.by_all[at], part)
        if spread.most_gain > 1.0:
            gains = memory.spread.gains(spread.most_gain)
            rows.go_further(trained, memory.last, gains, spread.bounds[at])

    def _rows(self, kind: Kind) -> Rows:
        return Rows([entry.shape for entry in self._layout.trained(kind)])

    def _step(self, spread: SpreadOfRound | None, *, is_first: bool, num_samples: int) -> None:
        """Commits the compression errors, and makes the outer step (if there was work) and the moving average."""
        outer = self._options.outer
        if self._compression is not None:
            self._compression.commit()
        if self._sends_unsent:
            self._unsent.clear()
        if not self._has_memory:
            return
        for kind, flat in self._layout.flat_buffers.items():
            trained = flat[: self._layout.num_trained(kind)]
            memory = self._memory(kind, trained)
            if not is_first:
                if spread is not None:
                    self._go_further(kind, trained, memory, spread)
                if self.has_outer_step:
                    memory.num_steps += 1
                    outer.step(memory.last, trained, memory.moments, int(memory.num_steps))
            memory.last.copy_(trained)
            if self._options.decay is not None:
                mean, weights = (self._layout.weights(kind, one) for one in (memory.mean, flat))
                self._options.decay.move(mean, weights, num_samples)

    def _memory(self, kind: Kind, trained: torch.Tensor) -> OuterState:
        if kind not in self._memories:
            self._memories[kind] = self._new_memory(kind, trained)
        memory = self._memories[kind]
        if memory.last.device != trained.device:  # of a group that averaged elsewhere
            memory = self._memories[kind] = memory.to(trained.device)
        return memory

    def mean(self) -> dict[str, torch.Tensor]:
        """The moving average of the weights by name, as views, after the last result; empty if the job has none."""
        if self._options.decay is None:
            return {}
        kinds = self._memories.items()
        return {name: view for kind, one in kinds for name, view in self._layout.weights(kind, one.mean).items()}

    def _new_mean(self, kind: Kind) -> torch.Tensor:
        """A new moving average: the checkpoint's, else the weights."""
        flat = self._layout.flat_buffers[kind]
        weights = self._layout.weights(kind, flat) if self._options.decay else {}
        parts = [self._loaded_mean.get(name, view).to(flat).reshape(-1) for name, view in weights.items()]
        return torch.cat(parts) if parts else flat.new_empty(0)

    def _new_memory(self, kind: Kind, trained: torch.Tensor) -> OuterState:
        spread = Spread.empty(self._rows(kind).num_rows if self._merges_by_rows else 0, trained.device)
        mean = self._new_mean(kind)
        if kind not in self._loaded:
            moments = [torch.zeros_like(trained) for _ in range(self._options.outer.num_moments())]
            num_steps = torch.zeros((), dtype=torch.int64, device=trained.device)
            return OuterState(trained.clone(), moments, num_steps, spread, mean)
        loaded = self._loaded.pop(kind)
        moments = [self._restored(kind, one) for one in loaded["moments"]]
        kept = loaded.get("spread")
        if kept and len(kept[0]) == len(spread.of_steps):  # else of a job that merged otherwise
            spread = Spread(*kept).each(lambda one: one.to(SQUARES))  # older checkpoints have float32
        return OuterState(trained.clone(), moments, loaded["num_steps"], spread, mean).to(trained.device)

    def memories(self) -> dict[str, Mapping[str, Any]]:
        """Checkpoint state of all memories, without the last result, which is the model."""
        return {str(kind): memory for kind, memory in (self._loaded | self._kept()).items()}

    def _kept(self) -> dict[Kind, Mapping[str, Any]]:
        return {
            kind: {
                "moments": [self._stored(kind, one) for one in memory.moments],
                "num_steps": memory.num_steps,
                # A process of a sharded model has the sums of its own rows only, and of what is not divided into
                # pieces the leader's are written. So a resumed job measures them anew.
                "spread": [] if self._layout.is_divided else memory.spread.tensors(),
            }
            for kind, memory in self._memories.items()
        }

    def _stored(self, kind: Kind, flat: torch.Tensor) -> torch.Tensor | list[Piece]:
        """A flat tensor; for a sharded model one piece per parameter, so that groups of other sizes can read it."""
        entries = self._layout.trained(kind)
        if not self._layout.is_divided or not entries:
            return flat
        parts = torch.split(flat, [entry.size for entry in entries])
        return [Piece.of(entry.find(), part.view(entry.shape)) for entry, part in zip(entries, parts, strict=True)]

    def restore(self, memories: Mapping[str, Mapping[str, Any]], mean: Mapping[str, torch.Tensor]) -> None:
        """Restores the memories of a checkpoint, and its average of the weights; empty if it has none."""
        self._memories, self._loaded_mean = {}, mean
        self._loaded = {cast(Kind, kind): memory for kind, memory in memories.items()}

    def _restored(self, kind: Kind, kept: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        """The inverse of `_stored`: this process's part, of a whole model or of a group of any size."""
        entries = self._layout.trained(kind)
        if isinstance(kept, torch.Tensor):
            if not self._layout.is_divided or not entries:
                return kept
            wholes = [entry.shape if entry.whole is None else entry.whole for entry in entries]
            parts = torch.split(kept, [whole.numel() for whole in wholes])
            kept = [part.view(whole) for part, whole in zip(parts, wholes, strict=True)]
        own = [local_of(placed(one, entry.find())) for one, entry in zip(kept, entries, strict=True)]
        return torch.cat([one.reshape(-1) for one in own])

    def _handed_state(self, group: ValueCollectives, source: int, state: bytes) -> bytes:
        """Broadcasts the source's state and returns it."""
        size = torch.full((1,), len(state), dtype=torch.int64, device=self._layout.device)
        group.broadcast(size, source)
        own = bytearray(state) if group.position == source else bytearray(int(size))
        if not own:
            return b""
        given = torch.frombuffer(own, dtype=torch.uint8).to(self._layout.device)
        group.broadcast(given, source)
        return given.cpu().numpy().tobytes()

    def _handed_memories(self, group: ValueCollectives, source: int) -> dict[Kind, OuterState]:
        """Broadcasts the source's memories as they were before the step, for ranks with another version."""
        handed: dict[Kind, OuterState] = {}
        if not self._has_memory:
            return handed
        for kind, flat in self._layout.flat_buffers.items():
            memory = self._memory(kind, flat[: self._layout.num_trained(kind)])
            if group.position != source:  # a copy: the round may yet fail, and must then leave the kept state as it was
                memory = memory.clone()
            for tensor in memory.tensors():
                if tensor.numel():
                    group.broadcast(tensor, source)
            handed[kind] = memory
        return handed


def _has_newcomers(rows: Sequence[Row]) -> bool:
    """True if ranks hold different versions: those with an older one have joined."""
    return any(row.version != rows[0].version for row in rows)

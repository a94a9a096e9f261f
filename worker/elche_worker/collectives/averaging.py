"""One round: header, average on a scratch copy, result into the model (ROUNDS, "A round").

The collective runs on a thread of its own. A blocking round waits for it; in an overlapped one the rank trains on
meanwhile, and the result comes as a correction of what it has then.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from typing import Any, cast

import torch

from elche_worker.collectives.compression import CODECS, Compression
from elche_worker.collectives.operations import CollectiveFailed, Collectives
from elche_worker.device.streams import HostStreams, Streams
from elche_worker.model.layout import Kind, Layout
from elche_worker.model.tensors import Piece, local_of, placed
from elche_worker.outer import Average as PlainAverage
from elche_worker.outer import OuterOptimizer


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank brings into a round; all integers, gathered from all ranks before the values."""

    attempt: int
    generation: int
    round: int
    layout_hash: int
    weight: int
    """Samples since the last average."""
    finite: int
    cut: int
    """Samples of its ordered leases that its values contain."""
    local_step: int
    compute_us: int
    version: int
    """Version that it held before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingOptions:
    """How rounds average, as the user's file says it."""

    weighting: str = "samples"
    nonfinite: str = "fail"
    compress: str | None = None
    outer: OuterOptimizer = field(default_factory=PlainAverage)


@dataclass(frozen=True, slots=True)
class Average:
    """What a collective has brought: the result is in the layout's scratch."""

    rows: list[Row]
    """The header, in order of position."""
    broadcast_bytes: torch.Tensor
    collective_ms: float
    """From entry to result."""
    sent_bytes: int = 0
    """Payload that this rank sent."""
    distance: tuple[float, float] | None = None
    """L2 over trained parameters of what the rank brought minus the result, and of the result."""

    @property
    def version(self) -> int:
        """The version that the result is, if the round commits."""
        return max(row.version for row in self.rows) + 1

    @property
    def divergence(self) -> float | None:
        """How far the rank was from the result, relative to that; 0 if that is tiny, NaN if it is not finite;
        None when it is not measured.
        """
        if self.distance is None:
            return None
        changed, size = self.distance
        return 0.0 if size <= 1e-10 else changed / size


class Averaging:
    """Rounds of one rank, one at a time. `wake` is called on the collective's thread when it has ended."""

    def __init__(
        self,
        layout: Layout,
        options: AveragingOptions,
        *,
        wake: Callable[[], None],
        streams: Streams | None = None,
        measures_divergence: bool = True,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`agree` says whether something holds in all processes of the rank."""
        self._agree = agree
        self._layout = layout
        self._wake = wake
        self._streams = streams or HostStreams()
        self._measures_divergence = measures_divergence
        self.reduction = Reduction(layout, options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="averaging")
        self._running: Future[Average] | None = None
        self._changing: dict[str, torch.Tensor] = {}
        """What comes from the source and changes as training goes on, as it was at the entry."""

    @property
    def is_running(self) -> bool:
        """Whether a round was started and not completed."""
        return self._running is not None

    @property
    def is_done(self) -> bool:
        """Whether the round's collective has ended, so that `complete` does not wait."""
        return self._running is not None and self._running.done()

    def start(self, group: Collectives, row: Row, *, keeps_snapshot: bool) -> bool:
        """Takes the snapshot and starts the collective; returns whether its values are finite.

        The snapshot is kept when the rank may train on. The host waits for the device here, once in a round.
        """
        self._layout.place(group.device)
        self._layout.gather()
        self._streams.finish_compute()  # what has been gathered into the host's memory is there only now
        if keeps_snapshot:
            self._layout.keep_snapshot()
            self._changing = self._layout.changing_bytes()
        row = replace(row, finite=int(self._agree(not row.weight or self._layout.is_finite())))
        self._streams.hand_over()
        # A sharded model's own rows are not to be found while training goes on: its forward has gathered them then.
        raw = self._layout.broadcast_bytes() if self._layout.is_part else None
        self._running = self._thread.submit(self._run, group, row, raw)
        self._running.add_done_callback(lambda _: self._wake())
        return bool(row.finite)

    def abort(self, group: Collectives, patience_s: float) -> None:
        """Ends a collective that waits for others, so that nothing on the device waits for it (SPEC W9).

        What ends it may itself be stuck: it is not waited for any longer than that. No round can follow.
        """
        running = self._running
        if running is None or running.done():
            return

        def end() -> None:
            with suppress(Exception):
                if group.abort():
                    wait([running])

        ending = threading.Thread(target=end, name="abort", daemon=True)
        ending.start()
        ending.join(patience_s)

    def _run(self, group: Collectives, row: Row, raw: torch.Tensor | None) -> Average:
        with self._streams.communication():
            raw = self._layout.broadcast_bytes(self._changing) if raw is None else raw
            return self.reduction.run(group, row, raw)

    def complete(self, *, has_newer_steps: bool) -> Average:
        """Waits for the result and brings it into the model. Without newer steps it replaces the parameters bit for
        bit; with them it corrects them. Raises `CollectiveFailed` or `RoundAborted`; the model is as before then.
        """
        assert self._running is not None
        running, self._running = self._running, None
        averaged = running.result()
        self._streams.take_back(averaged.broadcast_bytes)
        is_alone = len(averaged.rows) == 1 and not self.reduction.has_outer_step
        if is_alone:
            return averaged  # the model has the result already
        if self._measures_divergence:
            averaged = replace(averaged, distance=self._layout.distance())
        if has_newer_steps:
            self._layout.correct()
        else:
            self._layout.apply()
        if averaged.broadcast_bytes.numel():
            self._layout.apply_broadcast_bytes(averaged.broadcast_bytes)
        return averaged


@dataclass(slots=True)
class Memory:
    """What one kind of trained values needs from round to round: the last result, and the outer optimizer's state.

    Equal on all ranks that hold the version; a newcomer gets it from the source.
    """

    last: torch.Tensor
    moments: list[torch.Tensor]
    num_steps: torch.Tensor
    """Outer steps made; a tensor, so that it can be handed on."""


class Reduction:
    """Makes the next result of what all ranks brought: the average, compressed or not, and the outer step on it."""

    def __init__(self, layout: Layout, options: AveragingOptions) -> None:
        self._layout = layout
        self._options = options
        self._memories: dict[Kind, Memory] = {}
        self._compression: Compression | None = None
        self._generation = 0

    @property
    def has_outer_step(self) -> bool:
        """Whether results are something else than averages."""
        return not isinstance(self._options.outer, PlainAverage)

    def run(self, group: Collectives, row: Row, raw: torch.Tensor | None = None) -> Average:
        """One round on the layout's scratch.

        Raises `CollectiveFailed` or `RoundAborted`; memory and model are as before then.
        """
        started_s, sent_bytes = time.perf_counter(), group.sent_bytes
        group.begin(row.round)
        raw = self._layout.broadcast_bytes() if raw is None else raw
        rows = [Row(*tensor.tolist()) for tensor in group.all_gather(torch.tensor(astuple(row)))]
        _check_together(rows)
        source = self._source(rows)
        weights = self._weights(rows)
        is_first = not any(weights)
        if is_first:
            weights[source] = 1
        if group.size > 1:
            self._average(group, weights, is_exact=is_first or any(one.version == 0 for one in rows))
            if raw.numel():
                group.broadcast(raw, source)
            self._hand_memory(group, rows, source)
        group.finish()
        self._step(is_first=is_first)
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        return Average(rows, raw, elapsed_ms, sent_bytes=group.sent_bytes - sent_bytes)

    def _source(self, rows: list[Row]) -> int:
        """The lowest member that holds the newest version; with "skip" rather one whose values are finite."""
        skips = self._options.nonfinite == "skip"
        return max(range(len(rows)), key=lambda at: (rows[at].version, rows[at].finite if skips else 1, -at))

    def _weights(self, rows: list[Row]) -> list[int]:
        """Of each rank: its samples, or 1 when it has any. A rank whose values are left out has none."""
        weights = [row.weight if self._options.weighting == "samples" else int(row.weight > 0) for row in rows]
        is_out = [self._options.nonfinite == "skip" and not row.finite for row in rows]
        return [0 if out else weight for weight, out in zip(weights, is_out, strict=True)]

    def _average(self, group: Collectives, weights: list[int], *, is_exact: bool) -> None:
        """The weighted average of the scratch over the group, in the scratch."""
        own, total = weights[group.position], float(sum(weights))
        for kind, flat in self._layout.flat_buffers.items():
            is_small = self._options.compress is not None and kind == "float32" and not is_exact
            num_small = self._layout.num_trained(kind) if is_small else 0
            if num_small:
                self._average_small(group, flat[:num_small], [weight / total for weight in weights])
            exact = flat[num_small:]
            if exact.numel():
                exact.mul_(own) if own else exact.zero_()
                group.all_reduce(exact)
                exact.div_(torch.full((), total, dtype=exact.dtype, device=exact.device))

    def _average_small(self, group: Collectives, flat: torch.Tensor, fractions: list[float]) -> None:
        last = self._memory("float32", flat).last
        if self._compression is None or self._generation != group.generation:
            codec = CODECS[self._options.compress or ""]()
            self._compression, self._generation = Compression(codec, flat.numel(), group), group.generation
        flat.sub_(last)
        self._compression.average(flat, fractions, group)
        flat.add_(last)

    def _step(self, *, is_first: bool) -> None:
        """The outer step, and what compression has lost. A round that nobody brought work to makes no outer step."""
        outer = self._options.outer
        if self._compression is not None:
            self._compression.commit()
        if not self.has_outer_step and self._options.compress is None:
            return
        for kind, flat in self._layout.flat_buffers.items():
            trained = flat[: self._layout.num_trained(kind)]
            memory = self._memory(kind, trained)
            if not is_first:
                memory.num_steps += 1
                outer.step(memory.last, trained, memory.moments, int(memory.num_steps))
            memory.last.copy_(trained)

    def _memory(self, kind: Kind, trained: torch.Tensor) -> Memory:
        if kind not in self._memories:
            moments = [torch.zeros_like(trained) for _ in range(self._options.outer.num_moments())]
            num_steps = torch.zeros((), dtype=torch.int64, device=trained.device)
            self._memories[kind] = Memory(trained.clone(), moments, num_steps)
        memory = self._memories[kind]
        if memory.last.device != trained.device:  # of a checkpoint, or of a group that averaged elsewhere
            moments = [moment.to(trained.device) for moment in memory.moments]
            memory = Memory(memory.last.to(trained.device), moments, memory.num_steps.to(trained.device))
            self._memories[kind] = memory
        return memory

    def memories(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint keeps: every kind's memory, as plain values, tensors and pieces."""
        return {
            kind: {
                "last": self._kept(kind, memory.last),
                "moments": [self._kept(kind, one) for one in memory.moments],
                "num_steps": memory.num_steps,
            }
            for kind, memory in self._memories.items()
        }

    def _kept(self, kind: Kind, flat: torch.Tensor) -> torch.Tensor | list[Piece]:
        """Flat; of a divided model tensor by tensor, so that groups of other sizes can read it."""
        entries = self._layout.trained(kind)
        if not self._layout.is_divided or not entries:
            return flat
        parts = torch.split(flat, [entry.size for entry in entries])
        return [Piece.of(entry.find(), part.view(entry.shape)) for entry, part in zip(entries, parts, strict=True)]

    def restore(self, memories: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        """Goes on with the memory of a checkpoint."""
        for name, memory in memories.items():
            kind = cast(Kind, name)
            last, *moments = (self._restored(kind, one).to(device) for one in (memory["last"], *memory["moments"]))
            self._memories[kind] = Memory(last, moments, memory["num_steps"].to(device))

    def _restored(self, kind: Kind, kept: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        """What `_kept` made, by a whole model or by a group of any size, as this process has it."""
        entries = self._layout.trained(kind)
        if isinstance(kept, torch.Tensor):
            if not self._layout.is_divided or not entries:
                return kept
            wholes = [entry.shape if entry.whole is None else entry.whole for entry in entries]
            parts = torch.split(kept, [whole.numel() for whole in wholes])
            kept = [part.view(whole) for part, whole in zip(parts, wholes, strict=True)]
        own = [local_of(placed(one, entry.find())) for one, entry in zip(kept, entries, strict=True)]
        return torch.cat([one.reshape(-1) for one in own])

    def _hand_memory(self, group: Collectives, rows: list[Row], source: int) -> None:
        """Newcomers get the source's memory before the step, so that theirs is equal after it."""
        if rows[source].version == 0 or all(row.version for row in rows):
            return
        if not self.has_outer_step and self._options.compress is None:
            return
        for kind, flat in self._layout.flat_buffers.items():
            memory = self._memory(kind, flat[: self._layout.num_trained(kind)])
            for tensor in (memory.last, *memory.moments, memory.num_steps):
                if tensor.numel():
                    group.broadcast(tensor, source)


def _check_together(rows: list[Row]) -> None:
    first = rows[0]
    for position, row in enumerate(rows):
        if (row.attempt, row.generation, row.round) != (first.attempt, first.generation, first.round):
            raise CollectiveFailed(f"ranks 0 and {position} met in different rounds: {first.round} and {row.round}")
        if row.layout_hash != first.layout_hash:
            raise CollectiveFailed(f"the models of ranks 0 and {position} differ")

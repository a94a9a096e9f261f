"""Compression of rounds' payload, to 16 bits per value down to less than one, with error feedback.

Each rank sends the change since the last result, in parts, to the ranks that own them; an owner adds up its part and
sends the compressed sum to all. Every rank decodes the same bytes, so the results are equal bit for bit. The encoding
error is kept and added to the next change (Karimireddy et al., arXiv 1901.09847).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from elche_worker.collectives.codecs import BLOCK, Codec, Encoded
from elche_worker.collectives.operations import ValueCollectives
from elche_worker.device import chunks

CACHED = 1 << 18
"""Values that a CPU encodes at once, so that they stay in its cache: 2.5 times as fast as 32 MB with 2 bits."""


class Compression:
    """Averages compressed changes of one rank and generation, whose errors change in `commit` only."""

    def __init__(self, length: int, group: ValueCollectives) -> None:
        self.generation = group.generation
        self._position = group.position
        self._length = length
        part = -(-length // group.size)
        self._part = -(-part // BLOCK) * BLOCK
        self._step = max(1, chunks.CHUNK_BYTES // (4 * BLOCK * group.size)) * BLOCK
        """Values of each part that are sent together."""
        self._error = torch.zeros(group.size, self._part, device=group.device)
        """Accumulated encoding error of this rank's change."""
        self._sum_error = torch.zeros(1, self._part, device=group.device)
        """Accumulated encoding error of the sum of this rank's part."""
        self._next = self._error, self._sum_error
        """Both errors after the last average, until `commit`: a round that fails must leave them as they were."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compression")
        """Encodes and decodes what is in host memory while other values are sent."""

    def average(self, change: torch.Tensor, fractions: list[float], group: ValueCollectives, *, codec: Codec) -> None:
        """Makes `change` (float32, flat) the sum over ranks of fraction times change, by the same codec on all."""
        self._error, self._sum_error = self._error.to(change.device), self._sum_error.to(change.device)
        self._next = self._error, self._sum_error
        work = _Work(codec, change, fractions, self._error, self._sum_error, keeps=fractions[group.position] > 0)
        try:
            self._exchange(group, work, is_on_host=change.device.type == "cpu")
        finally:
            # The thread ends what it has begun, also after an error: the next round uses the same buffer.
            self._thread.submit(lambda: None).result()
        self._next = work.new_error, work.new_sum_error

    def _exchange(self, group: ValueCollectives, work: "_Work", *, is_on_host: bool) -> None:
        """Sends and receives chunk by chunk. The next chunk is encoded while one is sent, and the sums of one are sent
        while those of the next are made.
        """
        # A GPU computes on the stream of this thread.
        start: Callable[..., Future[Any]] = self._thread.submit if is_on_host else _called
        places = [slice(at, min(at + self._step, self._part)) for at in range(0, self._part, self._step)]
        encoded = deque(start(work.encode, at) for at in places[:2])
        sums: deque[Future[torch.Tensor]] = deque()
        stored: list[Future[None]] = []
        # Collectives are called on this thread only, in an order that follows from the sizes: all ranks must have the
        # same.
        for number in range(len(places) + 1):
            if number < len(places):
                received = group.all_to_all(encoded.popleft().result())
                sums.append(start(work.add, places[number], received))
                encoded.extend(start(work.encode, at) for at in places[number + 2 : number + 3])
            if number:
                gathered = torch.cat(group.all_gather(sums.popleft().result()))
                stored.append(start(work.store, places[number - 1], gathered))
        for one in stored:
            one.result()

    def add_unsent(self, change: torch.Tensor, fraction: float) -> None:
        """Adds to this rank's change, in place, what earlier rounds did not send: the encoding error of its own
        changes, and that of the sums of the part which it sums. The latter is divided by `fraction`, the weight of the
        change in the sum.
        """
        change += self._error.view(-1)[: self._length].to(change.device)
        own = change[self._position * self._part : (self._position + 1) * self._part]
        own += self._sum_error[0, : len(own)].to(change.device) / fraction

    def commit(self) -> None:
        """Keeps the encoding errors of the last average, which is committed, to be sent with the next."""
        self._error, self._sum_error = self._next


class _Work:
    """Computes one average, chunk by chunk: the same slice of each rank's part of the change.

    Without `keeps`, as for a rank whose values have no weight, the error of its earlier changes is neither sent nor
    changed.
    """

    def __init__(
        self,
        codec: Codec,
        change: torch.Tensor,
        fractions: Sequence[float],
        error: torch.Tensor,
        sum_error: torch.Tensor,
        *,
        keeps: bool,
    ) -> None:
        self._codec = codec
        self._change = change
        self._fractions = fractions
        self._error, self._sum_error = error, sum_error
        self.new_error, self.new_sum_error = torch.empty_like(error), torch.empty_like(sum_error)
        self._keeps = keeps

    def encode(self, at: slice) -> torch.Tensor:
        """The bytes of this rank's change, one row for each part."""
        raw = Encoded.empty(self._codec, len(self._error), at.stop - at.start, self._change.device)
        for place, cut in self._cuts(at):
            values = torch.zeros_like(self._error[:, place])
            for row, own in zip(values, self._rows(place), strict=True):
                row[: len(own)] = own
            if self._keeps:
                self._encode_into(raw, cut, values, self._error[:, place], self.new_error[:, place])
            else:
                raw.write(cut, values)
                self.new_error[:, place] = self._error[:, place]
        return raw.raw

    def add(self, at: slice, received: torch.Tensor) -> torch.Tensor:
        """The bytes of the sum of this rank's part, from those of all ranks' changes."""
        changes = Encoded(self._codec, received)
        raw = Encoded.empty(self._codec, 1, at.stop - at.start, received.device)
        for place, cut in self._cuts(at):
            total = torch.zeros_like(self._sum_error[:, place])
            for fraction, row in zip(self._fractions, changes.read(cut), strict=True):
                if fraction > 0:  # what a rank without weight has sent may be anything
                    total += row * fraction
            self._encode_into(raw, cut, total, self._sum_error[:, place], self.new_sum_error[:, place])
        return raw.raw

    def store(self, at: slice, gathered: torch.Tensor) -> None:
        """Puts all sums in place of the change. The owner decodes its own, too: results must be equal."""
        sums = Encoded(self._codec, gathered)
        for place, cut in self._cuts(at):
            for own, row in zip(self._rows(place), sums.read(cut), strict=True):
                own.copy_(row[: len(own)])

    def _encode_into(
        self, raw: Encoded, cut: slice, values: torch.Tensor, error: torch.Tensor, new_error: torch.Tensor
    ) -> None:
        values += error
        raw.write(cut, values)
        torch.sub(values, raw.read(cut), out=new_error)

    def _cuts(self, at: slice) -> Iterator[tuple[slice, slice]]:
        """Slices of a slice that are computed at once: of the parts, and relative to `at`."""
        is_cached = self._change.device.type == "cpu"
        step = max(1, CACHED // BLOCK // len(self._error)) * BLOCK if is_cached else max(1, at.stop - at.start)
        for start in range(at.start, at.stop, step):
            stop = min(start + step, at.stop)
            yield slice(start, stop), slice(start - at.start, stop - at.start)

    def _rows(self, place: slice) -> Iterator[torch.Tensor]:
        """The same slice of each part of the change; the last parts may have less of it, or nothing."""
        length = self._error.shape[1]
        for start in range(0, self._error.numel(), length):
            yield self._change[start + place.start : start + place.stop]


def _called(function: Callable[..., Any], *args: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(function(*args))
    return future

"""Data sets of jobs, and the order of samples in an epoch."""

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data._utils import worker

from elche.errors import InvalidJob
from elche.output import notice
from elche.permutation import permutation_slice
from elche_worker.device.rng import capture_rng_state, restore_rng_state, seed_host

COLUMNS = (torch.Tensor, np.ndarray, list)
MAX_COLUMNS = 8
"""A tuple of at most this many arrays, each longer than that, is taken for columns, not for samples."""
NOTICE_COUNT_S = 3.0
"""Seconds after which it says that it counts."""
COUNT_S = 60.0
"""Seconds for which a stream without a length is read to count its samples: it may have no end."""


class Shards:
    """A data set of parts that are read in order, such as files: `Shards(sizes, open)`.

    `open(index)` returns an iterable over the samples of a part, and `sizes[index]` is their number. A rank reads a
    part to its end before it begins another, and every sample counts once per epoch. The order within a part is kept;
    the order of parts is shuffled in every epoch. Several ranks and worker processes may read the same part, each of
    them from its beginning, and skip the samples of the others: so a part must give the same samples in the same order
    to each.
    """

    def __init__(self, sizes: Sequence[int], open: Callable[[int], Iterable[Any]]) -> None:
        try:
            self.sizes = tuple(map(operator.index, sizes))
        except TypeError:
            self.sizes = ()
        if not self.sizes or min(self.sizes) < 0:
            raise InvalidJob("Shards: sizes must be whole numbers, the samples of each part, and at least one")
        self._open = open
        self._starts = [0, *accumulate(self.sizes)]
        self._shard = -1
        self._next = 0
        """Position of the next sample of the open part."""
        self._samples: Iterator[Any] = iter(())
        self._seed: int | None = None
        self._epoch = 0
        """The `read` for which the part was opened."""
        self._random: dict[str, Any] | None = None
        """The state in which the open part has left the random generators; None if none is open, or without a seed."""

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, positions: Sequence[int], *, epoch: int = 0, seed: int | None = None) -> list[Any]:
        """The samples at these positions; efficient when they are consecutive.

        With a seed, what a part draws of random numbers follows from seed, epoch and part alone, so that a stream that
        shuffles its samples does so alike wherever it is read. No other thread may draw random numbers meanwhile.
        """
        if (seed, epoch) != (self._seed, self._epoch):
            self._seed, self._epoch, self._shard, self._random = seed, epoch, -1, None
        if seed is None:
            return [self._at(position) for position in positions]
        before = capture_rng_state(of_gpu=False)
        try:
            if self._random is not None:
                restore_rng_state(self._random)
            return [self._at(position) for position in positions]
        finally:
            self._random = capture_rng_state(of_gpu=False)
            restore_rng_state(before)

    def __getitems__(self, positions: list[int]) -> list[Any]:
        """`read` without a seed."""
        return self.read(positions)

    def __getitem__(self, position: int) -> Any:
        return self.read([position])[0]

    def _at(self, position: int) -> Any:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is out of range: the shards have {len(self)} samples")
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        with _undivided():
            return self._read(shard, position)

    def _opened(self, shard: int) -> Iterable[Any]:
        """The shard, which is told the epoch if it has `set_epoch`, as streams do that shuffle by it."""
        part = self._open(shard)
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        return part

    def _read(self, shard: int, position: int) -> Any:
        if shard != self._shard or position < self._next:  # a part can only be read on: to go back, it is opened again
            if self._seed is not None:
                seed_host(hash((self._seed, self._epoch, shard)) & 0xFFFFFFFF)
            self._shard, self._next, self._samples = shard, self._starts[shard], iter(self._opened(shard))
        while self._next <= position:
            try:
                sample = next(self._samples)
            except StopIteration:
                had = self._next - self._starts[shard]
                hint = "" if had else ": if it was read before, its iterator must start over each time"
                raise ValueError(
                    f"shard {shard} has {had} samples, and its size says {self.sizes[shard]}{hint}"
                ) from None
            self._next += 1
        # At a part's end, look for one more: the rest of a part that is longer than its size would never be trained.
        if self._next == self._starts[shard + 1] and next(self._samples, self) is not self:
            raise ValueError(f"shard {shard} has more samples than its size says, {self.sizes[shard]}")
        return sample


@contextmanager
def _undivided() -> Iterator[None]:
    """Context in which `get_worker_info()` is None. A stream that divides its samples among worker processes would do
    so a second time: leases have divided them already.
    """
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def as_dataset(built: Any, file_name: str) -> Any:
    """Returns the result of `dataset()` as a data set with len() and [index]. Raises `InvalidJob` for other values.

    A stream, or a list of streams, becomes shards; a stream without a length is read once to count its samples, for at
    most `COUNT_S`.
    """
    kind = type(built).__name__
    if _holds_data_sets(built):
        raise InvalidJob(f"{file_name}: dataset() returned a {kind} of data sets; return the one to train")
    if isinstance(built, tuple) and _are_columns(built):
        raise InvalidJob(
            f"{file_name}: dataset() returned a tuple of {len(built)} {type(built[0]).__name__}s; return a data set "
            "with one item per sample, such as TensorDataset(inputs, targets)"
        )
    if isinstance(built, DataLoader | Sampler):
        raise InvalidJob(
            f"{file_name}: dataset() returned a {kind}; return the data set itself. Ranks take slices of a shuffled "
            "epoch, so that a sampler is not used: give sample_weights to draw some samples more often, or a data set "
            "whose own order you choose. For batches of your own choice, as of a batch_sampler, let each item of the "
            "data set be a batch, with batch_size=1 and collate_fn=lambda items: items[0]"
        )
    if isinstance(built, IterableDataset):
        built = [built]
    if isinstance(built, list | tuple) and built and all(isinstance(one, IterableDataset) for one in built):
        parts = built
        return Shards([_count(one, file_name) for one in parts], lambda index: parts[index])
    if not isinstance(built, Sized) or not hasattr(built, "__getitem__"):
        raise InvalidJob(
            f"{file_name}: dataset() must return a data set with len() and [index], or an IterableDataset, not {kind}"
        )
    return built


def _holds_data_sets(built: Any) -> bool:
    """True for a mapping or a list of data sets, such as one for training and one for tests, but not for streams."""
    if isinstance(built, Mapping):
        try:
            return built[0] is None  # a mapping that has samples by index is a data set itself: `TensorDict`
        except Exception:
            return True
    if not isinstance(built, list | tuple):
        return False
    is_stream = [isinstance(one, IterableDataset) for one in built]
    return not all(is_stream) and any(isinstance(one, DataLoader | Dataset) for one in built)


def _are_columns(values: tuple[Any, ...]) -> bool:
    """True for a few long values of one type, such as inputs and targets, rather than for samples."""
    kinds = {type(one) for one in values}
    if len(kinds) != 1 or not 2 <= len(values) <= MAX_COLUMNS or not issubclass(kinds.pop(), COLUMNS):
        return False
    return min(len(one) if getattr(one, "ndim", 1) else 0 for one in values) > MAX_COLUMNS


def _count(stream: Any, file_name: str) -> int:
    """Number of samples of a stream. Raises `InvalidJob` for one that has no length and does not end in time."""
    try:
        return len(stream)
    except TypeError:
        pass
    count, began_s, has_printed = 0, time.monotonic(), False
    for count, _ in enumerate(stream, 1):
        counted_s = time.monotonic() - began_s
        if counted_s > NOTICE_COUNT_S and not has_printed:
            has_printed = True
            notice(
                f"{file_name}: the samples of {type(stream).__name__}, a stream without len(), are counted, for at "
                f"most {COUNT_S:g} s; a __len__ saves that, and an endless stream needs one"
            )
        if counted_s > COUNT_S:
            raise InvalidJob(
                f"{file_name}: dataset() returned a stream, {type(stream).__name__}, without len(), which did not "
                f"end within {COUNT_S:g} s ({count} samples): return their number in its __len__. An endless stream "
                "must end after that many, as with itertools.islice: an epoch has a fixed number of samples"
            )
    if count and next(iter(stream), stream) is stream:
        raise InvalidJob(
            f"{file_name}: dataset() returned a stream, {type(stream).__name__}, that can be read only once: let its "
            "__iter__ return a new iterator each time, since it is counted, and read once in each epoch"
        )
    return count


class Order(Protocol):
    """The order of samples in an epoch; equal on every rank."""

    def indices(self, epoch: int, offset: int, size: int) -> list[int]:
        """The indices of the samples at positions from `offset`."""


class Shuffled:
    """Every sample once, in the order of the epoch's permutation."""

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._seed = seed

    def indices(self, epoch: int, offset: int, size: int) -> list[int]:
        found = permutation_slice(seed=self._seed, epoch=epoch, length=self._length, offset=offset, size=size)
        return list(found.tolist())


class AsItIs:
    """Every sample once, in the data set's order; the coordinator shuffles shards when it leases them."""

    def indices(self, epoch: int, offset: int, size: int) -> list[int]:
        return list(range(offset, offset + size))


class Drawn:
    """Draws with replacement, in proportion to weights. The random number of a draw follows from seed, epoch and
    position alone, so that any rank computes any slice without those before it.
    """

    def __init__(self, weights: npt.NDArray[np.float64], seed: int) -> None:
        self._sums = np.cumsum(weights)
        self._seed = seed

    def indices(self, epoch: int, offset: int, size: int) -> list[int]:
        drawn = _uniform(self._seed, epoch, np.arange(offset, offset + size, dtype=np.uint64)) * self._sums[-1]
        found = np.searchsorted(self._sums, drawn, side="right")
        return list(np.minimum(found, len(self._sums) - 1).tolist())  # a product may round up to the whole sum


def _uniform(seed: int, epoch: int, positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """SplitMix64 (Steele, Lea and Flood, 2014) at given positions, as numbers from 0 to below 1."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mixed(_mixed(np.array([seed], dtype=np.uint64)) + np.array([epoch], dtype=np.uint64))
    mixed = _mixed(key + (positions + np.uint64(1)) * golden)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def order_of(dataset: Any, weights: Any, seed: int, file_name: str) -> Order:
    """The order of an epoch. Raises `InvalidJob` for weights that cannot be used."""
    if weights is not None:
        return Drawn(_checked_weights(weights, dataset, file_name), seed)
    return AsItIs() if isinstance(dataset, Shards) else Shuffled(len(dataset), seed)


def _checked_weights(weights: Any, dataset: Any, file_name: str) -> npt.NDArray[np.float64]:
    if isinstance(dataset, Shards):
        raise InvalidJob(
            f"{file_name}: sample_weights needs a data set whose samples can be taken in any order, not shards"
        )
    try:
        plain = weights.detach().cpu() if isinstance(weights, torch.Tensor) else weights
        values = np.asarray(plain, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise InvalidJob(f"{file_name}: sample_weights() must return numbers, not {type(weights).__name__}") from None
    if len(values) != len(dataset):
        raise InvalidJob(
            f"{file_name}: sample_weights() returned {len(values)} weights, and the data set has {len(dataset)} samples"
        )
    if not np.isfinite(values).all() or (values < 0).any() or not values.sum() > 0:
        raise InvalidJob(f"{file_name}: sample_weights() must return finite numbers of at least 0, not all of them 0")
    return values

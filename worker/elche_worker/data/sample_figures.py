"""Looks at some samples of a job's data set, for the coordinator to compare those of all ranks."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elche.samples import MAX_VALUES, TOLERANCE, are_alike, positions_to_compare
from elche.v1 import rank_pb2
from elche_worker.data.dataset import Shards
from elche_worker.data.fetching import Collate, Fetch, FetchError
from elche_worker.device.rng import host_state, seeded
from elche_worker.device.transfer import tensors_in

BUDGET_S = 0.2
"""Seconds after which no further sample is read, once there are as many as are compared at least."""
LEAST_BUDGET_S = 5.0
"""Seconds for these few: on a busy machine, or with slow samples, ranks with different data would train in silence."""
NUM_READS = 3
"""Number of times that each sample is read: if it comes out different, it is random, and is not compared."""
LEAST_SAMPLES = 2
"""Fewest samples that are compared, unless the data set has fewer: a single one that is drawn at random may be equal by
chance in all reads, and would then be taken for a fault."""
MOST_ENTRIES = 2**20
"""Most entries of a value that are read; of larger values, entries at equal distances."""
NUM_ENTRIES = 8
"""Entries of each value that are compared."""
MAX_DIMS = 32
"""Most dimensions of a value that is compared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """Facts that reading samples of a data set has shown."""

    samples: tuple[rank_pb2.SampleRead, ...] = ()
    are_random: bool = False
    """True if a sample comes out different each time."""
    draws: bool = False
    """True if reading a sample draws random numbers."""
    is_bound: bool = False
    """True if this thread can read a sample, and another one cannot."""
    is_unsteady: bool = False
    """True of a stream that gives another first sample when it is read again, with random generators seeded alike."""

    @property
    def is_for_one_thread(self) -> bool:
        """True if samples are to be read by the thread that trains."""
        return self.draws or self.is_bound


def look_at(
    dataset: Any,
    seed: int,
    *,
    collate_fn: Collate | None = None,
    budget_s: float = BUDGET_S,
    least_s: float = LEAST_BUDGET_S,
) -> Looked:
    """Reads some samples, each several times with random generators seeded differently. Leaves out samples that raise,
    and those for which there is no time: `least_s` for the fewest that are compared, then `budget_s` in all. Of a
    stream it reads the first sample alone, since each is read from the beginning.
    `collate_fn` is called with one sample, to see if it draws random numbers.
    """
    fetch, began_s = Fetch(dataset, collate_fn, ""), time.monotonic()
    until_s = began_s + max(budget_s, least_s)
    if isinstance(dataset, Shards):
        reads, draws = _read(fetch, 0, seed, until_s, step=0)
        return Looked(draws=draws, is_unsteady=not all(are_alike(reads[0], one) for one in reads[1:]))
    found: list[rank_pb2.SampleRead] = []
    draws = False
    is_bound: bool | None = None
    for index in positions_to_compare(len(dataset), seed):
        reads, draws_now = _read(fetch, index, seed, until_s)
        draws = draws or draws_now
        if not found and collate_fn is not None and not draws:
            draws = _collating_draws(fetch, index, seed)
        if is_bound is None and reads:
            is_bound = _is_bound(fetch, index, seed)
        if not all(are_alike(reads[0], one) for one in reads[1:]):
            return Looked(are_random=True, draws=draws, is_bound=bool(is_bound))
        if len(reads) == NUM_READS:
            values = [rank_pb2.ValueFigures(figures=one) for one in reads[0]]
            found.append(rank_pb2.SampleRead(index=index, values=values))
        if len(found) >= LEAST_SAMPLES:
            until_s = began_s + budget_s
        if time.monotonic() > until_s:
            break
    samples = tuple(found) if len(found) >= min(LEAST_SAMPLES, len(dataset)) else ()
    return Looked(samples, draws=draws, is_bound=bool(is_bound))


def _is_bound(fetch: Fetch, index: int, seed: int) -> bool:
    """True if another thread cannot read the sample, which this one has read: a connection of SQLite is such, and code
    that sets a signal handler.
    """
    read: list[Any] = []

    def read_it() -> None:
        read.append(fetch.__getitems__([index]))

    with seeded(seed):
        other = threading.Thread(target=read_it, name="other reader")
        other.start()
        other.join()
    return not read or isinstance(read[0], FetchError)


def _collating_draws(fetch: Fetch, index: int, seed: int) -> bool:
    with seeded(seed):
        samples = fetch.__getitems__([index])
        before = host_state()
        fetch.collate(samples)
        return host_state() != before


def _read(
    fetch: Fetch, index: int, seed: int, until_s: float, *, step: int = 1
) -> tuple[list[list[list[float]]], bool]:
    """The sample's figures, of `NUM_READS` reads, or of fewer where it raises or there is no time; and whether random
    numbers were drawn. `step` is added to the seed after each read.
    """
    reads: list[list[list[float]]] = []
    draws = False
    for number in range(NUM_READS):
        if reads and time.monotonic() > until_s:
            break
        # Each time another seed: with equal ones an augmented sample comes out alike here, and otherwise on a GPU.
        with seeded(seed + number * step):
            before = host_state()
            samples = fetch.__getitems__([index])
            draws = draws or host_state() != before
            figures = None if isinstance(samples, FetchError) else figures_or_none(samples)
        if figures is None:
            break
        reads.append(figures)
    return reads, draws


def figures_or_none(sample: Any) -> list[list[float]] | None:
    """The figures of a sample; None if a value cannot be decoded, as a truncated image, or be an array."""
    try:
        return figures_of(sample)
    except Exception:
        return None


def figures_of(sample: Any) -> list[list[float]]:
    """The figures of a sample's first values: tensors, arrays, images, numbers and texts, of any nested structure."""
    figures: list[list[float]] = []
    for value in _values_in(sample):
        if len(figures) == MAX_VALUES:
            break
        figures.append(_of_text(value) if isinstance(value, bytes) else _of_array(value))
    return figures


def _values_in(sample: Any) -> Iterator[npt.NDArray[Any] | bytes]:
    """Yields the values as arrays, texts as bytes. Leaves out texts that may be paths, which differ between hosts, and
    values without an order or of unknown types.
    """
    if isinstance(sample, str):
        if "/" not in sample and "\\" not in sample:
            yield sample.encode("utf-8", "replace")
    elif isinstance(sample, bytes):
        yield sample
    elif isinstance(sample, Mapping):
        for value in sample.values():
            yield from _values_in(value)
    elif isinstance(sample, list | tuple):
        for value in sample:
            yield from _values_in(value)
    elif dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        for one in dataclasses.fields(sample):
            yield from _values_in(getattr(sample, one.name, None))
    elif (array := _as_array(sample)) is not None:
        yield array
    elif not isinstance(sample, torch.Tensor):  # an object that moves itself to a device
        yield from filter(lambda one: one is not None, map(_as_array, tensors_in(sample)))


def _as_array(value: Any) -> npt.NDArray[Any] | None:
    """The array of a tensor, array, image or number, of numbers; None of anything else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.dim() > MAX_DIMS:
            return None
        # numpy takes no view that is conjugated or negated only when it is read.
        value = value.detach().cpu().resolve_conj().resolve_neg()
        # numpy has neither bfloat16 nor float8.
        value = (value.float() if value.dtype.is_floating_point and value.element_size() < 4 else value).numpy()
    elif not isinstance(value, bool | int | float | complex | np.generic) and not hasattr(value, "__array_interface__"):
        return None
    array = np.asarray(value)
    return array if array.dtype.kind in "biufc" and array.ndim <= MAX_DIMS else None


def _of_array(array: npt.NDArray[Any]) -> list[float]:
    """The figures of an array. Whole numbers such as labels and tokens are compared exactly; images, sound and floating
    point values with a tolerance, since decoders and processors round differently.
    """
    shape = [float(array.ndim), *map(float, array.shape)]
    values: npt.NDArray[Any] = array.flat[:: array.size // MOST_ENTRIES or 1]
    if array.dtype.kind in "biu" and (array.size == 1 or (array.dtype.itemsize >= 4 and array.ndim <= 2)):
        return [0.0, *shape, *_hash(values.astype(np.int64).tobytes())]
    values = np.concatenate([values.real, values.imag]) if array.dtype.kind == "c" else values
    # NaN is not equal to itself: a sample with one would count as random.
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    some = values[:: math.ceil(values.size / NUM_ENTRIES) or 1][:NUM_ENTRIES]
    greatest = np.abs(values).max() if values.size else 0.0
    return [TOLERANCE, *shape, float(greatest), *some.tolist()]


def _of_text(text: bytes) -> list[float]:
    return [0.0, 1.0, float(len(text)), *_hash(text[:: len(text) // MOST_ENTRIES or 1])]


def _hash(data: bytes) -> list[float]:
    return [float(one) for one in blake2b(data, digest_size=NUM_ENTRIES).digest()]

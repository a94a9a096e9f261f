"""Some samples of a loop's loader, looked at before training: what fields batches have, and whether all ranks have the
same data.

Every rank takes the samples by the numbers that rank 0's sampler gives, so that data that differ (a random split
without a seed, a list of files in another order, a vocabulary made of a set) would be trained wrongly, in silence.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from elche.errors import Misuse
from elche_worker.collectives.world import World
from elche_worker.data.fetching import Fetch, FetchError, Indices
from elche_worker.device.rng import seeded
from elche_worker.device.transfer import tensors_in

NUM_VALUES = 8
"""Values of each tensor that ranks compare."""
TOLERANCE = 0.05
"""By how much they may differ, as a part of the tensor's greatest: images are not decoded alike on all hosts."""
Figures = list[list[float]] | None
"""Of each tensor of a sample: its shape, its greatest value, and some others. None of a sample that cannot be read."""


def looked_at(loader: "DataLoader[Any]", indices: Sequence[int]) -> list[Any]:
    """Batches of one of these samples each, with random numbers that are alike on every rank, or a `FetchError`.

    They are fetched in a process of their own where the loader has such: a file that is opened with the first sample
    must not be shared with processes that are forked later, which would read at each other's positions.
    """
    is_plain = loader.collate_fn is torch.utils.data.default_collate
    fetch = Fetch(loader.dataset, None if is_plain else loader.collate_fn, "")
    if not loader.num_workers:
        with seeded(0):
            return [fetch.collate(fetch.__getitems__([index])) for index in indices]
    fetching: DataLoader[Any] = DataLoader(
        fetch,  # type: ignore[arg-type]  # it has what a loader needs of a Dataset
        batch_sampler=[Indices([index], 0) for index in indices],
        collate_fn=fetch.collate,
        num_workers=1,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(0),
    )
    return list(fetching)


def check_same_samples(loader: "DataLoader[Any]", world: World) -> None:
    """Raises `Misuse` on every rank where ranks have other samples under the same number.

    Not where a data set gives something else each time, as with random numbers of its own.
    """
    indices = sorted({0, len(loader.dataset) // 2, len(loader.dataset) - 1})  # type: ignore[arg-type]  # map-style
    told = world.gather_texts(json.dumps([figures_of(one) for one in looked_at(loader, indices)]))
    first, *others = [json.loads(text) for text in told]
    found = [
        (rank, at)
        for rank, other in enumerate(others, 1)
        for at in range(len(indices))
        if not _alike(first[at], other[at])
    ]
    if not found:
        return
    twice = [figures_of(one) for one in looked_at(loader, indices * 2)]
    is_random = any(not _alike(*pair) for pair in zip(twice, twice[len(indices) :], strict=False))
    if any(says for (says,) in world.gather_numbers([float(is_random)])):
        return
    rank, index = found[0]
    raise Misuse(
        f"ranks have different data: sample {index} of rank {rank} is not that of rank 0. All need the same data "
        "set, in the same order: seed what is drawn at random, as in random_split(..., "
        "generator=torch.Generator().manual_seed(0)) or train_test_split(..., random_state=0), sort what has no order, "
        "such as sets and os.listdir(), and do not divide the data by rank: the trainer does"
    )


def figures_of(batch: Any) -> Figures:
    """The figures of a batch that ranks compare, one list for each of its tensors."""
    if isinstance(batch, FetchError):
        return None
    return [_figures(one) for one in tensors_in(batch) if one.layout is torch.strided and not one.is_quantized]


def _figures(tensor: torch.Tensor) -> list[float]:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.detach().flatten().double().cpu()
    some = values[:: math.ceil(len(values) / NUM_VALUES)][:NUM_VALUES] if len(values) else values
    greatest = float(values.nan_to_num(0.0, 0.0, 0.0).abs().max()) if len(values) else 0.0
    return [float(tensor.dim()), *map(float, tensor.shape), greatest, *some.tolist()]


def _alike(one: Figures, other: Figures) -> bool:
    if one is None or other is None:  # an error of its own, once it is trained
        return True
    return len(one) == len(other) and all(map(_are_near, one, other))


def _are_near(one: list[float], other: list[float]) -> bool:
    if len(one) != len(other) or one[0] != other[0]:
        return False
    shape_end = 1 + int(one[0])
    if one[1:shape_end] != other[1:shape_end]:
        return False
    limit = TOLERANCE * max(one[shape_end], other[shape_end]) + 1e-12
    pairs = zip(one[shape_end:], other[shape_end:], strict=True)
    return all(abs(a - b) <= limit for a, b in pairs if math.isfinite(a) or math.isfinite(b))

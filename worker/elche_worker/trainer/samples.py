"""Some samples of a loop's loader, looked at before training: what fields batches have, and whether all ranks have the
same data.

Every rank takes the samples by the numbers that rank 0's sampler gives, so that data that differ (a random split
without a seed, a list of files in another order, a vocabulary made of a set) would be trained wrongly, in silence.
"""

import json
from collections.abc import Sequence
from functools import partial
from pickle import PicklingError
from typing import Any

import torch
from torch.utils.data import DataLoader

from elche.errors import Misuse
from elche.samples import are_alike
from elche_worker.collectives.world import World
from elche_worker.data.fetching import Fetch, FetchError, Indices, begin_worker
from elche_worker.data.sample_figures import figures_or_none
from elche_worker.device.rng import seeded
from elche_worker.trainer.refetching import Owed, refetched

Figures = list[list[float]] | None
"""None of a sample that cannot be read."""


def looked_at(loader: "DataLoader[Any]", batches: Sequence[Sequence[int]]) -> list[Any]:
    """Batches of these samples, or a `FetchError`, with random numbers that are alike on every rank. Raises `Misuse`
    where worker processes cannot get the data set.

    They are fetched in a process of their own where the loader has such: a file that is opened with the first sample
    must not be shared with processes that are forked later, which would read at each other's positions.
    """
    is_plain = loader.collate_fn is torch.utils.data.default_collate
    fetch = Fetch(loader.dataset, None if is_plain else loader.collate_fn, "")
    if not loader.num_workers:
        with seeded(0):
            return [fetch.collate(fetch.__getitems__([*indices])) for indices in batches]
    owed = Owed([Indices([*indices], 0) for indices in batches])

    def new_loader(_: bool) -> "DataLoader[Any]":
        return DataLoader(
            fetch,  # type: ignore[arg-type]  # it has what a loader needs of a Dataset
            batch_sampler=owed,
            collate_fn=fetch.collate,
            num_workers=1,
            timeout=loader.timeout,
            worker_init_fn=partial(begin_worker, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(0),
        )

    try:
        return list(refetched(new_loader, owed))
    except (TypeError, AttributeError, PicklingError) as error:
        if "pickle" not in str(error):
            raise
        raise Misuse(
            f"worker processes get a pickled copy of the loader's data set, collate_fn and worker_init_fn: {error}. "
            "Open files and connections on first use in each process, not in __init__, define functions at the top "
            "level, or give DataLoader(multiprocessing_context='fork')"
        ) from None


def first_batch(loader: "DataLoader[Any]") -> Any:
    """A batch of the first sample alone; of as many as in training where that makes none, as where `collate_fn` filters
    samples or pairs them. Raises as `looked_at` does.
    """
    [batch] = looked_at(loader, [[0]])
    if batch is None or isinstance(batch, FetchError):
        num_samples = min(loader.batch_size or 1, len(loader.dataset))  # type: ignore[arg-type]  # map-style
        [batch] = looked_at(loader, [range(num_samples)])
    return batch


def check_same_samples(loader: "DataLoader[Any]", world: World) -> None:
    """Raises `Misuse` on every rank where ranks have other samples under the same number.

    Not where a data set gives something else each time, as with random numbers of its own.
    """
    size = len(loader.dataset)  # type: ignore[arg-type]  # map-style
    indices = sorted({0, size // 2, size - 1})
    alone = [[index] for index in indices]
    gathered = world.gather_texts(json.dumps([_figures_of(one) for one in looked_at(loader, alone)]))
    first, *others = [json.loads(text) for text in gathered]
    found = [
        (rank, at)
        for rank, other in enumerate(others, 1)
        for at in range(len(indices))
        if not _alike(first[at], other[at])
    ]
    if not found:
        return
    twice = [_figures_of(one) for one in looked_at(loader, alone * 2)]
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


def _figures_of(batch: Any) -> Figures:
    """The figures of a batch that ranks compare; None of one that cannot be read."""
    return None if isinstance(batch, FetchError) else figures_or_none(batch)


def _alike(one: Figures, other: Figures) -> bool:
    if one is None or other is None:  # an error of its own, once it is trained
        return True
    return are_alike(one, other)

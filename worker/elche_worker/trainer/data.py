"""Splits a user's `DataLoader`: each rank fetches its own part of every step, and all parts together are the epoch."""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import index
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from elche.errors import ElcheError, Misuse
from elche_worker.collectives.world import World
from elche_worker.data.fetching import Fetch, FetchError, Indices, begin_worker
from elche_worker.data.prefetch import new_transfer
from elche_worker.device.streams import new_streams
from elche_worker.trainer.capture import joined
from elche_worker.trainer.checks import check_same_loader
from elche_worker.trainer.plans import Part, Planner, Step
from elche_worker.trainer.refetching import Owed, refetched
from elche_worker.trainer.samples import check_same_samples, first_batch
from elche_worker.trainer.together import Together

Fields = dict[str, Any]

AHEAD = 2
"""Batches that are copied to a GPU ahead of the one that is trained: one is ready while the next one is copied."""
LONGEST_EPOCH = 100
"""Times the length of its sampler or data set that an epoch may have: a sampler that gives more is taken as endless."""
MANY_SAMPLES = 10**8
"""Samples of an epoch, of a sampler that gives each over `LONGEST_EPOCH` times, above which it is taken as endless: the
numbers of an epoch are drawn at its beginning, and these take 4 GB.
"""
MEASURED_BATCHES = 4
"""Batches after which training's use of device memory is measured: by then the optimizer's states are allocated."""
SAME_BATCHES = ("torch.", "torchdata.", "monai.", "accelerate.")
"""Packages whose loaders give the batches of torch's, in their own way: they count, fetch ahead, or move."""

END_IT = (
    "give the sampler __len__, let it end after as many samples, an epoch, and begin epoch after epoch, as in "
    "`for epoch in trainer.epochs(10):`"
)
"""What to do with a sampler that does not end."""


class Batch(Mapping[str, Any]):
    """This rank's part of a step: one batch, or several under El Che; fields by name, on the device."""

    def __init__(self, parts: list[Fields], sizes: list[int], *, counts: bool = True) -> None:
        self.parts = parts
        """Its batches, each a dict of fields."""
        self.sizes = sizes
        """Samples of each."""
        self.size = sum(sizes) if counts else 0
        """Samples that count. 0 for a placeholder: a rank for which the end of an epoch has no samples gets another
        rank's, so that it makes the same collective calls as the others.
        """
        self._joined: Fields = {}

    def __getitem__(self, name: str) -> Any:
        """A field of all batches, concatenated (dimension 0). Raises `Misuse` for an unknown field."""
        if name not in self.parts[0]:
            raise Misuse(f"batches have no field {name!r}; they have {', '.join(map(repr, self.parts[0]))}")
        if name not in self._joined:
            self._joined[name] = joined([part[name] for part in self.parts])
        return self._joined[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts[0])

    def __len__(self) -> int:
        return len(self.parts[0])


@dataclass(frozen=True, slots=True)
class Wiring:
    """Mapping of a batch's fields to the arguments of the model."""

    primary: str
    others: tuple[str, ...]
    targets: tuple[str, ...]
    """Fields that do not go into the model."""
    problem: str = ""
    """Why it cannot be called with a batch's fields alone; empty: it can."""

    def call(self, model: nn.Module, part: Fields) -> Any:
        """The model's output of one batch. Raises `Misuse` if the fields are not all that it needs."""
        if self.problem:
            raise Misuse(
                f"{self.problem}. To call the model yourself, as with noise or a second view, use trainer.model"
            )
        return model(part[self.primary], **{name: part[name] for name in self.others})


class Data:
    """The attached loader."""

    def __init__(
        self,
        loader: "DataLoader[Any]",
        world: World,
        names: Sequence[str] | None,
        planner: Planner,
        together: Together,
    ) -> None:
        self._loader = loader
        self._world = world
        self._together = together
        self._names = tuple(names) if names is not None else None
        self.batch_size = loader.batch_size or 0
        self._epoch_size = len(loader.sampler)  # type: ignore[arg-type]  # that of a map-style data set has a length
        """Samples in the present epoch's order: a data set may grow from epoch to epoch."""
        self._transfer = new_transfer(world.device, new_streams(world.device))
        self._num_ahead = AHEAD if world.device.type == "cuda" else 0
        self._num_given = 0
        """Batches given out since the start."""
        self._fetching: DataLoader[Any] | None = None
        self._collated_by: Any = None
        """The `collate_fn` of `_fetching`: a script may give the loader another one between two epochs."""
        self._parts = _Parts(planner, world.number, self.batch_size)
        self._owed = Owed(self._parts)
        self.members = planner.members
        """The numbers of the ranks among which samples are split."""
        self._num_planned = 0
        """Samples of the present epoch that were given out, to all ranks."""
        self._next_start: int | None = None
        """Position of the sample from which the current epoch must be replanned; None: its plan stays."""
        self._generator = torch.Generator()
        self._order = torch.empty(0, dtype=torch.int64)
        """Seed of worker processes, followed by the order, of the epoch that was begun last."""

    @classmethod
    def agreed(
        cls,
        loader: "DataLoader[Any]",
        world: World,
        names: Sequence[str] | None,
        planner: Planner,
        together: Together,
        problem: str,
    ) -> "Data":
        """Attaches the loader. Collective. Raises `Misuse` on every rank for a problem of one, or if loaders differ."""
        data = None if problem else cls(loader, world, names, planner, together)

        def agree() -> list[str]:
            world.agree(problem)
            assert data is not None
            check_same_loader(data.facts, world)
            if world.size > 1:
                check_same_samples(loader, world)
            return world.gather_texts(str(world.device))

        devices = together.run(agree, "calls set_data_loader()")
        assert data is not None
        depth = loader.num_workers * (loader.prefetch_factor or 0)
        is_ahead = any(device.startswith("cuda") for device in devices)
        planner.delay = (depth + 1 if depth else 0) + (AHEAD if is_ahead else 0)
        planner.fit(data.num_batches)
        return data

    @property
    def num_batches(self) -> int:
        """Batches of an epoch, of all ranks together."""
        whole, rest = divmod(self._epoch_size, self.batch_size)
        return whole + (1 if rest and not self._loader.drop_last else 0)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch that are trained."""
        return min(self.num_batches * self.batch_size, self._epoch_size)

    @property
    def facts(self) -> list[int]:
        """Numbers that must be equal on all ranks; see `check_same_loader`."""
        return [self.num_samples, self.batch_size, self._loader.num_workers, self._loader.prefetch_factor or 0]

    def state(self, *, is_within: bool) -> dict[str, Any]:
        """State from which a checkpoint restores the following epochs, and, if `is_within` an epoch, the rest of it."""
        state: dict[str, Any] = {name: one.get_state() for name, one in _generators(self._loader).items()}
        return {**state, "order": self._order} if is_within else state

    def restore(self, state: Mapping[str, Any]) -> torch.Tensor | None:
        """Restores that state; returns the order of the epoch in which it was saved."""
        for name, generator in _generators(self._loader).items():
            if state.get(name) is not None:
                generator.set_state(state[name])
        return state.get("order")

    def plan_again(self, planner: Planner, lost: list[Part]) -> None:
        """Splits what follows the present step again, and appends `lost`, the parts of dead ranks, to the epoch."""
        self._parts.planner, self.members = planner, planner.members
        order = self._order[1 : self.num_samples + 1]
        is_lost = torch.zeros(len(order), dtype=torch.bool)
        for start, size in lost:
            is_lost[start : start + size] = True
        self._order = torch.cat([self._order[:1], order[~is_lost], order[is_lost], self._order[1 + len(order) :]])
        self._next_start = self._num_planned - sum(size for _, size in lost)

    def epoch(self, epoch: int, start: int = 0, order: torch.Tensor | None = None) -> Iterator[tuple[Batch, Step]]:
        """Yields this rank's part of every step of an epoch from sample `start` on, and the step; equally many on every
        rank. `order`, if given on rank 0, is that of a checkpoint; else the sampler decides.
        """
        if self._loader.batch_sampler.batch_size != self.batch_size:  # type: ignore[union-attr]  # `check_loader`
            raise Misuse(
                f"the loader's batch_sampler has been given another batch_size ({self.batch_size} before): attach a "
                "loader of that batch size by trainer.set_data_loader()"
            )
        set_epoch = getattr(self._loader.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        self._order = self._shared_order(order, epoch)
        if order is not None:
            _check_has_all(self._loader.dataset, self._order[1 + start :], epoch)
        self._epoch_size = len(self._order) - 1
        self._generator.manual_seed(int(self._order[0]) % 2**62)
        next_start: int | None = start
        while next_start is not None and next_start < self.num_samples:
            self._next_start = None
            yield from self._planned(next_start)
            next_start = self._next_start

    def _shared_order(self, order: torch.Tensor | None, epoch: int) -> torch.Tensor:
        """A seed and an order of the samples: those given to rank 0, or what its sampler decides, so that any sampler
        works and any number of ranks train the same batches.
        """
        seed = torch.empty(1, dtype=torch.int64)
        if order is None:  # seed before order, as torch's own loader draws them
            seed.random_(generator=self._loader.generator)

        def shared() -> torch.Tensor:
            nonlocal order
            problem = ""
            if self._world.rank == 0 and order is None:
                try:
                    order = torch.tensor([int(seed), *_numbers_of(self._loader)], dtype=torch.int64)
                except Misuse as error:
                    problem = str(error)
            own = torch.empty(0, dtype=torch.int64) if problem else order
            numbers = self._world.share_whole_numbers(seed if own is None else own)
            if not len(numbers):  # rank 0 says why, but only now: ranks in another call would receive its text
                self._world.agree(problem)
            return numbers

        return self._together.run(shared, f"begins epoch({epoch})")

    def _planned(self, start: int) -> Iterator[tuple[Batch, Step]]:
        """Yields the steps of the present order from a sample on, until they are replanned."""
        number = self._world.number
        order = self._order[1 : self.num_samples + 1]
        steps = self._parts.begin(order, start, int(self._order[0]) % 2**62)
        self._num_planned = start
        fetched = self._moved(refetched(self._present_loader, self._owed))
        for moved in fetched:
            step = steps.popleft()
            parts = [self._receive(moved), *(self._receive(next(fetched)) for _ in step.own(number)[1:])]
            sizes = [size for _, size in step.own(number)]
            self._num_planned += sum(step.samples)
            yield Batch(parts, sizes, counts=bool(step.of(number))), step
            if self._next_start is not None:
                return

    def _present_loader(self, is_lost: bool) -> "DataLoader[Any]":
        """The loader that fetches this rank's parts; a new one if the last one's worker processes are lost."""
        if self._fetching is None or is_lost or self._loader.collate_fn is not self._collated_by:
            self._fetching, self._collated_by = self._new_loader(), self._loader.collate_fn
        return self._fetching

    def _new_loader(self) -> "DataLoader[Any]":
        """A loader that fetches this rank's parts as the user's loader would fetch batches."""
        loader = self._loader
        is_plain = loader.collate_fn is torch.utils.data.default_collate
        dataset = self._transfer.place(loader.dataset) if is_plain and not loader.num_workers else loader.dataset
        fetch = Fetch(dataset, None if is_plain else loader.collate_fn, "", seed=0)
        fetched: Any = fetch
        collate: Callable[[Any], Any] = fetch.collate
        if not loader.num_workers and self._world.size > 1 and fetch.may_draw:
            fetched, collate = _Seeded(fetch), _as_it_is
        return DataLoader(
            fetched,  # it has what a loader needs of a Dataset
            batch_sampler=self._owed,
            collate_fn=collate,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=loader.pin_memory and dataset is loader.dataset,  # what is on the device cannot be pinned
            timeout=loader.timeout,
            worker_init_fn=partial(begin_worker, loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            persistent_workers=loader.persistent_workers,
        )

    def _moved(self, fetched: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Moves batches to the device a few ahead of training; yields each with its event."""
        waiting: deque[tuple[Any, Any]] = deque()
        self._transfer.plan()
        for data in fetched:
            with self._transfer.stream():
                waiting.append(self._transfer.move(data))
            if len(waiting) > self._num_ahead:
                yield waiting.popleft()
                self._num_given += 1
                if self._num_given == MEASURED_BATCHES:
                    self._transfer.plan()
        yield from waiting

    def _receive(self, moved: tuple[Any, Any]) -> Fields:
        data, event = moved
        if isinstance(data, FetchError):
            raise data.to_error()
        return named(self._transfer.receive(data, event), self._names)


def _generators(loader: "DataLoader[Any]") -> dict[str, torch.Generator]:
    """What draws the order of epochs, besides torch's default generator."""
    owners = {"generator": loader, "sampler_generator": loader.sampler}
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}


def _numbers_of(loader: "DataLoader[Any]") -> list[int]:
    """The numbers of an epoch's samples. Raises `Misuse` if the sampler does not end, or gives no numbers."""
    sampler: Any = loader.sampler
    most = LONGEST_EPOCH * max(len(sampler), len(loader.dataset))  # type: ignore[arg-type]  # map-style
    numbers: list[int] = []
    for one in islice(sampler, most + 1):
        if not hasattr(one, "__index__"):
            raise Misuse(
                f"{type(sampler).__name__} gives {one!r} for a sample, and elche deals samples by number: let the "
                "sampler give whole numbers, and the data set choose by these"
            )
        numbers.append(index(one))
    if len(numbers) > most:
        raise Misuse(f"{type(sampler).__name__} has given over {most} samples of one epoch: {END_IT}")
    return numbers


def _check_has_all(dataset: Any, remaining: torch.Tensor, epoch: int) -> None:
    """Raises `Misuse` if the data set has become smaller since the checkpoint that has these samples to be trained."""
    if len(remaining) and int(remaining.max()) >= len(dataset):
        raise Misuse(
            f"the checkpoint was made within epoch {epoch}, of which sample {int(remaining.max())} is still to be "
            f"trained, and the data set has {len(dataset)} samples now: resume with the data set of then, or begin a "
            "new training with the checkpoint's weights"
        )


class _Seeded:
    """Gives a `Fetch`'s batches, for which user code draws other random numbers than for other ranks' parts: ranks that
    the script has seeded alike would draw the same crops, or the same samples where the data set draws these. On one
    process it draws from the script's own generators, as without elche.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __len__(self) -> int:
        return len(self._fetch)

    def __getitems__(self, indices: list[int]) -> Any:
        return self._fetch.batch(indices)


def _as_it_is(batch: Any) -> Any:
    return batch


class _Parts:
    """Yields indices of this rank's parts, step by step, and records the steps."""

    def __init__(self, planner: Planner, number: int, batch_size: int) -> None:
        self.planner = planner
        self._number = number
        self._batch_size = batch_size
        self._order = torch.empty(0, dtype=torch.int64)
        self._steps: deque[Step] = deque()
        self._start = 0
        self._seed = 0

    def begin(self, order: torch.Tensor, start: int, seed: int) -> "deque[Step]":
        """Sets order and first sample of the next iteration; returns its steps, which are appended in time."""
        self._order, self._start, self._seed, self._steps = order, start, seed, deque()
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.planner.steps(len(self._order), self._batch_size, self._start):
            self._steps.append(step)
            for start, size in step.own(self._number):
                yield Indices(self._order[start : start + size].tolist(), self._seed)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside one that `torch.compile` returned."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _gives_the_same(part: Any) -> bool:
    return type(part).__module__.startswith(SAME_BATCHES)


def check_loader(loader: Any) -> str:
    """Returns why a loader's batches cannot be split among ranks; "" when they can."""
    if not isinstance(loader, DataLoader):
        return f"set_data_loader needs a torch DataLoader, not {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return "set_data_loader needs a map-style data set, with len() and [index]; iterate others in your own loop"
    if type(loader).__iter__ is not DataLoader.__iter__ and not _gives_the_same(loader):
        return (
            f"{type(loader).__name__} has an __iter__ of its own, which would not be called, since every rank reads "
            "the samples of its parts itself: give a torch DataLoader, and let collate_fn do what that __iter__ does "
            "to batches. What fetches ahead, or resumes within an epoch, can be left out: elche does both"
        )
    if isinstance(loader.sampler, DistributedSampler):
        return "give set_data_loader the loader without its DistributedSampler: it splits every batch itself"
    batches = loader.batch_sampler
    if loader.batch_size is None or not (isinstance(batches, BatchSampler) and _gives_the_same(batches)):
        return (
            "set_data_loader needs a loader with batch_size, and no batch_sampler of its own: iterate such a loader in "
            "your own loop, where each rank takes other batches of it, equally many: itertools.islice(loader, "
            "trainer.rank, len(loader) // trainer.world_size * trainer.world_size, trainer.world_size). Seed its order "
            "alike on all ranks, divide its batch size by trainer.world_size, and give step(samples=...) where sizes "
            "differ"
        )
    if not isinstance(loader.sampler, Sized):
        return f"{type(loader.sampler).__name__} has no length: {END_IT}"
    num_samples = len(loader.dataset)  # type: ignore[arg-type]  # map-style
    length = loader.sampler.__len__()  # not len(), which raises above 2**63
    if not num_samples:
        return "the data set of the loader is empty"
    if length > max(MANY_SAMPLES, LONGEST_EPOCH * num_samples):
        return (
            f"{type(loader.sampler).__name__} would give {length} samples an epoch, of a data set of {num_samples}, "
            "and the order of an epoch is drawn at its beginning: let it give as many (num_samples) as an epoch is to "
            "have, and begin epoch after epoch, as in `for epoch in trainer.epochs(10):`"
        )
    return ""


def named(data: Any, names: Sequence[str] | None) -> Fields:
    """A collated batch as fields by name. Raises `Misuse` when there are no names, or not as many as fields."""
    if isinstance(data, Mapping):
        return dict(data)
    if hasattr(data, "_asdict"):
        return dict(data._asdict())
    if data is None:
        raise Misuse(
            "collate_fn returned None, and every rank makes a step of each batch: leave samples that cannot be trained "
            "out of the data set, or let collate_fn put others in their place"
        )
    is_one = not isinstance(data, list | tuple)
    fields = [data] if is_one else list(data)
    if is_one and len(names or ()) != 1:
        raise Misuse(
            f"a batch is one {type(data).__name__}: give it one name, as in set_data_loader(loader, names=('data',)), "
            "and take batch['data'] in the loop"
        )
    if names is None:
        raise Misuse(
            f"batches are {type(data).__name__}s of {len(fields)} fields without names: name them, as in "
            "set_data_loader(loader, forward_input='image', names=('image', 'label'))"
        )
    if len(names) != len(fields):
        raise Misuse(
            f"names has {len(names)} names ({', '.join(map(repr, names))}), and batches have {len(fields)} fields"
        )
    return dict(zip(names, fields, strict=True))


def wire(
    loader: "DataLoader[Any]",
    model: nn.Module,
    forward_input: str | None,
    names: Sequence[str] | None,
    inputs: Sequence[str] | None,
) -> Wiring:
    """Decides which fields are passed to the model: `forward_input` first, then those named as arguments of its
    `forward`, or in `inputs`. Arguments that no field fills are a `problem` of `forward_batch` alone: a loop may call
    the model itself.

    Raises `Misuse` for unknown names, and lists the fields. Row G6.
    """
    for what, given in (("names", names), ("inputs", inputs)):
        if isinstance(given, str):
            raise Misuse(f"{what} must be a tuple of names, not the string {given!r}")
    sample = first_batch(loader)
    if isinstance(sample, FetchError):
        error = sample.to_error()
        raise error if isinstance(error, ElcheError) else Misuse(f"the loader has no batch to give: {sample.message}")
    fields = list(named(sample, names))
    known = ", ".join(map(repr, fields))
    if forward_input is None:
        return Wiring("", (), tuple(fields), f"forward_batch needs set_data_loader(forward_input=...), one of {known}")
    if forward_input not in fields:
        raise Misuse(f"forward_input is {forward_input!r}, and batches have the fields {known}")
    unknown = [name for name in inputs or () if name not in fields]
    if unknown:
        raise Misuse(f"inputs has {unknown[0]!r}, and batches have the fields {known}")
    if inputs is not None:
        others = tuple(name for name in inputs if name != forward_input)
        return Wiring(forward_input, others, tuple(name for name in fields if name not in (forward_input, *inputs)))
    taken = inspect.signature(unwrapped(model).forward).parameters.values()
    parameters = [one for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if not parameters and any(one.kind is one.VAR_KEYWORD for one in taken):
        raise Misuse(
            f"forward() of {type(model).__name__} does not name its arguments: say which of the fields {known} go in, "
            f"as in set_data_loader(loader, forward_input={forward_input!r}, inputs=({forward_input!r}, ...))"
        )
    rest = parameters[1:]
    lacking = [one.name for one in rest if one.default is inspect.Parameter.empty and one.name not in fields]
    problem = (
        f"forward() of {type(model).__name__} needs {lacking[0]!r}; batches have the fields {known}" if lacking else ""
    )
    wired = {one.name for one in rest if one.kind is not inspect.Parameter.POSITIONAL_ONLY}
    others = tuple(name for name in fields if name in wired and name != forward_input)
    targets = tuple(name for name in fields if name not in others and name != forward_input)
    return Wiring(forward_input, others, targets, problem)

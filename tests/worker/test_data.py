"""Data sets as jobs give them: shards that are read in order, draws by weight, and what is refused with a reason."""

import random
import sqlite3
from collections import UserDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from elche.errors import InvalidJob
from elche_worker import Shards
from elche_worker.data import dataset
from elche_worker.data.build import build_dataset, build_order
from elche_worker.data.dataset import AsItIs, Drawn, Shuffled, as_dataset, order_of
from elche_worker.data.fetching import Fetch, Indices
from elche_worker.data.lease_loader import LeaseLoader
from elche_worker.user.job import JobDefinition

SIZES = [3, 0, 4, 1]
SAMPLES = ["0.0", "0.1", "0.2", "2.0", "2.1", "2.2", "2.3", "3.0"]


class Library:
    """Shards of SIZES, which remember which of them were opened, and how many samples were read."""

    def __init__(self, sizes: list[int] | None = None) -> None:
        self.sizes = sizes or SIZES
        self.opened: list[int] = []
        self.num_read = 0

    def open(self, index: int) -> Iterator[str]:
        self.opened.append(index)
        for position in range(self.sizes[index]):
            self.num_read += 1
            yield f"{index}.{position}"


class Stream(IterableDataset[int]):
    """Samples that only come one after the other; it does not say how many."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.start + self.size))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is not read only to be counted")


# Shards


def test_shards_are_one_sequence_and_each_is_opened_once() -> None:
    library = Library()
    shards = Shards(SIZES, library.open)
    assert len(shards) == 8
    assert [shards[position] for position in range(8)] == SAMPLES
    assert library.opened == [0, 2, 3]
    assert library.num_read == 8


def test_what_lies_between_two_positions_is_skipped_in_the_open_shard() -> None:
    library = Library()
    shards = Shards(SIZES, library.open)
    assert shards.__getitems__([3, 6]) == ["2.0", "2.3"]
    assert library.opened == [2]
    assert library.num_read == 4


def test_a_position_before_the_last_one_opens_its_shard_again() -> None:
    library = Library()
    shards = Shards(SIZES, library.open)
    assert shards.__getitems__([5, 4, 4]) == ["2.2", "2.1", "2.1"]
    assert library.opened == [2, 2, 2]


def test_every_position_is_right_in_any_order() -> None:
    shards = Shards(SIZES, Library().open)
    order = np.random.default_rng(0).integers(0, len(shards), size=100).tolist()
    assert shards.__getitems__(order) == [SAMPLES[position] for position in order]


def test_a_shard_may_be_anything_that_can_be_iterated() -> None:
    shards = Shards([2, 3], lambda index: [f"{index}.{position}" for position in range(2 + index)])
    assert [shards[position] for position in (4, 0, 2)] == ["1.2", "0.0", "1.0"]


def test_a_shard_that_ends_too_soon_is_named() -> None:
    shards = Shards([3, 5], Library([3, 4]).open)
    assert shards.__getitems__([5, 6]) == ["1.2", "1.3"]
    with pytest.raises(ValueError, match="shard 1 has 4 samples, and its size says 5"):
        shards[7]
    with pytest.raises(ValueError, match="shard 1 has 4 samples, and its size says 5"):
        shards[7]  # a second try does not find the rest of another shard
    assert shards[0] == "0.0"


@pytest.mark.parametrize("sizes", [[], [3, -1], [2.0], ["3"], (None,)])
def test_sizes_that_are_none_are_refused(sizes: Any) -> None:
    with pytest.raises(InvalidJob, match="sizes must be whole numbers, the samples of each part, and at least one"):
        Shards(sizes, Library().open)


@pytest.mark.parametrize("sizes", [[np.int64(3), np.int64(5)], list(np.array([3, 5]))])
def test_whole_numbers_of_numpy_are_sizes(sizes: Any) -> None:
    assert len(Shards(sizes, Library([3, 5]).open)) == 8


def test_a_position_before_the_first_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        Shards(SIZES, Library().open)[-1]


def test_a_stream_that_divides_itself_among_worker_processes_gives_all_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's documentation writes streams, and libraries do: elche divides already."""

    def stream(_: int) -> Iterator[int]:
        info = get_worker_info()
        yield from range(6) if info is None else range(info.id, 6, info.num_workers)

    two = SimpleNamespace(id=1, num_workers=2)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", two)
    assert Shards([6], stream).__getitems__(list(range(6))) == list(range(6))
    assert get_worker_info() is two


def test_a_stream_is_told_the_epoch_in_which_it_is_read() -> None:
    """Streams of libraries that shuffle by `set_epoch` gave each epoch's samples in the same order."""

    class Turned(IterableDataset[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter([(number + self.epoch) % 4 for number in range(4)])

    shards = as_dataset(Turned(), "train.py")
    assert [shards.read(range(4), epoch=epoch, seed=1)[0] for epoch in (0, 1, 2)] == [0, 1, 2]
    assert shards.read([2], epoch=1, seed=1) == [3]


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_stream_that_shuffles_itself_gives_each_sample_once_to_several_readers(
    monkeypatch: pytest.MonkeyPatch, is_worker: bool
) -> None:
    """Each rank and worker process shuffled otherwise: of an epoch, a quarter of the samples was never trained, in
    silence.
    """

    class Buffered(IterableDataset[int]):
        """A buffer for shuffling, which draws as it is read."""

        def __len__(self) -> int:
            return 40

        def __iter__(self) -> Iterator[int]:
            held = list(range(8))
            for number in range(8, 40):
                at = random.randrange(8)
                yield held[at]
                held[at] = number
            yield from (held[at] for at in torch.randperm(8))

    if is_worker:
        monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", SimpleNamespace(id=1, num_workers=2))
    readers = [Fetch(as_dataset(Buffered(), "train.py"), None, "train.py", seed=3) for _ in range(2)]

    def read(epoch: int, batch_size: int) -> list[int]:
        """The epoch's samples, of which the readers take batches in turn."""
        found: list[int] = []
        for number, start in enumerate(range(0, 40, batch_size)):
            random.seed(number)  # other code draws, too
            indices = Indices([*range(start, start + batch_size)], epoch)
            reader = readers[number % 2]
            found += reader.__getitems__(indices) if is_worker else reader.batch(indices).tolist()
        return found

    orders = [read(0, 4), read(1, 4)]
    assert [sorted(one) for one in orders] == [[*range(40)]] * 2
    assert orders[0] != orders[1]
    assert [read(0, 8), read(1, 5)] == orders
    readers = readers[:1] * 2
    assert read(0, 4) == orders[0]


def test_a_stream_that_is_read_draws_nothing_of_other_code() -> None:
    def stream(_: int) -> Iterator[float]:
        yield from (random.random() for _ in range(4))

    shards = Shards([4], stream)
    random.seed(5)
    expected = random.Random(5).random()
    assert len({*shards.read([0, 1], seed=0), *shards.read([2, 3], seed=0)}) == 4
    assert random.random() == expected


def test_shards_can_be_iterated_like_any_sequence() -> None:
    def open_file(index: int) -> list[str]:
        if index >= len(SIZES):
            raise FileNotFoundError(f"part-{index}.tar")
        return list(Library().open(index))

    assert list(Shards(SIZES, open_file)) == SAMPLES


def test_a_shard_that_goes_on_beyond_its_size_is_told() -> None:
    shards = Shards([3, 5], Library([4, 5]).open)
    assert [shards[position] for position in range(2)] == ["0.0", "0.1"]
    with pytest.raises(ValueError, match="shard 0 has more samples than its size says, 3"):
        shards[2]


# What dataset() may return


def test_a_map_style_data_set_stays_what_it_is() -> None:
    for built in (TensorDataset(torch.zeros(3, 1)), list(range(5)), Subset(list(range(9)), [1, 2]), np.arange(4)):
        assert as_dataset(built, "train.py") is built
    shards = Shards(SIZES, Library().open)
    assert as_dataset(shards, "train.py") is shards


@pytest.mark.parametrize("built", [[Stream(0, 3), Stream(3, 4)], (Stream(0, 3), Stream(3, 4))])
def test_streams_become_shards_and_are_counted(built: Any) -> None:
    shards = as_dataset(built, "train.py")
    assert isinstance(shards, Shards)
    assert shards.sizes == (3, 4)
    assert [shards[position] for position in range(7)] == list(range(7))
    assert [shards[position] for position in range(7)] == list(range(7))  # the next epoch


def test_one_stream_is_one_shard() -> None:
    shards = as_dataset(Stream(5, 3), "train.py")
    assert shards.sizes == (3,)
    assert [shards[position] for position in range(3)] == [5, 6, 7]


def test_a_stream_without_an_end_is_asked_how_many_samples_an_epoch_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was read forever, before the first batch, then for a minute without a word."""

    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return count()

    monkeypatch.setattr(dataset, "COUNT_S", 0.01)
    monkeypatch.setattr(dataset, "NOTICE_COUNT_S", 0.0)
    with pytest.raises(
        InvalidJob,
        match=r"train.py: dataset\(\) returned a stream, Endless, without len\(\).*return their number in its __len__",
    ):
        as_dataset([Stream(0, 3), Endless()], "train.py")
    assert capsys.readouterr().err.count("the samples of Endless, a stream without len(), are counted") == 1


def test_a_stream_that_can_be_read_only_once_is_refused_and_one_that_begins_anew_is_not() -> None:
    """It was counted, and had no sample left for the first batch: "shard 0 has 0 samples"."""

    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.numbers = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.numbers

    class Anew(Once):
        def __iter__(self) -> Iterator[int]:
            self.numbers = iter(range(3))
            return self.numbers

    with pytest.raises(InvalidJob, match=r"dataset\(\) returned a stream, Once, that can be read only once"):
        as_dataset(Once(), "train.py")
    assert as_dataset(Anew(), "train.py").sizes == (3,)


def test_a_collate_fn_gets_what_the_data_set_gave_together() -> None:
    """Such as a `TensorDict`, whose `collate_fn` in its own examples returns it as it is."""

    class Rows(list[int]):
        def __getitems__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor([self[index] for index in indices])

    fetch = Fetch(Rows(range(8)), lambda samples: samples, "train.py")
    assert torch.equal(fetch.batch([5, 2]), torch.tensor([5, 2]))
    in_parts = Fetch(Rows(range(8)), lambda samples: samples, "train.py", num_parts=2)
    assert [(list(part), size) for part, size in in_parts.batch([5, 2])] == [([5], 1), ([2], 1)]


class Columns(UserDict[Any, Any]):
    """Columns by name and samples by index, as a `TensorDict`."""

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else {name: one[key] for name, one in self.data.items()}


def test_a_mapping_with_samples_by_index_is_a_data_set() -> None:
    built = Columns(x=[1, 2, 3])
    assert as_dataset(built, "train.py") is built
    with pytest.raises(InvalidJob, match=r"returned a dict of data sets"):
        as_dataset({"train": built, "test": built}, "train.py")


def test_a_stream_that_knows_its_length_is_not_read_to_count_it() -> None:
    assert as_dataset([StreamWithLength(0, 3), StreamWithLength(3, 9)], "train.py").sizes == (3, 9)


@pytest.mark.parametrize(
    ("built", "says"),
    [
        (DataLoader(list(range(8)), batch_size=2), "dataset() returned a DataLoader; return the data set itself"),
        (BatchSampler(range(8), 2, False), "of a batch_sampler, let each item of the data set be a batch, with batch"),
        (RandomSampler(list(range(8))), "dataset() returned a RandomSampler; return the data set itself"),
        (iter([1, 2]), "must return a data set with len() and [index], or an IterableDataset, not list_iterator"),
        (None, "must return a data set with len() and [index], or an IterableDataset, not NoneType"),
        ({1, 2}, "must return a data set with len() and [index], or an IterableDataset, not set"),
        ((n for n in range(3)), "must return a data set with len() and [index], or an IterableDataset, not generator"),
    ],
)
def test_what_is_no_data_set_is_refused_with_the_way_out(built: Any, says: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        as_dataset(built, "train.py")
    assert str(refused.value).startswith("train.py: ")
    assert says in str(refused.value)


def test_a_loader_is_told_of_sample_weights() -> None:
    with pytest.raises(InvalidJob, match="give sample_weights to draw some samples more often"):
        as_dataset(DataLoader(list(range(8)), sampler=RandomSampler(list(range(8)))), "train.py")


@pytest.mark.parametrize(
    "built",
    [
        {"train": list(range(8)), "val": list(range(2))},
        [DataLoader(list(range(8))), DataLoader(list(range(2)))],
    ],
)
def test_several_data_sets_at_once_are_refused(built: Any) -> None:
    with pytest.raises(InvalidJob, match="of data sets; return the one to train"):
        as_dataset(built, "train.py")


@pytest.mark.parametrize(
    "built",
    [(torch.zeros(20, 3), torch.zeros(20, 3)), (np.zeros((9, 2)), np.ones(9)), (list(range(20)), list(range(9)))],
)
def test_inputs_beside_targets_are_no_two_samples(built: Any) -> None:
    """`return inputs, targets` trained on two samples, with exit code 0 where both had one shape."""
    with pytest.raises(
        InvalidJob, match=r"tuple of 2 \w+s; return a data set with one item per sample, such as TensorDataset"
    ):
        as_dataset(built, "train.py")


def test_samples_in_a_tuple_are_a_data_set() -> None:
    for built in ((torch.zeros(8), torch.zeros(8)), ((torch.zeros(9), 1), (torch.zeros(9), 0)), (1.0, 2.0), ("a" * 9,)):
        assert as_dataset(built, "train.py") is built


# Draws by weight


def test_samples_are_drawn_as_often_as_their_weight_says() -> None:
    weights = np.array([1.0, 0.0, 2.0, 5.0, 0.0, 0.5, 1.5, 0.0])
    num_draws = 200_000
    drawn = np.array(Drawn(weights, seed=3).indices(epoch=0, offset=0, size=num_draws))
    counts = np.bincount(drawn, minlength=len(weights))
    expected = num_draws * weights / weights.sum()
    assert counts[weights == 0].sum() == 0
    deviations = np.sqrt(expected * (1 - weights / weights.sum()))
    assert (np.abs(counts - expected) <= 4.5 * deviations).all(), (counts, expected)


def test_neighbouring_draws_do_not_depend_on_each_other() -> None:
    drawn = np.array(Drawn(np.ones(4), seed=0).indices(epoch=0, offset=0, size=100_000))
    pairs = np.bincount(4 * drawn[:-1] + drawn[1:], minlength=16)
    chi_squared = float(((pairs - pairs.mean()) ** 2 / pairs.mean()).sum())
    assert chi_squared < 45  # 15 degrees of freedom: more than that once in 10,000 times


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_a_draw_depends_on_its_position_alone_however_the_epoch_is_cut(seed: int) -> None:
    order = Drawn(np.arange(1.0, 101.0), seed)
    whole = order.indices(epoch=5, offset=0, size=1000)
    rng, at, pieces = np.random.default_rng(1), 0, []
    while at < 1000:
        size = min(int(rng.integers(1, 70)), 1000 - at)
        pieces += order.indices(epoch=5, offset=at, size=size)
        at += size
    assert pieces == whole
    assert Drawn(np.arange(1.0, 101.0), seed).indices(epoch=5, offset=377, size=3) == whole[377:380]


def test_epochs_and_seeds_draw_differently() -> None:
    drawn = {
        (seed, epoch): tuple(Drawn(np.ones(50), seed).indices(epoch=epoch, offset=0, size=50))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(set(drawn.values())) == 25
    equal = sum(a == b for a, b in zip(drawn[0, 1], drawn[1, 0], strict=True))
    assert equal < 10  # seed and epoch cannot stand for each other; one in 50 is equal by chance


def test_a_draw_may_come_twice_and_samples_may_stay_out() -> None:
    drawn = Drawn(np.ones(1000), seed=0).indices(epoch=0, offset=0, size=1000)
    assert 580 < len(set(drawn)) < 690  # (1 - 1/e) of them


# Which order a data set gets


def test_a_data_set_whose_length_changes_is_refused_before_training() -> None:
    """Longer, it was trained in part, in silence; shorter, the training failed with "size is 99", naming nothing."""

    class Changing:
        lengths = iter([100, 99])

        def __len__(self) -> int:
            return next(self.lengths)

        def __getitem__(self, index: int) -> int:
            return index

    job = cast(JobDefinition, SimpleNamespace(dataset=Changing, seed=0, sample_weights=None))
    built, num_samples = build_dataset(job, "train.py")
    with pytest.raises(InvalidJob, match=r"train.py: the data set had 100 samples, and has 99 now: its len\(\) must"):
        build_order(job, built, num_samples, "train.py")


def test_without_weights_every_sample_comes_once_in_an_order_of_the_epoch() -> None:
    order = order_of(list(range(50)), None, 7, "train.py")
    assert isinstance(order, Shuffled)
    first, second = (order.indices(epoch, 0, 50) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert order.indices(0, 20, 10) == first[20:30]


def test_shards_keep_their_own_order() -> None:
    order = order_of(Shards(SIZES, Library().open), None, 7, "train.py")
    assert isinstance(order, AsItIs)
    assert order.indices(epoch=3, offset=2, size=4) == [2, 3, 4, 5]


@pytest.mark.parametrize("weights", [[1, 2, 3], np.array([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]), (0, 0, 1)])
def test_weights_may_be_any_numbers(weights: Any) -> None:
    assert isinstance(order_of(["a", "b", "c"], weights, 0, "train.py"), Drawn)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1, 2], "sample_weights() returned 2 weights, and the data set has 3 samples"),
        ([], "sample_weights() returned 0 weights"),
        ([1, -1, 1], "finite numbers of at least 0, not all of them 0"),
        ([0, 0, 0], "finite numbers of at least 0, not all of them 0"),
        ([1, float("nan"), 1], "finite numbers of at least 0, not all of them 0"),
        ([1, float("inf"), 1], "finite numbers of at least 0, not all of them 0"),
        (["a", "b", "c"], "sample_weights() must return numbers, not list"),
        ({"cat": 2.0, "dog": 1.0}, "sample_weights() must return numbers, not dict"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights: Any, says: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        order_of(["a", "b", "c"], weights, 0, "train.py")
    assert str(refused.value).startswith("train.py: ")
    assert says in str(refused.value)


def test_shards_cannot_be_drawn_from() -> None:
    with pytest.raises(InvalidJob, match="samples can be taken in any order, not shards"):
        order_of(Shards(SIZES, Library().open), [1.0] * 8, 0, "train.py")


def test_weights_may_be_a_tensor_that_has_a_gradient() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
    assert order_of(["a", "b", "c"], weights, 0, "train.py").indices(0, 0, 5) == [1] * 5


def test_augmentation_differs_from_epoch_to_epoch_and_is_the_same_whoever_fetches_the_batch() -> None:
    class Drawn:
        def __getitem__(self, index: int) -> float:
            return float(torch.rand(1))

    def drawn(epoch: int, first: int) -> float:
        return float(Fetch(Drawn(), None, "train.py", seed=3).batch(Indices([first, 9], epoch))[0])

    assert drawn(0, 5) == drawn(0, 5)
    assert len({drawn(0, 5), drawn(1, 5), drawn(0, 6)}) == 3


def test_batches_that_are_fetched_ahead_take_a_bounded_part_of_the_memory() -> None:
    loader = SimpleNamespace(_is_stopped=False, _ready=[1], _ready_bytes=200 << 20, transfer=SimpleNamespace(room=None))
    assert LeaseLoader._has_room(cast(LeaseLoader, loader), 56 << 20)
    assert not LeaseLoader._has_room(cast(LeaseLoader, loader), 57 << 20)
    loader._ready = []
    assert LeaseLoader._has_room(cast(LeaseLoader, loader), 1 << 40), "a batch that is larger than that comes alone"


def test_a_connection_of_another_thread_is_told_with_what_to_do() -> None:
    """Worker processes are forked by the thread that reads ahead."""
    with closing(sqlite3.connect(":memory:")) as database:

        class Table:
            def __getitem__(self, index: int) -> Any:
                return database.execute("select ?", (index,)).fetchone()

        with ThreadPoolExecutor() as other:
            told = other.submit(Fetch(Table(), None, "train.py").batch, Indices([3], 0)).result()
    assert "at sample 3 of the data set" in told.message
    assert "open it in __getitem__, on first use" in told.message


def test_a_data_set_that_has_become_shorter_is_named_as_the_cause() -> None:
    """It was an IndexError of a sample alone, which the data set had had."""
    samples = [0.0, 1.0, 2.0]
    fetch = Fetch(samples, None, "train.py")
    assert len(fetch.batch(Indices([0, 2], 0))) == 2
    del samples[1:]
    assert "has 1 samples now, and had more when training began" in fetch.batch(Indices([0, 2], 0)).message

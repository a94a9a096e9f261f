"""Fetches the samples of a batch, in this process or a worker process, and reports errors of user code."""

import fcntl
import os
import stat
import traceback
from collections.abc import Callable, Sized
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

from torch.utils.data import TensorDataset, default_collate, get_worker_info

from elche.errors import InvalidJob
from elche.output import notice
from elche_worker.data.dataset import Shards
from elche_worker.data.prefetch import Resident
from elche_worker.data.unshared import Unshared
from elche_worker.device.rng import host_seeded, seed_host
from elche_worker.device.transfer import InParts, bounds_of
from elche_worker.user.loading import UserCodeRaised, describe_raised

Collate = Callable[[list[Any]], Any]
OPEN_FILES = "/proc/self/fd"
OF_ONE_THREAD = "can only be used in that same thread"
"""SQLite's words on a connection that another thread, or a process forked from it, uses."""


@dataclass(frozen=True, slots=True)
class FetchError:
    """Returned instead of a batch when user code raised. Contains only texts, so that worker processes can send it."""

    message: str
    traceback: str
    error: Exception | None = None
    """The exception, in the process that raised it; None after pickling, which it may not survive, or StopIteration."""

    def to_error(self) -> Exception:
        """The exception to raise."""
        return self.error or UserCodeRaised(self.message, self.traceback)

    def __reduce__(self) -> tuple[type["FetchError"], tuple[str, str]]:
        return FetchError, (self.message, self.traceback)


@dataclass(slots=True)
class NotAgain:
    """Stands for the `set_epoch` of a data set that elche tells the epoch: what a callback told it would reach samples
    of another epoch, which are fetched at the time.
    """

    original: Callable[[int], None]
    has_said: bool = False

    def __call__(self, *_: Any, **__: Any) -> None:
        if not self.has_said:
            self.has_said = True
            notice(
                "set_epoch() of the data set is without effect here: elche calls it itself, before it reads samples of "
                "another epoch, since batches are fetched ahead of training"
            )


def _taken_over(dataset: Any) -> Any:
    """The data set's `set_epoch`, or None. Until `Fetch.give_back` nobody else can call it."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if isinstance(set_epoch, NotAgain):  # of a loader that was not stopped
        return set_epoch.original
    if callable(set_epoch):
        with suppress(Exception):  # a class with slots, or with checks of its own
            dataset.set_epoch = NotAgain(set_epoch)
    return set_epoch


class Indices(list[int]):
    """Indices of a batch's samples, its epoch, and the most parts into which it may be split."""

    def __init__(self, indices: list[int], epoch: int, max_parts: int = 1) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.max_parts = max_parts

    def __reduce__(self) -> tuple[type["Indices"], tuple[list[int], int, int]]:
        return Indices, (list(self), self.epoch, self.max_parts)


class Together(list[Any]):
    """Samples that a data set gave together, and `given`, the object in which it gave them: a `collate_fn` gets that,
    as torch's loader would give it.
    """

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.given: Any = given if isinstance(given, Sized) else [*self]  # an iterator is used up


class Samples(list[Any]):
    """The samples of a batch, and the number of parts to collate."""

    num_parts = 1


class CollatedBatch(list[Any]):
    """A batch that is collated already."""


class Fetch:
    """The user's data set as a `DataLoader` reads it: a list of indices gives a list of samples, or a `FetchError`."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate | None,
        file_name: str,
        seed: int = 0,
        num_parts: int = 1,
        *,
        tells_epoch: bool = False,
    ) -> None:
        """With the job's own `collate_fn`, whose batches cannot be split, the samples are collated in `num_parts` parts
        instead: the result is `InParts`.

        With `tells_epoch` a data set that has `set_epoch` is told the epoch before each batch of another one. Nobody
        else could: batches of two epochs are fetched in turn, ahead of training, and by several processes. Its length
        must not change by this, nor otherwise from epoch to epoch.
        """
        self._set_epoch = _taken_over(dataset) if tells_epoch else None
        self._num_samples = len(dataset) if tells_epoch else 0
        self._tells_epoch = tells_epoch
        self._told_epoch: int | None = None
        self._num_parts = num_parts if collate_fn else 1
        self._dataset = dataset
        self._seed = seed
        is_own = collate_fn is not None and collate_fn is not default_collate
        self._collate_fn: Collate = Unshared(collate_fn) if collate_fn and is_own else default_collate
        self._file_name = file_name
        self._is_plain = collate_fn is None and type(dataset) in (TensorDataset, Resident)
        """True if whole batches of the data set's tensors are indexed at once."""

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self._dataset

    def give_back(self) -> None:
        """Lets others call the data set's `set_epoch` again, as a script that goes on with the same data set."""
        if isinstance(getattr(self._dataset, "set_epoch", None), NotAgain):
            self._dataset.set_epoch = self._set_epoch

    @property
    def may_draw(self) -> bool:
        """True if samples or their collation are user code, which may draw random numbers."""
        return not self._is_plain

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[Any] | FetchError:
        """The samples at these indices."""
        is_worker = get_worker_info() is not None
        if indices and is_worker:
            seed_host(self._seed_of(indices))
        return self._samples(indices, is_seeded=is_worker)

    def _samples(self, indices: list[int], *, is_seeded: bool) -> list[Any] | FetchError:
        samples = self._samples_at(indices, is_seeded=is_seeded)
        if self._num_parts > 1 and isinstance(samples, list):
            samples = Samples(samples)
            samples.num_parts = min(self._num_parts, len(samples), getattr(indices, "max_parts", len(samples)))
        return samples

    def _samples_at(self, indices: list[int], *, is_seeded: bool) -> list[Any] | FetchError:
        index: int | None = None
        try:
            if indices and (why := self._tell(_epoch_of(indices))):
                return FetchError(why, "", InvalidJob(why))
            if indices and isinstance(self._dataset, Shards):
                return self._dataset.read(indices, epoch=_epoch_of(indices), seed=self._seed if is_seeded else None)
            if indices and self._is_plain:  # its tensors as they are now: a script may have replaced them
                return CollatedBatch([tensor[indices] for tensor in self._dataset.tensors])
            if indices and hasattr(self._dataset, "__getitems__"):
                return Together(self._dataset.__getitems__(indices))
            samples = []
            for index in indices:
                samples.append(self._dataset[index])
            return samples
        except BaseException as error:
            self._note_shrunk(error, max(indices, default=-1))
            return self._broken(error, f"at sample {index} of the data set" if index is not None else "")

    def _tell(self, epoch: int) -> str:
        """Tells the data set the epoch. Returns what is wrong if its length has changed: each epoch has as many samples
        as the data set had at first, and others would never be trained.
        """
        if not self._tells_epoch or self._told_epoch == epoch:
            return ""
        if callable(self._set_epoch):
            self._set_epoch(epoch)
        if (now := len(self._dataset)) != self._num_samples:
            return (
                f"{self._file_name}: the data set had {self._num_samples} samples, and has {now} in epoch {epoch}: its "
                "len() must stay the same. Let set_epoch(epoch) choose which samples are at these numbers"
            )
        self._told_epoch = epoch
        return ""

    def _note_shrunk(self, error: BaseException, last: int) -> None:
        try:
            now = len(self._dataset)
        except Exception:  # of the user's code; the first error counts
            return
        if last >= now:
            error.add_note(
                f"the data set has {now} samples now, and had more when training began: its len() must stay the same"
            )

    def batch(self, indices: list[int]) -> Any:
        """The collated batch, or a `FetchError`, of samples that are fetched by this thread. User code draws the same
        random numbers as in a worker process; afterwards the generators are as they were before.
        """
        with host_seeded(self._seed_of(indices)):
            return self.collate(self._samples(indices, is_seeded=True))

    def _seed_of(self, indices: list[int]) -> int:
        """The seed of a batch: of the batch alone, so that what is drawn does not depend on the worker or the rank."""
        # A tuple of whole numbers has the same hash in every process, whatever PYTHONHASHSEED is.
        return hash((self._seed, _epoch_of(indices), indices[0])) & 0xFFFFFFFF

    def collate(self, samples: list[Any] | FetchError) -> Any:
        """Collates samples into a batch, or returns a `FetchError`. None for no samples, and where the job's
        `collate_fn` returns None, which skips the batch; parts that it returns as None are left out.
        """
        if isinstance(samples, CollatedBatch):
            return list(samples)
        if isinstance(samples, FetchError) or not samples:
            return samples or None
        try:
            if isinstance(samples, Samples) and samples.num_parts > 1:
                bounds = bounds_of(len(samples), samples.num_parts)
                parts = ((self._collate_fn(samples[start:end]), end - start) for start, end in bounds)
                return InParts(part for part in parts if part[0] is not None) or None
            if self._collate_fn is default_collate and any(sample is None for sample in samples):
                return self._without_none(samples)
            if isinstance(samples, Together) and self._collate_fn is not default_collate:
                return self._collate_fn(samples.given)
            return self._collate_fn(samples)
        except BaseException as error:
            return self._broken(error, "in collating a batch")

    def _without_none(self, samples: list[Any]) -> FetchError | None:
        """None if every sample is None: the batch is skipped. Else an error, since its size would be wrong."""
        num_none = sum(sample is None for sample in samples)
        if num_none == len(samples):
            return None
        why = (
            f"{self._file_name}: the data set gives None for {num_none} of the {len(samples)} samples of a batch: give "
            "collate_fn, which leaves them out and returns None where no sample is left"
        )
        return FetchError(why, "", InvalidJob(why))

    def _broken(self, error: BaseException, where: str) -> FetchError:
        if not isinstance(error, Exception) and get_worker_info() is None:  # a worker process would end without a word
            raise error
        if where:
            error.add_note(where)
        if OF_ONE_THREAD in str(error):
            error.add_note(
                "open it in __getitem__, on first use, since samples are read by other threads and processes than the "
                "one that makes the data set; or give num_workers=0"
            )
        raised = describe_raised(error, self._file_name)
        # Raised itself, a StopIteration would end a generator between here and the user's code, or break it namelessly.
        own = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
        return FetchError(str(raised), raised.traceback, own)


def _epoch_of(indices: list[int]) -> int:
    """The epoch of `Indices`; 0 of a plain list."""
    return getattr(indices, "epoch", 0)


def begin_worker(of_user: Callable[[int], None] | None, worker: int) -> None:
    """Begins a worker process of a user's loader, whose `worker_init_fn` is `of_user`."""
    report_unpicklable()
    show_dataset()
    open_again()
    if of_user is not None:
        of_user(worker)


def open_again() -> None:
    """Opens the files again that were open for reading when this worker process was forked. Otherwise it would share
    their positions with its parent and the other workers, and between its `seek` and its `read` another one's `seek`
    would have it read other samples.
    """
    if not os.path.isdir(OPEN_FILES):  # not on Linux
        return
    for name in os.listdir(OPEN_FILES):
        number, path = int(name), os.path.join(OPEN_FILES, name)
        with suppress(OSError):  # one that may not be opened again, such as with rights that the process had before
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if number > 2 and flags & os.O_ACCMODE == os.O_RDONLY and stat.S_ISREG(os.fstat(number).st_mode):
                position = os.lseek(number, 0, os.SEEK_CUR)
                own = os.open(path, flags)
                os.lseek(own, position, os.SEEK_SET)
                os.dup2(own, number, inheritable=os.get_inheritable(number))
                os.close(own)


def show_dataset() -> None:
    """Has `get_worker_info().dataset`, in this worker process, be the user's data set and not the `Fetch` around it."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, Fetch):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # its own refuses: users are to change nothing in it


def report_unpicklable() -> None:
    """Has this worker process send an error for a batch that cannot be pickled. Python's thread that sends batches only
    prints it, and the rank would wait forever.
    """
    Queue._on_queue_feeder_error = _send_error_instead  # type: ignore[attr-defined]


def _send_error_instead(queue: Any, error: Exception, item: Any) -> None:
    """Sends an error in place of a batch that cannot be pickled, in a worker process; called by `queue`'s thread."""
    match item:
        case (int() as position, data):
            said = f"{type(data).__name__}: {type(error).__name__}: {error}"
            why = (
                f"a batch cannot be pickled, as worker processes send it ({said}): let collate_fn return what can be, "
                "such as tensors and objects of classes at the top level of a module, or set num_workers to 0"
            )
            queue.put((position, FetchError(why, "")))
        case _:
            traceback.print_exception(error)

"""Batches come in the order of the leases, as the permutation says, and errors are raised where batches are taken."""

import errno
import multiprocessing
import os
import random
import re
import resource
import signal
import tempfile
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from elche.errors import InvalidJob
from elche.permutation import permutation_slice
from elche_worker.data import lease_loader
from elche_worker.data.dataset import Shuffled
from elche_worker.data.fetching import Fetch
from elche_worker.data.lease_loader import BLOCK_BATCHES, LeasedPart, LeaseLoader, WorkerLost
from elche_worker.device.rng import seed_all
from elche_worker.device.transfer import to_device
from elche_worker.process.leaving import ASK, leave_on_sigterm
from elche_worker.user.loading import UserCodeRaised, describe_raised


class Indices:
    """A data set whose samples are their own indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.size - 1000:
            raise ValueError(f"sample {index} is broken")
        return torch.tensor(index)


def loader_of(dataset: Indices, num_workers: int = 0) -> tuple[LeaseLoader, threading.Event]:
    wake = threading.Event()
    order = Shuffled(len(dataset), seed=3)
    loader = LeaseLoader(dataset, order=order, batch_size=10, collate_fn=None, wake=wake.set, num_workers=num_workers)
    return loader, wake


def take(loader: LeaseLoader, wake: threading.Event) -> Any:
    while not loader.is_ready:
        assert wake.wait(400)
        wake.clear()
    return loader.take()


class Drawn(Indices):
    """Samples with what they draw of each generator of the host."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, float(torch.rand(1)), random.random(), np.random.rand()], dtype=torch.float64)


def test_what_is_fetched_in_step_is_what_worker_processes_fetch() -> None:
    """And the model's random numbers are as if nothing else were drawn."""
    taken = []
    for num_workers in (0, 1):
        loader, wake = loader_of(Drawn(5000), num_workers)
        if not num_workers:
            loader.fetch_in_step()
        assert not loader.is_ready
        loader.add(LeasedPart(id=1, epoch=0, offset=100, size=25))
        loader.add(LeasedPart(id=2, epoch=1, offset=0, size=0))
        loader.add(LeasedPart(id=3, epoch=1, offset=0, size=645))
        seed_all(5)
        taken.append([(take(loader, wake), float(torch.rand(1)), random.random()) for _ in range(68)])
        assert not loader.is_ready
        loader.stop()
    in_step, by_workers = taken
    for (one, *drawn), (other, *as_drawn) in zip(in_step, by_workers, strict=True):
        assert (one.epoch, one.size, one.lease, one.offset) == (other.epoch, other.size, other.lease, other.offset)
        assert torch.equal(one.data, other.data)
        assert drawn == as_drawn


def test_what_a_data_set_raises_in_step_is_raised_and_a_stopped_loader_has_nothing() -> None:
    loader, _ = loader_of(Indices(10))
    loader.fetch_in_step()
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    loader.add(LeasedPart(id=2, epoch=1, offset=0, size=10))
    with pytest.raises(ValueError, match="is broken"):
        loader.take()
    assert loader.is_ready
    loader.stop()
    assert not loader.is_ready


def test_who_holds_the_data_set_still_waits_for_the_read_that_goes_on() -> None:
    """Both may read one open file: a read in between would move its position."""
    begun, go, seen = threading.Event(), threading.Event(), []

    class Noted(Indices):
        def __getitem__(self, index: int) -> torch.Tensor:
            begun.set()
            assert go.wait(400)
            seen.append("read")
            return super().__getitem__(index)

    loader, wake = loader_of(Noted(10**9))
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    assert begun.wait(400)

    def hold() -> None:
        with loader.still():
            seen.append("still")

    holder = threading.Thread(target=hold)
    holder.start()
    holder.join(0.2)  # enough for one that does not wait
    go.set()
    holder.join()
    assert len(take(loader, wake).data) == 10
    assert seen == ["read"] * 10 + ["still"]
    loader.stop()


def test_worker_processes_read_on_while_the_data_set_is_held_still() -> None:
    loader, wake = loader_of(Indices(10**9), num_workers=1)
    with loader.still():
        loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
        assert len(take(loader, wake).data) == 10
    loader.stop()


def test_batches_follow_the_leases_and_the_permutation() -> None:
    dataset = Indices(10**9)
    loader, wake = loader_of(dataset)
    loader.add(LeasedPart(id=1, epoch=0, offset=100, size=25))
    loader.add(LeasedPart(id=2, epoch=1, offset=0, size=10))
    loader.add(LeasedPart(id=1, epoch=0, offset=100, size=25))  # sent again: changes nothing
    batches = [take(loader, wake) for _ in range(4)]
    assert [(batch.epoch, batch.size) for batch in batches] == [(0, 10), (0, 10), (0, 5), (1, 10)]
    got = torch.cat([batch.data for batch in batches[:3]]).tolist()
    assert got == permutation_slice(seed=3, epoch=0, length=10**9, offset=100, size=25).tolist()
    assert loader.num_leased == 35


def test_a_long_lease_has_each_of_its_samples_once() -> None:
    """Indices are computed for some batches at a time."""
    size = 10 * (2 * BLOCK_BATCHES + 3) + 7
    loader, wake = loader_of(Indices(10**9))
    loader.add(LeasedPart(id=1, epoch=2, offset=1000, size=size))
    batches = [take(loader, wake) for _ in range(-(-size // 10))]
    got = torch.cat([batch.data for batch in batches]).tolist()
    assert got == permutation_slice(seed=3, epoch=2, length=10**9, offset=1000, size=size).tolist()
    assert batches[-1].size == 7


def test_a_broken_sample_is_raised_where_batches_are_taken() -> None:
    loader, wake = loader_of(Indices(1000))
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    with pytest.raises(ValueError, match="is broken") as raised:
        take(loader, wake)
    told = str(describe_raised(raised.value, "train.py"))
    assert re.search(r"ValueError: sample (\d+) is broken .*, at sample \1 of the data set", told), told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_worker_processes_change_neither_order_nor_errors(num_workers: int) -> None:
    loader, wake = loader_of(Indices(10**9), num_workers=num_workers)
    for lease in range(1, 4):
        loader.add(LeasedPart(id=lease, epoch=0, offset=1000 * lease, size=95))
        got = torch.cat([take(loader, wake).data for _ in range(10)]).tolist()
        assert got == permutation_slice(seed=3, epoch=0, length=10**9, offset=1000 * lease, size=95).tolist()
    loader.stop()
    loader, wake = loader_of(Indices(1000), num_workers=num_workers)
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    with pytest.raises((ValueError, UserCodeRaised), match=r"sample \d+ is broken"):
        take(loader, wake)
    loader.stop()


def test_worker_processes_begin_with_the_loader_and_end_with_it() -> None:
    before = set(multiprocessing.active_children())
    loader, wake = loader_of(Indices(10**9), num_workers=2)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=95))
    take(loader, wake)
    loader.stop()
    deadline_s = time.monotonic() + 100
    while any(one.exitcode is None for one in started):  # not join: the loader's thread waits for them, too
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert {one.exitcode for one in started} == {0}


class Deadly(Indices):
    def __getitem__(self, index: int) -> torch.Tensor:
        os._exit(3)


@pytest.fixture
def unsignalled() -> Iterator[None]:
    """Once the main thread has used a `DataLoader`, PyTorch raises in it, whatever it does, when a worker dies. Other
    signals may be handled as by a rank until the test's end.
    """
    before = {one: signal.getsignal(one) for one in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, ASK)}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("unsignalled")
def test_a_worker_process_that_dies_is_an_error() -> None:
    before = set(threading.enumerate())
    loader, wake = loader_of(Deadly(1000), num_workers=1)
    (its_thread,) = (one for one in set(threading.enumerate()) - before if one.name == "loader")
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    with pytest.raises(RuntimeError, match=r"worker .* exited unexpectedly"):
        take(loader, wake)
    loader.stop()
    its_thread.join(400)


class Signalled(Indices):
    """Gets SIGTERM while it is read, as all processes do when systemd or Slurm stops a worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return torch.tensor(index)


@pytest.mark.usefixtures("unsignalled")
def test_worker_processes_read_on_for_a_rank_that_is_to_leave() -> None:
    """They ended, and the rank failed: the work that it was to commit first was lost."""
    leave_on_sigterm()
    loader, wake = loader_of(Signalled(10**9), num_workers=1)
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=20))
    assert [len(take(loader, wake).data) for _ in range(2)] == [10, 10]
    loader.stop()


@pytest.mark.usefixtures("unsignalled")
def test_worker_processes_of_what_is_no_rank_end_at_sigterm() -> None:
    """multiprocessing sends it when a program ends, and waits: one that called job.run() and failed never ended."""
    loader, wake = loader_of(Signalled(10**9), num_workers=1)
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=20))
    try:
        with pytest.raises(RuntimeError, match=r"worker .* (exited unexpectedly|is killed by signal: Terminated)"):
            take(loader, wake)
    finally:
        loader.stop()


@pytest.mark.parametrize(
    "error",
    [
        EOFError(),
        ConnectionResetError(104, "reset"),
        FileNotFoundError(2, "No such file or directory"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed"),
    ],
)
def test_however_the_death_of_a_worker_process_shows_it_is_known(error: Exception) -> None:
    """It was taken for a mistake in the user's file, which ends the job."""
    assert isinstance(WorkerLost.of(error), WorkerLost)
    for mistake in (RuntimeError("the shapes do not match"), FileNotFoundError(2, "no such folder", "/gone/pymp-1")):
        assert WorkerLost.of(mistake) is mistake


def test_worker_processes_are_forked_whatever_the_start_method_is() -> None:
    """Those of Python 3.14's default cannot import the user's file."""
    loader, _ = loader_of(Indices(10**9), num_workers=1)
    context = loader._loader.multiprocessing_context
    loader.stop()
    assert context.get_start_method() == "fork"


class Exiting(Indices):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise SystemExit("no such folder")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_exits_is_told_where_batches_are_taken(num_workers: int) -> None:
    """In a worker process all that was said was FileNotFoundError, of the connection to it."""
    loader, wake = loader_of(Exiting(10**9), num_workers)
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    with pytest.raises((UserCodeRaised, SystemExit), match="no such folder"):
        take(loader, wake)
    loader.stop()


class Ending(Indices):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(10**9)
        self._error = error

    def __getitem__(self, index: int) -> torch.Tensor:
        raise self._error


@pytest.mark.parametrize("error", [KeyboardInterrupt, CancelledError, GeneratorExit, StopIteration])
def test_whatever_is_raised_in_a_worker_process_is_told(error: type[BaseException]) -> None:
    """Those that torch does not send ended the process without a word: a lost worker, which is no mistake of a user."""
    loader, wake = loader_of(Ending(error), num_workers=1)
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    with pytest.raises(UserCodeRaised, match=rf"^{error.__name__}.*, at sample \d+ of the data set$"):
        take(loader, wake)
    loader.stop()


@pytest.mark.parametrize("collates", [False, True])
def test_a_data_set_that_raises_stop_iteration_is_told_where_batches_are_taken_in_a_generator(
    collates: bool,
) -> None:
    """All that was said was "generator raised StopIteration"."""

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        raise StopIteration

    dataset, collate_fn = (Indices(10**9), collate) if collates else (Ending(StopIteration), None)
    fetched = Fetch(dataset, collate_fn, "train.py").batch([7])
    where = "in collating a batch" if collates else "at sample 7 of the data set"

    def batches() -> Iterator[torch.Tensor]:
        raise fetched.to_error()
        yield

    with pytest.raises(UserCodeRaised, match=rf"^StopIteration \(train.py\), {where}$"):
        next(batches())


class Told(Indices):
    """A data set that augments by the epoch that it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.epoch)


@pytest.mark.parametrize(("num_workers", "is_in_step"), [(0, False), (0, True), (2, False)])
def test_a_data_set_is_told_the_epoch_of_its_samples(num_workers: int, is_in_step: bool) -> None:
    """What a callback told it came too late, as batches are fetched ahead, and never reached worker processes."""
    loader, wake = loader_of(Told(10**9), num_workers)
    if is_in_step:
        loader.fetch_in_step()
    epochs = [3, 4, 3, 5]
    for number, epoch in enumerate(epochs):
        loader.add(LeasedPart(id=number + 1, epoch=epoch, offset=0, size=30))
    taken = [take(loader, wake) for _ in range(12)]
    loader.stop()
    assert [set(one.data.tolist()) for one in taken] == [{epoch} for epoch in epochs for _ in range(3)]


def test_what_a_callback_tells_a_data_set_does_not_reach_samples_of_another_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`epoch_fn` that called `set_epoch`, as scripts do: it came while samples of the next epoch were fetched, in
    silence.
    """
    dataset = Told(10**9)
    for _ in range(2):
        loader, wake = loader_of(dataset)
        loader.add(LeasedPart(id=1, epoch=1, offset=0, size=10))
        assert take(loader, wake).data.unique().tolist() == [1]
        dataset.set_epoch(0)
        loader.add(LeasedPart(id=2, epoch=1, offset=10, size=10))
        assert take(loader, wake).data.unique().tolist() == [1]
        assert capsys.readouterr().err.count("set_epoch() of the data set is without effect here") == 1
        loader.stop()
        dataset.set_epoch(7)  # by what goes on with it after `job.run()`
        assert dataset.epoch == 7


class Growing(Told):
    """A curriculum: each epoch has ten samples more."""

    def set_epoch(self, epoch: int) -> None:
        self.size = 10**9 + 10 * epoch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_whose_length_changes_with_the_epoch_is_refused(num_workers: int) -> None:
    """Each epoch had the first one's samples, and the training succeeded without the others."""
    loader, wake = loader_of(Growing(10**9), num_workers)
    for epoch in range(2):
        loader.add(LeasedPart(id=epoch + 1, epoch=epoch, offset=0, size=10))
    assert take(loader, wake).data.shape == (10,)
    with pytest.raises((InvalidJob, UserCodeRaised), match=r"had 1000000000 .* has 1000000010 in epoch 1"):
        take(loader, wake)
    loader.stop()


class Checked(Told):
    """A data set with a class that checks what is set, as those of pydantic do."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("epoch", "size"):
            raise ValueError(f"no field {name}")
        super().__setattr__(name, value)


def test_a_data_set_that_lets_nothing_be_set_is_read_all_the_same() -> None:
    loader, wake = loader_of(Checked(10**9))
    loader.add(LeasedPart(id=1, epoch=2, offset=0, size=10))
    assert take(loader, wake).data.unique().tolist() == [2]
    loader.stop()


class Asking(Indices):
    """A data set that asks its worker process for the data set."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(get_worker_info().dataset is self)


def test_worker_processes_know_the_users_data_set() -> None:
    """It was an object of elche's own."""
    loader, wake = loader_of(Asking(10**9), num_workers=1)
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
    batch = take(loader, wake)
    loader.stop()
    assert batch.data.all()


def test_nested_structures_are_moved_and_keep_their_form() -> None:
    from collections import namedtuple

    pair = namedtuple("pair", "left right")
    batch = {"a": [torch.zeros(1), ("text", torch.ones(1))], "b": pair(torch.zeros(2), 3)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1][0] == "text"
    assert isinstance(moved["b"], pair)
    assert moved["b"].right == 3


def test_too_little_shared_memory_for_workers_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives a container 64 MiB of it."""

    def full(self: torch.utils.data.DataLoader[Any]) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", full)
    loader, wake = loader_of(Indices(10**9), num_workers=2)
    with pytest.raises(InvalidJob, match=r"/dev/shm on .* MiB left.*--shm-size.*num_workers to 0"):
        take(loader, wake)


def open_all(pipe: Any) -> None:
    """Opens as many files as a process may have, but a few that it had to close."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    opened: list[Any] = []
    with suppress(OSError):
        while True:
            opened.append(open(os.devnull))  # noqa: SIM115
    del opened[:3]
    pipe.send("opened")
    pipe.recv()


def test_a_worker_process_that_may_open_no_more_files_is_told() -> None:
    """Its rank was started again and again, and then the samples were said to be deadly."""
    context = multiprocessing.get_context("fork")
    pipe, others = context.Pipe()
    worker = context.Process(target=open_all, args=(others,))
    worker.start()
    assert pipe.recv() == "opened"
    told = lease_loader._of_workers(EOFError())
    pipe.send("end")
    worker.join()
    assert isinstance(told, InvalidJob)
    assert "(num_workers) has 200 files open, the most that it may (ulimit -n)" in str(told)
    assert isinstance(lease_loader._of_workers(EOFError()), WorkerLost)


@pytest.mark.parametrize(("length", "fits"), [(75, True), (76, False)])
def test_a_temporary_folder_whose_name_is_too_long_for_sockets_is_told(
    monkeypatch: pytest.MonkeyPatch, length: int, fits: bool
) -> None:
    """Worker processes would wait forever to hand over their first batches."""
    with tempfile.TemporaryDirectory(prefix="elche-test-") as short:
        folder = Path(short) / ("x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if fits:
            loader, wake = loader_of(Indices(10**9), num_workers=1)
            loader.add(LeasedPart(id=1, epoch=0, offset=0, size=10))
            assert len(take(loader, wake).data) == 10
            loader.stop()
        else:
            monkeypatch.setattr(lease_loader, "get_temp_dir", lambda: f"{folder}/pymp-12345678")
            with pytest.raises(InvalidJob, match="it has 76 characters, of at most 75"):
                loader_of(Indices(10**9), num_workers=1)
            monkeypatch.setattr(lease_loader, "get_temp_dir", lambda: "/tmp/pymp-12345678")
            loader_of(Indices(10**9), num_workers=1)[0].stop()


def test_a_batch_that_worker_processes_cannot_send_is_an_error() -> None:
    wake, order = threading.Event(), Shuffled(10**9, seed=3)
    loader = LeaseLoader(
        Indices(10**9), order=order, batch_size=10, collate_fn=lambda _: lambda: 0, wake=wake.set, num_workers=1
    )
    loader.add(LeasedPart(id=1, epoch=0, offset=0, size=20))
    with pytest.raises(UserCodeRaised, match=r"cannot be pickled, as worker processes send it .*num_workers to 0"):
        take(loader, wake)
    loader.stop()

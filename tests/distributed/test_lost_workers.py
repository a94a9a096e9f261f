"""Worker processes of a loop's loader that are killed, as the kernel does when memory is short."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, _utils, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from elche_worker.data.lease_loader import WorkerLost, shows_lost_worker
from elche_worker.trainer import Trainer
from elche_worker.trainer.refetching import MOST_LOST, Owed, refetched
from support.loops import flat
from support.worlds import UNDO, Worlds


class Deadly(Dataset[torch.Tensor]):
    """Sample `index` kills the process that reads it: the first one, or each."""

    def __init__(self, index: int, mark: Path | None) -> None:
        self.index, self.mark = index, mark

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.index and get_worker_info() is not None and (self.mark is None or not self.mark.exists()):
            if self.mark is not None:
                self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((2,), float(index))


def look_every(seconds: float) -> None:
    """By default torch looks every five seconds whether worker processes live."""
    _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (seconds,)


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    look_every(0.1)
    yield
    look_every(_utils.MP_STATUS_CHECK_INTERVAL)


def batches(dataset: Deadly) -> list[list[float]]:
    owed = Owed([[at, at + 1] for at in range(0, 48, 2)])
    loaders: list[Any] = []

    def new_loader(is_lost: bool) -> Any:
        assert is_lost == bool(loaders)
        loaders.append(DataLoader(dataset, batch_sampler=owed, num_workers=2, multiprocessing_context="fork"))
        return loaders[-1]

    return [batch[:, 0].tolist() for batch in refetched(new_loader, owed)]


@pytest.mark.parametrize("index", [0, 21, 47])
def test_each_batch_comes_once_and_in_its_place(tmp_path: Path, index: int) -> None:
    assert batches(Deadly(index, tmp_path / "killed")) == [[at, at + 1.0] for at in range(0, 48, 2)]
    assert (tmp_path / "killed").exists()


def test_a_sample_that_kills_each_process_is_not_fetched_for_ever() -> None:
    with pytest.raises(WorkerLost, match="has died"):
        batches(Deadly(21, None))
    assert MOST_LOST < 10


def train(mark: Path | None, index: int) -> tuple[list[float], torch.Tensor]:
    look_every(0.1)
    UNDO.append(partial(look_every, _utils.MP_STATUS_CHECK_INTERVAL))
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    trainer = Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    own = mark and mark.with_name(f"{mark.name}-{trainer.rank}")
    data = Deadly(index if own else -1, own)
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork")
    trainer.set_data_loader(loader, forward_input="input", names=("input",))
    seen: list[float] = []
    for epoch in trainer.epochs(2):
        for batch in trainer.epoch(epoch):
            seen += batch["input"][:, 0].tolist()
            trainer.forward_batch(batch).square().mean().backward()
            trainer.step()
    assert own is None or own.exists()
    return seen, flat(model)


@pytest.mark.parametrize("index", [0, 21])
def test_a_loop_trains_the_same_whatever_happens_to_its_worker_processes(
    worlds: Worlds, tmp_path: Path, index: int
) -> None:
    """One that was killed, in any process, ended the whole loop. Sample 0 is also read before training."""
    expected = worlds.run(1, train, None, index)
    (seen, parameters), *_ = worlds.run(1, train, tmp_path / "killed", index)
    assert seen == expected[0][0]
    assert torch.equal(parameters, expected[0][1])


def test_whose_death_it_is_that_a_loader_tells() -> None:
    """One of user code's own loader tells it wherever the main thread is, and the job failed for it."""
    assert shows_lost_worker(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    assert shows_lost_worker(RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"))
    assert shows_lost_worker(WorkerLost("a worker process of the loader has died"))
    assert not shows_lost_worker(ValueError("Caught ValueError in DataLoader worker process 0.\nOriginal Traceback"))
    assert not shows_lost_worker(EOFError())

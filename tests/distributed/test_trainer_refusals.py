"""What cannot work, or would be wrong without a word, is one clear error on every rank."""

import contextlib
import io
import math
import os
import re
from collections.abc import Callable
from itertools import cycle
from multiprocessing import current_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_value_
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from elche.errors import Misuse
from elche_worker.collectives import world
from elche_worker.collectives.gradients import SUMMED_STEPS
from elche_worker.trainer import Trainer, TrainerConfig
from elche_worker.trainer.checks import problem_of_synced
from elche_worker.user.loading import UserCodeRaised
from support.loops import NAMES, Recurrent, TwoInputs, dicts, flat, new_model, new_optimizer, samples
from support.worlds import Raised, Worlds


def setup_different(kind: str) -> None:
    rank = dist.get_rank()
    match kind:
        case "shape":
            model: Any = nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4 + rank, 1))
        case "name":
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if rank else nn.ModuleDict({"a": nn.Linear(4, 4)})
        case "number":
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank)))
        case "buffer":
            model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=not rank))
        case "frozen":
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            model[0].weight.requires_grad_(not rank)
        case "kind":
            model = nn.Linear(4, 4)
            Trainer.setup(model if rank == 0 else "model", new_optimizer(model))  # type: ignore[arg-type]
        case "optimizer":
            model = nn.Linear(4, 4)
            Trainer.setup(model, new_optimizer(model if rank else nn.Linear(4, 4)))
        case "config":
            model = nn.Linear(4, 4)
            Trainer.setup(model, new_optimizer(model), TrainerConfig(anchor=10 + rank))
        case "synced":
            model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    Trainer.setup(model, new_optimizer(model))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["'0.weight'", "(4, 4)", "(5, 4)", "rank 0", "rank 1"]),
        ("name", ["'a.weight'", "'0.weight'", "rank 1"]),
        ("number", ["2 tensors", "4", "'1.weight'", "only on rank 1"]),
        ("buffer", ["'0.running_mean'", "only on rank 0"]),
        ("frozen", ["'0.weight'", "frozen", "rank 1"]),
        ("kind", ["rank 1", "torch.nn.Module, not str"]),
        ("optimizer", ["rank 0", "2 parameters that the model does not have"]),
        ("synced", ["1 is a SyncBatchNorm", "for GPUs alone", "leave nn.SyncBatchNorm.convert_sync_batchnorm() out"]),
        ("config", ["configs", "anchor=10", "anchor=11"]),
    ],
)
def test_what_differs_between_ranks_is_told_on_every_rank(worlds: Worlds, kind: str, words: list[str]) -> None:
    for raised in worlds.run(2, setup_different, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert not [word for word in words if word not in raised.message], raised.message


def attach_different(kind: str) -> None:
    rank, model = dist.get_rank(), new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    dataset = samples(20 + (rank if kind == "size" else 0))
    loader = DataLoader(dataset, batch_size=4 + (rank if kind == "batch" else 0))
    forward_input = "inputs" if kind != "field" or rank == 0 else "image"
    trainer.set_data_loader(loader, forward_input=forward_input, names=NAMES)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("size", ["(20, 4, 0, 0)", "(21, 4, 0, 0)"]),
        ("batch", ["(20, 4, 0, 0)", "(20, 5, 0, 0)"]),
        ("field", ["rank 1", "'image'", "'inputs', 'labels'"]),
    ],
)
def test_loaders_that_differ_are_told_on_every_rank(worlds: Worlds, kind: str, words: list[str]) -> None:
    for raised in worlds.run(2, attach_different, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert not [word for word in words if word not in raised.message], raised.message


class Samples(Dataset[Any]):
    """64 samples that follow from `seed`, and what each read adds to them."""

    def __init__(self, seed: int, change: Callable[[], torch.Tensor], *, breaks_at: int = -1) -> None:
        self.inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
        self.change = change
        self.breaks_at = breaks_at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.breaks_at:
            raise OSError("no such file")
        return self.inputs[index] + self.change(), index % 3


def attach_data(kind: str, num_workers: int) -> None:
    rank, model = dist.get_rank(), new_model()
    own = torch.Generator().manual_seed(rank)
    match kind:
        case "other samples":
            data: Any = Samples(rank, lambda: torch.zeros(4))
        case "other order":
            data = Subset(Samples(0, lambda: torch.zeros(4)), list(range(64))[:: -1 if rank else 1])
        case "divided":
            data = Subset(Samples(0, lambda: torch.zeros(4)), range(rank, 64, 2))
        case "alike":
            data = Samples(0, lambda: torch.zeros(4))
        case "augmented":
            data = Samples(0, lambda: torch.randn(4))
        case "augmented by itself":
            data = Samples(0, lambda: torch.randn(4, generator=own))
        case "decoded differently":
            data = Samples(0, lambda: torch.full((4,), 0.01 * rank))
        case "a sample breaks on one rank":
            data = Samples(0, lambda: torch.zeros(4), breaks_at=63 if rank else -1)
    trainer = Trainer.setup(model, new_optimizer(model))
    before = torch.get_rng_state()
    trainer.set_data_loader(
        DataLoader(data, batch_size=4, num_workers=num_workers), forward_input="inputs", names=NAMES
    )
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["other samples", "other order", "divided"])
def test_data_that_differ_between_ranks_are_refused(worlds: Worlds, kind: str, num_workers: int) -> None:
    """A random split without a seed, or a vocabulary made of a set, was trained wrongly in silence."""
    for raised in worlds.run(2, attach_data, kind, num_workers, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.message.startswith("ranks have different data: sample 0 of rank 1 is not that of rank 0."), raised


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["alike", "augmented", "augmented by itself", "decoded differently"])
def test_data_that_are_alike_but_for_chance_are_taken(worlds: Worlds, kind: str, num_workers: int) -> None:
    worlds.run(2, attach_data, kind, num_workers)


def test_a_sample_that_breaks_is_no_other_sample(worlds: Worlds) -> None:
    worlds.run(2, attach_data, "a sample breaks on one rank", 0)


class Handle(Dataset[Any]):
    """Opens its file with the first sample that is read, as data sets do that worker processes are to share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = self.path.open("rb")
        return torch.zeros(4), 0


def attach_file(path: Path) -> bool:
    model, data = new_model(), Handle(path)
    trainer = Trainer.setup(model, new_optimizer(model))
    loader = DataLoader(data, batch_size=4, num_workers=2)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    return data.file is None


def test_a_file_that_worker_processes_open_is_not_opened_before_they_are_forked(worlds: Worlds, tmp_path: Path) -> None:
    """They shared its position, and read each other's samples."""
    path = tmp_path / "samples"
    path.touch()
    assert worlds.run(2, attach_file, path) == [True, True]


def open_in_worker(_: int) -> None:
    """As `worker_init_fn`s do."""
    own: Any = get_worker_info()
    own.dataset.file = own.dataset.path.open("rb")


def test_a_worker_init_fn_finds_the_loaders_data_set(tmp_path: Path) -> None:
    """It found an object of elche's own: AttributeError."""
    (tmp_path / "samples").touch()
    model, data = new_model(), Handle(tmp_path / "samples")
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu")) as trainer:
        loader = DataLoader(data, batch_size=4, num_workers=1, worker_init_fn=open_in_worker)
        trainer.set_data_loader(loader, names=NAMES)
        assert sum(batch.size for batch in trainer.epoch(0)) == len(data)


def attach_nothing() -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    trainer.set_data_loader(
        DataLoader(samples(20), batch_size=4, collate_fn=lambda _: None), forward_input="inputs", names=NAMES
    )


def test_a_batch_of_no_good_samples_is_told_what_to_do(worlds: Worlds) -> None:
    for raised in worlds.run(2, attach_nothing, may_raise=True):
        assert isinstance(raised, Raised)
        assert "collate_fn returned None" in raised.message
        assert not raised.message.startswith("rank")  # it is so on all
        assert "leave samples that cannot be trained out of the data set" in raised.message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_anchor": -1}, "max_anchor"),
        ({"anchor": 0}, "anchor"),
        ({"overhead_target": float("nan")}, "overhead_target"),
        ({"speed_hint": 2.0}, "speed_hint"),
        ({"speed_hint": (0, float("inf"))}, "speed_hint"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"max_anchor": 0, "anchor": 5}, "anchor=5 has no effect with max_anchor=0"),
        ({"max_anchor": 0, "overhead_target": 0.2}, "overhead_target=0.2 has no effect with max_anchor=0"),
        ({"max_anchor": 4, "anchor": 5}, "anchor must be at most 4"),
        ({"anchor": 500}, "anchor must be at most 200, or max_anchor more"),
    ],
)
def test_a_config_that_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Misuse, match=words):
        TrainerConfig(**values)


def step_with_own_batches(settings: dict[str, Any], scatters: bool) -> tuple[int, bool, list[int]]:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(**settings))
    inputs, labels = samples(8)[:]
    for _ in range(2):
        output = trainer.forward_scattered(inputs) if scatters else trainer(inputs)
        cross_entropy(output, labels).backward()
        trainer.step()
    return trainer.num_steps, trainer.has_el_che, trainer.batch_counts


@pytest.mark.parametrize(
    ("settings", "scatters", "words"),
    [
        ({"anchor": 5}, False, "anchor=5 has no effect"),
        ({"max_anchor": 50}, False, "max_anchor=50 has no effect"),
        ({"overhead_target": 0.2}, False, "overhead_target=0.2 has no effect"),
        ({"max_anchor": 0, "speed_hint": (1, 3.0)}, False, r"speed_hint=\(1, 3.0\) has no effect"),
        ({"anchor": 5, "speed_hint": (1, 3.0)}, True, "anchor=5 has no effect"),
    ],
)
def test_settings_of_el_che_are_refused_in_a_loop_that_takes_its_own_batches(
    worlds: Worlds, settings: dict[str, Any], scatters: bool, words: str
) -> None:
    for raised in worlds.run(2, step_with_own_batches, settings, scatters, may_raise=True):
        assert isinstance(raised, Raised)
        assert re.search(rf"^TrainerConfig: {words} .* itself, .*: leave it out, or have elche give", raised.message)


@pytest.mark.parametrize(
    ("settings", "scatters"), [({}, False), ({"speed_hint": (1, 3.0)}, True), ({"max_anchor": 0}, False)]
)
def test_a_loop_that_takes_its_own_batches_has_no_el_che(
    worlds: Worlds, settings: dict[str, Any], scatters: bool
) -> None:
    assert worlds.run(2, step_with_own_batches, settings, scatters) == [(2, False, [])] * 2


def what_is_said(has_loader: bool) -> str:
    model = new_model()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig())
        if has_loader:
            trainer.set_data_loader(DataLoader(samples(8), batch_size=4), forward_input="inputs", names=NAMES)
        for _ in range(2):
            model(samples(4).tensors[0]).sum().backward()
            trainer.step()
    return said.getvalue()


def test_what_a_loop_does_with_batches_is_said_when_it_is_known(worlds: Worlds) -> None:
    first, second = worlds.run(2, what_is_said, False)
    assert second == ""
    assert "several batches" not in first
    assert first.count("a step after every batch of the loop's own") == 1
    with_loader, _ = worlds.run(2, what_is_said, True)
    assert "each rank trains several batches per step" in with_loader
    assert "a step after every" not in with_loader


def test_a_device_that_cannot_be_used_is_one_clear_error() -> None:
    model = new_model()
    with pytest.raises(
        Misuse, match=r"the device 'cuda:9' cannot be used: cuda:9.*; use auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"
    ):
        Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cuda:9"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here cuda:0 can be used")
def test_a_bad_gpu_of_one_of_several_processes_is_named_and_of_one_alone_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # listed; that they fail is real
    assert world.choose_device("auto") == torch.device("cpu")
    assert capsys.readouterr().err.count("is left out") == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(Misuse, match=r"cannot be used: cuda:1: .*; leave it out: name the others in CUDA_VISIBLE_DEV"):
        world.choose_device("auto")


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([])


class Endless:
    def __iter__(self) -> Any:
        return cycle(range(8))


class Given:
    """A sampler of one's own, which has the length of its data set."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(self.gives())


class Halving(DataLoader):  # type: ignore[type-arg]
    """A loader that changes its batches as it gives them."""

    def __iter__(self) -> Any:
        return ((inputs / 2, targets) for inputs, targets in super().__iter__())


def raise_on_collate(_: Any) -> Any:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([1, 2], "needs a torch DataLoader, not list"),
        (DataLoader(Stream()), "map-style"),
        (DataLoader(samples(8), batch_size=None), "batch_size"),
        (Halving(samples(8)), "Halving has an __iter__ of its own, which would not be called.* let collate_fn do what"),
        (DataLoader(samples(8), batch_sampler=[[0, 1], [2]]), "no batch_sampler of its own"),
        (DataLoader(samples(8), sampler=DistributedSampler(samples(8), 2, 0)), "without its DistributedSampler"),
        (DataLoader(samples(8), collate_fn=raise_on_collate), "on purpose"),
        (DataLoader(samples(8)), "name them, as in set_data_loader"),
        (DataLoader(TensorDataset(torch.ones(0, 6))), "is empty"),
        (DataLoader(samples(8), sampler=Endless()), "Endless has no length: .* let it end after as many samples"),
        # As in minGPT: it filled the memory, in silence.
        (
            DataLoader(samples(8), sampler=RandomSampler(samples(8), replacement=True, num_samples=10**10)),
            "RandomSampler would give 10000000000 samples an epoch, of a data set of 8",
        ),
        # It was len()'s OverflowError.
        (
            DataLoader(samples(8), sampler=RandomSampler(samples(8), replacement=True, num_samples=10**20)),
            "RandomSampler would give 100000000000000000000 samples an epoch, of a data set of 8",
        ),
    ],
)
def test_a_loader_that_cannot_be_split_is_refused(loader: Any, words: str) -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    with pytest.raises(Misuse, match=words):
        trainer.set_data_loader(loader, forward_input="inputs")
    with pytest.raises(Misuse, match="call set_data_loader"):
        trainer.data_num_batches  # noqa: B018
    with pytest.raises(Misuse, match="names has 1 names"):
        trainer.set_data_loader(DataLoader(samples(8)), forward_input="inputs", names=("inputs",))


def test_a_loader_that_gives_the_same_batches_in_its_own_way_is_taken() -> None:
    """As torchdata's `StatefulDataLoader`, which counts what it gives."""
    its_own = {"__iter__": lambda _: pytest.fail("it is not called"), "__module__": "torchdata.stateful_dataloader"}
    batches: Any = type("BatchSampler", (BatchSampler,), its_own)
    loader: Any = type("StatefulDataLoader", (DataLoader,), its_own)(samples(8), 4)
    loader.__dict__["batch_sampler"] = batches(loader.sampler, 4, False)
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu", max_anchor=0))
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    assert [batch.size for batch in trainer.epoch(0)] == [4, 4]


def begin_epoch(kind: str) -> list[int]:
    gives: Any = {
        "endless": lambda: cycle(range(8)),
        "pairs": lambda: [(0, 1)] * 8,
        "numbers of other types": lambda: [torch.tensor(1), np.int64(2), -1, *range(5)],
    }[kind]
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0))
    loader: Any = DataLoader(samples(8), batch_size=4, sampler=Given(gives))
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    sizes = []
    for batch in trainer.epoch(0):
        trainer.forward_batch(batch).sum().backward()
        trainer.step()
        sizes.append(batch.size)
    return sizes


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("endless", "Given has given over 800 samples of one epoch: give the sampler __len__, let it end"),
        ("pairs", "Given gives (0, 1) for a sample, and elche deals samples by number"),
        ("numbers of other types", ""),
    ],
)
def test_a_sampler_that_gives_no_epoch_of_numbers_is_refused(worlds: Worlds, kind: str, words: str) -> None:
    """An endless one filled the memory, in silence."""
    for raised in worlds.run(2, begin_epoch, kind, may_raise=bool(words)):
        assert words in raised.message if words else raised == [2, 2]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_fields_follow_from_a_whole_batch_where_one_sample_makes_none(num_workers: int) -> None:
    """As of a `collate_fn` that leaves bad samples out, of which the first may be one, or that pairs them."""
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    loader = DataLoader(samples(8), batch_size=4, collate_fn=without_first, num_workers=num_workers)
    trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
    assert [len(batch["labels"]) for batch in trainer.epoch(0)] == [3, 3]


def without_first(items: list[Any]) -> Any:
    return default_collate(items[1:]) if len(items) > 1 else None


def test_a_batch_size_that_is_changed_behind_the_trainer_is_refused() -> None:
    """Batches kept the size that the loader had at first, in silence."""
    model = new_model()
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu")) as trainer:
        loader = DataLoader(samples(12), batch_size=4)
        trainer.set_data_loader(loader, names=("x", "y"))
        assert len([*trainer.epoch(0)]) == 3
        loader.batch_sampler.batch_size = 6
        with pytest.raises(Misuse, match=r"another batch_size \(4 before\): attach a loader of that batch size"):
            next(iter(trainer.epoch(1)))


def test_a_closed_trainer_says_so() -> None:
    model = new_model()
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu")) as trainer:
        trainer.capture(tags=["0"])
    trainer.close()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    for use in (
        trainer.step,
        lambda: trainer(torch.ones(1, 6)),
        lambda: next(trainer.epoch(0)),
        lambda: next(trainer.epochs(1)),
        trainer.gather,
        lambda: trainer.set_loss_fn(None),
    ):
        with pytest.raises(Misuse, match="closed"):
            use()


def test_a_name_that_the_model_does_not_have_is_refused_with_those_that_it_has() -> None:
    model = Recurrent()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.capture(tags=["cell"])
    with pytest.raises(Misuse, match="no module 'encodr'; it has 'encoder'"):
        trainer.capture(tags=["encodr"])
    model(torch.ones(1, 6))
    assert "cell" in trainer.tags
    trainer.set_data_loader(DataLoader(samples(8)), forward_input="inputs", names=NAMES)
    trainer.set_loss_fn(lambda context: context.output)
    batch = next(trainer.epoch(0))
    with pytest.raises(Misuse, match="scalar with a gradient"):
        trainer.forward_batch(batch)


def misuse(kind: str) -> None:
    """Loops that are wrong without a word, if nobody looks."""
    model = new_model()
    optimizer = new_optimizer(model)
    trainer = Trainer.setup(model, optimizer)
    inputs, labels = samples(8).tensors
    for step in range(3):
        cross_entropy(model(inputs), labels).backward()
        match kind:
            case "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            case "zeroed":
                optimizer.zero_grad()
            case "clamped":
                for one in model.parameters():
                    one.grad.data.clamp_(-1e-4, 1e-4)  # type: ignore[union-attr]  # each has one
            case "optimizer":
                optimizer.step()
            case "samples":
                trainer.step(samples=8) if step < 2 else trainer.step()
            case "negative":
                trainer.step(samples=-1)
            case "one rank":
                trainer.step(samples=8) if dist.get_rank() else trainer.step()
        if kind in ("clipped", "zeroed", "clamped"):
            trainer.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("clipped", "changed after backward, when it had been sent: call trainer.average_gradients() first"),
        ("zeroed", "changed after backward"),
        ("clamped", "changed after backward"),  # by `data`, which has no version counter
        ("optimizer", "gradients of this rank alone: call trainer.step() instead"),
        ("samples", "give step(samples=...) at every step, or never"),
        ("negative", "samples is -1"),
        ("one rank", "some ranks call step(samples=...)"),
    ],
)
def test_a_loop_that_would_be_wrong_without_a_word_is_told(worlds: Worlds, kind: str, words: str) -> None:
    for raised in worlds.run(2, misuse, kind, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.kind == "Misuse"
        assert words in raised.message


class Says(nn.Module):
    """Takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, *arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(*arguments) * named["scale"]
        return result


def test_a_forward_that_does_not_name_its_arguments_is_asked_for_them() -> None:
    model = Says()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    loader: Any = DataLoader(dicts(), batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match=r"does not name its arguments.*inputs="):
        trainer.set_data_loader(loader, forward_input="picture")
    with pytest.raises(Misuse, match="inputs has 'size'"):
        trainer.set_data_loader(loader, forward_input="picture", inputs=("size",))
    with pytest.raises(Misuse, match="names must be a tuple"):
        trainer.set_data_loader(loader, forward_input="picture", names="abc")
    trainer.set_data_loader(loader, forward_input="picture", inputs=("picture", "scale"))
    assert trainer.forward_batch(next(trainer.epoch(0))).shape == (4, 3)


def test_a_compiled_model_is_known_by_its_own_names() -> None:
    model = TwoInputs()
    compiled: Any = torch.compile(model, backend="eager")
    trainer = Trainer.setup(compiled, new_optimizer(model), TrainerConfig(device="cpu"))
    trainer.set_data_loader(DataLoader(dicts(), batch_size=4), forward_input="picture")  # type: ignore[arg-type]
    trainer.capture(tags=["linear"])
    assert trainer._forward.wiring is not None
    assert trainer._forward.wiring.others == ("scale",)
    assert trainer.forward_batch(next(trainer.epoch(0))).shape == (4, 3)


def test_a_batch_that_is_one_object_gets_one_name() -> None:
    """Such as a data class. It was said to have a field without a name, with two names as the way out."""
    model = nn.Linear(4, 1)
    loader = DataLoader(samples(8), batch_size=4, collate_fn=lambda items: SimpleNamespace(size=len(items)))
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    for names in (None, NAMES):
        with pytest.raises(
            Misuse, match=r"a batch is one SimpleNamespace: give it one name, as in .* names=\('data',\)"
        ):
            trainer.set_data_loader(loader, names=names)
    trainer.set_data_loader(loader, names=("data",))
    assert next(trainer.epoch(0))["data"].size == 4


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.LazyLinear(3), "has no shape yet"),
        (nn.Linear(2, 2), "LBFGS needs a closure"),
        (nn.DataParallel(nn.Linear(2, 2)), "the model is in DataParallel, which would take other ranks' GPUs"),
        (nn.Linear(2, 2, device="meta"), "weight has no values, since it was made on the device 'meta'"),
    ],
)
def test_what_cannot_be_trained_is_told_at_once(model: nn.Module, words: str) -> None:
    lazy = isinstance(model, nn.LazyLinear)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1) if lazy else torch.optim.LBFGS(model.parameters())
    with pytest.raises(Misuse, match=words):
        Trainer.setup(model, optimizer, TrainerConfig(device="cpu"))


@pytest.mark.parametrize("setting", [{"max_iter": 2}, {"max_iter": 1, "line_search_fn": "strong_wolfe"}])
def test_lbfgs_that_evaluates_its_loss_several_times_is_refused(setting: dict[str, Any]) -> None:
    model = new_model()
    with pytest.raises(Misuse, match="build it with max_iter=1 and without line_search_fn"):
        Trainer.setup(model, torch.optim.LBFGS(model.parameters(), **setting), TrainerConfig(device="cpu"))


def test_a_step_of_lbfgs_says_where_its_closure_goes() -> None:
    model = new_model()
    trainer = Trainer.setup(model, torch.optim.LBFGS(model.parameters(), max_iter=1), TrainerConfig(device="cpu"))
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(Misuse, match=r"call average_gradients\(\), optimizer.step\(lambda: loss\) and finish_step\(\)"):
        trainer.step()


@pytest.mark.parametrize("does", ["step", "unscale, step"])
def test_a_step_of_scaled_gradients_is_refused(does: str) -> None:
    """It stepped with gradients of 65536 times their size, and the model became NaN, with exit code 0."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(device="cpu"))
    scaler = torch.amp.GradScaler("cpu")
    inputs, labels = samples(8)[:]
    before = flat(model)
    scaler.scale(cross_entropy(model(inputs), labels)).backward()
    if does != "step":
        scaler.unscale_(optimizer)
    with pytest.raises(Misuse, match=r"call trainer.average_gradients\(\), scaler.step\(optimizer\), scaler.update"):
        trainer.step()
    assert torch.equal(before, flat(model))
    scaler.step(optimizer)
    trainer.finish_step()
    assert not torch.equal(before, flat(model))
    cross_entropy(model(inputs), labels).backward()
    trainer.step()
    torch.amp.GradScaler("cpu", enabled=False).scale(cross_entropy(model(inputs), labels)).backward()
    trainer.step()
    assert trainer.num_steps == 3
    trainer.close()


def unscale_first() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer.setup(model, optimizer, TrainerConfig(max_anchor=0, device="cpu"))
    scaler = torch.amp.GradScaler("cpu")
    inputs, labels = samples(8)[:]
    for unscales_first in (False, True):
        scaler.scale(cross_entropy(model(inputs), labels)).backward()
        if unscales_first:
            scaler.unscale_(optimizer)
        trainer.average_gradients()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        trainer.finish_step()


def test_gradients_that_are_unscaled_before_they_are_averaged_are_refused(worlds: Worlds) -> None:
    """Each rank found only its own overflow: without one it stepped with an infinite average, and the model was NaN."""
    for raised in worlds.run(2, unscale_first, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.message.startswith("scaler.unscale_(optimizer) is called before trainer.average_gradients()")


CLIPS = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "infinite norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), math.inf),
    "value": lambda model: clip_grad_value_(model.parameters(), 0.01),  # imported before any trainer
    "named value": lambda model: nn.utils.clip_grad_value_(model.parameters(), clip_value=0.01),
    "infinite value": lambda model: nn.utils.clip_grad_value_(model.parameters(), clip_value=math.inf),
}


def said_while_gradients_change(averages: bool, change: Callable[[nn.Module], object]) -> str:
    """What is said of three steps, each of which changes its gradients, after they were averaged if it `averages`."""
    model, config = new_model(), TrainerConfig(max_anchor=0, overlap=False)
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        Trainer.setup(model, new_optimizer(model), config) as trainer,
    ):
        for _ in range(3):
            model(torch.ones(2, 6) + dist.get_rank()).sum().backward()
            if averages:
                trainer.average_gradients()
            change(model)
            trainer.step()
    return said.getvalue()


def clip(averages: bool, how: str) -> str:
    return said_while_gradients_change(averages, CLIPS[how])


@pytest.mark.parametrize(
    ("averages", "how", "count"),
    [
        (False, "norm", 1),
        (True, "norm", 0),
        (False, "infinite norm", 0),
        (False, "value", 1),
        (False, "named value", 1),
        (True, "value", 0),
        (False, "infinite value", 0),
    ],
)
def test_gradients_that_are_clipped_before_they_are_averaged_are_named_once(
    worlds: Worlds, averages: bool, how: str, count: int
) -> None:
    """A loop that kept `clip_grad_norm_`, or `clip_grad_value_`, where one device has it trained otherwise than on one,
    in silence.
    """
    first, second = worlds.run(2, clip, averages, how)
    assert first.count("gradients are clipped before they are averaged") == count
    assert "clipped" not in second


def train_elsewhere(is_set_up: bool) -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0)) if is_set_up else None
    model(torch.ones(2, 6)).sum().backward()
    with torch.device("meta"):  # as torch.set_default_device does it for the whole script
        trainer.step() if trainer is not None else Trainer.setup(model, new_optimizer(model))


@pytest.mark.parametrize("is_set_up", [False, True])
def test_a_default_device_is_refused_by_name(worlds: Worlds, is_set_up: bool) -> None:
    """It was an error in torch's words, of a tensor that the script does not know."""
    for raised in worlds.run(2, train_elsewhere, is_set_up, may_raise=True):
        assert isinstance(raised, Raised)
        assert raised.message.startswith("torch.set_default_device('meta') would put tensors there")


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp": lambda one: one.grad.data.clamp_(-1e-4, 1e-4),  # type: ignore[union-attr]  # each has one
    "sign": lambda one: setattr(one, "grad", one.grad.sign()),  # type: ignore[union-attr]
    "nothing": lambda one: one.grad.mul_(1),  # type: ignore[union-attr]
}


def change(averages: bool, how: str) -> str:
    return said_while_gradients_change(averages, lambda model: [CHANGES[how](one) for one in model.parameters()])


@pytest.mark.parametrize(
    ("averages", "how", "count"),
    [(False, "clamp", 1), (False, "sign", 1), (True, "clamp", 0), (False, "nothing", 0)],
)
def test_gradients_that_are_changed_before_they_are_averaged_are_named_once(
    worlds: Worlds, averages: bool, how: str, count: int
) -> None:
    """As DQN's tutorial does it: each rank clamped its own gradients, in silence."""
    first, second = worlds.run(2, change, averages, how)
    assert first.count("gradients are changed after backward and before they are averaged") == count
    assert "changed" not in second


def count_hooks(overlap: bool) -> list[int]:
    model = new_model()
    counts = []
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(max_anchor=0, overlap=overlap)) as trainer:
        for _ in range(SUMMED_STEPS + 2):
            counts.append(sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters()))
            model(torch.ones(2, 6) + dist.get_rank()).sum().backward()
            trainer.step()
    return counts


def test_gradients_are_watched_in_the_first_steps_where_nothing_is_sent_during_backward(worlds: Worlds) -> None:
    """Calls of a hook for each of 500 small parameters made every step 3 % longer, and their sums 4 % more."""
    num_parameters = len(list(new_model().parameters()))
    assert worlds.run(2, count_hooks, False)[0] == [num_parameters] * SUMMED_STEPS + [0, 0]
    assert worlds.run(2, count_hooks, True)[0] == [num_parameters] * (SUMMED_STEPS + 2)


def call_wrapped(is_early: bool) -> None:
    model = new_model()
    wrapped = nn.parallel.DistributedDataParallel(model) if is_early else model
    with Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu")) as trainer:
        wrapped = wrapped if is_early else nn.parallel.DistributedDataParallel(model)
        with torch.no_grad():
            wrapped(torch.ones(2, 6))
        model(torch.ones(2, 6)).sum().backward()
        trainer.step()
        wrapped(torch.ones(2, 6)).sum().backward()
        trainer.step()


@pytest.mark.parametrize("is_early", [False, True])
def test_a_model_that_is_called_through_ddp_is_refused(worlds: Worlds, is_early: bool) -> None:
    """DDP's average weighed ranks alike, whatever their samples, and the trainer's changed nothing of it."""
    for raised in worlds.run(2, call_wrapped, is_early, may_raise=True):
        assert "the model is called through DistributedDataParallel, which averages gradients itself" in raised.message


@pytest.mark.parametrize(
    ("device", "has_el_che", "words"), [("cuda", True, "TrainerConfig(max_anchor=0)"), ("cuda", False, "")]
)
def test_ranks_that_wait_for_each_other_in_forward_passes_make_equally_many(
    device: str, has_el_che: bool, words: str
) -> None:
    problem = problem_of_synced(nn.Sequential(nn.SyncBatchNorm(4)), device, has_el_che=has_el_che)
    assert words in problem
    assert bool(problem) == has_el_che
    assert problem_of_synced(nn.Sequential(nn.BatchNorm1d(4)), "cpu", has_el_che=True) == ""


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_model_that_is_not_finite_at_the_end_is_named(is_lost: bool) -> None:
    model = new_model()
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), Trainer.setup(model, new_optimizer(model)) as trainer:
        for _ in range(2):
            (model(torch.ones(2, 6)).sum() * (float("nan") if is_lost else 1.0)).backward()
            trainer.step()
        trainer._stepper.comparison.compare("ends epochs()")
    said = "elche: 0.weight is not finite (NaN or infinite) after 2 steps: the model is of no use"
    assert errors.getvalue().count(said) == is_lost


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("builds", "SGD was built of the model's parameters after Trainer.setup"),
        ("builds and sets up", ""),
        ("builds of another model", ""),
        ("unfreezes", "parameter '0.weight' was unfrozen after Trainer.setup, and no optimizer of the Trainer has it"),
        ("unfreezes and adds", ""),
    ],
)
def test_an_optimizer_or_parameter_that_step_does_not_know_is_named_once(does: str, words: str) -> None:
    """Its rates, or its layers, had no effect, without a word."""
    model = new_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    trained = [one for one in model.parameters() if one.requires_grad]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), Trainer.setup(model, torch.optim.AdamW(trained)) as trainer:
        if does.startswith("builds"):
            other = torch.optim.SGD((new_model() if does.endswith("model") else model).parameters(), lr=0.1)
        if does == "builds and sets up":
            Trainer.setup(model, other)
        if does.startswith("unfreezes"):
            model.requires_grad_(True)
        if does == "unfreezes and adds":
            trainer.optimizer.add_param_group({"params": list(model[0].parameters())})  # type: ignore[index]
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            trainer.step()
    assert errors.getvalue().count(words or "after Trainer.setup") == bool(words)


@pytest.mark.parametrize("uses_another", [False, True])
def test_a_loss_of_another_model_is_named_once(uses_another: bool) -> None:
    """The model stayed as it was built, without a word."""
    model, other = new_model(), new_model()
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), Trainer.setup(model, new_optimizer(model)) as trainer:
        for _ in range(2):
            (other if uses_another else model)(torch.ones(2, 6)).sum().backward()
            trainer.step()
    assert errors.getvalue().count("no parameter of the model has a gradient in the first step") == uses_another


@pytest.mark.parametrize(
    ("steps", "computes", "is_told"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_loop_that_forgets_its_step_is_told_so(steps: bool, computes: bool, is_told: bool) -> None:
    """It ended well, with the model as it was, and not a word. A loop that only looks at batches is none."""
    model, errors = new_model(), io.StringIO()
    with contextlib.redirect_stderr(errors), Trainer.setup(model, new_optimizer(model)) as trainer:
        trainer.set_data_loader(DataLoader(TensorDataset(torch.ones(8, 6)), batch_size=4), names=("x",))
        for batch in trainer.epoch(0):
            if computes:
                model(batch["x"]).sum().backward()
            if steps:
                trainer.step()
    assert ("the loop made no step" in errors.getvalue()) == is_told


def test_a_batch_of_another_loader_is_refused() -> None:
    """By an `AttributeError` about a dict without parts."""
    model = new_model()
    with Trainer.setup(model, new_optimizer(model)) as trainer:
        loader = DataLoader(TensorDataset(torch.ones(8, 6)), batch_size=4)
        trainer.set_data_loader(loader, forward_input="x", names=("x",))
        with pytest.raises(Misuse, match=r"takes a batch of trainer.epoch\(\), not a dict: call the model"):
            trainer.forward_batch({"x": torch.ones(4, 6)})  # type: ignore[arg-type]


def test_gradients_that_a_loop_clears_with_its_own_step_were_there() -> None:
    """nanoGPT's loop, which clears them before `finish_step`, was told that its loss is of another model."""
    model = new_model()
    errors, optimizer = io.StringIO(), new_optimizer(model)
    with contextlib.redirect_stderr(errors), Trainer.setup(model, optimizer) as trainer:
        model(torch.ones(2, 6)).sum().backward()
        trainer.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        trainer.finish_step()
    assert "gradient" not in errors.getvalue()


def test_gradients_that_hooks_of_backward_have_stepped_were_there() -> None:
    """As in PyTorch's tutorial, with an optimizer for each parameter: the model was said to stay as it is."""
    model = new_model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[cast(nn.Parameter, parameter)].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), Trainer.setup(model, list(optimizers.values())) as trainer:
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
            trainer.step()
    assert "no parameter of the model has a gradient" not in errors.getvalue()
    assert "leave the former out (several ranks refuse it)" in errors.getvalue()


@pytest.mark.parametrize(("num_own", "is_said"), [(0, False), (1, False), (3, True)])
def test_a_batch_that_one_device_steps_twice_is_named_once(num_own: int, is_said: bool) -> None:
    """It took two steps for each batch, without a word."""
    model = new_model()
    errors, optimizer = io.StringIO(), new_optimizer(model)
    with contextlib.redirect_stderr(errors), Trainer.setup(model, optimizer) as trainer:
        for number in range(3):
            model(torch.ones(2, 6)).sum().backward()
            if number < num_own:
                optimizer.step()
            trainer.step()
        model(torch.ones(2, 6)).sum().backward()
        trainer.average_gradients()
        optimizer.step()
        trainer.finish_step()
    assert errors.getvalue().count("each batch is two steps: leave the former out") == is_said


def test_a_step_that_a_framework_finishes_in_a_hook_is_no_second_one() -> None:
    """Lightning averages in the closure of the optimizer's step; on one device each batch was said to be two steps."""
    model = new_model()
    errors, optimizer = io.StringIO(), new_optimizer(model)
    with contextlib.redirect_stderr(errors), Trainer.setup(model, optimizer) as trainer:
        optimizer.register_step_post_hook(lambda *_: trainer.finish_step())

        def closure() -> float:
            loss = model(torch.ones(2, 6)).sum()
            loss.backward()
            trainer.average_gradients()
            return loss.item()

        for _ in range(3):
            optimizer.step(closure)
    assert "each batch is two steps" not in errors.getvalue()


def set_up_seeded(is_alike: bool) -> str:
    torch.manual_seed(1 if is_alike else 1 + dist.get_rank())
    model = nn.Linear(4, 4)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        Trainer.setup(model, new_optimizer(model))
    return said.getvalue()


@pytest.mark.parametrize("is_alike", [False, True])
def test_models_that_differed_at_first_are_told_with_what_else_may_differ(worlds: Worlds, is_alike: bool) -> None:
    """Each rank had another target network, and trained towards it, in silence."""
    first, second = worlds.run(2, set_up_seeded, is_alike)
    assert ("the ranks' models had different initial values" in first) is not is_alike
    assert "initial values" not in second


def step_schedule(has_el_che: bool, each_batch: bool) -> tuple[int, bool]:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        config = TrainerConfig(anchor=2, max_anchor=2) if has_el_che else TrainerConfig(max_anchor=0)
        trainer = Trainer.setup(model, optimizer, config)
        loader = DataLoader(samples(47), batch_size=2)
        trainer.set_data_loader(loader, forward_input="inputs", names=NAMES)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=len(loader) * 2)
        for epoch in range(2):
            for batch in trainer.epoch(epoch):
                trainer.forward_batch(batch).sum().backward()
                trainer.step()
                num_batches = -(-sum(trainer.shard_sizes) // trainer.data_batch_size) or 1
                for _ in range(num_batches if each_batch else 1):
                    schedule.step()
    return schedule.last_epoch, "a schedule that counts batches must be stepped once for each" in said.getvalue()


def test_a_schedule_that_is_stepped_with_each_step_of_el_che_is_told_that_it_ends_late(worlds: Worlds) -> None:
    """Its rate never fell, in silence; the tutorial's way steps it as often as there are batches."""
    (shared, is_said), _ = worlds.run(2, step_schedule, False, False)
    assert (shared, is_said) == (48, False)
    (stretched, is_said), (_, other_says) = worlds.run(2, step_schedule, True, False)
    assert stretched < 24
    assert is_said
    assert not other_says
    assert [count for count, _ in worlds.run(2, step_schedule, True, True)] == [48, 48]


class WithHandle(Dataset[Any]):
    """Opens a file where it is made, as data sets over HDF5 or SQLite do."""

    def __init__(self) -> None:
        self.handle = open(os.devnull)  # noqa: SIM115

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": torch.full((6,), float(index))}


def test_a_data_set_that_worker_processes_cannot_be_given_is_named() -> None:
    model, dataset = new_model(), WithHandle()
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    with pytest.raises(Misuse, match=r"cannot pickle .* Open files and connections on first use in each process"):
        trainer.set_data_loader(loader, forward_input="inputs")
    trainer.close()
    dataset.handle.close()


def test_a_batch_that_worker_processes_cannot_send_is_refused_at_once() -> None:
    model = new_model()
    loader = DataLoader(samples(8), batch_size=4, num_workers=1, collate_fn=lambda pairs: (pair for pair in pairs))
    trainer = Trainer.setup(model, new_optimizer(model), TrainerConfig(device="cpu"))
    with pytest.raises(UserCodeRaised, match=r"cannot be pickled, as worker processes send it .*num_workers to 0"):
        trainer.set_data_loader(loader, names=("pairs",))
    trainer.close()


def lose_a_peer() -> None:
    model = new_model()
    trainer = Trainer.setup(model, new_optimizer(model))
    inputs, labels = samples(8).tensors
    for step in range(3):
        if step == 1 and trainer.rank == 1:
            os._exit(3)
        cross_entropy(model(inputs), labels).backward()
        trainer.step()


def test_a_rank_whose_peer_is_gone_says_that_and_not_why(worlds: Worlds) -> None:
    first, second = worlds.run(2, lose_a_peer, may_raise=True)
    assert (second.kind, second.message) == ("Ended", "the process ended with 3")
    assert first.kind == "PeerLost"
    assert "its own error says why" in first.message


def test_a_step_that_accelerate_would_skip_is_refused_before_its_gradients_are_cleared() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(new_model())
    optimizer = accelerator.prepare(new_optimizer(model))
    trainer = Trainer.setup(model, optimizer)
    inputs, labels = samples(4)[:]
    steps = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), labels))
            if accelerator.sync_gradients:
                trainer.step()
            else:
                with pytest.raises(Misuse, match=r"only where accelerator\.sync_gradients is true"):
                    trainer.step()
                assert all(one.grad is not None for one in model.parameters())
            steps.append(trainer.num_steps)
    assert steps == [0, 1, 1, 2]
    trainer.close()
    accelerate.state.GradientState._reset_state()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_script_that_its_own_process_imports_does_not_train_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of a spawned pool tried to listen where rank 0 does, as often as the pool started it anew."""
    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)  # as multiprocessing sets it
    model = nn.Linear(1, 1)
    with pytest.raises(Misuse, match="put what trains under `if __name__ == '__main__':`"):
        Trainer.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

"""Rounds over real gloo groups: weighted, spread by the first, bitwise equal, and refused when they do not fit."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elche_worker import outer as outer_optimizers
from elche_worker.collectives.averaging import Averaging
from elche_worker.collectives.codecs import BLOCK, CODECS, Encoded, Int8
from elche_worker.collectives.compression import Compression
from elche_worker.collectives.header import AveragingOptions, Row
from elche_worker.collectives.operations import CollectiveFailed, Collectives, RanksDiffer, SoloCollectives
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.collectives.reduction import AverageResult
from elche_worker.device import chunks
from elche_worker.device.streams import DeviceStreams
from elche_worker.model.layout import Layout

CPU = torch.device("cpu")


def group(store: dist.Store, position: int, size: int, generation: int = 1) -> Collectives:
    return ProcessGroupCollectives(
        store,
        backend="gloo",
        attempt=1,
        generation=generation,
        position=position,
        size=size,
        peer="127.0.0.1:1",
        device=CPU,
    )


def row(layout: Layout, **changes: int) -> Row:
    values = {
        "attempt": 1,
        "generation": 1,
        "round": 1,
        "layout_hash": layout.hash,
        "weight": 1,
        "finite": 1,
        "cut": 0,
        "local_step": 0,
        "compute_us": 0,
        "version": 1,
    }
    return Row(**{**values, **changes})


class Ranks:
    """A thread and a real process group for each model; rounds go over all of them."""

    def __init__(self, models: list[nn.Module], *, streams: DeviceStreams | None = None, **options: Any) -> None:
        self.models = models
        self.layouts = [Layout(model) for model in models]
        self._store = dist.HashStore()
        self._threads = ThreadPoolExecutor(len(models))
        self._options = options
        self._averagings = [
            Averaging(layout, AveragingOptions(**options), wake=lambda: None, streams=streams)
            for layout in self.layouts
        ]
        self._generation = 1
        self._groups = self.all(self._join)

    def replace(self, position: int) -> None:
        """A rank that knows of no round takes this one's place."""
        self._averagings[position] = Averaging(
            self.layouts[position], AveragingOptions(**self._options), wake=lambda: None
        )

    def memories(self, position: int) -> Any:
        """What a checkpoint gets of its outer memory."""
        return self._averagings[position].reduction.memories()

    def restore(self, position: int, memories: Any) -> None:
        """Goes on from `memories`."""
        self._averagings[position].reduction.restore(memories, {})

    def regroup(self) -> None:
        """The same ranks in a new generation, in another order."""
        self._generation += 1
        self._groups = self.all(self._join)

    def start(self, position: int, row: Row, *, keeps_snapshot: bool = False) -> bool:
        """One rank enters a round."""
        return self._averagings[position].start(self._groups[position], row, keeps_snapshot=keeps_snapshot)

    def complete(self, position: int, *, has_newer_steps: bool = False) -> AverageResult:
        """The round's result comes into one rank's model."""
        return self._averagings[position].complete(has_newer_steps=has_newer_steps)

    def take_own(self, position: int) -> None:
        """Nobody reads the result any more."""
        self._averagings[position].take_own()

    def alone(self, position: int, **changes: int) -> AverageResult:
        """A round of one rank that is alone meanwhile; nobody will ask for its result."""
        group = SoloCollectives(attempt=1, generation=1, device=CPU)
        asked = row(self.layouts[position], **changes)
        self._averagings[position].start(group, asked, keeps_snapshot=True, keeps_result=False)
        return self.complete(position, has_newer_steps=True)

    def round(self, rows: Callable[[int, Layout], Row]) -> list[AverageResult]:
        """One blocking round; the results are in the models."""

        def one(position: int) -> AverageResult:
            self.start(position, rows(position, self.layouts[position]))
            return self.complete(position)

        return self.all(one)

    def digests(self) -> set[int]:
        """Of all models; one when they are equal bit for bit."""
        return {layout.digest() for layout in self.layouts}

    def _join(self, position: int) -> Collectives:
        size = len(self.models)
        return group(self._store, (position + self._generation - 1) % size, size, self._generation)

    def all(self, one: Callable[[int], Any]) -> list[Any]:
        """What it returns for each rank, all at once."""
        futures = [self._threads.submit(one, position) for position in range(len(self.models))]
        return [future.result() for future in futures]


def round_of(models: list[nn.Module], rows: Callable[[int, Layout], Row], **options: Any) -> list[list[Row]]:
    """One round over new groups; its headers."""
    return [averaged.rows for averaged in Ranks(models, **options).round(rows)]


def nudge(models: list[nn.Module], seed: int) -> list[torch.Tensor]:
    """Moves each model's weight as training would; returns where to."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for model in models:
            model.weight.add_(torch.randn(model.weight.shape, generator=generator) * 0.1)  # type: ignore[union-attr, operator, arg-type]
    return [model.weight.detach().clone() for model in models]  # type: ignore[union-attr, operator]


def weights(*values: float) -> list[nn.Module]:
    models: list[nn.Module] = []
    for value in values:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, value)
        models.append(model)
    return models


def test_the_average_is_weighted_by_samples() -> None:
    models = weights(1.0, 2.0, 4.0)
    headers = round_of(models, lambda position, layout: row(layout, weight=[64, 128, 64][position], cut=position))
    assert headers[0] == headers[1] == headers[2]
    assert [one.cut for one in headers[0]] == [0, 1, 2]
    for model in models:
        assert torch.equal(model.weight, torch.full((2, 3), 2.25))


def test_results_are_bitwise_equal_on_every_member() -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)) for _ in range(3)]
    models[1][1].num_batches_tracked.fill_(99)  # type: ignore[index, union-attr]
    round_of(models, lambda position, layout: row(layout, weight=17 * position + 5))
    digests = {Layout(model).digest() for model in models}
    assert len(digests) == 1


def test_frozen_parameters_go_only_where_they_are_others() -> None:
    """As with adapters on a large model: what is equal on all ranks, a newcomer's included, costs 8 bytes a round."""
    torch.manual_seed(0)
    base = torch.randn(10_000)
    models = weights(1.0, 2.0, 3.0)
    for model in models:
        model.base = nn.Parameter(base.clone(), requires_grad=False)
    ranks = Ranks(models)

    def sent(rows: Callable[[int, Layout], Row]) -> list[int]:
        return [averaged.sent_bytes for averaged in ranks.round(rows)]

    little = max(sent(lambda position, layout: row(layout, version=0, weight=0)))
    assert little < 1000
    assert max(sent(lambda position, layout: row(layout, version=position % 2))) <= little + 100
    models[1].base.data[9_999] += 1  # of a rank that is not the source
    assert sum(sent(lambda position, layout: row(layout))) >= 4 * 10_000
    assert len(ranks.digests()) == 1
    assert torch.equal(models[1].base, base)
    assert max(sent(lambda position, layout: row(layout))) <= little


def test_the_first_round_gives_everybody_the_source() -> None:
    models = weights(1.5, 2.0, 4.0)
    round_of(models, lambda position, layout: row(layout, weight=0, version=0))
    assert [model.weight[0, 0].item() for model in models] == [1.5, 1.5, 1.5]  # type: ignore[index]


def test_a_newcomer_with_nan_receives_and_does_not_spread_it() -> None:
    models = weights(1.0, float("nan"), 3.0)
    header = round_of(
        models, lambda position, layout: row(layout, weight=[1, 0, 1][position], version=[5, 0, 5][position])
    )[0]
    assert [model.weight[0, 0].item() for model in models] == [2.0, 2.0, 2.0]  # type: ignore[index]
    assert all(one.finite for one in header)


def test_values_that_are_not_finite_are_flagged() -> None:
    models = weights(1.0, float("inf"))
    header = round_of(models, lambda position, layout: row(layout))[0]
    assert [one.finite for one in header] == [1, 0]


def test_ranks_with_other_models_or_other_rounds_are_refused() -> None:
    with pytest.raises(RanksDiffer, match="the models of the ranks at positions 0 and 1 differ"):
        round_of(weights(1.0, 2.0), lambda position, layout: row(layout, layout_hash=position))
    with pytest.raises(RanksDiffer, match="met in different rounds: 7 and 8"):
        round_of(weights(1.0, 2.0), lambda position, layout: row(layout, round=7 + position))


def test_one_rank_alone_keeps_its_parameters() -> None:
    models = weights(0.1)
    round_of(models, lambda position, layout: row(layout, weight=64))
    assert models[0].weight[0, 0].item() == pytest.approx(0.1)  # type: ignore[index]


def test_a_rank_alone_keeps_statistics_of_batches_that_it_trains_during_an_averaging() -> None:
    """It makes rounds like others where these have a moving average, or an outer step."""
    ranks = Ranks([nn.BatchNorm1d(2)], outer=outer_optimizers.Nesterov())
    ranks.start(0, row(ranks.layouts[0], weight=64), keeps_snapshot=True)
    ranks.models[0](torch.randn(8, 2))
    newer = ranks.models[0].running_mean.clone()  # type: ignore[union-attr, operator]
    ranks.complete(0, has_newer_steps=True)
    assert newer.abs().sum() > 0
    assert torch.equal(ranks.models[0].running_mean, newer)  # type: ignore[arg-type]


def test_a_rank_alone_has_its_result_and_keeps_no_copy_of_it() -> None:
    (model,) = weights(0.1)
    ranks = Ranks([model])
    averaged = ranks.alone(0, weight=64, version=3, samples=100, local_step=7)
    assert (averaged.version, averaged.samples, averaged.is_finite) == (4, 164, True)
    assert torch.equal(model.weight, torch.full((2, 3), 0.1))
    assert not ranks.layouts[0].flat_buffers
    nn.init.constant_(model.weight, float("nan"))
    assert not ranks.alone(0).is_finite
    assert ranks.alone(0, weight=0).is_finite, "who brings nothing is not looked at"


def test_who_comes_to_a_rank_that_was_alone_gets_its_values_and_knows_as_little_of_the_gains() -> None:
    """Its step in their first round is none, and its mean one by rounding alone, of which no gain may be made."""
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(30, 20, bias=False), nn.Linear(30, 20, bias=False)]
    ranks = Ranks(models, merge="adascale", weighting="samples")
    for number in range(3):
        nudge(models[:1], seed=number)
        ranks.alone(0, weight=3, version=1 + number)
    (values,) = nudge(models[:1], seed=3)
    ranks.round(lambda at, layout: row(layout, weight=[3, 0][at], version=[4, 0][at]))
    assert len(ranks.digests()) == 1
    assert torch.allclose(models[0].weight, values)  # type: ignore[arg-type]
    for number in range(4):
        for model in models:
            (values,) = nudge([model], seed=10 + number)
        ranks.round(lambda at, layout: row(layout, weight=3, version=5))
        assert torch.allclose(models[0].weight, values, atol=1e-6), "who makes the same steps goes no further"  # type: ignore[arg-type]


def test_an_overlapped_result_is_a_correction_that_keeps_newer_steps() -> None:
    store = dist.HashStore()
    models = weights(1.0, 3.0)
    may_finish = threading.Barrier(2)

    def one(position: int) -> None:
        layout = Layout(models[position])
        averaging = Averaging(layout, AveragingOptions(), wake=lambda: None)
        averaging.start(group(store, position, 2), row(layout), keeps_snapshot=True)
        with torch.no_grad():
            models[position].weight.add_(10.0)  # type: ignore[operator, union-attr]
        may_finish.wait(400)
        averaging.complete(has_newer_steps=True)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(one, position) for position in range(2)]:
            future.result()
    for model in models:
        assert torch.equal(model.weight, torch.full((2, 3), 12.0))


class Held(DeviceStreams):
    """Streams whose collectives begin when the test says so."""

    def __init__(self) -> None:
        self.may_begin = threading.Event()

    @contextmanager
    def communication(self) -> Iterator[None]:
        if threading.current_thread().name.startswith("averaging"):
            assert self.may_begin.wait(400)
        yield


def test_counters_of_an_overlapped_round_are_those_of_its_snapshot() -> None:
    """The rank that they come from trains on, and counts on, before they are sent."""
    models, streams = counting(7, 9), Held()
    ranks = Ranks(models, streams=streams)
    ranks.all(lambda at: ranks.start(at, row(ranks.layouts[at]), keeps_snapshot=True))
    for model in models:
        model.num_batches_tracked.add_(100)  # type: ignore[union-attr, operator]
    streams.may_begin.set()
    ranks.all(lambda at: ranks.complete(at, has_newer_steps=True))
    assert counts(models) == [7, 7]
    ranks.all(ranks.take_own)
    assert counts(models) == [107, 7], "the rank that they come from loses none of its newer steps"


def test_uniform_weighting_counts_ranks_and_not_samples() -> None:
    models = weights(1.0, 2.0, 9.0)
    round_of(models, lambda position, layout: row(layout, weight=[500, 1, 0][position]), weighting="uniform")
    assert models[2].weight[0, 0].item() == 1.5  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "result"),
    [({"merge": "mean"}, 4 / 3), ({"merge": "adascale"}, 1.5), ({"merge": "adascale", "weighting": "samples"}, 4 / 3)],
)
def test_where_rounds_go_further_every_rank_counts_the_same(options: dict[str, str], result: float) -> None:
    """Nothing is known of the gains in a first round, so that both make their mean."""
    models = weights(1.0, 2.0)
    round_of(models, lambda position, layout: row(layout, weight=[16, 8][position]), **options)
    assert models[0].weight[0, 0].item() == pytest.approx(result)  # type: ignore[index]


def test_a_rank_that_is_not_finite_can_be_left_out() -> None:
    models = weights(1.0, float("nan"), 3.0)
    round_of(models, lambda position, layout: row(layout), nonfinite="skip")
    assert [model.weight[0, 0].item() for model in models] == [2.0, 2.0, 2.0]  # type: ignore[index]


def known(outliers: str) -> Ranks:
    """Three ranks of whose steps it is known how long they are, after 12 rounds."""
    ranks = Ranks(weights(1.0, 1.0, 1.0), merge="adascale", outliers=outliers)
    start(ranks)
    for number in range(1, 13):
        nudge(ranks.models, number)
        done = ranks.round(lambda _, layout, step=number: row(layout, local_step=step))  # type: ignore[misc]
        assert not any(averaged.rows[0].unusual or averaged.is_discarded for averaged in done)
    return ranks


def wrong(ranks: Ranks, number: int) -> list[AverageResult]:
    """A round in which one number of the second rank is wrong."""
    nudge(ranks.models, number)
    with torch.no_grad():
        ranks.models[1].weight[0, 0] = 1e4  # type: ignore[index, operator]
    return ranks.round(lambda _, layout: row(layout, local_step=number))


@pytest.mark.parametrize("outliers", ["skip", "keep"])
def test_a_step_that_is_far_too_long_is_left_out(outliers: str) -> None:
    ranks = known(outliers)
    done = wrong(ranks, 13)
    assert [one.unusual for one in done[0].rows] == [0, 1, 0]
    assert [averaged.is_discarded for averaged in done] == [False, outliers == "skip", False]
    assert len(ranks.digests()) == 1
    largest = float(ranks.models[1].weight.detach().abs().max())  # type: ignore[operator, union-attr]
    assert (largest < 10) == (outliers == "skip")


def test_what_was_trained_meanwhile_on_values_that_are_left_out_is_dropped() -> None:
    """Such steps are long, too: they would be left out of the next rounds, until the job fails."""
    ranks = known("skip")
    nudge(ranks.models, 13)
    with torch.no_grad():
        ranks.models[1].weight[0, 0] = 1e6  # type: ignore[index, operator]
    ranks.all(lambda at: ranks.start(at, row(ranks.layouts[at], local_step=13), keeps_snapshot=True))
    for model in ranks.models:
        with torch.no_grad():
            model.weight[0, 0] *= 0.9  # type: ignore[index, operator]
    done = ranks.all(lambda at: ranks.complete(at, has_newer_steps=True))
    assert [averaged.is_discarded for averaged in done] == [False, True, False]
    result = ranks.layouts[1].flat_buffers["float32"][:6]
    assert torch.equal(ranks.models[1].weight.detach().reshape(-1), result)  # type: ignore[operator, union-attr]
    assert not torch.equal(ranks.models[0].weight.detach().reshape(-1), result)  # type: ignore[operator, union-attr]


def test_a_device_that_stays_wrong_is_left_out_until_the_job_fails() -> None:
    """Of as many rounds in a row as the coordinator allows (`MAX_DISCARDED`)."""
    ranks = known("skip")
    assert all(wrong(ranks, 13 + number)[1].is_discarded for number in range(3))


def counting(*counts: int) -> list[nn.Module]:
    """Models whose BatchNorm has counted so many batches, which is not averaged."""
    models: list[nn.Module] = [nn.BatchNorm1d(3) for _ in counts]
    for model, count in zip(models, counts, strict=True):
        model.num_batches_tracked.fill_(count)  # type: ignore[union-attr, operator]
    return models


def counts(models: list[nn.Module]) -> list[int]:
    return [int(model.num_batches_tracked) for model in models]  # type: ignore[arg-type]


def test_a_newcomer_gets_what_is_not_averaged_from_a_rank_that_has_trained() -> None:
    models = counting(0, 7, 9)
    versions = [0, 5, 5]
    round_of(models, lambda at, layout: row(layout, weight=int(versions[at] > 0), version=versions[at]))
    assert counts(models) == [7, 7, 7], "of the lowest of those that hold the newest version"


def test_what_is_not_averaged_does_not_come_from_a_rank_that_is_left_out() -> None:
    models = counting(6, 7)
    nn.init.constant_(models[0].weight, float("nan"))  # type: ignore[arg-type]
    round_of(models, lambda at, layout: row(layout), nonfinite="skip")
    assert counts(models) == [7, 7]


def start(ranks: Ranks) -> torch.Tensor:
    """The first round; returns the start state."""
    ranks.round(lambda position, layout: row(layout, weight=0, version=0))
    return ranks.models[0].weight.detach().clone()  # type: ignore[union-attr, operator]


def test_average_as_an_outer_optimizer_changes_no_bit() -> None:
    torch.manual_seed(0)
    plain, outer = weights(1.0, 2.0), weights(1.0, 2.0)
    for models, options in ((plain, {}), (outer, {"outer": outer_optimizers.SGD(lr=1.0)})):
        ranks = Ranks(models, **options)
        start(ranks)
        nudge(models, seed=1)
        ranks.round(lambda position, layout: row(layout, weight=3 + position))
    assert torch.allclose(plain[0].weight, outer[0].weight)  # type: ignore[arg-type]
    again = weights(1.0, 2.0)
    ranks = Ranks(again, outer=outer_optimizers.Average())
    start(ranks)
    nudge(again, seed=1)
    ranks.round(lambda position, layout: row(layout, weight=3 + position))
    assert torch.equal(plain[0].weight, again[0].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outer", "optimizer"),
    [
        (outer_optimizers.SGD(lr=0.5, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
        (outer_optimizers.Nesterov(), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
        (outer_optimizers.Adam(lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-3)),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_an_outer_step_is_torchs_own_on_the_pseudo_gradient(
    outer: Any, optimizer: Callable[..., Any], size: int
) -> None:
    ranks = Ranks(weights(1.0, 2.0)[:size], outer=outer)
    expected = nn.Parameter(start(ranks))
    reference = optimizer([expected])
    for step in range(4):
        arrived = nudge(ranks.models, seed=step)
        ranks.round(lambda position, layout: row(layout))
        expected.grad = expected.detach() - sum(arrived) / size
        reference.step()
        assert len(ranks.digests()) == 1
        assert torch.allclose(ranks.models[0].weight, expected, atol=1e-5)  # type: ignore[arg-type]


def test_a_round_without_work_makes_no_outer_step() -> None:
    """Such as the first one of a job that goes on: momentum alone would move the model."""
    ranks = Ranks(weights(1.0, 2.0), outer=outer_optimizers.Nesterov())
    start(ranks)
    nudge(ranks.models, seed=0)
    ranks.round(lambda position, layout: row(layout))
    before = ranks.digests()
    ranks.round(lambda position, layout: row(layout, weight=0, version=3))
    assert ranks.digests() == before


@pytest.mark.parametrize("own", ["has it", "has failed"])
def test_a_process_of_a_replica_group_takes_a_result_only_when_all_of_the_group_have_theirs(own: str) -> None:
    """Else one part of the model would be of another version, and its outer step made twice."""
    told: list[bool] = []

    def agree(holds: bool) -> bool:
        told.append(holds)
        return len(told) < 3  # all agree on what they bring, and not on the result

    class Broken(SoloCollectives):
        def finish(self) -> None:
            raise CollectiveFailed("a peer is gone")

    (model,) = weights(1.0)
    layout = Layout(model)
    averaging = Averaging(layout, AveragingOptions(outer=outer_optimizers.Nesterov()), wake=lambda: None, agree=agree)
    kind = SoloCollectives if own == "has it" else Broken
    averaging.start(kind(attempt=1, generation=1, device=CPU), row(layout), keeps_snapshot=False)
    with pytest.raises(CollectiveFailed, match="another process of this replica group" if own == "has it" else "gone"):
        averaging.complete(has_newer_steps=False)
    assert told == [True, True, own == "has it"]
    assert not averaging.reduction.memories(), "nor does its outer step change anything"


def compression(codec: str) -> tuple[Compression, Callable[[torch.Tensor], None]]:
    """Of one rank alone, and its average, which is what is left of its own change."""
    alone = SoloCollectives(attempt=1, generation=1, device=CPU)
    compressed = Compression(4, alone)
    return compressed, lambda change: compressed.average(change, [1.0], alone, codec=CODECS[codec]())


CHANGE = torch.tensor([1.0, 0.003, -0.0011, 0.2])


@pytest.mark.parametrize(
    ("codec", "most"), [("bf16", 0.02), ("int8", 0.02), ("int4", 0.1), ("int2", 2.0), ("topk", 0.5)]
)
def test_what_compression_loses_is_sent_with_the_next_rounds(codec: str, most: float) -> None:
    compressed, average = compression(codec)
    total = torch.zeros(4)
    for _ in range(100):
        change = CHANGE.clone()
        average(change)
        compressed.commit()
        total += change
    assert (total - 100 * CHANGE).abs().max() < most, "of the last round or two"


def test_the_next_values_are_encoded_while_others_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * 4 * BLOCK)  # of two ranks: a block of each part
    num_chunks = 5
    is_encoded = [threading.Event() for _ in range(num_chunks)]
    num_encoded = itertools.count()

    class Counted(Int8):
        def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = super().encode(blocks)
            if len(blocks) == 2:  # of this rank's change, not of the sum
                is_encoded[next(num_encoded)].set()
            return made

    class Two(SoloCollectives):
        size = 2

        def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
            sent.append(rows)
            if len(sent) < num_chunks:
                assert is_encoded[len(sent)].wait(timeout=20)
            return rows[:1].repeat(2, 1)

        def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
            return [row, row]

    sent: list[torch.Tensor] = []
    group = Two(attempt=1, generation=1, device=CPU)
    change = torch.arange(2.0 * num_chunks * BLOCK)
    expected = change[: num_chunks * BLOCK].clone()  # of which both ranks have sent the same
    Compression(len(change), group).average(change, [0.5, 0.5], group, codec=Counted())
    assert len(sent) == num_chunks
    torch.testing.assert_close(change.view(2, -1), torch.stack([expected, expected]), rtol=0.01, atol=1.0)


def test_a_compressed_average_that_fails_changes_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer is that of the next round, which may begin when the error is raised."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2 * 4 * BLOCK)  # of two ranks: a block of each part
    has_failed, is_raised, num_decoded = threading.Event(), threading.Event(), threading.Semaphore(0)
    sent: list[torch.Tensor] = []
    late: list[bool] = []

    class Held(Int8):
        def decode(self, *parts: torch.Tensor) -> torch.Tensor:
            num_decoded.release()
            if len(sent) == 2:  # what is begun then is under way when the average fails
                assert has_failed.wait(timeout=20)
                late.append(is_raised.wait(timeout=0.2))
            return super().decode(*parts)

    class Failing(SoloCollectives):
        size = 2

        def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
            if sent:  # by then three chunks are encoded, one decode each, and the first is summed, with two
                assert all(num_decoded.acquire(timeout=20) for _ in range(5))
            sent.append(rows)
            return rows[:1].repeat(2, 1)

        def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
            has_failed.set()
            raise CollectiveFailed("a peer is gone")

    group = Failing(attempt=1, generation=1, device=CPU)
    change = torch.ones(10 * BLOCK)
    with pytest.raises(CollectiveFailed):
        Compression(len(change), group).average(change, [0.5, 0.5], group, codec=Held())
    is_raised.set()
    assert late
    assert not any(late)


def encoded(codec: str, values: torch.Tensor) -> torch.Tensor:
    """Rows of bytes from rows of float32."""
    rows = Encoded.empty(CODECS[codec](), *values.shape, CPU)
    rows.write(slice(0, values.shape[1]), values)
    return rows.raw


def decoded_from(codec: str, raw: torch.Tensor, length: int) -> torch.Tensor:
    return Encoded(CODECS[codec](), raw).read(slice(0, length))


def normal_blocks(num_rows: int = 2, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, 3 * BLOCK, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("codec", "bits", "lost"), [("int4", 4.25, 0.02), ("int2", 2.125, 0.13), ("topk", 0.4375, 0.9)]
)
def test_thin_values_take_few_bits_and_lose_no_more_than_is_known(codec: str, bits: float, lost: float) -> None:
    """Of values with a normal distribution; no row depends on another."""
    values = normal_blocks()
    raw, length = encoded(codec, values), values.shape[1]
    assert raw.dtype == torch.uint8
    assert 8 * raw.numel() == bits * values.numel()
    decoded = decoded_from(codec, raw, length)
    assert ((decoded - values).norm() / values.norm()) ** 2 < lost
    assert torch.equal(decoded_from(codec, raw[1:], length), decoded[1:])
    assert torch.equal(encoded(codec, values[1:]), raw[1:])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.zeros(1, BLOCK), id="nothing"),
        pytest.param(torch.full((1, BLOCK), 1e-42), id="tiny"),
        pytest.param(normal_blocks().div(10).clamp(-1, 1) * 3e38, id="huge"),
        pytest.param(torch.eye(BLOCK)[:1] * 7 - torch.eye(BLOCK)[1:2], id="sparse"),
        pytest.param(-torch.ones(1, BLOCK), id="equal"),
    ],
)
def test_what_is_encoded_brings_values_nearer(codec: str, values: torch.Tensor) -> None:
    """Else errors would grow with each round."""
    decoded = decoded_from(codec, encoded(codec, values), values.shape[1]).double()
    assert decoded.isfinite().all()
    assert (decoded - values).norm() <= values.double().norm()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_encoded_as_a_number(codec: str, number: float) -> None:
    values = normal_blocks()
    values[1, BLOCK + 5] = number
    decoded = decoded_from(codec, encoded(codec, values), values.shape[1])
    assert not decoded[1, BLOCK + 5].isfinite()
    assert decoded[0].isfinite().all()
    assert decoded[1, :BLOCK].isfinite().all()
    assert decoded[1, 2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
def test_a_round_that_is_given_up_keeps_what_compression_had_lost_before(codec: str) -> None:
    given_up, average = compression(codec)
    plain, average_plain = compression(codec)
    for number in range(6):
        one, other = CHANGE.clone(), CHANGE.clone()
        if number % 2:
            average(CHANGE.clone())  # and no `commit`
        average(one)
        given_up.commit()
        average_plain(other)
        plain.commit()
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("compress", "ratio", "most"),
    [("bf16", 1.8, 0.01), ("int8", 3.5, 0.01), ("int4", 6.0, 0.05), ("int2", 11.0, 0.15), ("topk", 32.0, 0.7)],
)
def test_compressed_rounds_are_equal_everywhere_send_less_and_forget_nothing(
    compress: str, ratio: float, most: float
) -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(200, 50) for _ in range(3)]
    exact: list[nn.Module] = [nn.Linear(200, 50) for _ in range(3)]
    ranks, reference = Ranks(models, compress=compress), Ranks(exact)
    reference.round(lambda position, layout: row(layout, weight=0, version=0))
    with torch.no_grad():
        for model, other in zip(models, exact, strict=True):
            model.weight.copy_(other.weight)  # type: ignore[union-attr, operator, arg-type]
            model.bias.copy_(other.bias)  # type: ignore[union-attr, operator, arg-type]
    start(ranks)
    for step in range(20):
        for those in (ranks, reference):
            nudge(those.models, seed=step)
        small = those_bytes(ranks)
        large = those_bytes(reference)
        assert len(ranks.digests()) == 1
    assert small < large / ratio
    error = (models[0].weight - exact[0].weight).norm() / exact[0].weight.norm()  # type: ignore[operator, union-attr]
    assert error < most


@pytest.mark.parametrize(
    ("compress", "has_newcomer"), [("int8", False), ("int8", True), ("int2", True), ("topk", True)]
)
def test_what_compression_has_lost_is_sent_in_the_next_generation(compress: str, has_newcomer: bool) -> None:
    """By each rank its own, and of the sum that of the part that it had; the next may be a round with a newcomer."""
    models: list[nn.Module] = [nn.Linear(300, 4, bias=False) for _ in range(3)]
    for model in models:
        nn.init.zeros_(model.weight)  # type: ignore[arg-type]
    ranks = Ranks(models, compress=compress)
    start(ranks)
    with torch.no_grad():
        for at, model in enumerate(models):
            model.weight += 0.003 + 0.001 * at  # type: ignore[operator]
            model.weight[:, ::256] = 1.0  # type: ignore[index, operator]
    arrived = sum(model.weight.detach() for model in models) / 3  # type: ignore[operator, misc]
    ranks.round(lambda at, layout: row(layout))
    lost = (models[0].weight - arrived).abs().max()  # type: ignore[operator]
    assert lost > 0.001, "what is small beside the largest of its block is not sent"
    ranks.regroup()
    second, third = ([1, 1, 1], [2, 2, 1]), ([1, 1, 1], [3, 3, 3])
    if not has_newcomer:
        second = ([1, 0, 1], [2, 2, 2])  # one has no samples: what it has lost is sent when it has
    for weights_of, versions in (second, third):
        rows = [{"generation": 2, "weight": weights_of[at], "version": versions[at]} for at in range(3)]
        ranks.round(partial(lambda rows, at, layout: row(layout, **rows[at]), rows))
    left = (models[0].weight - arrived).abs().max()  # type: ignore[operator]
    assert left < lost / 20
    assert len(ranks.digests()) == 1


@pytest.mark.parametrize("compress", CODECS)
def test_a_newcomer_to_compressed_rounds_gets_the_model_whole(compress: str) -> None:
    """It knows no last result, of which the others send the change."""
    ranks = Ranks(weights(1.0, 2.0, 9.0), compress=compress)
    start(ranks)
    nudge(ranks.models, seed=0)
    ranks.round(lambda at, layout: row(layout))
    arrived = nudge(ranks.models, seed=1)
    ranks.replace(2)
    nn.init.constant_(ranks.models[2].weight, 9.0)  # type: ignore[arg-type]
    ranks.round(lambda at, layout: row(layout, weight=[1, 1, 0][at], version=[2, 2, 0][at]))
    assert len(ranks.digests()) == 1
    assert torch.allclose(ranks.models[2].weight, (arrived[0] + arrived[1]) / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compress", "most"), [("bf16", 0.005), ("int8", 0.005), ("int4", 0.02), ("int2", 0.2), ("topk", 0.2)]
)
def test_what_a_rank_without_weight_sends_compressed_is_in_no_round(compress: str, most: float) -> None:
    """Neither in the round that leaves it out, nor as an error that is sent with the next."""
    ranks = Ranks(weights(1.0, 2.0, 3.0), compress=compress, nonfinite="skip")
    start(ranks)
    for step, parts in enumerate([2, 3]):
        arrived = nudge(ranks.models, seed=step)
        if parts == 2:
            nn.init.constant_(ranks.models[2].weight, float("nan"))  # type: ignore[arg-type]
        ranks.round(lambda at, layout: row(layout))
        assert len(ranks.digests()) == 1
        mean = torch.stack(arrived[:parts]).mean(dim=0)
        assert torch.allclose(ranks.models[0].weight, mean, atol=most)  # type: ignore[arg-type]


def those_bytes(ranks: Ranks) -> int:
    """Bytes that one rank sends in a round."""
    return int(ranks.round(lambda position, layout: row(layout, weight=1 + position))[0].sent_bytes)


@pytest.mark.parametrize("outer", [outer_optimizers.Nesterov(), outer_optimizers.Adam()], ids=["Nesterov", "Adam"])
def test_a_newcomer_gets_the_outer_state_and_makes_the_same_step(outer: Any) -> None:
    ranks = Ranks(weights(1.0, 2.0, 3.0), outer=outer)
    start(ranks)
    for step in range(2):
        nudge(ranks.models, seed=step)
        ranks.round(lambda position, layout: row(layout))
    ranks.replace(2)
    nudge(ranks.models, seed=9)
    ranks.round(lambda position, layout: row(layout, weight=[1, 1, 0][position], version=[3, 3, 0][position]))
    assert len(ranks.digests()) == 1
    nudge(ranks.models, seed=10)
    ranks.round(lambda position, layout: row(layout, version=4))
    assert len(ranks.digests()) == 1

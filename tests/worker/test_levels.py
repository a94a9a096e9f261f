"""How much `compress="auto"` compresses: the level that a line asks for, and rounds whose level changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from worker.test_averaging import Ranks, nudge, row, start

from elche.errors import InvalidJob
from elche_worker.collectives import reduction
from elche_worker.collectives.codecs import BLOCK, CODECS
from elche_worker.collectives.header import Row
from elche_worker.collectives.levels import LAST, LEVELS, LevelChoice, level_of
from support.solo import JOB

NAMES = list(LEVELS)
BYTES = [1024, 260, 136, 68]


class Line:
    """Rounds as they go over a line: each begins when the one before has ended, but not before `wanted_s`."""

    def __init__(
        self, *, bytes_per_s: float, fixed_s: float = 0.0, wanted_s: float = 0.0, batch_s: float = 0.1, level: int = 2
    ) -> None:
        self.choice = LevelChoice()
        self.choice.level = level
        self.bytes_per_s, self.fixed_s, self.wanted_s, self.batch_s = bytes_per_s, fixed_s, wanted_s, batch_s
        self.generation, self.now_s = 1, 0.0
        self.levels: list[int] = []
        self.reasons: list[str] = []

    def rounds(self, num: int, *, is_exact: bool = False) -> str:
        """The name of the level after so many rounds."""
        for _ in range(num):
            level = self.choice.level
            averaging_s = self.fixed_s + BYTES[0 if is_exact else level - 1] / self.bytes_per_s
            steps = int(self.now_s / self.batch_s), int(self.now_s / self.batch_s * 2)
            rows = [Row(1, self.generation, 1, 0, 1, 1, 0, step, 0, 1) for step in steps]
            why = self.choice.learn(level, rows, self.now_s, averaging_s, is_exact=is_exact)
            self.levels.append(level)
            self.reasons += [why] if why else []
            self.now_s += max(averaging_s * 1.1, self.wanted_s)
        return NAMES[self.choice.level - 1]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        pytest.param({"bytes_per_s": 1e6, "wanted_s": 0.1}, "none", id="a fast line"),
        pytest.param({"bytes_per_s": 2000, "wanted_s": 0.5}, "int8", id="an averaging is a quarter of a round"),
        pytest.param({"bytes_per_s": 400, "wanted_s": 1.0}, "int4", id="an averaging takes most of a round"),
        pytest.param({"bytes_per_s": 100, "batch_s": 0.2}, "int4", id="rounds of a few batches are short enough"),
        pytest.param({"bytes_per_s": 100, "batch_s": 0.05}, "int2", id="a slow network"),
        pytest.param({"bytes_per_s": 1e5, "fixed_s": 0.3}, "int8", id="it is slow to answer, not thin"),
    ],
)
def test_the_level_is_the_least_with_which_an_averaging_is_short(line: dict[str, float], level: str) -> None:
    rounds = Line(**line)  # type: ignore[arg-type]
    assert rounds.rounds(30) == level
    num_changes = len(rounds.reasons)
    assert rounds.rounds(100) == level
    assert len(rounds.reasons) == num_changes, "nor does it go to and fro"


def test_more_compression_that_helps_little_is_not_tried_again_until_the_ranks_change() -> None:
    line = Line(bytes_per_s=1e5, fixed_s=0.3)
    line.rounds(30)
    assert line.levels.count(NAMES.index("int4") + 1) == 3
    assert line.reasons[0].startswith(
        "compress='auto': int4 instead of int8, since an averaging takes 0.303 s, and 0.33"
    )
    assert (
        line.reasons[1] == "compress='auto': int8 instead of int4, since an averaging takes 0.301 s, and took 0.303 s"
    )
    line.generation = 2
    line.rounds(4)
    assert line.rounds(1) == "int4"


def test_a_line_that_becomes_fast_needs_less() -> None:
    line = Line(bytes_per_s=100, batch_s=0.05, wanted_s=0.2)
    assert line.rounds(30) == "int2"
    line.bytes_per_s = 1e5
    assert line.rounds(30) == "none"


def test_one_slow_round_changes_nothing() -> None:
    line = Line(bytes_per_s=1e4, wanted_s=0.1)
    for _ in range(5):
        line.rounds(5)
        line.fixed_s = 0.5
        line.rounds(1)
        line.fixed_s = 0.0
    assert set(line.levels) == {2}


def test_rounds_that_are_exact_tell_nothing() -> None:
    line = Line(bytes_per_s=100)
    assert line.rounds(10, is_exact=True) == "int8"


def test_where_compressing_takes_longer_than_sending_nothing_is_compressed() -> None:
    """The first round, which is exact, has shown how long that takes."""
    line = Line(bytes_per_s=1e5)
    line.rounds(1, is_exact=True)
    line.fixed_s = 0.3
    assert line.rounds(4) == "none"
    assert line.reasons == [
        "compress='auto': none instead of int8, since an averaging takes 0.303 s, and took 0.0102 s without compression"
    ]
    assert line.rounds(30) == "none", "nor is it tried again"


def test_a_rank_goes_on_from_the_level_that_others_have_chosen() -> None:
    choice = LevelChoice()
    rows = [Row(1, 1, 1, 0, 1, 1, 0, 0, 0, 1)]
    assert choice.learn(4, rows, 1.0, 9.0, is_exact=True) == ""
    assert choice.level == 4


@pytest.mark.parametrize(("said", "level"), [(-1, 1), (0, 1), (3, 3), (2**62, LAST)])
def test_what_is_no_level_is_taken_for_the_nearest(said: int, level: int) -> None:
    assert level_of(said) == level


def test_a_value_that_is_not_compressed_arrives_as_it_is() -> None:
    codec = LEVELS["none"]()
    values = torch.randn(3, 2, BLOCK)
    assert torch.equal(codec.decode(*codec.encode(values)), values)
    assert {name: LEVELS[name] for name in NAMES[1:]}.items() <= CODECS.items()


def test_averagings_that_block_have_nothing_to_hide_behind() -> None:
    assert replace(JOB, compress="auto").compress == "auto"
    with pytest.raises(InvalidJob, match="use averaging='overlapped'"):
        replace(JOB, compress="auto", averaging="blocking")
    with pytest.raises(InvalidJob, match="name a compression, such as 'int8'"):
        replace(JOB, compress="auto", policy="sync")


# Rounds


def test_rounds_whose_level_changes_are_equal_everywhere_and_forget_nothing() -> None:
    """Each rank would choose another level: they take that of the source, and a newcomer does so, too."""
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(300, 40) for _ in range(3)]
    exact: list[nn.Module] = [nn.Linear(300, 40) for _ in range(3)]
    for model, other in zip(models, exact, strict=True):
        model.load_state_dict(other.state_dict())
    ranks, reference = Ranks(models, compress="auto"), Ranks(exact)
    for world in (ranks, reference):
        start(world)
    sent: dict[int, int] = {}
    for number in range(24):
        level = (2, 4, 3, 4, 1)[number % 5] if number < 22 else 1
        for world in (ranks, reference):
            nudge(world.models, seed=number)

        def said(at: int, layout: Any, number: int = number, level: int = level) -> Row:
            return row(layout, level=level if at == 0 else 1 + (number + at) % 4)

        results = ranks.round(said)
        reference.round(said)
        assert {one.level for one in results} == {level}
        assert len(ranks.digests()) == 1
        sent[level] = results[0].sent_bytes
    assert sent[1] > 3 * sent[2]
    assert sent[2] > 1.5 * sent[3]
    assert sent[3] > 1.5 * sent[4]
    difference = (models[0].weight - exact[0].weight).abs().max()  # type: ignore[operator]
    assert difference < 1e-4, "what was not sent in 2 bits has come with the values as they are"


def test_a_newcomer_and_a_new_generation_go_on_from_the_level_there_is() -> None:
    models: list[nn.Module] = [nn.Linear(300, 4, bias=False) for _ in range(3)]
    ranks = Ranks(models, compress="auto")
    start(ranks)
    for number in range(2):
        nudge(models, seed=number)
        ranks.round(lambda at, layout: row(layout, level=4))
    ranks.replace(0)
    ranks.regroup()
    rows = {"generation": 2, "round": 4}
    joined = ranks.round(lambda at, layout: row(layout, **rows, weight=min(at, 1), version=3 * min(at, 1)))
    assert {one.level for one in joined} == {4}, "it had wanted another, and was not asked"
    nudge(models, seed=7)
    after = ranks.round(lambda at, layout: row(layout, **rows, version=4))
    assert {one.level for one in after} == {4}
    assert len(ranks.digests()) == 1


def test_the_source_says_why_the_level_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(reduction, "record_event", said.append)
    monkeypatch.setattr(LevelChoice, "_choose", lambda choice: choice._change(4, "it took 9 s"))
    ranks = Ranks([nn.Linear(30, 4) for _ in range(3)], compress="auto")
    start(ranks)
    levels = [ranks.round(lambda at, layout: row(layout))[0].level for _ in range(4)]
    assert levels == [2, 2, 2, 4]
    assert said == ["compress='auto': int2 instead of int8, since it took 9 s"]

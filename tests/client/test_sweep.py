"""What a sweep tries, by its file; each mistake in it gets one clear error."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from elche.errors import InvalidJob
from elche_client.commands.sweep import Range, Sweep, Trial, halved, read_sweep, trials
from elche_client.commands.sweep_run import Optuna, Runner
from elche_client.events import JobState, JobView
from elche_client.options import JobOptions
from elche_client.transport.bundle import Bundle

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    (tmp_path / "train.py").write_text("job = None\n")

    def write(text: str, name: str = "sweep.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


HALVING = """
job: train.py
metric: accuracy
mode: max
method: halving
trials: 9
halving: {epochs: 2, factor: 3, rungs: 3}
arguments: {--width: {min: 1, max: 64}}
"""


def halving(write: Write) -> Sweep:
    return read_sweep(write(HALVING))


def test_a_grid_has_every_combination(write: Write) -> None:
    sweep = read_sweep(write("{job: train.py, settings: {batch_size: [8, 16], epochs: 2}, arguments: {--lr: [a, b]}}"))
    found = trials(sweep)
    assert [tuple(one.values.values()) for one in found] == [(8, "a"), (8, "b"), (16, "a"), (16, "b")]
    options = sweep.options(found[1])
    assert options.settings == {"epochs": 2, "batch_size": 8}
    assert options.arguments == ("--lr", "b")
    assert (options.name, options.priority, options.num_ranks) == ("train-1", -1, 1)


def test_toml_says_the_same(write: Write) -> None:
    text = (
        'job = "train.py"\nmethod = "random"\ntrials = 5\n[arguments]\n"--lr" = {min = 1e-4, max = 0.1, log = true}\n'
    )
    first, again = (trials(read_sweep(write(text, "sweep.toml"))) for _ in range(2))
    assert first == again, "the seed decides"
    values = [one.values["arguments", "--lr"] for one in first]
    assert len(set(values)) == 5
    assert all(1e-4 <= value <= 0.1 for value in values)


def test_numbers_that_yaml_takes_for_text_are_numbers(write: Write) -> None:
    sweep = read_sweep(write("{job: train.py, method: random, arguments: {--lr: {min: 1e-4, max: 1e-1}}}"))
    assert all(1e-4 <= one.values["arguments", "--lr"] <= 0.1 for one in trials(sweep))


@pytest.mark.parametrize(
    ("space", "least", "quarter", "middle", "most"),
    [
        (Range(1e-4, 1.0, True, False), 1e-4, 1e-3, 1e-2, 1.0),
        (Range(0.0, 1.0, False, False), 0.0, 0.25, 0.5, 1.0),
        (Range(-1.0, 3.0, False, False), -1.0, 0.0, 1.0, 3.0),
        (Range(1, 4, False, True), 1, 2, 3, 4),
        (Range(-2, 1, False, True), -2, -1, 0, 1),
    ],
)
def test_what_is_drawn_is_spread_evenly_over_its_range(
    space: Range, least: float, quarter: float, middle: float, most: float
) -> None:
    """Of rates from 1e-4 to 1 a half is below 0.01, not 0.5 % of them."""
    found = [space.at(fraction) for fraction in (0.0, 0.25, 0.5, 1.0)]
    assert found == [least, quarter, middle, most]
    if space.is_whole:
        assert all(isinstance(value, int) for value in found)
        counts = dict.fromkeys(range(int(space.least), int(space.most) + 1), 0)
        for step in range(4000):
            counts[int(space.at(step / 4000))] += 1
        assert set(counts.values()) == {1000}, "the last is as likely as the others"


def test_logarithms_are_asked_for_and_whole_numbers_are_those_of_whole_bounds(write: Write) -> None:
    spaces = "{--a: {min: 1, max: 8}, --b: {min: 1, max: 8.5}, --c: {min: 1, max: 8, log: true}}"
    found = read_sweep(write(f"{{job: train.py, method: random, arguments: {spaces}}}")).spaces.values()
    assert [(one.is_log, one.is_whole) for one in found if isinstance(one, Range)] == [
        (False, True),
        (False, False),
        (True, False),
    ]


def test_another_file_is_another_sweep(write: Write) -> None:
    sweep = halving(write)
    assert halving(write).id == sweep.id
    sweep.job.write_text("job = 1\n")
    assert halving(write).id != sweep.id


def test_the_best_third_of_a_rung_goes_on_for_three_times_as_long(write: Write) -> None:
    sweep = halving(write)
    first = list(halved(sweep, {}))
    assert [(one.number, one.epochs) for one in first] == [(at, 2) for at in range(9)]
    results: dict[tuple[int, int], float | None] = {(at, 0): at / 10 for at in range(8)}
    assert list(halved(sweep, results)) == first, "one of them has not ended"
    results[8, 0] = None
    second = list(halved(sweep, results))[9:]
    assert [(one.number, one.rung, one.epochs) for one in second] == [(5, 1, 6), (6, 1, 6), (7, 1, 6)]
    assert second[0].values == first[5].values
    results |= {(5, 1): 0.9, (6, 1): 0.8, (7, 1): 0.7}
    assert list(halved(sweep, results))[12:] == [Trial(5, first[5].values, 2, 18)]
    results[5, 2] = 1.0
    assert len(list(halved(sweep, results))) == 13
    assert sweep.options(second[0], "/checkpoints").settings == {"epochs": 6, "checkpoint_every_epochs": 2}


@pytest.mark.parametrize(
    ("metrics", "is_without_effect"),
    [([0.5, 0.5, 0.5], True), ([0.5, None, 0.5, 0.5], True), ([0.5, 0.5, 0.6], False), ([0.5, 0.5], False)],
)
def test_values_that_the_file_does_not_use_are_noticed(
    write: Write, metrics: list[float | None], is_without_effect: bool
) -> None:
    """A file that does not read its arguments had a best trial, of nine that were the same."""
    runner = Runner(
        None, read_sweep(write("job: train.py\narguments: {--lr: [1, 2, 3, 4]}\n")), lambda results: [], ExitStack()
    )  # type: ignore[arg-type]
    runner.results = {(number, 0): value for number, value in enumerate(metrics)}
    runner.results[0, 1] = 0.7
    assert runner.is_without_effect is is_without_effect


def test_trials_of_one_sweep_are_of_the_same_code(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever edited a file, or changed a branch, while a sweep ran compared trials of unlike code."""
    monkeypatch.delenv("ELCHE_FOLDER", raising=False)
    sent: list[tuple[str, Path, str, bool]] = []

    class Coordinator:
        def submit_options(
            self, path: Path, options: JobOptions, folder: Path, *, source: str, bundle: Bundle, **_: object
        ) -> SimpleNamespace:
            sent.append((source, folder, bundle.name, bundle.archive.exists()))
            return SimpleNamespace(id=str(len(sent)))

        def jobs(self) -> list[JobView]:
            return []

        def get(self, job_id: str) -> JobView:
            return JobView(job_id=job_id, name="train", state=JobState.QUEUED)

    sweep = halving(write)
    (sweep.job.parent / "losses.py").write_text("SIGN = 1\n")
    proposed = trials(sweep)[:1]
    with ExitStack() as kept:
        runner = Runner(Coordinator(), sweep, lambda results: proposed, kept)  # type: ignore[arg-type]
        runner.step()
        (sweep.job.parent / "losses.py").write_text("SIGN = -1\n")
        sweep.job.write_text("from ..above import job\n")
        proposed.append(trials(sweep)[1])
        runner.step()
    assert [source for source, *_ in sent] == ["job = None\n"] * 2
    assert [folder for _, folder, *_ in sent] == [sweep.job.parent] * 2, "in which the file has its place"
    assert len({name for *_, name, _ in sent}) == 1
    assert all(is_there for *_, is_there in sent), "it may have to be sent again"


def test_optuna_is_asked_for_the_same_trials_again(write: Write) -> None:
    """Whatever has ended meanwhile."""
    space = "{--lr: {min: 0.0, max: 1.0}, --n: [a, b]}"
    sweep = read_sweep(write(f"{{job: train.py, method: optuna, trials: 12, at_once: 2, arguments: {space}}}"))
    results: dict[tuple[int, int], float | None] = {}
    search = Optuna(sweep)
    assert len(search.trials(results)) == 2
    results[1, 0] = None
    assert len(search.trials(results)) == 2, "the first has not ended"
    for number in range(12):
        results[number, 0] = None if number == 1 else (number * 7 % 5) / 5
        trials_now = list(search.trials(results))
    assert len(trials_now) == 12
    assert list(Optuna(sweep).trials(results)) == trials_now


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("[1, 2]", "a sweep is a table with `job: train.py`"),
        ("{job: train.py", "cannot be read"),
        ("{job: train.py}", "nothing varies"),
        ("{job: other.py, settings: {epochs: [1]}}", "there is no file"),
        ("{job: train.py, trails: 3}", "there is no 'trails'; known are"),
        ("{job: train.py, settings: {epochs: []}}", "settings: epochs is an empty list"),
        ("{job: train.py, settings: {epoch: [1, 2]}}", "there is no setting 'epoch'"),
        ("{job: train.py, settings: {epochs: [0]}}", "epochs"),
        ("{job: train.py, method: best, settings: {epochs: [1]}}", "method is one of grid, random, halving, optuna"),
        ("{job: train.py, arguments: {--lr: {min: 0, max: 1, log: true}}}", "above 0"),
        ("{job: train.py, arguments: {--lr: {from: 0, to: 1}}}", "min: 0.001, max: 0.1"),
        ("{job: train.py, arguments: {--lr: {min: 0, max: 1}}}", "a grid has no points"),
        ("{job: train.py, trials: many, settings: {epochs: [1]}}", "trials is a whole number from 1 to 1000"),
        ("{job: train.py, method: halving, settings: {epochs: [1, 2]}}", "leave out settings: epochs"),
        (
            "{job: train.py, settings: {seed: [" + "1," * 40 + "1], batch_size: [" + "1," * 40 + "1]}}",
            "the grid has 1681 points, more than 1000",
        ),
        ("{job: train.py, ranks: true, settings: {epochs: [1]}}", "ranks is a whole number"),
        ("{job: train.py, settings: {batch_size: [16, 32, -1]}}", "batch_size"),
        ("{job: train.py, halving: 3, settings: {epochs: [1]}}", "halving is a table"),
        ("{job: train.py, conditions: zone=eu, settings: {epochs: [1]}}", "conditions is a list"),
        ("{job: train.py, folder: 3, settings: {epochs: [1]}}", "folder is a path"),
        ("{job: train.py, conditions: [gpu], settings: {epochs: [1]}}", "is not a condition on devices"),
    ],
)
def test_a_mistake_in_the_file_gets_one_clear_error(write: Write, text: str, mend: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        read_sweep(write(text))
    assert mend in str(caught.value)
    assert "\n" not in str(caught.value)

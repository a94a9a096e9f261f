"""What people see of a job: the live picture, the summary, the table of jobs, the record."""

import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from elche.formatting import duration
from elche.views import EXITED
from elche_client.display.formatting import figure, percent, printable_lines, quantity, si
from elche_client.display.panel import Bar, job_panel
from elche_client.display.progress import LineProgress
from elche_client.display.record import MAX_ROUNDS, JobRecord, result_document, to_json
from elche_client.display.summary import hosts_table, jobs_table, says_why, summary_panel
from elche_client.events import (
    EpochReport,
    EvaluationReport,
    HostView,
    JobResult,
    JobState,
    JobView,
    MembershipReport,
    RankResult,
    RankView,
    RoundReport,
    SlotView,
)

RANKS = (
    RankView(
        rank=0,
        device="cuda:0 NVIDIA H200",
        state="averaging",
        ms_per_batch=25.04,
        round_batches=23,
        round_target=23,
        share_fraction=0.697,
        waited_s=0.25,
    ),
    RankView(
        rank=1,
        device="cpu",
        state="training",
        ms_per_batch=57.5,
        round_batches=5,
        round_target=10,
        share_fraction=0.303,
    ),
)
VIEW = JobView(
    job_id="j-42",
    name="digits",
    state=JobState.TRAINING,
    epoch=2,
    num_epochs=10,
    dataset_size=36_000,
    epoch_committed=18_000,
    epoch_processed=22_500,
    loss=0.12345,
    samples_per_s=12_345.0,
    anchor=12,
    num_rounds=412,
    eta_s=80.0,
    ranks=RANKS,
    pacing="rank 1 sets the cadence: 12 batches",
)
RESULT = JobResult(
    state=JobState.SUCCEEDED,
    epochs=10,
    metrics={"accuracy": 0.98123},
    samples_per_s=12_345.0,
    bound_samples_per_s=12_600.0,
    bound_fraction=0.9787,
    dataset_size=36_000,
    committed_samples=(36_000,) * 10,
    dropped_samples=(0,) * 10,
    rounds=412,
    ranks=(
        RankResult(device="cpu", batches=300, ms_per_batch=25.0, waited_s=0.1),
        RankResult(device="cpu", batches=100, ms_per_batch=57.5),
    ),
    model="/data/runs/digits/model.safetensors",
    duration_s=38.2,
)


def drawn(what: RenderableType, *, width: int, encoding: str = "utf-8") -> str:
    file = TextIOWrapper(BytesIO(), encoding=encoding)
    Console(file=file, width=width, highlight=False).print(what)
    file.seek(0)
    return file.read()


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_picture_tells_everything_in_any_width(width: int) -> None:
    text = drawn(job_panel(VIEW, width=width), width=width)
    for part in (
        "digits  training",
        "job j-42",
        "epoch 3/10",
        "62.5 %",
        "18.0 k of 36.0 k samples",
        "loss 0.1235   12.3 k samples/s   412 rounds   anchor 12   ETA 1 min 20 s",
        "rank 1 sets the cadence: 12 batches",
    ):
        assert part in text
    assert [line.split()[1:8] for line in text.splitlines() if "cuda:0" in line] == [
        ["0", "cuda:0", "NVIDIA", "H200", "averaging", "25.0", "23/23"]
    ]
    row = next(line for line in text.splitlines() if "57.5" in line)
    assert "5/10" in row
    assert "30.3 %" in row
    assert "…" not in text
    assert {cell_len(line) for line in text.splitlines()} == {width}


def test_a_wide_terminal_shows_each_ranks_round() -> None:
    rows = {width: drawn(job_panel(VIEW, width=width), width=width).splitlines() for width in (80, 120)}
    narrow, wide = (next(row for row in rows[width] if "57.5" in row) for width in (80, 120))
    assert "━" not in narrow
    assert abs(wide.count("━") - wide.count("─")) <= 1  # 5 of 10 batches


def test_the_bar_tells_committed_from_processed() -> None:
    assert drawn(Bar(0.5, 0.75, width=8), width=20, encoding="ascii").rstrip() == "####==--"
    assert drawn(Bar(0.5, 0.25, width=8), width=20, encoding="ascii").rstrip() == "####----"
    assert drawn(Bar(math.nan, 7.0, width=8), width=20, encoding="ascii").rstrip() == "========"


def test_a_terminal_without_unicode_gets_none() -> None:
    text = drawn(job_panel(VIEW, width=80), width=80, encoding="ascii")
    assert text.isascii()


def test_many_ranks_are_cut_and_counted() -> None:
    many = tuple(replace(RANKS[0], rank=number, device=f"cuda:{number}") for number in range(40))
    text = drawn(job_panel(replace(VIEW, ranks=many), width=80), width=80)
    assert "cuda:15 " in text
    assert "cuda:16 " not in text
    assert "and 24 more ranks" in text


def test_ranks_of_several_hosts_show_where_they_are() -> None:
    ranks = (replace(RANKS[0], host="left"), replace(RANKS[1], host="right"))
    text = drawn(job_panel(replace(VIEW, ranks=ranks), width=80), width=80)
    assert "left" in text
    assert "right" in text
    assert {cell_len(line) for line in text.splitlines()} == {80}


def test_a_queued_job_says_what_it_waits_for() -> None:
    view = JobView(job_id="j-1", name="digits", state=JobState.QUEUED, reason="waits for 2 free slots")
    text = drawn(job_panel(view, width=80), width=80)
    assert "digits  queued" in text
    assert "waits for 2 free slots" in text
    assert "loss -" in text


def test_a_job_that_writes_its_final_model_says_what_keeps_it() -> None:
    """Not the plan of the last round, which is over."""
    view = replace(VIEW, state=JobState.FINISHING, pacing="every 5 batches", reason="the disk is full")
    text = drawn(job_panel(view, width=80), width=80)
    assert "the disk is full" in text
    assert "every 5 batches" not in text
    assert says_why(view)
    assert not says_why(VIEW)


def test_a_job_that_starts_says_what_keeps_it() -> None:
    """Orders did not reach its host: neither `elche jobs` nor a watch without a terminal said more than starting."""
    said, view = StringIO(), JobView(job_id="j-1", name="digits", state=JobState.STARTING, reason="loads the file")
    display = LineProgress(Console(file=said))
    late = replace(view, reason="rank 1 waits for host gpu-2: its orders do not arrive")
    for one in (view, view, late, late, view):
        display.show(one)
    assert said.getvalue().splitlines() == [
        "digits: starting",
        f"digits: starting, {late.reason}",
        "digits: starting, loads the file",
    ]
    assert says_why(late)


def test_names_from_elsewhere_cannot_command_the_terminal() -> None:
    view = replace(VIEW, name="\x1b[2J[bold]x", ranks=(replace(RANKS[1], device="\x1b]0;t\x07[red]cpu"),))
    text = drawn(job_panel(view, width=80), width=80)
    assert "\x1b" not in text
    assert "[bold]x" in text
    assert "\x1b" not in printable_lines("a\x1b[2J\n\tb")


@pytest.mark.parametrize("width", [80, 120])
def test_the_summary_says_what_was_reached_and_where_it_lies(width: int) -> None:
    text = drawn(summary_panel(RESULT, name="digits", record="runs/digits/record.json", width=width), width=width)
    for part in (
        "digits  succeeded",
        "0.9812",
        "12.3 k samples/s",
        "12.6 k samples/s without any communication",
        "97.9 %",
        "10 of 36.0 k samples, 412 rounds",
        "38.2 s",
        "/data/runs/digits/model.safetensors",
        "runs/digits/record.json",
        "75.0 %",
    ):
        assert part in text
    assert "drop_last" not in text
    assert {cell_len(line) for line in text.splitlines()} == {width}


def test_shares_are_of_samples_where_batches_differ_in_size() -> None:
    ranks = tuple(replace(one, samples=samples) for one, samples in zip(RESULT.ranks, (900, 5100), strict=True))
    rows = drawn(summary_panel(replace(RESULT, ranks=ranks), name="own loop"), width=80).splitlines()
    assert [row.split()[4:6] for row in rows if "cpu" in row] == [["15.0", "%"], ["85.0", "%"]]


@pytest.mark.parametrize(("num_ranks", "is_said"), [(4, True), (3, True), (2, False)])
def test_the_summary_warns_of_trainings_that_are_short_for_their_ranks(num_ranks: int, is_said: bool) -> None:
    """On four ranks, a transformer with 500 batches each lost 12 % at the defaults, and nothing said so."""
    short = replace(RESULT, ranks=(replace(RESULT.ranks[0], batches=500),) * num_ranks)
    assert ("few batches" in drawn(summary_panel(short, name="x"), width=80)) == is_said
    long = replace(short, ranks=(*short.ranks[1:], replace(RESULT.ranks[0], batches=3000)))
    assert "few batches" not in drawn(summary_panel(long, name="x"), width=80)


def test_the_summary_of_a_job_that_began_at_a_checkpoint_says_which_part_took_the_duration() -> None:
    """After a job had gone back its summary said `8 of 10.0 k samples` and `duration 16.7 s` at 3.60 k samples/s. Of a
    resumed one of 1461 batches a rank it said that they were under 1000.
    """
    ranks = (replace(RESULT.ranks[0], batches=900, samples=30_000),) * 3
    resumed = replace(RESULT, ranks=ranks)
    text = drawn(summary_panel(resumed, name="digits"), width=80)
    assert "38.2 s, 90.0 k samples since a checkpoint" in text
    assert "few batches" not in text
    whole = drawn(summary_panel(replace(resumed, committed_samples=(45_000,) * 2), name="digits"), width=80)
    assert "since" not in whole
    assert "few batches" in whole


def test_a_long_path_is_folded_not_cut() -> None:
    result = replace(RESULT, model="/" + "long/" * 30 + "model.safetensors")
    text = drawn(summary_panel(result, name="digits", width=80), width=80)
    assert "…" not in text
    assert "".join(line.strip("│ ") for line in text.splitlines()).count("long/") == 30


def test_the_table_of_jobs() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    waiting = JobView(
        job_id="j-43", name="next", state=JobState.QUEUED, submitted_at=now - timedelta(minutes=5, seconds=3)
    )
    lines = drawn(jobs_table([VIEW, waiting], now), width=80).splitlines()
    assert lines[0].split() == ["job", "state", "epoch", "train", "loss", "samples/s", "ranks", "age"]
    assert lines[1].split() == ["j-42", "training", "3/10", "0.1235", "12.3", "k", "2", "-"]
    assert lines[2].split() == ["j-43", "queued", "-", "-", "-", "0", "5", "min", "03", "s"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_table_cuts_an_id(width: int) -> None:
    name = "a-job-with-a-name-that-says-everything-about-it-and-more-1a2b3c4d"
    slots = (SlotView(device="cuda:0", model="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, job_id=name, rank=0),)
    host = HostView(agent_id="a-1", host="a-host-with-a-long-name.of.a.domain.example", slots=slots)
    assert column("job", jobs_table([replace(VIEW, job_id=name)]), width) == name
    assert column("job", hosts_table([host]), width) == name
    assert column("host", hosts_table([host]), width) == host.host


def column(title: str, table: RenderableType, width: int) -> str:
    """What a column has, put together."""
    head, *rows = drawn(table, width=width).splitlines()
    begin = head.index(title)
    after = re.compile(r"\S+\s+").match(head, begin)
    assert after is not None
    return "".join(row[begin : after.end()].split("  ")[0].strip() for row in rows)


@pytest.mark.parametrize(
    ("state", "epoch", "committed", "expected"),
    [
        (JobState.SUCCEEDED, 9, 36_000, "10/10"),
        (JobState.SUCCEEDED, 9, 35_000, "10/10"),  # of an epoch that drops its last samples
        (JobState.SUCCEEDED, 3, 36_000, "4/10"),  # ended early, after an epoch
        (JobState.CANCELLED, 3, 20_000, "3/10"),
        (JobState.TRAINING, 3, 20_000, "4/10"),
    ],
)
def test_an_ended_job_shows_how_many_epochs_are_complete(
    state: JobState, epoch: int, committed: int, expected: str
) -> None:
    view = replace(VIEW, state=state, epoch=epoch, epoch_committed=committed, dataset_size=36_000)
    assert expected in drawn(jobs_table([view]), width=80)


def test_plain_lines_for_logs() -> None:
    file = StringIO()
    progress = LineProgress(Console(file=file, width=40, highlight=False))
    queued = replace(VIEW, state=JobState.QUEUED, reason="waits for 2 free slots")
    with progress:
        for event in (
            queued,
            queued,
            VIEW,
            replace(VIEW, epoch_committed=20_000),
            RoundReport(round=1),
            EpochReport(epoch=2, loss=0.5, scalars={"lr": 0.1}, committed=36_000, duration_s=3.0),
            EvaluationReport(epoch=2, metrics={"accuracy": 0.98}),
            MembershipReport(rank=1, text="rank 1 on box (cpu) was killed by signal 9", num_ranks=1),
            MembershipReport(rank=1, text="rank 1 trains again on box (cpu)", num_ranks=2, is_back=True),
        ):
            progress.show(event)
    assert file.getvalue().splitlines() == [
        "digits: queued, waits for 2 free slots",
        "digits: training",
        "epoch 3/10  loss 0.5  lr 0.1  12.0 k samples/s  3.0 s",
        "epoch 3/10  evaluated  accuracy 0.98",
        "rank 1 on box (cpu) was killed by signal 9; 1 rank in training",
        "rank 1 trains again on box (cpu); 2 ranks in training",
    ]


def test_the_last_model_is_told_of_once() -> None:
    """Epochs that end in one round share an evaluation, of which a report comes for each."""
    file = StringIO()
    progress = LineProgress(Console(file=file, width=60, highlight=False))
    last = EvaluationReport(epoch=8, metrics={"accuracy": 0.98}, is_final=True)
    with progress:
        for event in (VIEW, last, replace(last, epoch=9), replace(last, epoch=9, attempt=2)):
            progress.show(event)
    assert file.getvalue().splitlines() == ["digits: training", *["the last model  accuracy 0.98"] * 2]


def test_the_summary_says_that_a_metric_was_never_a_number() -> None:
    result = replace(RESULT, metrics={"accuracy": 0.5, "loss": float("nan")})
    rows = drawn(summary_panel(result, name="digits"), width=80).splitlines()
    assert ["metrics", "never a finite number: loss"] in [row.strip("│ ").split(maxsplit=1) for row in rows]
    assert "never" not in drawn(summary_panel(RESULT, name="digits"), width=80)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (0.5, "0.50"),
        (12.34, "12.3"),
        (999.6, "1.00 k"),
        (1000, "1.00 k"),
        (12_345, "12.3 k"),
        (999_999, "1.00 M"),
        (2**62, "4.61 E"),
        (10**24, "1000000 E"),
        (-1500, "-1.50 k"),
        (math.inf, "inf"),
    ],
)
def test_si_prefixes(value: float, text: str) -> None:
    assert si(value) == text
    assert quantity(value, "batches") == f"{text} batches"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0123, "12 ms"),
        (0.9999, "1.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (360_000, "4 d 04 h"),
        (math.nan, "-"),
        (-1, "-"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_never_hide_their_size() -> None:
    assert [figure(value) for value in (0.0, 0.98123, 2.5e-7, 123456.0, 4e12)] == [
        "0",
        "0.9812",
        "2.500e-07",
        "123456.0",
        "4.000e+12",
    ]
    assert figure(math.nan) == "nan"
    assert percent(math.nan) == "-"


BEST = replace(RESULT, best_epoch=7, best_metrics={"accuracy": 0.9956}, model_is="best of epoch 7")


def test_the_summary_has_the_saved_models_metrics_first_and_names_both() -> None:
    first, *rest = drawn(summary_panel(BEST, name="digits"), width=120).splitlines()[1:]
    assert first.split()[1:3] == ["accuracy", "0.9956"]
    assert "best of epoch 7, accuracy 0.9956; last: accuracy 0.9812" in "\n".join(rest)
    last = replace(BEST, model_is="last", best_problem="the best model cannot be kept: it is gone")
    first, *rest = drawn(summary_panel(last, name="digits"), width=120).splitlines()[1:]
    assert first.split()[1:3] == ["accuracy", "0.9812"]
    assert "last, accuracy 0.9812; best of epoch 7: accuracy 0.9956" in "\n".join(rest)
    assert "it is gone" in "\n".join(rest)
    assert "the model is" not in drawn(summary_panel(replace(RESULT, model_is="last"), name="digits"), width=120)


def test_the_json_object_has_the_keys_that_scripts_read() -> None:
    document = result_document(RESULT)
    assert set(document) == {
        *("state", "epochs", "metrics", "samples_per_s", "bound_samples_per_s", "bound_fraction", "dataset_size"),
        *("committed_samples", "dropped", "discarded", "rounds", "ranks", "model", "duration_s", "checkpoints"),
        *("metrics_epoch", "best_epoch", "best_metrics", "model_is"),
    }
    of_rank = {"device": "cpu", "batches": 300, "ms_per_batch": 25.0, "waited_s": 0.1, "samples": 0}
    assert document["ranks"][0] == of_rank
    failed = result_document(JobResult(state=JobState.FAILED, error="no", traceback="at line 1"))
    assert (failed["state"], failed["error"], failed["traceback"]) == ("failed", "no", "at line 1")


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    assert json.loads(to_json({"loss": math.nan, "list": [math.inf, 1.0]})) == {"loss": None, "list": [None, 1.0]}


def test_the_record_keeps_all_epochs_and_the_newest_rounds(tmp_path: Path) -> None:
    record = JobRecord(job_id="j-42")
    record.add(VIEW)
    record.add(EpochReport(epoch=0, loss=math.nan))
    record.add(EvaluationReport(epoch=0, metrics={"accuracy": 0.9}))
    for number in range(MAX_ROUNDS + 5):
        record.add(RoundReport(round=number, rank_batches=(2, 1)))
    record.write(tmp_path / "record.json", RESULT)
    document = json.loads((tmp_path / "record.json").read_text())
    assert (document["job_id"], document["name"], document["state"]) == ("j-42", "digits", "succeeded")
    assert document["epoch_reports"][0]["loss"] is None
    (evaluation,) = document["evaluations"]
    assert evaluation == {"epoch": 0, "attempt": 1, "metrics": {"accuracy": 0.9}, "duration_s": 0.0, "is_final": False}
    assert [document["round_reports"][index]["round"] for index in (0, -1)] == [5, MAX_ROUNDS + 4]
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_epochs_of_a_job_that_has_ended_are_those_that_are_complete() -> None:
    ended = replace(VIEW, state=JobState.SUCCEEDED, epoch=7, num_epochs=10)
    assert "7/10" in drawn(jobs_table([ended]), width=80)
    assert "8/10" in drawn(jobs_table([replace(ended, state=JobState.TRAINING)]), width=80)


def test_a_rank_whose_host_is_lost_is_not_among_those_that_train() -> None:
    lost = replace(VIEW, ranks=(VIEW.ranks[0], replace(VIEW.ranks[1], state=EXITED)))
    assert drawn(jobs_table([lost]), width=80).splitlines()[1].split()[-2] == "1"
    ended = replace(lost, state=JobState.SUCCEEDED, ranks=tuple(replace(one, state=EXITED) for one in VIEW.ranks))
    assert drawn(jobs_table([ended]), width=80).splitlines()[1].split()[-2] == "2"

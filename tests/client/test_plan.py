"""`elche plan`: what it takes, and what it shows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from elche.errors import InvalidJob
from elche.plan import DevicePlan, MemoryPlan, Plan, PlanRequest
from elche_client.cli.main import main
from elche_client.commands.plan import bar, document, make_plans, panel, times_like
from elche_client.events import JobView, RankView

ARGUMENTS = ["plan", "--ranks", "25ms", "--model", "350MB"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "25"], "'25' is not a time per batch: write it such as 25ms,57ms,0.4s or 8x25ms"),
        (["--ranks", "25ms,"], "'' is not a time per batch"),
        (["--ranks", "0ms"], "'0ms' is not a time per batch"),
        (["--ranks", "0x25ms"], "'0x25ms' is not a time per batch"),
        (["--ranks", "33x25ms"], "33 devices are too many to simulate: at most 32"),
        (["--add", "32x25ms"], "with --add there are more than 32 devices"),
        (["--model", "350"], "'350' is not a size: write it such as 350MB or 1.5GiB"),
        (["--link", "50MB"], "'50MB' is not a bandwidth: write it such as 50Mbit/s"),
        (["--link", "50Mbit/s,"], "'50Mbit/s,' is not a bandwidth"),
        (["--mtbf", "often"], "'often' is not a time between failures: write it such as 2h"),
        (["--like", "runs/none"], "give the devices either as --ranks 25ms,57ms or as --like JOB"),
        (["--policy", "sync", "--averaging", "overlapped"], "averaging is auto or blocking with policy sync"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(arguments: list[str], message: str, capsys):
    assert main([*ARGUMENTS, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.count("\n") == 1


def test_the_answer_is_json_with_both_plans_and_the_gain(capsys):
    arguments = ["--ranks", "2x0.1s", "--model", "1.5MiB", "--link", "1Gbit/s,2ms", "--add", "200ms"]
    assert main(["plan", *arguments, "--averaging", "blocking", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["batch_ms"] for one in answer["devices"]] == [100, 100]
    assert answer["memory"]["parameters"] == 1.5 * 2**20
    assert answer["averaging_s"] == pytest.approx(0.005 + 1.5 * 2**20 / 125e6 + 4 * 0.002)
    assert [one["batch_ms"] for one in answer["with_added"]["devices"]] == [100, 100, 200]
    assert answer["bound_batches_per_s"] == pytest.approx(20)
    assert answer["gain_batches_per_s"] == pytest.approx(5, rel=0.05)
    assert answer["bound_fraction"] == pytest.approx(answer["batches_per_s"] / 20)


def test_what_the_simulator_refuses_is_told_in_its_words():
    refused = PlanRequest(
        batch_ms=(25.0, 25.0),
        model_bytes=1,
        link_bytes_per_s=1e9,
        round_trip_s=1e-3,
        policy="sync",
        averaging="overlapped",
    )
    with pytest.raises(InvalidJob, match=r"^averaging is auto or blocking with policy sync"):
        make_plans([refused])


def test_the_times_of_a_run_are_taken_from_its_record(tmp_path: Path):
    (tmp_path / "record.json").write_text('{"ranks": [{"ms_per_batch": 25.5}, {"ms_per_batch": 57}]}')
    assert times_like(str(tmp_path), "nowhere:1") == (25.5, 57)


def test_the_times_of_a_job_are_those_of_its_ranks_now(monkeypatch: pytest.MonkeyPatch):
    ranks = (RankView(rank=0, ms_per_batch=25.5), RankView(rank=1, ms_per_batch=57.0))
    others = (RankView(rank=0, ms_per_batch=1.0),)
    views = [
        JobView(job_id="digits-1", name="digits", ranks=ranks),
        JobView(job_id="text-2", name="text", ranks=others),
    ]

    class Answers:
        def __init__(self, address: str) -> None:
            assert address == "gpu1:7717"

        def __enter__(self) -> "Answers":
            return self

        def __exit__(self, *_: object) -> None: ...

        def jobs(self) -> list[JobView]:
            return views

    monkeypatch.setattr("elche_client.client.Client", Answers)
    assert times_like("digits", "gpu1:7717") == (25.5, 57.0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("", "has no record.json of a run that has ended: give --ranks"),
        ('{"ranks": []}', "does not say what a batch takes on each rank: give --ranks"),
        ('{"ranks": [{"ms_per_batch": 25}, {"ms_per_batch": 0}]}', "does not say what a batch takes on each rank"),
        (json.dumps({"ranks": [{"ms_per_batch": 25}] * 33}), "has 33 ranks, which are too many to simulate"),
    ],
)
def test_a_run_without_times_is_refused_in_one_line(record: str, message: str, tmp_path: Path, capsys):
    (tmp_path / "record.json").write_text(record)
    assert main(["plan", "--like", str(tmp_path), "--model", "1MB"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


PLAN = Plan(
    batches_per_s=30.0,
    bound_batches_per_s=40.0,
    rounds_per_minute=6.0,
    averaging_s=2.0,
    sent_bytes_per_round=700e6,
    loss_per_failure_s=20.0,
    devices=(DevicePlan(batch_ms=25.0, batches_per_s=30.0, training=0.75, waiting=0.05, averaging=0.15, lost=0.05),),
    memory=MemoryPlan(parameters=10**6, gradients=10**6, optimizer=2 * 10**6, rounds=3 * 10**6, while_averaging=0),
    simulated_s=100.0,
)


def shown(*plans: Plan, with_unicode: bool = True) -> str:
    console = Console(width=120, highlight=False)
    with console.capture() as capture:
        console.print(panel(plans, with_unicode=with_unicode))
    return capture.get()


def test_the_table_has_throughput_traffic_memory_and_where_time_goes():
    text = shown(PLAN)
    for words in ("30 batches/s", "40 batches/s", "75.0 %", "700 MB", "252 GB", "20.0 s", "7.00 MB", "15.0 %"):
        assert words in text
    assert "epoch" not in text, "its batches are not given"
    assert "added" not in text


def test_added_devices_are_shown_beside_what_there_was():
    more = replace(PLAN, batches_per_s=45.0, bound_batches_per_s=60.0)
    text = shown(PLAN, more)
    assert "+15 batches/s: 50.0 % more; the added would make 20 batches/s alone" in text
    assert "-15 batches/s: 33.3 % less" in shown(more, PLAN)
    assert document([PLAN, more])["gain_batches_per_s"] == 15


def test_a_bar_has_a_character_for_each_fortieth():
    assert bar([0.75, 0.05, 0.15, 0.05]) == "█" * 30 + "░" * 2 + "▒" * 6 + "·" * 2
    assert bar([0.75, 0.05, 0.15, 0.05], with_unicode=False) in shown(PLAN, with_unicode=False)


def test_parts_of_a_bar_are_rounded_to_the_nearest_and_add_up():
    assert bar([0.99, 0.01, 0.0, 0.0]) == "█" * 40
    assert bar([1 / 3, 1 / 3, 1 / 3, 0.0]) == "█" * 13 + "░" * 14 + "▒" * 13


def test_devices_that_are_alike_have_one_bar_with_what_they_do_on_average_and_together():
    (one,) = PLAN.devices
    two = replace(PLAN, devices=(one, replace(one, training=0.25, waiting=0.55)))
    (row,) = (cells for line in shown(two).splitlines() if (cells := line.split())[:1] == ["25"])
    assert (row[1], row[-1]) == ("2", "60")
    assert row[3:-1] == ["50.0", "%", "30.0", "%", "15.0", "%", "5.0", "%"]


def test_a_folder_that_is_not_there_is_not_asked_of_a_coordinator():
    with pytest.raises(InvalidJob, match="there is no folder runs/typo"):
        times_like("runs/typo", "nowhere:1")

"""What `elche chaos` makes of a job's events."""

from unittest.mock import Mock

import pytest

from elche_client.commands.chaos import NOT_YET, Chaos, Course, _print, lines_of
from elche_client.events import Fault, JobView, MembershipReport, RankView, RoundReport


def test_rounds_are_counted_once_also_by_views_that_overtake_their_reports() -> None:
    course = Course()
    events: tuple[RoundReport | JobView, ...] = (
        RoundReport(round=1),
        JobView(job_id="j", num_rounds=2),
        RoundReport(round=2),
        JobView(job_id="j", num_rounds=2),
        JobView(job_id="j", num_rounds=9),
    )
    for at_s, event in enumerate(events):
        course.add(event, float(at_s))
    assert course.commits_s == [0.0, 1.0, 4.0]


def view(*states: str) -> JobView:
    return JobView(job_id="j", ranks=tuple(RankView(rank=rank, state=state) for rank, state in enumerate(states)))


def test_ranks_without_a_process_are_no_victims() -> None:
    course = Course()
    assert course.victims == []
    course.add(view("training", "exited", "stalled"), 0.0)
    assert [one.rank for one in course.victims] == [0, 2]


def test_a_rank_is_back_when_that_is_told_or_seen_after_an_absence_of_the_watch() -> None:
    course = Course()
    course.add(MembershipReport(rank=0), 0.5)
    course.add(MembershipReport(rank=1), 1.0)
    course.add(view("exited", "starting"), 1.5)
    course.add(MembershipReport(rank=1, is_back=True), 3.5)
    course.add(view("training", "training"), 4.0)
    course.add(MembershipReport(rank=0, is_back=True), 4.5)
    assert (course.num_lost, course.back_after_s) == (2, [2.5, 3.5])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["job j: succeeded", "faults: none", "rounds: 0", "ranks: lost 0 times, back 0 times"]),
        (
            {
                "faults": {"rank": 2, "stop": 1},
                "missed": 1,
                "rounds": 9,
                "between_rounds_s": {"median": 0.5, "longest": 3.25},
                "ranks_lost": 2,
                "ranks_back": 1,
                "back_after_s": {"median": 1.5, "longest": 1.5},
                "committed_samples": [500, 500, 480],
                "dataset_size": 500,
            },
            [
                "job j: succeeded",
                "faults: 2 rank, 1 stop; 1 more hit nothing",
                "rounds: 9, between two of them 500 ms (median), 3.2 s (longest)",
                "ranks: lost 2 times, back 1 times, after 1.5 s (median), 1.5 s (longest)",
                "samples: 2 x 500, 1 x 480 committed (epochs x samples), of 500; 0 left out",
            ],
        ),
    ],
)
def test_the_report_for_people(changes: dict[str, object], expected: list[str]) -> None:
    nothing = {
        "job_id": "j",
        "state": "succeeded",
        "error": "",
        "faults": {},
        "missed": 0,
        "rounds": 0,
        "between_rounds_s": None,
        "ranks_lost": 0,
        "ranks_back": 0,
        "back_after_s": None,
        "committed_samples": [],
        "dataset_size": 0,
        "discarded_samples": 0,
    }
    assert lines_of({**nothing, **changes}) == expected


def test_the_report_of_a_job_that_goes_on_does_not_say_that_it_has_no_audit(capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder was here: the audit is for a job that has ended."""
    chaos = Chaos(Mock(), "j", mtbf_s=1.0, faults=[Fault.RANK], seed=0)
    assert not _print(chaos, as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == NOT_YET

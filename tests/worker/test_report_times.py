"""How often a rank reports its progress, by the number of ranks and the length of its batches."""

import pytest

from elche_worker.session.report_times import ReportTimes


def reports(num_ranks: int, batch_s: float, *, until_s: float = 60.0) -> list[int]:
    """The steps that a rank reports which trains without a pause."""
    times, steps, now_s, local_step = ReportTimes(), [], 0.0, 0
    times.learn(num_ranks)
    while now_s < until_s:
        now_s, local_step = now_s + batch_s, local_step + 1
        if times.is_due(now_s, local_step):
            times.note(now_s, local_step)
            steps.append(local_step)
    return steps


@pytest.mark.parametrize(("batch_s", "per_s"), [(1 / 64, 16.0), (0.0625, 16.0), (1.0, 1.0)])
def test_ranks_of_a_small_job_report_each_batch_at_most_20_times_a_second(batch_s: float, per_s: float) -> None:
    for num_ranks in (1, 50):
        assert len(reports(num_ranks, batch_s)) == pytest.approx(60 * per_s, rel=0.05)


@pytest.mark.parametrize("num_ranks", [300, 1000, 4000])
def test_all_ranks_of_a_large_job_report_about_a_thousand_times_a_second(num_ranks: int) -> None:
    batch_s = num_ranks / 1000 / 3.5
    assert num_ranks * len(reports(num_ranks, batch_s)) / 60 <= 1000


@pytest.mark.parametrize("num_ranks", [1, 300, 10_000])
@pytest.mark.parametrize("batch_s", [0.02, 0.25, 1.0, 30.0])
def test_no_silence_is_longer_than_a_few_batches(num_ranks: int, batch_s: float) -> None:
    """A rank that hangs is found as soon as before: a silence of 20 batches is explained in any case."""
    steps = reports(num_ranks, batch_s, until_s=max(60.0, 20 * batch_s))
    most = max(4, 0.05 / batch_s + 1)
    assert max(late - early for early, late in zip([0, *steps], steps, strict=False)) <= most


def test_what_others_wait_for_is_reported_after_50_ms() -> None:
    times = ReportTimes()
    times.learn(1000)
    times.note(10.0, 5)
    assert not times.is_allowed(10.04)
    assert not times.is_due(10.5, 7)
    assert times.is_allowed(10.06)

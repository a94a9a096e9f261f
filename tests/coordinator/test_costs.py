"""What the messages of a thousand ranks cost around the core, counted."""

import gc

import pytest

from elche.mapping import from_message, to_message
from elche.ready import ready_message
from elche.settings import AgreedSettings
from elche.v1 import rank_pb2
from elche_coordinator import codec, collector
from elche_coordinator.core.describe import JobDetails, JobView
from elche_coordinator.core.messages.commands import SendOutcome
from elche_coordinator.core.messages.events import BatchesTrained, RankReady
from elche_coordinator.core.messages.ids import Incarnation, JobId, Rank, RoundId, Version
from elche_coordinator.core.messages.reports import EvaluationReport, Report, UserEvent
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.loop_health import LoopHealth
from elche_coordinator.services.validation import first_problem
from elche_coordinator.streams.watchers import Watchers
from elche_coordinator.web import payloads
from support.effort import lines_run

ADDRESS: Address = {"job_id": JobId("job"), "rank": Rank(0), "incarnation": Incarnation(1)}


def test_a_report_and_an_outcome_are_converted_without_a_call_for_each_field() -> None:
    """These took 41 and 21 lines."""
    report = rank_pb2.BatchesTrained(
        local_step=3, num_processed=192, batch_ms=[250.0, 251.0], loss_sum=2.0, loss_count=2
    )
    outcome = SendOutcome(**ADDRESS, round=RoundId(7), version=Version(6), global_step=100)
    from_message(report, BatchesTrained, **ADDRESS)  # makes the converters
    to_message(outcome, rank_pb2.RoundOutcome)
    assert lines_run(lambda: from_message(report, BatchesTrained, **ADDRESS)) <= 25
    assert lines_run(lambda: to_message(outcome, rank_pb2.RoundOutcome)) <= 14


def test_a_report_that_nobody_watches_is_not_made_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Report] = []
    make = codec.watch_message
    monkeypatch.setattr(codec, "watch_message", lambda report: (made.append(report), make(report))[1])
    watchers, report = Watchers(LoopHealth()), UserEvent(rank=Rank(0), text="said")
    watchers.publish(JobId("job"), report)
    assert made == []
    queues = [watchers.watch("job"), watchers.watch("job")]
    watchers.publish(JobId("job"), report)
    assert made == [report], "one message for both"
    assert all(queue._items for queue in queues)


def test_what_all_ranks_are_ready_with_is_one_object() -> None:
    """Record, journal and saved state of each rank had settings and a checkpoint's state of their own: 32 ranks with
    the state of 4 MB took 570 MB.
    """
    settings = AgreedSettings(epochs=1, batch_size=64, dataset_size=10**9)
    request = rank_pb2.ConverseRequest(ready=ready_message(settings, device="cpu", resumed='{"attempt": 1}'))
    one, other = codec.rank_event(ADDRESS, request), codec.rank_event({**ADDRESS, "rank": Rank(1)}, request)
    assert isinstance(one, RankReady)
    assert isinstance(other, RankReady)
    assert one.settings is other.settings
    assert one.resumed is other.resumed


def test_a_data_sets_many_shards_are_not_looked_at_one_by_one() -> None:
    """Each rank of a job with half a million shards took 0.2 s of the event loop, and the page as much each 5 s."""
    settings = AgreedSettings(epochs=1, batch_size=64, dataset_size=10**6, shard_sizes=(100,) * 10_000)
    message = ready_message(settings, device="cpu", tensors=["weight: float32[2]"] * 1000)
    first_problem(message)  # makes the checks
    assert lines_run(lambda: first_problem(message)) < 200
    spec = JobSpec(name="job", source_hash="", file_name="job.py")
    details = JobDetails(spec=spec, result=None, settings=settings)
    view = JobView(job_id=JobId("job"), name="job", state="training", reason="")
    shown: dict[str, object] = {}
    assert lines_run(lambda: shown.update(payloads.about(view, details))) < 1000
    assert isinstance(shown["settings"], dict)
    assert "shard_sizes" not in shown["settings"]


def test_the_collector_looks_at_what_is_new_and_not_at_what_was_imported() -> None:
    before = gc.get_threshold()
    try:
        collector.settle()
        assert gc.get_threshold() == (10_000, 10, 50)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def test_metrics_with_long_names_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    report = EvaluationReport(epoch=1, metrics={f"m{index}" + "y" * 190: 1.0 for index in range(1000)}, duration_s=1.0)
    Watchers(LoopHealth()).publish(JobId("job-1"), report)
    assert 400 < len(caplog.text) < 1000

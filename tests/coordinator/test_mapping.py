"""Messages and dataclasses have the same fields; what one side has alone is listed here, and is so on purpose."""

from dataclasses import dataclass, fields
from typing import Any, get_args

import pytest

import elche_client.events as client
from elche.mapping import from_message, to_message
from elche.settings import AgreedSettings
from elche.v1 import access_pb2, agent_pb2, job_pb2, rank_pb2
from elche_client.commands.tokens import Token
from elche_client.options import JobOptions
from elche_client.transport.codec import decode_event
from elche_coordinator import codec
from elche_coordinator.core import describe
from elche_coordinator.core.messages import commands, events, ids, reports, spec
from elche_coordinator.core.records.ranks import Address
from elche_coordinator.telemetry import timelines
from elche_coordinator.web import recorder

OF_A_RANK = {"job_id", "rank", "incarnation"}
"""Known from the session, and not said in it."""
PAIRS: dict[tuple[Any, Any], tuple[set[str], set[str]]] = {
    # From ranks.
    (events.Gauges, rank_pb2.Gauges): (set(), set()),
    (spec.HeaderRow, rank_pb2.HeaderRow): (set(), set()),
    (spec.EpochWork, rank_pb2.EpochWork): ({"has_loss"}, {"has_no_loss"}),
    (spec.Build, rank_pb2.Build): (set(), set()),
    (spec.SampleRead, rank_pb2.SampleRead): (set(), set()),
    (spec.ValueFigures, rank_pb2.ValueFigures): (set(), set()),
    (events.RankReady, rank_pb2.Ready): (
        {*OF_A_RANK, "settings"},
        {one.name for one in rank_pb2.Ready.DESCRIPTOR.fields}
        - {
            "device",
            "build",
            "tensors",
            "batch_size",
            "resumed",
            "links_address",
            "samples",
            "are_samples_random",
        },  # its batch size is `rank_batch_size`
    ),
    (AgreedSettings, rank_pb2.Ready): (
        {"checkpoint_every_minutes", "mode"},
        {"checkpoint_every_s", "more_is_better"}
        | {
            "device",
            "build",
            "tensors",
            "rank_batch_size",
            "resumed",
            "timeline",
            "links_address",
            "samples",
            "are_samples_random",
        },  # what the rank itself is
    ),
    # From and to agents.
    (spec.Slot, agent_pb2.Slot): (set(), set()),
    (events.RankExited, agent_pb2.RankExited): ({"agent_id"}, set()),
    (commands.StartRank, agent_pb2.StartRank): ({"agent_id"}, {"secret"}),
    (commands.StopRank, agent_pb2.StopRank): ({"agent_id"}, set()),
    (commands.AskStacks, agent_pb2.SendStacks): ({"agent_id"}, set()),
    # To ranks.
    (commands.SendSyncNow, rank_pb2.SyncNow): (OF_A_RANK, set()),
    (commands.Evaluate, rank_pb2.Evaluate): (set(), set()),
    (commands.WriteCheckpoint, rank_pb2.WriteCheckpoint): (set(), set()),
    (reports.EpochReport, rank_pb2.EpochMetrics): ({"committed", "dropped"}, {"metrics", "samples"}),
    # From and to clients.
    (spec.JobSpec, job_pb2.JobSpec): (
        {"source_hash", "resume_host", "resume_work_folder", "resume_version"},
        {"source"},
    ),
    (spec.RecordedRound, job_pb2.RecordedRound): (set(), set()),
    (spec.RankPart, job_pb2.RankPart): (set(), set()),
    (spec.Slice, job_pb2.Slice): (set(), set()),
    (JobOptions, job_pb2.JobSpec): (set(), {"source", "file_name", "submitted_by", "bundle", "is_loop"}),
    (reports.RoundReport, job_pb2.RoundReport): (set(), set()),
    (reports.EpochReport, job_pb2.EpochReport): (set(), set()),
    (reports.EvaluationReport, job_pb2.EvaluationReport): (set(), set()),
    (reports.StallReport, job_pb2.StallReport): (set(), set()),
    (reports.MembershipReport, job_pb2.MembershipReport): (set(), set()),
    (reports.Checkpoint, job_pb2.Checkpoint): ({"name", "host", "work_folder"}, set()),
    (reports.UserEvent, job_pb2.UserEvent): ({"is_of_user"}, set()),
    (reports.RankResult, job_pb2.RankResult): (set(), set()),
    (reports.JobResult, job_pb2.JobResult): ({"outcome", "failed_rank", "model_agent_id", "model_folder"}, {"state"}),
    (client.JobView, job_pb2.JobView): (set(), set()),
    (client.RankView, job_pb2.RankView): (set(), set()),
    (client.RoundReport, job_pb2.RoundReport): (set(), set()),
    (client.Checkpoint, job_pb2.Checkpoint): (set(), set()),
    (client.UserEvent, job_pb2.UserEvent): (set(), set()),
    (client.JobResult, job_pb2.JobResult): (set(), set()),
    (client.LinkView, job_pb2.LinkMeasured): ({"host", "other", "error"}, set()),
    (Token, access_pb2.Token): (set(), set()),
    (describe.JobView, job_pb2.JobView): (
        {one.name for one in fields(describe.JobView)} - {one.name for one in fields(client.JobView)},
        {"resume"},
    ),
    (describe.RankView, job_pb2.RankView): (
        {one.name for one in fields(describe.RankView)} - {one.name for one in fields(client.RankView)},
        set(),
    ),
}
"""A dataclass and its message: what the one has alone, and the other."""
SAID = rank_pb2.ConverseRequest.DESCRIPTOR.oneofs_by_name["message"].fields
ELSEWHERE = {"spans"}
"""What ranks say that is not an event of the core's: `services` takes it."""
SENT = rank_pb2.ConverseResponse.DESCRIPTOR.oneofs_by_name["message"].fields
NO_COMMAND = {"clock", "welcome", "taken"}
"""What ranks are sent that is not a command of the core's: the driver sends it."""


@pytest.mark.parametrize(("pair", "alone"), PAIRS.items(), ids=lambda one: getattr(one[0], "__name__", ""))
def test_a_message_has_the_fields_of_its_dataclass(pair: tuple[Any, Any], alone: tuple[set[str], set[str]]) -> None:
    kind, message = pair
    ours, theirs = {one.name for one in fields(kind)}, set(message.DESCRIPTOR.fields_by_name)
    assert (ours - theirs, theirs - ours) == alone


@pytest.mark.parametrize("said", [one for one in SAID if one.name not in ELSEWHERE], ids=lambda one: one.name)
def test_what_a_rank_says_has_the_fields_of_its_event(said: Any) -> None:
    kind = codec.RANK_EVENTS[said.name]
    if said.name == "ready":
        return  # listed above
    ours, theirs = {one.name for one in fields(kind)}, set(said.message_type.fields_by_name)
    assert (ours - theirs, theirs - ours) == (OF_A_RANK, set())


def test_every_message_of_a_rank_is_an_event() -> None:
    assert set(codec.RANK_EVENTS) == {one.name for one in SAID} - ELSEWHERE


@pytest.mark.parametrize("kind", codec.SESSION_MESSAGES, ids=lambda one: one.__name__)
def test_what_a_rank_is_sent_has_the_fields_of_its_command(kind: Any) -> None:
    name = codec.SESSION_MESSAGES[kind]
    if name in codec.WRITTEN_OTHERWISE:
        return  # listed above, or written field by field
    message = rank_pb2.ConverseResponse.DESCRIPTOR.fields_by_name[name].message_type
    ours, theirs = {one.name for one in fields(kind)}, set(message.fields_by_name)
    assert (ours - theirs, theirs - ours) == (OF_A_RANK, set())


def test_every_command_to_a_rank_is_a_message_and_every_message_a_command() -> None:
    assert set(codec.SESSION_MESSAGES) == set(get_args(commands.SessionCommand))
    assert sorted(codec.SESSION_MESSAGES.values()) == sorted(one.name for one in SENT if one.name not in NO_COMMAND)


@pytest.mark.parametrize(
    "closed", [commands.AgentCommand, reports.Report, client.Event], ids=["agents", "reports", "events"]
)
def test_no_kind_of_message_is_without_its_pair(closed: Any) -> None:
    assert set(get_args(closed)) <= {kind for kind, _ in PAIRS}


def test_tables_of_reports_have_every_kind() -> None:
    assert set(timelines.NAMES) == set(get_args(reports.Report))
    assert {*recorder.KINDS, reports.RoundReport} == set(get_args(reports.Report))


def test_clients_get_every_kind_of_report() -> None:
    told: dict[type[Any], reports.Report] = {
        reports.RoundReport: reports.RoundReport(round=1),
        reports.EpochReport: reports.EpochReport(epoch=1),
        reports.EvaluationReport: reports.EvaluationReport(epoch=1, metrics={"accuracy": 0.5}),
        reports.StallReport: reports.StallReport(rank=1, is_over=True),
        reports.MembershipReport: reports.MembershipReport(rank=1, text="is gone", num_ranks=2, is_back=True),
        reports.Checkpoint: reports.Checkpoint(version=1, name="1-1"),
        reports.UserEvent: reports.UserEvent(rank=1, text="seen"),
        reports.JobResult: reports.JobResult(outcome=reports.Outcome.SUCCEEDED),
    }
    assert set(told) == set(get_args(reports.Report))
    for kind, report in told.items():
        event = decode_event(codec.watch_message(report))
        assert type(event).__name__ == kind.__name__
        if kind in get_args(client.Event):  # declared once for both sides
            assert event == report
    assert set(client.EVENT_NAMES) == set(get_args(client.Event))


# How values are mapped


@dataclass(frozen=True, kw_only=True)
class Named:
    """Fields of messages of several kinds."""

    epoch: int = 0
    sums: dict[str, tuple[float, int]]
    duration_ms: float = 0.0


def test_a_map_of_messages_is_a_dict_of_tuples_and_back() -> None:
    message = rank_pb2.Evaluated(epoch=3, sums={"loss": rank_pb2.ScalarSum(sum=1.5, count=2)}, duration_ms=7.0)
    value = from_message(message, Named)
    assert value == Named(epoch=3, sums={"loss": (1.5, 2)}, duration_ms=7.0)
    assert to_message(value, rank_pb2.Evaluated) == message


@pytest.mark.parametrize("loss", [None, 0.0, 0.5])
def test_none_is_a_field_that_is_absent(loss: float | None) -> None:
    message = to_message(reports.EpochReport(epoch=1, loss=loss), job_pb2.EpochReport)
    assert message.HasField("loss") == (loss is not None)
    assert from_message(message, reports.EpochReport).loss == loss


def test_none_is_the_zero_of_a_field_that_cannot_be_absent() -> None:
    settings = AgreedSettings(epochs=1, batch_size=2, dataset_size=3, max_steps=None, patience=None)
    message = to_message(settings, rank_pb2.Ready)
    assert (message.max_steps, message.patience) == (0, 0)
    assert from_message(message, AgreedSettings).max_steps is None


def test_nested_messages_are_nested_dataclasses() -> None:
    recorded = spec.RecordedRound(
        parts=(spec.RankPart(slices=(spec.Slice(epoch=0, offset=5, size=10),), num_batches=2),)
    )
    report = reports.RoundReport(round=3, recorded=recorded, rank_batches=(2,))
    message = to_message(report, job_pb2.RoundReport)
    assert message.recorded.parts[0].slices[0].offset == 5
    assert from_message(message, reports.RoundReport) == report


def test_what_is_given_is_not_taken_from_the_other_side() -> None:
    message = rank_pb2.EpochWork(epoch=1, has_no_loss=True)
    assert not from_message(message, spec.EpochWork, has_loss=not message.has_no_loss).has_loss
    sync_now = commands.SendSyncNow(
        job_id=events.JobId("j"),
        rank=events.Rank(0),
        incarnation=events.Incarnation(1),
        round=events.RoundId(2),
        generation=events.GenerationId(1),
        after_step=7,
    )
    assert to_message(sync_now, rank_pb2.SyncNow, every=1).every == 1


def test_of_a_long_error_the_beginning_and_the_end_are_kept() -> None:
    """Each of the many jobs that have failed kept 384 kB in the coordinator's memory."""
    text = "E" + "x" * 200_000 + "!"
    address: Address = {"job_id": ids.JobId("job"), "rank": ids.Rank(0), "incarnation": ids.Incarnation(1)}
    told = rank_pb2.ConverseRequest(failed=rank_pb2.RankFailed(error=text, traceback=text))
    failed = codec.rank_event(address, told)
    exited = codec.rank_exited(ids.AgentId("host"), agent_pb2.RankExited(exit_code=1, log_tail=text))
    assert isinstance(failed, events.RankFailed)
    kept = {failed.error: codec.MAX_ERROR_CHARS, failed.traceback: codec.MAX_TRACEBACK_CHARS}
    for one, most in {**kept, exited.log_tail: codec.MAX_TRACEBACK_CHARS}.items():
        assert len(one) < most + 100
        assert (one[0], one[-1]) == ("E", "!")


def test_of_many_checkpoints_clients_get_the_newest_and_the_best() -> None:
    """A hundred with 900 metrics each made a message of more than 4 MiB: nobody could list jobs any more."""
    metrics = {f"{number:03}" + "m" * 90: 1.0 for number in range(900)}
    kept = tuple(
        reports.Checkpoint(
            version=version, name="", path="", epoch=1, global_step=1, metrics=metrics, is_best=version == 3
        )
        for version in range(1, 31)
    )
    view = codec.view_message(describe.JobView(job_id="job", state="training", checkpoints=kept))
    result = codec.watch_message(reports.JobResult(outcome=reports.Outcome.SUCCEEDED, checkpoints=kept)).result
    for message in view, result:
        versions = [one.version for one in message.checkpoints]
        assert versions == [3, *range(31 - len(versions) + 1, 31)]
        assert codec.MAX_CHECKPOINTS_BYTES / 2 < message.ByteSize() < codec.MAX_CHECKPOINTS_BYTES * 1.5

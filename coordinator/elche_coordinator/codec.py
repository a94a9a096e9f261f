"""Converts messages of `elche.v1` to the core's values and back.

`elche.mapping` converts fields of the same name; fields that differ are written out here.
"""

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from elche.errors import UnknownMessage
from elche.formatting import shortened
from elche.mapping import from_message, to_message
from elche.ready import settings_of
from elche.v1 import agent_pb2, job_pb2, rank_pb2
from elche.views import JobState
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages import commands, events, reports
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.core.messages.spec import EpochWork, JobSpec
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.core.records.ranks import Address

Agreed = TypeVar("Agreed", bound=Hashable)

MAX_EVENT_CHARS = 200
"""Longest text of a user-defined event, in characters."""
MAX_ERROR_CHARS = 4096
MAX_TRACEBACK_CHARS = 1 << 14
"""Most characters of a traceback, and of a log's end: they stay in memory, with each of many jobs that have failed."""
MAX_CHECKPOINTS_BYTES = 1 << 20
"""Most bytes of a job's checkpoints in one message to a client, each with its metrics."""

STATES: dict[str, job_pb2.JobState.ValueType] = {
    state: job_pb2.JobState.Value(f"JOB_STATE_{state.upper()}") for state in JobState if state is not JobState.UNKNOWN
}
"""The message's value for each state of a job."""


# From ranks and agents

RANK_EVENTS: dict[str, type[events.Event]] = {
    "batches_trained": events.BatchesTrained,
    "round_entered": events.RoundEntered,
    "recalled": events.ReserveRecalled,
    "sync_ack": events.ResultReceived,
    "header_reported": events.HeaderReported,
    "round_failed": events.RoundFailed,
    "ready": events.RankReady,
    "group_ready": events.GroupFormed,
    "abandoned": events.GenerationAbandoned,
    "pong": events.PingAnswered,
    "probed": events.LinksProbed,
    "leaving": events.LeaveRequested,
    "stopped": events.RankStopped,
    "evaluated": events.EvaluationDone,
    "checkpoint_saved": events.CheckpointSaved,
    "checkpoint_failed": events.CheckpointFailed,
    "epoch_metrics_taken": events.EpochMetricsTaken,
    "event_recorded": events.UserEventRecorded,
    "final_state_saved": events.FinalStateSaved,
    "best_kept": events.BestKept,
    "loop_progress": events.LoopProgressed,
    "loop_epoch_ended": events.LoopEpochEnded,
    "loop_began": events.LoopBegan,
    "loop_left": events.LoopLeft,
    "failed": events.RankFailed,
}
"""The event for each message of a rank; the most frequent come first."""


def rank_event(address: Address, request: rank_pb2.ConverseRequest) -> events.Event:
    """The event of a rank's message. Raises `UnknownMessage`."""
    name = request.WhichOneof("message")
    kind = RANK_EVENTS.get(name or "")
    if kind is None or name is None:
        raise UnknownMessage("ConverseRequest", name)
    message = getattr(request, name)
    more = OTHERWISE[name](message) if name in OTHERWISE else {}
    return from_message(message, kind, **address, **more)


def _ready(message: rank_pb2.Ready) -> dict[str, Any]:
    return {
        "settings": _one_of(settings_of(message)),
        "resumed": _one_of(message.resumed),
        "batch_size": message.rank_batch_size or None,
    }


@lru_cache(maxsize=4)  # of jobs that start now: a data set may have a million shards, a checkpoint's state 4 MB
def _one_of(agreed: Agreed) -> Agreed:
    """The same object for equal ones, which all ranks of a job have: records, journal and saved state keep them."""
    return agreed


def _user_event(message: rank_pb2.EventRecorded) -> dict[str, Any]:
    return {"text": message.text[:MAX_EVENT_CHARS], "num_dropped": min(message.num_dropped, 2**31)}


def _failed(message: rank_pb2.RankFailed) -> dict[str, Any]:
    error, traceback = shortened(message.error, MAX_ERROR_CHARS), shortened(message.traceback, MAX_TRACEBACK_CHARS)
    return {"error": error, "traceback": traceback}


OTHERWISE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sync_ack": lambda message: {"work": tuple(map(_epoch_work, message.work))},
    "ready": _ready,
    "event_recorded": _user_event,
    "failed": _failed,
    "loop_epoch_ended": lambda message: {"work": _epoch_work(message.work)},
}
"""Conversions of fields that differ between events and messages."""


def _epoch_work(work: rank_pb2.EpochWork) -> EpochWork:
    return from_message(work, EpochWork, has_loss=not work.has_no_loss)


def agent_joined(agent_id: AgentId, hello: agent_pb2.AgentHello) -> events.AgentJoined:
    """The event of a host that offers its slots."""
    return from_message(hello, events.AgentJoined, agent_id=agent_id)


def rank_exited(agent_id: AgentId, message: agent_pb2.RankExited) -> events.RankExited:
    """The event that a rank's process has ended."""
    log_tail = shortened(message.log_tail, MAX_TRACEBACK_CHARS)
    return from_message(message, events.RankExited, agent_id=agent_id, log_tail=log_tail)


# To ranks and agents


SESSION_MESSAGES: dict[type[commands.SessionCommand], str] = {
    commands.SendSyncNow: "sync_now",
    commands.SendLease: "start_epoch",
    commands.SendPermit: "permit",
    commands.SendRecall: "recall",
    commands.SendThrottle: "throttle",
    commands.SendOutcome: "round_outcome",
    commands.SendEpochMetrics: "epoch_metrics",
    commands.SendFormGroup: "form_group",
    commands.SendAbandon: "abandon",
    commands.SendPing: "ping",
    commands.SendProbe: "probe",
    commands.SendSaveCheckpoint: "save_checkpoint",
    commands.SendPauseLoop: "pause_loop",
    commands.SendKeepBest: "keep_best",
    commands.SendMakeMetrics: "make_metrics",
    commands.SendShutdown: "shutdown",
}
"""For each command to a rank, its field of `ConverseResponse`."""


def rank_response(command: commands.SessionCommand) -> rank_pb2.ConverseResponse:
    """The message of a command to a rank."""
    name = SESSION_MESSAGES[type(command)]
    write = WRITTEN_OTHERWISE.get(name)
    message: Any = write(command) if write else to_message(command, KINDS[name])
    return rank_pb2.ConverseResponse(**{name: message})


def _start_epoch(command: commands.SendLease) -> rank_pb2.StartEpoch:
    lease = command.lease
    where = {"epoch": lease.epoch, "partition_offset": lease.offset, "partition_size": lease.size}
    return rank_pb2.StartEpoch(lease=lease.id, **where, is_reserve=command.is_reserve)


def _epoch_metrics(command: commands.SendEpochMetrics) -> rank_pb2.EpochMetrics:
    report = command.report
    # The field has no presence: 0 would be a loss.
    loss = math.nan if report.loss is None else report.loss
    return to_message(report, rank_pb2.EpochMetrics, loss=loss, metrics=command.metrics, samples=report.committed)


def _kinds(response: Any) -> dict[str, Any]:
    """The message classes of a response's fields, by name."""
    fields = response.DESCRIPTOR.fields
    return {one.name: GetMessageClass(one.message_type) for one in fields if one.message_type is not None}


KINDS = _kinds(rank_pb2.ConverseResponse)
WRITTEN_OTHERWISE: dict[str, Callable[[Any], Message]] = {
    "start_epoch": _start_epoch,
    "epoch_metrics": _epoch_metrics,
}
"""Conversions of commands whose fields differ from the message's."""


def start_rank(command: commands.StartRank, secret: str, source: str) -> agent_pb2.AttendResponse:
    """The message that tells an agent to start a process of a job whose file has this text."""
    start = to_message(command, agent_pb2.StartRank, secret=secret, spec=spec_message(command.spec, source))
    return agent_pb2.AttendResponse(start_rank=start)


def agent_order(command: commands.StopRank | commands.AskStacks) -> agent_pb2.AttendResponse:
    """The message that tells an agent to end a process, or asks for the stacks of its threads."""
    if isinstance(command, commands.StopRank):
        return agent_pb2.AttendResponse(stop_rank=to_message(command, agent_pb2.StopRank))
    return agent_pb2.AttendResponse(send_stacks=to_message(command, agent_pb2.SendStacks))


def taken(number: int, *, to_agent: bool) -> agent_pb2.AttendResponse | rank_pb2.ConverseResponse:
    """The message that those up to a number are durable."""
    if to_agent:
        return agent_pb2.AttendResponse(taken=agent_pb2.AgentTaken(seq=number))
    return rank_pb2.ConverseResponse(taken=rank_pb2.Taken(seq=number))


# From and to clients


def spec(message: job_pb2.JobSpec, source_hash: str) -> JobSpec:
    """The spec of a submission, whose file has this hash."""
    return from_message(message, JobSpec, source_hash=source_hash)


def spec_message(spec: JobSpec, source: str) -> job_pb2.JobSpec:
    """The part of the spec that ranks need as a message, with the text of the job's file."""
    return to_message(spec, job_pb2.JobSpec, source=source, replay=(), submitted_by="")


def view_message(view: JobView, resume: str = "") -> job_pb2.JobView:
    """The message of a job's view, with the folder of checkpoints from which it begins."""
    message = to_message(view, job_pb2.JobView, state=STATES[view.state], submitted_at=None, resume=resume)
    _bound(message.checkpoints)
    message.submitted_at.FromMilliseconds(int(view.submitted_at * 1000))
    return message


def _bound(checkpoints: Any) -> None:
    """Leaves the oldest checkpoints out, but not the best, where all take more than `MAX_CHECKPOINTS_BYTES`."""
    left = MAX_CHECKPOINTS_BYTES
    for index in reversed(range(len(checkpoints))):
        left -= checkpoints[index].ByteSize()
        if left < 0 and not checkpoints[index].is_best:
            del checkpoints[index]


def host_message(host: HostView) -> job_pb2.HostView:
    """The message of a host."""
    slots = [
        to_message(slot, job_pb2.SlotView, **_owner(host.ranks.get(index))) for index, slot in enumerate(host.slots)
    ]
    return to_message(host, job_pb2.HostView, slots=slots)


def _owner(owner: tuple[str, int] | None) -> dict[str, Any]:
    return {} if owner is None else {"job_id": owner[0], "rank": owner[1]}


WATCH_MESSAGES: dict[type[reports.Report], str] = {
    reports.RoundReport: "round",
    reports.EpochReport: "epoch",
    reports.EvaluationReport: "evaluation",
    reports.StallReport: "stall",
    reports.MembershipReport: "membership",
    reports.Checkpoint: "checkpoint",
    reports.UserEvent: "user_event",
    reports.JobResult: "result",
}
"""For each report, its field of `WatchJobResponse`."""
WATCH_KINDS = _kinds(job_pb2.WatchJobResponse)


def watch_message(report: reports.Report) -> job_pb2.WatchJobResponse:
    """The message of a report to watchers."""
    name = WATCH_MESSAGES[type(report)]
    more = {"state": STATES[report.outcome]} if isinstance(report, reports.JobResult) else {}
    message: Any = to_message(report, WATCH_KINDS[name], **more)
    if isinstance(report, reports.JobResult):
        _bound(message.checkpoints)
    return job_pb2.WatchJobResponse(**{name: message})

"""Converts messages of `elche.v1` to this package's own values and back.

`elche.mapping` converts fields of the same name; fields that differ are written out here.
"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from elche.errors import InvalidJob
from elche.mapping import from_message, to_message
from elche.network import user_at_host
from elche.v1 import job_pb2 as pb
from elche_client.events import EVENT_NAMES, Event, Fault, JobResult, JobState, JobView, LinkView, RoundReport
from elche_client.options import MAX_NAME_CHARS, JobOptions, has_own_loop

Sent = TypeVar("Sent", bound=Message)
STATES: dict[int, JobState] = {
    pb.JobState.Value(f"JOB_STATE_{state.upper()}"): state for state in JobState if state is not JobState.UNKNOWN
}

EVENT_KINDS = {name: kind for kind, name in EVENT_NAMES.items()}

FAULTS: dict[Fault | None, pb.Fault.ValueType] = {
    None: pb.FAULT_UNSPECIFIED,
    Fault.RANK: pb.FAULT_KILL_RANK,
    Fault.STOP: pb.FAULT_STOP_RANK,
    Fault.NETWORK: pb.FAULT_CUT_CONNECTIONS,
    Fault.AGENT: pb.FAULT_KILL_AGENT,
    Fault.COORDINATOR: pb.FAULT_KILL_COORDINATOR,
    Fault.DISK: pb.FAULT_FILL_DISK,
}


def encode_spec(path: Path, source: str, options: JobOptions) -> pb.JobSpec:
    """The message for a job whose file is at `path`, with the text `source`."""
    spec = to_message(
        options,
        pb.JobSpec,
        name=options.name or _utf8(path.stem)[:MAX_NAME_CHARS],
        source=source,
        file_name=_utf8(str(path.absolute())),
        settings=encode_settings(options),
        arguments=map(_utf8, options.arguments),
        environment={name: _utf8(value) for name, value in options.environment.items()},
        submitted_by=user_at_host(),
        replay=(),
        is_loop=not options.module and has_own_loop(path),
    )
    spec.MergeFromString(options.replay)  # serialised parts of a `JobSpec`, end to end: see `decode_round`
    return spec


def encode_settings(options: JobOptions) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in options.settings.items()}


def _utf8(name: str) -> str:
    """Makes a text valid UTF-8, as messages need; a file's name may not be."""
    return os.fsencode(name).decode("utf-8", "replace")


def decode_event(message: pb.WatchJobResponse) -> Event | None:
    """The event in a watch's message; None for a kind that this client does not know.

    A client may be older than its coordinator. Events only inform, so an unknown one is no error: `Client.watch` logs
    it.
    """
    match message.WhichOneof("event"):
        case "view":
            return decode_view(message.view)
        case "round":
            return decode_round(message.round)
        case "result":
            return from_message(message.result, JobResult, state=decode_state(message.result.state))
        case None:
            return None
        case name:
            return from_message(getattr(message, name), EVENT_KINDS[name])


def decode_link(found: pb.MeasureLinksResponse) -> LinkView:
    return from_message(found.measured, LinkView, host=found.host, other=found.other, error=found.error)


def decode_state(state: int) -> JobState:
    return STATES.get(state, JobState.UNKNOWN)


def decode_view(view: pb.JobView) -> JobView:
    return from_message(view, JobView, state=decode_state(view.state), submitted_at=_time(view))


def _time(view: pb.JobView) -> datetime | None:
    """When the job was submitted; None for a time that no calendar has."""
    if not view.HasField("submitted_at"):
        return None
    try:
        return view.submitted_at.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def decode_round(report: pb.RoundReport) -> RoundReport:
    # Serialised messages may be concatenated: repeated fields are appended. So a file of these is the whole recording.
    recorded = pb.JobSpec(replay=[report.recorded]).SerializeToString() if report.HasField("recorded") else b""
    return from_message(report, RoundReport, recorded=recorded)


def request_of(kind: type[Sent], **values: Any) -> Sent:
    """The request with these values. Raises `InvalidJob`, naming it, for a value that none can have."""
    try:
        return kind(**values)
    except (TypeError, ValueError):
        for name, value in values.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                raise InvalidJob(f"{name} cannot be {value!r}") from None
        raise

"""Validates requests of clients, agents and ranks before handlers: lengths of texts and lists, ranges of integers, and
finite numbers. Also converts handlers' exceptions to gRPC statuses.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from elche.errors import ElcheError, InvalidJob
from elche.ready import MAX_TENSORS, MAX_TENSORS_CHARS
from elche.samples import MAX_FIGURES, MAX_VALUES, NUM_POSITIONS
from elche.settings import SETTINGS
from elche.status import answering
from elche_coordinator.limits.releasing import Context, kind_of

log = logging.getLogger(__name__)

Check = Callable[[Any, int], str]
"""Returns the problem of a value, at a depth of nesting, as text; empty when it has none."""

MAX_CHARACTERS = 4096
"""Longest text of a field without a bound of its own."""
MAX_ENTRIES = 10_000
"""Most entries of a list or map without a bound of its own."""
MAX_RANKS = 10_000
"""Most ranks that a job may ask for."""
MAX_SPANS = 4000
"""Most spans in one message for a timeline."""
MAX_INTEGER = 2**53
"""The largest integer that a JSON number, a float and a database column all represent exactly."""
MAX_DEPTH = 16
"""Deepest nesting of messages: the check calls itself for each level."""

WHOLE = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)
CHARACTERS = {
    "AgentHello.folder": 64,
    "AgentHello.host": 255,
    "AgentHello.jobs": 200,
    "AttachRequest.name": 200,
    "AttachRequest.policy": 1000,
    "AttachRequest.submitted_by": 255,
    "DeliverRequest.error": 1 << 16,
    "EpochWork.scalars": 200,
    "Evaluated.sums": 200,
    "Evaluated.tensors": 200,
    "HostFitness.problem": 1000,
    "JobSpec.arguments": 1 << 15,
    "JobSpec.artifacts": 1000,
    "JobSpec.environment": 1 << 15,
    "JobSpec.file_name": 255,
    "JobSpec.name": 200,
    "JobSpec.project": 64,
    "JobSpec.settings": 1 << 16,
    "JobSpec.source": 4 << 20,
    "JobSpec.submitted_by": 255,
    "LoopRank.device": 255,
    "LoopRank.host": 255,
    "RankExited.log_path": 5000,
    "RankExited.log_tail": 1 << 17,
    "RankFailed.error": 1 << 17,
    "RankFailed.traceback": 1 << 18,
    "RankStacks.text": 1 << 17,
    "RankStarted.log_path": 5000,
    "Ready.device": 255,
    "Ready.policy": 100,
    "Ready.resumed": 4 << 20,
    "ResumeJobRequest.settings": 1 << 16,
    "ResumeJobRequest.submitted_by": 255,
    "Slot.device": 255,
    "Slot.model": 255,
    "AgentHello.labels": 200,
    "JobSpec.conditions": 200,
    "JobSpec.module": 255,
    "JobSpec.requirements": 500,
    "JobSpec.secrets": 64,
    "SubmitJobRequest.key": 200,
}
"""Longest texts in characters, by field, if not `MAX_CHARACTERS`; for a map, of each key and value."""
ENTRIES = {
    "AgentHello.gone": 100,
    "AgentHello.jobs": 1000,
    "AgentHello.slots": 1024,
    "AgentHello.labels": 64,
    "BatchesTrained.batch_ms": 64,
    "JobSpec.conditions": 16,
    "JobSpec.requirements": 200,
    "JobSpec.secrets": 64,
    "EpochWork.scalars": 1000,
    "Evaluated.sums": 1000,
    "Evaluated.tensors": 1000,
    "Gauges.gpu_slowdowns": 16,
    "JobSpec.replay": 100_000,
    "JobSpec.settings": 200,
    "RankPart.slices": 100_000,
    "Ready.samples": NUM_POSITIONS,
    "Ready.shard_sizes": 1 << 20,
    "Ready.tensors": MAX_TENSORS,
    "ResumeJobRequest.settings": 200,
    "SampleRead.values": MAX_VALUES,
    "Spans.details": MAX_SPANS,
    "Spans.durations_us": MAX_SPANS,
    "Spans.kinds": MAX_SPANS,
    "Spans.starts_us": MAX_SPANS,
    "SyncAck.work": 1000,
    "TensorSum.shape": 64,
    "ValueFigures.figures": MAX_FIGURES,
}
"""Most entries of lists and maps, by field, if not `MAX_ENTRIES`."""
OF_RANKS = frozenset({"HeaderReported.header", "Probed.ranks", "SyncAck.header"})
"""Lists that have at most one entry for each rank of the job."""
NUM_RANKS: ContextVar[int] = ContextVar("NUM_RANKS", default=MAX_RANKS)
"""The number of ranks of the job whose message is checked."""
ALL_ENTRIES = {"JobSpec.replay": (("parts", "slices"), 200_000), "SyncAck.work": (("scalars",), 10_000)}
"""Most entries in a list's messages together, by field: those of their lists or maps of these names, each in the one
before. Each message costs some microseconds, and 2 bytes of the request are enough for an empty one.
"""
ALL_CHARACTERS = {"Ready.tensors": MAX_TENSORS_CHARS}
"""Most characters of all texts of a list together, by field, where the bound on the message's size is not enough."""
INTEGERS = {
    "AddRequest.amount": 2**63,
    "JobSpec.num_ranks": MAX_RANKS,
    "JobSpec.min_ranks": MAX_RANKS,
    "ScaleJobRequest.num_ranks": MAX_RANKS,
    "LoopProgress.num_epochs": 2**32,
    "Ready.epochs": int(SETTINGS["epochs"].below) - 1,
    "Ready.seed": 2**64,
}
"""Largest integers, by field, if not `MAX_INTEGER`. Fixed-size integers are hashes and have no bound."""
MAY_BE_NAN = frozenset(
    {
        "BatchesTrained.loss_sum",
        "EpochWork.loss_sum",
        "Gauges.gradient_norm",
        "Gauges.learning_rate",
        "Gauges.parameter_norm",
        "ScalarSum.sum",
        "SyncAck.divergence",
    }
)
"""Numbers for which NaN and infinity are valid."""
MAY_BE_INFINITE = frozenset({"Ready.divergence_threshold", "Ready.overhead_target"})


def first_problem(message: Message) -> str:
    """The first field that exceeds its bound, with its value and the bound; empty when none does."""
    return _problem(message, 0)


def _problem(message: Message, depth: int) -> str:
    if depth > MAX_DEPTH:
        return f"{message.DESCRIPTOR.name} is nested more than {MAX_DEPTH} deep"
    for field, value in message.ListFields():
        if problem := _checks(field.containing_type)[field.number](value, depth):
            return problem
    return ""


@cache
def _checks(descriptor: Descriptor) -> dict[int, Check]:
    """Checks of a message class's fields, by field number."""
    return {field.number: _check_of(field) for field in descriptor.fields}


def _check_of(field: FieldDescriptor) -> Check:
    assert field.containing_type is not None
    name = f"{field.containing_type.name}.{field.name}"
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _map_check(field.message_type, name)
    return _list_check(field, name) if field.is_repeated else _check_one(field, name)


def _map_check(entry: Descriptor, name: str) -> Check:
    of_key, of_value = (_check_one(entry.fields_by_name[part], name) for part in ("key", "value"))
    most = ENTRIES.get(name, MAX_ENTRIES)

    def check(value: Any, depth: int) -> str:
        if len(value) > most:
            return f"{name} has {len(value)} entries; at most {most} are taken"
        return next((problem for key in value if (problem := of_key(key, depth) or of_value(value[key], depth))), "")

    return check


def _list_check(field: FieldDescriptor, name: str) -> Check:
    most, all_characters = ENTRIES.get(name, MAX_ENTRIES), ALL_CHARACTERS.get(name)
    are_fine, of_one = _check_all(field, name), _check_one(field, name)

    def check(value: Any, depth: int) -> str:
        if name in OF_RANKS and len(value) > (num_ranks := NUM_RANKS.get()):
            return f"{name} has {len(value)} entries; the job has {num_ranks} ranks"
        if len(value) > most:
            return f"{name} has {len(value)} entries; at most {most} are taken"
        if name in ALL_ENTRIES and (problem := _all_entries_problem(name, value)):
            return problem
        if all_characters is not None and (found := sum(map(len, value))) > all_characters:
            return f"{name} has {found} characters; at most {all_characters} are taken"
        if are_fine(value):
            return ""
        return next((problem for one in value if (problem := of_one(one, depth))), "")

    return check


def _all_entries_problem(name: str, value: Any) -> str:
    path, most = ALL_ENTRIES[name]
    level, found = value, 0
    for of in path:
        found += sum(len(getattr(one, of)) for one in level)
        if found > most:
            return f"{name} has {found} {' and '.join(path)} in all; at most {most} are taken"
        level = [inner for one in level for inner in getattr(one, of)]
    return ""


def _check_all(field: FieldDescriptor, name: str) -> Callable[[Any], bool]:
    """A quick look at all values of a list at once: a million take 20 ms, and one by one half a second. If it finds
    something, or cannot tell, each is checked.
    """
    match field.cpp_type:
        # Bytes have the same `cpp_type`. `ListFields` leaves empty lists out, so that `max` and `min` have a value.
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_STRING:
            most_characters = CHARACTERS.get(name, MAX_CHARACTERS)
            return lambda values: max(map(len, values)) <= most_characters
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return lambda values: all(map(math.isfinite, values))
        case kind if kind in WHOLE:
            most = INTEGERS.get(name, MAX_INTEGER)
            return lambda values: -most <= min(values) and max(values) <= most
        case _:
            return lambda values: False


def _check_one(field: FieldDescriptor, name: str) -> Check:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return lambda value, depth: _problem(value, depth + 1)
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_STRING:
            return partial(_text_problem, name, CHARACTERS.get(name, 200 if field.name == "job_id" else MAX_CHARACTERS))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return partial(_float_problem, name, name in MAY_BE_NAN, name in MAY_BE_NAN | MAY_BE_INFINITE)
        case kind if kind in WHOLE and field.type not in (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_FIXED32):
            return partial(_integer_problem, name, INTEGERS.get(name, MAX_INTEGER))
        case _:  # bytes are bounded by the message size; enums and flags need no bound
            return lambda value, depth: ""


def _text_problem(name: str, most: int, value: str, depth: int) -> str:
    return f"{name} has {len(value)} characters; at most {most} are taken" if len(value) > most else ""


def _integer_problem(name: str, most: int, value: int, depth: int) -> str:
    return f"{name} is {value}; at most {most} is taken" if not -most <= value <= most else ""


def _float_problem(name: str, may_be_nan: bool, may_be_infinite: bool, value: float, depth: int) -> str:
    if (math.isnan(value) and not may_be_nan) or (math.isinf(value) and not may_be_infinite):
        return f"{name} is {value}; it must be a finite number"
    return ""


class ValidationInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stub only
    """Refuses messages that are malformed or exceed a bound with INVALID_ARGUMENT and the field's name.

    In a request stream the error is raised in place of the message. An exception of a handler other than `ElcheError`
    is a bug: it is logged, and answered with INTERNAL without its text.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler, with validated requests."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = kind_of(handler)
        behave = getattr(handler, kind)
        if handler.request_streaming:
            behave = partial(_with_checked_stream, behave)
        guarded = _guarded_stream if handler.response_streaming else _guarded
        return handler._replace(
            **{kind: partial(guarded, behave, str(handler_call_details.method))},
            request_deserializer=partial(_parse, handler.request_deserializer),
        )


def _parse(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    """The message, or the `InvalidJob` to raise for it."""
    try:
        message = deserialize(data)
    except Exception:  # protobuf raises several kinds
        return InvalidJob("the request is malformed: it is not a message of this service")
    problem = first_problem(message) if isinstance(message, Message) else ""
    return InvalidJob(problem) if problem else message


def _with_checked_stream(behave: Callable[..., Any], requests: AsyncIterator[Any], context: Context) -> Any:
    return behave(_checked(requests), context)


async def _checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, ElcheError):
            raise request
        yield request


async def _guarded(behave: Callable[..., Any], method: str, request: Any, context: Context) -> Any:
    async with answering(context):
        if isinstance(request, ElcheError):
            raise request
        try:
            return await behave(request, context)
        except (ElcheError, grpc.aio.BaseError):  # BaseError also when the peer has disconnected
            raise
        except Exception:
            await _abort_bug(method, context)


async def _guarded_stream(
    behave: Callable[..., Any], method: str, request: Any, context: Context
) -> AsyncIterator[Any]:
    async with answering(context):
        if isinstance(request, ElcheError):
            raise request
        try:
            async for response in behave(request, context):
                yield response
        except (ElcheError, grpc.aio.BaseError):  # BaseError also when the peer has disconnected
            raise
        except Exception:
            await _abort_bug(method, context)


async def _abort_bug(method: str, context: Context) -> None:
    log.exception("%s failed; this is a bug in the coordinator", method)
    await context.abort(grpc.StatusCode.INTERNAL, "a bug in the coordinator; its log says more")

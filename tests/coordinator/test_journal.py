"""What is kept of a job's events: within bounds, without secrets, and read back as it was."""

import os
import tracemalloc
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.commands import Publish, StartRank
from elche_coordinator.core.messages.events import (
    AgentJoined,
    BatchesTrained,
    CheckpointRequested,
    Event,
    Gauges,
    JobCancelled,
    JobSubmitted,
    RankExited,
    RankReady,
    ResultReceived,
)
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Incarnation, JobId, Rank, RoundId
from elche_coordinator.core.messages.reports import JobResult, Outcome
from elche_coordinator.core.messages.spec import EpochWork, HeaderRow, JobSpec, Slot
from elche_coordinator.journal.coding import COMMANDS, EVENTS, decode, encode
from elche_coordinator.journal.entries import MAX_TEXT, cut_text, fault_text, kept_command, kept_event
from elche_coordinator.journal.journals import Extract, JournalLimits, Journals
from elche_coordinator.journal.weights import weight
from elche_coordinator.telemetry import journal_files
from elche_coordinator.telemetry.journal_files import JournalFiles

KINDS = EVENTS | COMMANDS


def filled(hint: Any, numbers: "count[int]") -> Any:
    """A value of a type that is not a field's default, made of numbers that come once."""
    if isinstance(hint, NewType):
        return filled(hint.__supertype__, numbers)
    if get_origin(hint) in (Union, UnionType):
        return filled(next(one for one in get_args(hint) if one is not NoneType), numbers)
    if is_dataclass(hint):
        return made(hint, numbers)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return tuple(filled(one, numbers) for one in get_args(hint) if one is not ...)
    if get_origin(hint) in (dict, Mapping):
        of_key, of_value = get_args(hint)
        return {filled(of_key, numbers): filled(of_value, numbers)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return list(hint)[-1]
    if hint is bool:
        return True
    if hint is float:
        return next(numbers) + 0.1
    if hint is bytes:
        return f"{next(numbers)} äß".encode()
    return next(numbers) if hint is int else f"text {next(numbers)} äß"


def made(kind: type, numbers: "count[int]") -> Any:
    """A message with every field filled."""
    hints = get_type_hints(kind)
    return kind(**{field.name: filled(hints[field.name], numbers) for field in fields(kind)})


@pytest.mark.parametrize("name", KINDS)
def test_every_message_is_read_back_as_it_was(name: str) -> None:
    message = made(KINDS[name], count(7))
    assert decode(KINDS, encode(message)) == message


@pytest.mark.parametrize("report", get_args(get_type_hints(Publish)["report"]))
def test_every_report_is_read_back_as_it_was(report: type) -> None:
    message = Publish(job_id=JobId("job"), report=made(report, count(7)))
    assert decode(KINDS, encode(message)) == message


def test_numbers_that_json_has_not_are_read_back() -> None:
    message = replace(made(BatchesTrained, count(1)), batch_ms=(float("inf"), float("nan"), -float("inf"), 0.1 + 0.2))
    again = decode(KINDS, encode(message))
    assert repr(again) == repr(message)


@pytest.mark.parametrize(
    "tagged", [None, {}, {"Nothing": {}}, {"JobCancelled": {}}, {"JobCancelled": {"x": 1}}, {"JobCancelled": 1}, []]
)
def test_what_is_no_message_is_refused(tagged: Any) -> None:
    with pytest.raises(ValueError, match=r"is none of|this is not a JobCancelled"):
        decode(KINDS, tagged)


def submitted(name: str = "job", **spec: Any) -> JobSubmitted:
    whole = {"name": name, "source_hash": "", "file_name": "a.py", "num_ranks": 1, **spec}
    return JobSubmitted(job_id=JobId(name), spec=JobSpec(**whole), submitted_at=0.0)


SECRETS = {
    "arguments": ("--key", "hunter-argument"),
    "environment": {"TOKEN": "hunter-environment"},
}


def test_nothing_that_was_submitted_in_confidence_is_in_it() -> None:
    core, journals = Coordinator(), Journals()
    event: Event
    slots = (Slot(device="cpu"),)
    for event in (AgentJoined(agent_id=AgentId("a"), host="a", slots=slots), submitted(**SECRETS)):
        journals.note(core, 1.0, event, core.handle(event, now_s=1.0))
    extract = journals.extract("job", 1.0)
    assert extract is not None
    text = "\n".join(extract.lines())
    assert {"JobSubmitted", "StartRank", "TOKEN"} <= {word for word in text.split('"') if word}
    assert "hunter" not in text
    assert "hunter" not in repr(extract)


def test_long_texts_are_cut_in_the_middle_and_stay_as_they_are() -> None:
    text = "a" * MAX_TEXT + "b" * MAX_TEXT
    short = cut_text(text)
    assert len(short) <= MAX_TEXT
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert f"of {len(text)} characters" in short
    assert cut_text(short) == short
    assert cut_text(text + "c") != short
    assert "crc32" in cut_text("\ud800" * 3 * MAX_TEXT)
    result = JobResult(outcome=Outcome.FAILED, error="no", traceback=text)
    kept = kept_command(Publish(job_id=JobId("job"), report=result))
    assert kept == Publish(job_id=JobId("job"), report=replace(result, traceback=short))


def test_what_the_core_reads_stays_whole() -> None:
    ready = replace(made(RankReady, count(1)), resumed="x" * 10 * MAX_TEXT)
    assert kept_event(ready) == ready


# Bounds

ADDRESS = {"job_id": JobId("job"), "rank": Rank(0), "incarnation": Incarnation(1)}


def batches(index: int) -> BatchesTrained:
    """One of those that come most often, with values of its own, as they come off the wire."""
    return BatchesTrained(
        job_id=JobId(f"job-{index}"[:3]),
        rank=Rank(0),
        incarnation=Incarnation(1),
        local_step=1000 + index,
        num_processed=100_000 + index,
        batch_ms=tuple(20.0 + index + part / 7 for part in range(4)),
        loss_sum=index + 0.5,
        loss_count=4000 + index,
        data_wait_ms=index + 0.25,
        gauges=Gauges(learning_rate=index * 0.1, memory_used_bytes=10**9 + index, gradient_norm=index * 0.3),
    )


def held(index: int, num_ranks: int = 64) -> ResultReceived:
    rows = tuple(
        HeaderRow(weight=1000 + rank + index, cut=2000 + rank + index, local_step=3000 + rank, compute_us=4000 + rank)
        for rank in range(num_ranks)
    )
    work = (EpochWork(epoch=0, num_batches=1000 + index, num_samples=2000 + index, loss_sum=0.1 * index),)
    return ResultReceived(
        job_id=JobId("job"),
        rank=Rank(0),
        incarnation=Incarnation(1),
        generation=GenerationId(1),
        round=RoundId(1000 + index),
        header=rows,
        collective_ms=index * 0.7,
        work=work,
    )


@pytest.mark.parametrize("make", [batches, held])
def test_a_message_takes_no_more_than_is_counted(make: Any) -> None:
    make(0)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    messages = [make(index) for index in range(1000, 2000)]
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    counted = sum(map(weight, messages))
    assert taken <= 1.05 * counted, "more is kept than is counted"
    assert counted <= 2 * taken, "far less is kept than could be"


def training(journals: Journals, *names: str) -> Coordinator:
    """A core with jobs that have a rank each, journalled."""
    core = Coordinator()
    slots = (Slot(device="cpu"),) * len(names)
    core.handle(AgentJoined(agent_id=AgentId("a"), host="a", slots=slots), now_s=0.0)
    for name in names:
        event = submitted(name)
        journals.note(core, 0.0, event, core.handle(event, now_s=0.0))
    return core


def tell(journals: Journals, core: Coordinator, name: str, num: int) -> None:
    for index in range(num):
        record = core.jobs[JobId(name)].ranks[Rank(0)]
        event = replace(batches(index), **record.address)
        journals.note(core, float(index), event, core.handle(event, now_s=float(index)))


def test_so_many_entries_are_kept_and_the_rest_is_counted() -> None:
    journals = Journals(JournalLimits(num_entries=50))
    core = training(journals, "job")
    tell(journals, core, "job", 200)
    extract = journals.extract("job", 0.0)
    assert extract is not None
    assert (len(extract.entries), extract.num_dropped) == (50, 151)
    newest = journals.extract("job", 0.0, 10)
    assert newest is not None
    assert (newest.entries, newest.num_dropped) == (extract.entries[-10:], 191)
    assert journals.extract("other", 0.0) is None


def test_so_many_bytes_are_kept() -> None:
    bounds = JournalLimits(num_bytes=200_000)
    journals = Journals(bounds)
    core = training(journals, "job")
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tell(journals, core, "job", 3000)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.9 * bounds.num_bytes < journals.num_bytes <= bounds.num_bytes
    assert taken < 1.3 * bounds.num_bytes, "with what the core itself keeps of a rank"
    event = replace(batches(1), job_id=JobId("job"), batch_ms=(1.0,) * 10_000)
    journals.note(core, 1.0, event, core.handle(event, now_s=1.0))
    extract = journals.extract("job", 0.0)
    assert extract is not None
    assert extract.entries == (), "one that is larger than all may be is not kept"
    assert journals.num_bytes == 0


def test_journals_of_jobs_that_have_ended_make_room_the_oldest_first() -> None:
    journals = Journals(JournalLimits(total_bytes=300_000))
    core = training(journals, "one", "two", "three")
    for name in ("one", "two"):
        tell(journals, core, name, 80)
        event = JobCancelled(job_id=JobId(name))
        journals.note(core, 9.0, event, core.handle(event, now_s=9.0))
        lost = core.jobs[JobId(name)].ranks[Rank(0)]
        core_event = made_exit(name, lost.incarnation)
        journals.note(core, 9.0, core_event, core.handle(core_event, now_s=9.0))
        assert core.jobs[JobId(name)].result is not None
    while journals.extract("one", 0.0) is not None:
        tell(journals, core, "three", 1)
    assert journals.extract("two", 0.0) is not None
    tell(journals, core, "three", 2000)
    assert journals.extract("two", 0.0) is None
    assert journals.num_bytes <= 300_000
    three = journals.extract("three", 0.0)
    assert three is not None
    assert three.num_dropped > 0
    event = CheckpointRequested(job_id=JobId("one"))
    journals.note(core, 9.0, event, core.handle(event, now_s=9.0))
    one = journals.extract("one", 0.0)
    assert one is not None
    assert one.num_dropped > 0, "what is written anew has no beginning"


def made_exit(name: str, incarnation: Incarnation) -> Event:
    return RankExited(job_id=JobId(name), rank=Rank(0), incarnation=incarnation, agent_id=AgentId("a"), exit_code=0)


def test_the_words_of_a_model_are_kept_once() -> None:
    journals = Journals()
    core = training(journals, "job")
    settings = AgreedSettings(dataset_size=10, batch_size=1, epochs=1, policy="cadence", layout_hash=5)
    for layout_hash in (5, 5, 6):
        ready = RankReady(
            **ADDRESS, settings=replace(settings, layout_hash=layout_hash), device="cpu", tensors=("weight",)
        )
        journals.note(core, 1.0, ready, core.handle(ready, now_s=1.0))
    extract = journals.extract("job", 1.0)
    assert extract is not None
    kept = [entry.event.tensors for entry in extract.entries if isinstance(entry.event, RankReady)]
    assert kept == [("weight",), (), ("weight",)]
    assert StartRank in {type(command) for entry in extract.entries for command in entry.commands}


def test_a_bug_of_the_core_is_in_the_journal_of_the_job_that_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    journals = Journals()
    core = training(journals, "one", "two")
    job = core.jobs[JobId("one")]
    monkeypatch.setattr(job, "request_checkpoint", lambda: {}["nothing"])
    event = CheckpointRequested(job_id=job.id)
    with pytest.raises(KeyError) as raised:
        core.handle(event, now_s=2.0)
    journals.note(core, 2.0, event, [], (job.id, fault_text(raised.value)))
    one, two = journals.extract("one", 0.0), journals.extract("two", 0.0)
    assert one is not None
    assert two is not None
    assert (one.entries[-1].event, one.entries[-1].error) == (event, "KeyError: 'nothing'")
    assert list(one.lines())[-1].endswith('"error":"KeyError: \'nothing\'"}')
    assert len(two.entries) == 1


def test_journals_of_one_user_do_not_push_out_those_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_files, "MAX_FILES", 3)
    driver: Any = SimpleNamespace(watchers=SimpleNamespace(on_published=lambda action: None))
    files = JournalFiles(tmp_path, driver, lambda job_id: job_id.partition("-")[0])
    for index, job_id in enumerate(("bob-0", "eve-1", "eve-2", "eve-3", "eve-4")):
        files._write(Extract(JobId(job_id), 0, (), 0.0))
        os.utime(tmp_path / f"{job_id}.jsonl.gz", (index, index))
    assert sorted(one.name.partition(".")[0] for one in tmp_path.iterdir()) == ["bob-0", "eve-3", "eve-4"]

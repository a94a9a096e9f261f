"""What programs read on their own machine: records, scripts, what ranks have left for each other, a cloud's answers."""

import http.client
import io
import json
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche import own_modules, requirements
from elche.errors import InvalidJob
from elche_client.commands import plan
from elche_worker.agent import artifacts, notices
from elche_worker.process.rank_files import RankFiles
from elche_worker.replaying.recording import read_recording
from support.corpus import COMMAND, JOB, MANIFEST, RANK_FILES, RECORD, START, resealed, with_start
from support.fuzzing import as_text, changed_bytes, changed_json, fuzzed, tried

pytestmark = pytest.mark.usefixtures("bounded")


def repeat(run: Path) -> None:
    """Reads what a replay begins with."""

    def read() -> list[str]:
        recording = read_recording(run, until_round=None, attempt=None)
        return [recording.resume(file) for file in recording.files.values()]

    tried(read, InvalidJob)


@fuzzed(50)
@given(data=st.one_of(changed_bytes(RANK_FILES), changed_bytes(RANK_FILES).map(resealed)))
def test_a_ranks_file_is_repeated_or_refused(run: Path, data: bytes) -> None:
    (run / "audit" / JOB / "rank-0-1.bin").write_bytes(data)
    repeat(run)


@fuzzed(50)
@given(start=changed_json(START).map(as_text))
def test_ranks_files_of_any_beginning_are_repeated_or_refused(run: Path, start: str) -> None:
    for path in (run / "audit" / JOB).iterdir():
        path.write_bytes(with_start(start))
    repeat(run)


@fuzzed(50)
@given(command=changed_json(COMMAND).map(as_text), record=changed_json(RECORD).map(as_text))
def test_a_recorded_run_of_any_command_is_repeated_or_refused(run: Path, command: str, record: str) -> None:
    (run / "run.json").write_text(command)
    (run / "record.json").write_text(record)
    repeat(run)


@fuzzed(50)
@given(text=changed_json(RECORD).map(as_text))
def test_a_plan_is_made_of_any_record_or_refused(run: Path, text: str) -> None:
    (run / "record.json").write_text(text)
    tried(lambda: plan.times_like(str(run), ""), InvalidJob)


SCRIPT = b"""\
# /// script
# requires-python = ">=3.11"
# dependencies = ["pandas>=2", "a[b]==1.0; python_version>'3'"]
# ///
"""
DEEP = st.sampled_from([b"[", b"{a=", b"[{a="]).map(
    lambda one: b"# /// script\n# dependencies = " + one * 30_000 + b"\n# ///\n"
)


@fuzzed(75)
@given(data=st.one_of(changed_bytes([SCRIPT]), DEEP))
def test_a_scripts_own_requirements_are_read_or_refused(data: bytes) -> None:
    tried(lambda: requirements.inline_requirements(data.decode(errors="replace")), InvalidJob)


MODULES = {"other": ["/there/other.py", "X = 1\n"], "more": ["/there/more/__init__.py", ""]}


@fuzzed(50)
@given(text=changed_json(MODULES).map(as_text))
def test_modules_that_a_rank_has_kept_are_read_or_not(tmp_path: Path, text: str) -> None:
    path = tmp_path / "modules"
    path.write_text(text, encoding="ascii", errors="backslashreplace")
    tried(lambda: own_modules.edited(own_modules.read_modules(path)))


@fuzzed(50)
@given(text=changed_json(MANIFEST).map(as_text))
def test_a_checkpoint_with_any_manifest_is_stored_within_its_folder_or_not(tmp_path: Path, text: str) -> None:
    """The store writes nothing: what is to be written is named."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "manifest.json").write_text(text)
    named: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "_write", lambda _place, name, _chunks: named.append(name) or {})
        tried(lambda: artifacts._store_checkpoint(checkpoint, None, RankFiles()))  # type: ignore[arg-type]
    assert not any(".." in Path(name).parts or Path(name).is_absolute() for name in named)


EVENTS = {"DocumentIncarnation": 1, "Events": [{"EventId": "1", "EventType": "Preempt", "Resources": ["a"]}]}


ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    for text in (json.dumps(EVENTS).encode(), b"TRUE", b"a-token", b"[" * 30_000)
]


class Line:
    """A connection on which the service has answered."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._data)


def asked(cloud: notices.Cloud) -> None:
    with suppress(*notices.INVALID):
        cloud.is_noticed("http://there")


@fuzzed(100)
@given(data=changed_bytes(ANSWERS))
def test_a_clouds_answer_is_a_notice_or_none_or_refused(data: bytes) -> None:
    def open_(*_: object, **__: object) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(Line(data))  # type: ignore[arg-type]
        response.begin()
        return response

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notices._opener, "open", open_)
        for cloud in notices.CLOUDS.values():
            tried(partial(asked, cloud))

"""Files that may be damaged, or anybody's: whoever reads them says so in one line, and takes nothing else from them."""

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import elche_audit
from elche import manifest, token
from elche.errors import InvalidJob, NotAllowed
from elche_client.commands import journal, resume
from elche_client.commands.sweep import read_sweep
from elche_client.display import timeline
from elche_client.options import JobOptions
from elche_client.transport import contexts
from elche_client.transport.codec import encode_spec
from elche_coordinator.journal.replaying import CannotReplay
from elche_coordinator.journal.replaying import read as read_journal
from elche_coordinator.services.submission import check_settings
from elche_coordinator.telemetry.journal_files import JournalFiles
from elche_coordinator.web.recordings import Recordings
from elche_worker.process.log_times import TimesReader, times_path
from elche_worker.process.rank_files import RankFiles
from support.corpus import (
    CHECKPOINT,
    COMMAND,
    FOLDER,
    JOB,
    MANIFEST,
    RANK_FILES,
    RECORD,
    RUN,
    START,
    file_of_run,
    resealed,
    with_start,
)
from support.fuzzing import as_text, changed_bytes, changed_json, fuzzed, tried

pytestmark = pytest.mark.usefixtures("bounded")

JOURNAL = [json.loads(line) for line in (FOLDER / "journal.jsonl").read_text().splitlines()]
TIMELINE = [json.loads(line) for line in file_of_run("coordinator/timelines/*").read_text().splitlines()]
CADENCE = (RUN / "cadence.binpb").read_bytes()


# The auditor's files


def judge(folder: Path) -> None:
    """The auditor's documented answer is its verdict: it raises nothing."""
    verdict = tried(lambda: elche_audit.judge(folder))
    assert isinstance(verdict, elche_audit.Verdict)
    lines = elche_audit.lines(verdict)
    assert all(len(line) < 8192 for line in lines)


CUT = st.integers(0, len(RANK_FILES[0])).map(lambda size: RANK_FILES[0][:size])


@fuzzed(75)
@given(data=st.one_of(CUT, changed_bytes(RANK_FILES), changed_bytes(RANK_FILES).map(resealed)))
def test_the_auditor_reads_any_file_of_a_rank(run: Path, data: bytes) -> None:
    (run / "audit" / JOB / "rank-0-1.bin").write_bytes(data)
    judge(run)


@fuzzed(40)
@given(start=changed_json(START).map(as_text))
def test_the_auditor_reads_any_beginning_of_a_ranks_file(run: Path, start: str) -> None:
    for path in (run / "audit" / JOB).iterdir():
        path.write_bytes(with_start(start))
    judge(run)


@fuzzed(50)
@given(data=changed_bytes([CADENCE]))
def test_the_auditor_reads_any_record_of_rounds(run: Path, data: bytes) -> None:
    (run / "cadence.binpb").write_bytes(data)
    judge(run)


@fuzzed(50)
@given(text=changed_json(RECORD).map(as_text))
def test_the_auditor_reads_any_record_of_a_job(run: Path, text: str) -> None:
    (run / "record.json").write_text(text)
    judge(run)


def sealed_manifest(text: str) -> str:
    """The manifest with its checksum, where it is one at all."""
    try:
        value = json.loads(text)
        return json.dumps({**value, "checksum": manifest.checksum(value)})
    except (TypeError, AttributeError):
        return text


MANIFESTS = changed_json(MANIFEST, MANIFEST["training"]).flatmap(
    lambda text: st.sampled_from([as_text(text), sealed_manifest(text), as_text(sealed_manifest(text))])
)


@fuzzed(50)
@given(text=MANIFESTS)
def test_the_auditor_reads_any_manifest(run: Path, text: str) -> None:
    (run / "checkpoints" / JOB / CHECKPOINT.name / "manifest.json").write_text(text)
    judge(run)


# Checkpoints


@fuzzed(120)
@given(text=MANIFESTS)
def test_checkpoints_are_listed_by_any_manifest(run: Path, text: str) -> None:
    (run / "checkpoints" / JOB / CHECKPOINT.name / "manifest.json").write_text(text)
    tried(lambda: resume._here(run), InvalidJob)


@fuzzed(40)
@given(text=MANIFESTS, training=changed_json(MANIFEST["training"]))
def test_a_draft_becomes_a_checkpoint_or_is_refused(run: Path, text: str, training: str) -> None:
    draft = run / "checkpoints" / JOB / CHECKPOINT.name
    shutil.copytree(CHECKPOINT, draft, dirs_exist_ok=True)
    shutil.rmtree(run / "made", ignore_errors=True)
    (draft / manifest.UNFINISHED).write_text(text)
    tried(lambda: manifest.finish(draft, run / "made", json.loads(training)), OSError, ValueError)


# What users write, and earlier runs have left


@fuzzed(40)
@given(text=changed_json(COMMAND).map(as_text), cadence=changed_bytes([CADENCE]), is_replay=st.booleans())
def test_a_run_is_repeated_or_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, text: str, cadence: bytes, is_replay: bool
) -> None:
    monkeypatch.setattr(resume.LocalRun, "run", lambda one: encode_spec(one.path, "", one.options))
    (run / "run.json").write_text(text)
    (run / "cadence.binpb").write_bytes(cadence)
    options: dict[str, Any] = {"device": "cpu", "out": None, "as_json": False}
    if is_replay:
        tried(lambda: resume.replay_run(run, JobOptions(), **options), InvalidJob)
    else:
        tried(lambda: resume.resume_here(str(run), None, JobOptions(), **options), InvalidJob)


CONTEXTS = b"""current = "lab"

[contexts.lab]
coordinator = "gpu1:7600"
token_file = "~/.elche-token"
tls = "/etc/elche"
"""


@fuzzed(50)
@given(data=st.one_of(changed_bytes([CONTEXTS]), changed_json([1]).map(lambda text: f"a = {as_text(text)}".encode())))
def test_contexts_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(data)
    monkeypatch.setenv("ELCHE_CONFIG", str(path))
    tried(lambda: contexts.load().chosen({}), contexts.InvalidContext)


SWEEP: dict[str, Any] = {
    "job": "job.py", "metric": "loss", "mode": "max", "method": "random", "trials": 5, "seed": 1,
    "settings": {"batch_size": [16, 32], "epochs": 3}, "arguments": {"--lr": {"min": 0.001, "max": 0.1, "log": True}},
    "environment": {"A": ["x", "y"]}, "halving": {"epochs": 1, "factor": 3, "rungs": 3}, "conditions": ["device=cuda"],
}  # fmt: skip
YAML = b"job: job.py\nsettings: {epochs: [1, 2]}\nseed: 2026-01-01\narguments:\n  --lr: {min: 1e-3, max: .inf}\n"


@fuzzed(60)
@given(text=st.one_of(changed_json(SWEEP).map(as_text).map(str.encode), changed_bytes([YAML])))
def test_a_sweep_is_read_or_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "job.py").write_text("job = 1")
    path = tmp_path / "sweep.yaml"
    path.write_bytes(text)
    tried(lambda: read_sweep(path), InvalidJob)


@fuzzed(50)
@given(data=changed_bytes([b"0123456789abcdef0123\n", b"x" * 4097]))
def test_a_token_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(data)
    tried(lambda: token.read_token({token.FILE_VARIABLE: str(path)}), NotAllowed)


# Journals, timelines, recordings, logs


def lines_of(text: str) -> str:
    """The rows of a list in JSON, a line each; the text itself where it is not a list."""
    rows = json.loads(text)
    return "\n".join(as_text(json.dumps(row)) for row in rows) if isinstance(rows, list) else as_text(text)


LEASED = [
    {"journal": 2, "job": JOB, "num_dropped": 0, "wall_s": 0.0},
    *(line for line in JOURNAL[1:] if "SendLease" in json.dumps(line) or "ResultReceived" in json.dumps(line)),
][:5]


@fuzzed(60)
@given(text=changed_json(LEASED).map(lines_of), is_packed=st.booleans())
def test_the_auditor_reads_any_journal(run: Path, text: str, is_packed: bool) -> None:
    folder = run / "coordinator" / "journals"
    folder.mkdir(parents=True, exist_ok=True)
    data = gzip.compress(text.encode(), mtime=0) if is_packed else text.encode()
    (folder / f"{JOB}.jsonl.gz").write_bytes(data)
    judge(run)


PACKED = [gzip.compress("\n".join(map(json.dumps, JOURNAL)).encode(), mtime=0)]
JOURNALS = st.one_of(
    changed_json(JOURNAL[:5]).map(lines_of).map(lambda text: gzip.compress(text.encode(), mtime=0)),
    changed_bytes(PACKED),
)


@fuzzed(60)
@given(data=JOURNALS)
def test_a_journal_is_shown_or_refused(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "coordinator" / "journals"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "one.jsonl.gz").write_bytes(data)
    with CliRunner().isolation():
        tried(lambda: journal.show(str(tmp_path), "", num_events=None, as_json=False), InvalidJob)
        tried(lambda: journal.show(str(tmp_path), "", num_events=2, as_json=True), InvalidJob)


@fuzzed(50)
@given(data=JOURNALS)
def test_the_coordinator_serves_a_journal_or_refuses(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "one.jsonl.gz").write_bytes(data)
    files = JournalFiles.__new__(JournalFiles)
    files._folder = tmp_path
    tried(lambda: list(files._read("one", 2)), InvalidJob)


@fuzzed(60)
@given(text=changed_json(JOURNAL).map(lines_of))
def test_a_journal_is_replayed_or_refused(text: str) -> None:
    tried(lambda: read_journal(text.splitlines()), CannotReplay)


@fuzzed(60)
@given(text=changed_json(TIMELINE).map(lines_of))
def test_a_timeline_is_read_or_refused(text: str) -> None:
    tried(lambda: timeline.read(text.splitlines(), "timeline.jsonl"), InvalidJob)


@fuzzed(50)
@given(text=changed_json(json.loads(file_of_run("coordinator/recordings/*").read_text())).map(as_text))
def test_a_recording_is_loaded_or_set_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    tried(lambda: Recordings(tmp_path).load("one"))


@fuzzed(50)
@given(data=changed_bytes([b"0 1790000000\n51 1790000001\n900 1790000002\n", b"0 1e400\n", b"0 nan\n"]))
def test_a_log_is_shown_whatever_its_times(tmp_path: Path, data: bytes) -> None:
    """The rank whose log it is may have written anything there."""
    log = tmp_path / "rank-0.log"
    times_path(log).write_bytes(data)
    stamped: Any = tried(lambda: TimesReader(log, RankFiles()).stamped(0, b"one\ntwo\n"))
    assert stamped.endswith(b"two\n")


# What is handed to ranks


def archive(name: str = "job.py") -> bytes:
    """A bundle with two files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for member in ("lib/more.py", name):
            info = tarfile.TarInfo(member)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"a=1\n"))
    return packed.getvalue()


TAR = gzip.decompress(archive())
ELSEWHERE = [archive(name) for name in ("../out.py", "lib/../../out.py", "./../out.py", "..")]


def numbered(data: bytes) -> bytes:
    """The archive with right checksums of its headers."""
    found = bytearray(data)
    for at in range(0, len(found) - 511, 512):
        if found[at + 257 : at + 262] == b"ustar":
            total = sum(found[at : at + 148]) + 256 + sum(found[at + 156 : at + 512])
            found[at + 148 : at + 156] = b"%06o\0 " % (total % 8**6)
    return bytes(found)


@fuzzed(60)
@given(
    data=st.one_of(
        changed_bytes([archive()]),
        st.sampled_from(ELSEWHERE),
        changed_bytes([TAR[:2560]]).map(numbered).map(gzip.compress),
    )
)
def test_a_bundle_is_unpacked_within_its_folder_or_refused(tmp_path: Path, data: bytes) -> None:
    from elche_worker.rank.bundle import unpack

    folder = tmp_path / "inner" / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tried(lambda: unpack(io.BytesIO(data), folder), InvalidJob)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner"]
    assert sorted(path.name for path in (tmp_path / "inner").iterdir()) == ["folder"]


@fuzzed(50)
@given(
    name=st.sampled_from(["epochs", "batch_size", "max_batch_diff", "speed_hint", "monitor"]),
    text=changed_json([1]).map(as_text),
)
def test_settings_are_checked(name: str, text: str) -> None:
    tried(lambda: check_settings({name: text}), InvalidJob)
    tried(lambda: check_settings({name: text[1:-1]}), InvalidJob)

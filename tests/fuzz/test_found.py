"""What fuzzing has found: damaged files and unusual messages that were bugs, and are errors in one line."""

import base64
import gzip
import json
import shutil
import threading
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import elche_audit
from elche import manifest
from elche.errors import ElcheError, InvalidJob
from elche.tls import BadCertificate
from elche.v1 import agent_pb2, averaging_pb2, job_pb2, rank_pb2
from elche_client.commands import journal, resume
from elche_client.commands.certificates import Authority, read_certificate
from elche_client.commands.sweep import read_sweep
from elche_client.display import timeline
from elche_client.options import JobOptions
from elche_client.transport import contexts
from elche_client.transport.codec import decode_view
from elche_coordinator.journal.replaying import CannotReplay
from elche_coordinator.journal.replaying import read as read_journal
from elche_coordinator.services.interceptor import RECEIVED, num_received_of
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import DamagedStore
from elche_coordinator.telemetry.journal_files import JournalFiles
from elche_worker.agent.agent import Agent
from elche_worker.agent.link_speed import LinkFault, measure
from elche_worker.collectives.operations import RoundAborted
from elche_worker.collectives.relay import AHEAD, Relay
from elche_worker.model.checkpoint import load
from elche_worker.process.log_times import TimesReader, times_path
from elche_worker.process.rank_files import RankFiles
from elche_worker.rank.evaluation_messages import tensors_of
from elche_worker.session.control import Rounds
from elche_worker.session.stopped import FOLDER, stopped_ranks
from support.corpus import JOB, LEFT, RUN, START, file_of_run, with_start

NAME = file_of_run("checkpoints/*/*").name
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(RUN, tmp_path / "run")


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / JOB / NAME


def changed(checkpoint: Path, **fields: Any) -> Path:
    """The checkpoint, with these fields in its manifest and its right checksum."""
    value = {**json.loads((checkpoint / "manifest.json").read_text()), **fields}
    (checkpoint / "manifest.json").write_text(json.dumps({**value, "checksum": manifest.checksum(value)}))
    return checkpoint


@pytest.mark.parametrize("text", [DEEP, "[]", '"format"'])
def test_a_manifest_that_is_nested_deeply_is_damaged(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    with pytest.raises(InvalidJob, match="is not a manifest of an elche checkpoint, or is damaged"):
        manifest.read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [("files", []), ("training", None), ("saved_at", "today"), ("settings", "{}"), ("num_ranks", "2")],
)
def test_a_manifest_of_which_a_field_is_something_else_is_damaged(checkpoint: Path, field: str, value: Any) -> None:
    with pytest.raises(InvalidJob, match=f"is damaged: {field} is not what elche writes"):
        manifest.read_manifest(changed(checkpoint, **{field: value}))


@pytest.mark.parametrize("name", ["../job.py", "/etc/passwd", "a/../../b", "\0"])
def test_a_manifest_names_no_file_outside_of_its_checkpoint(checkpoint: Path, name: str) -> None:
    with pytest.raises(InvalidJob, match="its list of files is invalid"):
        manifest.read_manifest(changed(checkpoint, files={name: {"bytes": 1, "sha256": ""}}))


def test_checkpoints_without_a_trainings_state_are_named(run: Path, checkpoint: Path) -> None:
    changed(checkpoint, training={})
    with pytest.raises(InvalidJob, match="its manifest lacks the training's state; remove it"):
        resume._here(run)


@pytest.mark.parametrize("text", [DEEP, "{}", '{"files": []}', '{"files": {"model.safetensors": 5}}'])
def test_a_damaged_draft_becomes_no_checkpoint(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (checkpoint / manifest.UNFINISHED).write_text(text)
    with pytest.raises(ValueError, match="is damaged: the draft of this checkpoint is left as it is"):
        manifest.finish(checkpoint, tmp_path / "made", {})
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", ["null", "[]", DEEP])
def test_a_checkpoint_whose_state_is_none_is_refused(checkpoint: Path, text: str) -> None:
    path = checkpoint / "state.json"
    path.write_text(text)
    entry = {"bytes": len(text), "sha256": sha256(text.encode()).hexdigest()}
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    with pytest.raises(InvalidJob, match=r"cannot be read: ."):
        load(str(changed(checkpoint, files={**files, "state.json": entry})))


@pytest.mark.parametrize("epoch", [1e308, 10**12, -1])
def test_the_auditor_names_a_manifest_in_an_epoch_that_no_job_has(run: Path, checkpoint: Path, epoch: float) -> None:
    """It made a dictionary of all epochs, which fits no memory."""
    training = json.loads((checkpoint / "manifest.json").read_text())["training"]
    changed(checkpoint, training={**training, "ledger": {"epoch": epoch, "books": {}}})
    assert any("its manifest is damaged" in line for line in elche_audit.judge(run).missing)


def test_a_checkpoint_with_a_file_whose_name_is_too_long_is_not_whole(checkpoint: Path) -> None:
    name = "x" * 5000
    with pytest.raises(InvalidJob, match=r"is not whole: x+ is missing"):
        load(str(changed(checkpoint, files={name: {"bytes": 1, "sha256": ""}})))


def test_there_is_no_checkpoint_whose_name_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="there is no checkpoint"):
        manifest.checkpoints_in(tmp_path / ("x" * 5000))


def test_the_auditor_names_a_checkpoint_elsewhere_whose_name_is_too_long(run: Path) -> None:
    start = {**START, "version": 1, "samples": 16, "resume": "s3://" + "x" * 5000}
    for path in (run / "audit" / JOB).iterdir():
        path.write_bytes(with_start(json.dumps({**start, "rank": int(path.name.split("-")[1])})))
    assert any("elche audit reads no URLs" in line for line in elche_audit.judge(run).missing)


@pytest.mark.parametrize("books", [{"0": {"committed": [[0, float("inf")]]}}, {"0": {"committed": 5}}])
def test_the_auditor_names_a_manifest_with_books_that_are_none(run: Path, checkpoint: Path, books: Any) -> None:
    training = json.loads((checkpoint / "manifest.json").read_text())["training"]
    changed(checkpoint, training={**training, "ledger": {"epoch": 0, "books": books}})
    assert any("its manifest is damaged" in line for line in elche_audit.judge(run).missing)


@pytest.mark.parametrize("name", ["record.json", f"checkpoints/{JOB}/{NAME}/manifest.json"])
def test_the_auditor_names_what_is_nested_deeply(run: Path, name: str) -> None:
    (run / name).write_text(DEEP)
    assert any("damaged" in line for line in elche_audit.judge(run).missing)


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", 10**12), ("epochs", "2"), ("max_steps", []), ("rank", None), ("drop_last", 7)]
)
def test_the_auditor_names_a_file_whose_head_no_rank_has_written(run: Path, field: str, value: Any) -> None:
    """10**12 epochs were a list that fits no memory."""
    (run / "audit" / JOB / "rank-0-1.bin").write_bytes(with_start(json.dumps({**START, field: value})))
    assert any("its head has other fields" in line for line in elche_audit.judge(run).missing)


def test_contexts_that_are_nested_deeply_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text(f"a = {DEEP}")
    monkeypatch.setenv("ELCHE_CONFIG", str(tmp_path / "config.toml"))
    with pytest.raises(contexts.InvalidContext, match="correct it, or remove it"):
        contexts.load()


@pytest.mark.parametrize(
    "text",
    ["seed: 2026-13-45", f"settings: {'[' * 3000}", f"job: job.py\nsettings: {{lr: {{min: 1, max: {10**400}}}}}"],
)
def test_a_sweep_with_dates_and_numbers_that_are_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.py").write_text("job = 1")
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(InvalidJob, match=r"sweep\.yaml"):
        read_sweep(tmp_path / "sweep.yaml")


@pytest.mark.parametrize(
    "change",
    [
        *({"file": 5}, {"arguments": 7}, {"environment": []}, {"settings": "x"}),
        *({"file": "\0"}, {"folder": "\ud800"}, {"arguments": ["\0"]}),
    ],
)
def test_a_run_whose_command_is_damaged_is_not_repeated(run: Path, change: dict[str, Any]) -> None:
    command = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**command, **change}))
    with pytest.raises(InvalidJob, match=r"run\.json was not written by elche run, or is damaged"):
        resume.replay_run(run, JobOptions(), device="cpu", out=None, as_json=False)
    with pytest.raises(InvalidJob, match=r"run\.json of the run that has written .* is damaged"):
        resume.resume_here(str(run), None, JobOptions(), device="cpu", out=None, as_json=False)


def test_a_run_whose_rounds_are_damaged_is_not_repeated(run: Path) -> None:
    (run / "cadence.binpb").write_bytes(b"\xff" * 20)
    with pytest.raises(InvalidJob, match=r"cadence\.binpb was not written by elche run, or is damaged"):
        resume.replay_run(run, JobOptions(), device="cpu", out=None, as_json=False)


PACKED = gzip.compress(b'{"num_dropped": 0, "wall_s": 1}\n{}\n' * 50, mtime=0)
DAMAGED = {
    "flipped": PACKED[:20] + b"\xff" * 8 + PACKED[28:],
    "empty": gzip.compress(b""),
    "other": gzip.compress(b'{"a": 1}\n{}\n'),
    "list": gzip.compress(b"[]\n{}\n"),
    "deep": gzip.compress(DEEP.encode()),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_journal_is_refused(tmp_path: Path, how: str) -> None:
    (tmp_path / "coordinator" / "journals").mkdir(parents=True)
    path = tmp_path / "coordinator" / "journals" / "one.jsonl.gz"
    path.write_bytes(DAMAGED[how])
    with pytest.raises(InvalidJob, match=r"cannot be read|is damaged"):
        journal.show(str(tmp_path), "", num_events=None, as_json=False)
    files = JournalFiles.__new__(JournalFiles)
    files._folder = path.parent
    with pytest.raises(InvalidJob, match="the journal of job one cannot be read"):
        list(files._read("one", 2))


def test_a_journal_that_is_nested_deeply_is_not_replayed() -> None:
    with pytest.raises(CannotReplay, match="this is not a journal"):
        read_journal([DEEP])


@pytest.mark.parametrize("row", ['{"spans": 0}', '{"clock": 0}', '{"told": 0}', '{"event": 1}', DEEP])
def test_a_timeline_that_lacks_something_is_refused(row: str) -> None:
    with pytest.raises(InvalidJob, match=r"timeline\.jsonl is not a timeline"):
        timeline.read([row], "timeline.jsonl")


@pytest.mark.parametrize("times", [b"0 1e400\n", b"0 nan\n", b"0 99999999999999999999\n", b"0 -5\n"])
def test_a_log_is_shown_whatever_its_rank_has_written_as_times(tmp_path: Path, times: bytes) -> None:
    times_path(tmp_path / "rank-0.log").write_bytes(times)
    assert TimesReader(tmp_path / "rank-0.log", RankFiles()).stamped(0, b"one\n").endswith(b" one\n")


@pytest.mark.parametrize(
    "left", [{"messages": [5]}, {"messages": ["/w=="]}, {"rank": "0"}, {"draft": "\0"}, {"secret": "é"}]
)
def test_what_a_stopped_rank_has_left_damaged_is_named(tmp_path: Path, left: dict[str, Any]) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank-0.1.json").write_text(json.dumps({**LEFT, **left}))
    with pytest.raises(ValueError, match=r"rank-0\.1\.json is damaged; remove it"):
        stopped_ranks(tmp_path, LEFT["job_id"])


def test_a_job_from_a_time_that_no_calendar_has_is_shown() -> None:
    view = job_pb2.JobView(job_id="job")
    view.submitted_at.seconds = 2**60
    assert decode_view(view).submitted_at is None


def test_a_rank_that_has_heard_more_messages_than_python_reads_digits() -> None:
    """It was a bug of the coordinator, answered with INTERNAL."""

    class Call:
        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ((RECEIVED, "9" * 5000),)

    call: Any = Call()
    assert num_received_of(call) == 2**53


def test_rounds_that_fit_no_memory_are_not_announced() -> None:
    with pytest.raises(ElcheError, match="announces 4294967295 rounds at once"):
        Rounds().learn(rank_pb2.SyncNow(round=1, generation=1, count=2**32 - 1))


def test_sums_that_are_no_tensor_are_named() -> None:
    with pytest.raises(ElcheError, match="sums of 'hits' that are not a tensor"):
        tensors_of({"hits": rank_pb2.TensorSum(shape=[2], data=bytes(7))})


@pytest.mark.parametrize("num_bytes", [0, 7, 100])
def test_a_relayed_average_of_another_length_is_given_up(num_bytes: int) -> None:
    relay = Relay.__new__(Relay)
    relay.position, relay.size, relay.sent_bytes, relay._outgoing = 0, 2, 0, SimpleQueue()
    relay._answers = iter([averaging_pb2.AverageResponse(data=bytes(num_bytes))] * (AHEAD + 1))
    with pytest.raises(RoundAborted, match=f"has sent {num_bytes} bytes of 16"):
        relay.all_reduce(torch.zeros(4))


@pytest.mark.parametrize(
    ("slot", "setting", "why"),
    [(7, "1", "this host has no slot 7: it offers 1"), (0, "[" * 5000, "maximum recursion depth exceeded")],
)
def test_an_order_that_no_rank_can_be_started_by_is_answered(tmp_path: Path, slot: int, setting: str, why: str) -> None:
    """It ended the agent, and with it the ranks of other jobs."""
    agent, said = Agent("127.0.0.1:1", [agent_pb2.Slot(device="cpu")], tmp_path), []
    agent._report_exit = lambda key, exit: said.append(exit.log_tail)  # type: ignore[assignment, method-assign]
    spec = job_pb2.JobSpec(source="job = 1", file_name="job.py", settings={"epochs": setting})
    agent._do(agent_pb2.AttendResponse(start_rank=agent_pb2.StartRank(job_id="job", slot=slot, spec=spec)))
    assert len(said) == 1
    assert said[0].startswith(f"the rank cannot be started: {why}")


def test_a_loops_rank_whose_device_is_not_named_cannot_be_started(tmp_path: Path) -> None:
    """It ended the agent, and with it the ranks of other jobs."""
    agent, said = Agent("127.0.0.1:1", [agent_pb2.Slot(device="cpu")], tmp_path), []
    agent._report_exit = lambda key, exit: said.append(exit.log_tail)  # type: ignore[assignment, method-assign]
    spec = job_pb2.JobSpec(source="a", file_name="a.py", is_loop=True)
    agent._do(agent_pb2.AttendResponse(start_rank=agent_pb2.StartRank(job_id="job", spec=spec)))
    assert said == ["the rank cannot be started: the order names the devices of 0 ranks"]


def test_an_unknown_fault_does_not_end_the_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It did, and with it all ranks of its host."""
    order = agent_pb2.InjectFault(job_id="job", fault=7)  # type: ignore[arg-type]
    Agent("127.0.0.1:1", [], tmp_path)._do(agent_pb2.AttendResponse(inject_fault=order))
    assert "ignored a fault that only newer versions of elche know" in caplog.text


@pytest.mark.parametrize("seconds", [1e308, float("nan"), -1.0])
def test_a_stopped_rank_goes_on_after_any_number_of_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The thread that waited so long failed, and the rank stood still for good."""
    waits: list[float] = []
    monkeypatch.setattr("threading.Timer", lambda wait_s, *_: SimpleNamespace(start=lambda: waits.append(wait_s)))
    order = agent_pb2.InjectFault(job_id="job", fault=job_pb2.FAULT_STOP_RANK, seconds=seconds)
    Agent("127.0.0.1:1", [], tmp_path)._do(agent_pb2.AttendResponse(inject_fault=order))
    assert 0 <= waits[0] <= threading.TIMEOUT_MAX


@pytest.mark.parametrize("seconds", [1e308, float("inf"), float("nan"), -1.0])
def test_a_rank_is_killed_after_any_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The thread that waited so long failed once it had asked the rank to end, which was never killed then."""
    waits: list[float] = []
    agent = Agent("127.0.0.1:1", [], tmp_path, grace_s=seconds)
    monkeypatch.setattr(agent._processes, "stop", lambda _, grace_s, **__: waits.append(grace_s))
    agent._do(agent_pb2.AttendResponse(stop_rank=agent_pb2.StopRank(job_id="job", grace_s=seconds)))
    assert all(0 <= wait_s <= threading.TIMEOUT_MAX for wait_s in (*waits, agent._grace_s))
    assert waits


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (agent_pb2.AttendResponse(send_model=agent_pb2.SendModel(job_id="job", checkpoint="x" * 5000)), "too long"),
        (agent_pb2.AttendResponse(send_model=agent_pb2.SendModel(job_id="\0")), "null"),
        (agent_pb2.AttendResponse(send_log=agent_pb2.SendLog(job_id="\0", max_bytes=1)), "null"),
    ],
)
def test_an_order_for_a_file_of_no_possible_name_is_answered(tmp_path: Path, order: Any, why: str) -> None:
    """The thread failed, and a client waited until its time was over."""
    answered: list[str] = []
    agent = Agent("127.0.0.1:1", [], tmp_path)
    agent._begin_delivery = lambda deliver, one: deliver(one)  # type: ignore[assignment, method-assign]
    agent._deliver_parts = lambda _, parts: answered.extend(part.error for part in parts)  # type: ignore[assignment, method-assign]
    for job_id in ("job", "\0"):
        agent._folders._known[job_id] = tmp_path / job_id
    agent._do(order)
    assert why in answered[-1]


def test_an_address_that_no_name_can_have_is_a_fault_of_the_link() -> None:
    """The thread failed, and whoever measured waited until the time was over."""
    with pytest.raises(LinkFault, match="is no address"):
        measure(f"{'x' * 5000}:1", b"s")


def test_a_damaged_certificate_is_named(tmp_path: Path) -> None:
    Authority(tmp_path).client("anna", "user", expires=timedelta(days=1))
    path = tmp_path / "anna" / "tls.crt"
    content = x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(serialization.Encoding.DER)
    changed = content.replace(bytes.fromhex("a003020102"), bytes.fromhex("a00302010a"), 1)  # version 3 becomes 11
    lines = base64.encodebytes(changed).decode()
    path.write_text(f"-----BEGIN CERTIFICATE-----\n{lines}-----END CERTIFICATE-----\n")
    with pytest.raises(BadCertificate, match=r"tls\.crt cannot be read: 10 is not a valid X509 version"):
        Authority(tmp_path).all()


def test_a_certificate_is_not_repeated_in_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's message had all bytes of a name, 10,000 characters."""

    def refuse(_: bytes) -> None:
        raise ValueError("x" * 10_000)

    monkeypatch.setattr(x509, "load_pem_x509_certificate", refuse)
    (tmp_path / "tls.crt").write_bytes(b"")
    with pytest.raises(BadCertificate, match=r"cannot be read: x{500}$"):
        read_certificate(tmp_path / "tls.crt")


def test_a_database_whose_own_descriptions_are_no_text_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "elche.sqlite"
    SqlStore.in_file(path).close()
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE jobs", b"CREATE TABLE \x80obs"))
    with pytest.raises(DamagedStore, match="is damaged"):
        SqlStore.in_file(path)

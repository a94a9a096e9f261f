"""The Python client against a real gRPC server that plays a script."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elche.errors import ElcheError, InvalidJob, JobFailed, NotAllowed, TooMuch, UnknownJob, Unreachable
from elche.network import BadAddress, user_at_host
from elche.status import explained, from_rpc
from elche.v1 import job_pb2 as pb
from elche_client import (
    Client,
    EpochReport,
    EvaluationReport,
    JobResult,
    JobState,
    JobView,
    LogLine,
    RankResult,
    RankView,
    RoundReport,
)
from elche_client import client as client_module
from elche_client.transport.rank_output import RankLines
from support.scripted import (
    CANCELLED,
    EPOCH,
    EVALUATION,
    FAILURE,
    RESULT,
    ROUND,
    SOURCE,
    UNTIL_CANCELLED,
    VIEW,
    ScriptedJobs,
    closed_address,
    connected,
    message,
    serving,
)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "digits.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_submit_sends_the_file_and_every_option(job_file: Path) -> None:
    jobs = ScriptedJobs()
    with connected(jobs) as client:
        handle = client.submit(
            job_file,
            num_ranks=2,
            slow_factors={1: 2.3},
            seed=7,
            epochs=3,
            policy="sync",
            output_dir="/out",
            verify_rounds=True,
            name="mine",
        )
    assert handle.id == "j-1"
    assert jobs.specs == [
        pb.JobSpec(
            name="mine",
            source=SOURCE,
            file_name=str(job_file),
            num_ranks=2,
            slow_factors={1: 2.3},
            settings={"seed": "7", "epochs": "3", "policy": '"sync"'},
            output_dir="/out",
            verify_rounds=True,
            submitted_by=user_at_host(),
        )
    ]


class Losing(ScriptedJobs):
    """Takes each submission in, and its answers to the first calls are lost."""

    def __init__(self, num_lost: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__()
        self._num_lost, self._code = num_lost, code
        self.keys: list[str] = []

    def SubmitJob(self, request, context):  # noqa: N802
        self.keys.append(request.key)
        if len(self.keys) <= self._num_lost:
            context.abort(self._code, "the connection has ended")
        return pb.SubmitJobResponse(job_id=f"j-{request.key}")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
@pytest.mark.parametrize("key", ["", "mine"])
def test_a_submission_whose_answer_is_lost_is_sent_again_as_the_same(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, key: str, code: grpc.StatusCode
) -> None:
    """With a key by which the coordinator knows it: without one there would be two jobs."""
    monkeypatch.setattr("elche_client.client.RETRY_AFTER_S", (0.0, 0.0))
    jobs = Losing(2, code)
    with connected(jobs) as client:
        handle = client.submit(job_file, key=key)
        client.submit(job_file)
    first, *again, another = jobs.keys
    assert first
    assert again == [first, first]
    assert key in ("", first)
    assert handle.id == f"j-{first}"
    assert another != first, "it is another job"


def test_a_submission_is_sent_again_so_often_and_one_that_is_refused_never(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elche_client.client.RETRY_AFTER_S", (0.0, 0.0))
    for code, num_calls in ((grpc.StatusCode.UNAVAILABLE, 3), (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)):
        jobs = Losing(9, code)
        with connected(jobs) as client, pytest.raises(ElcheError) as raised:
            client.submit(job_file)
        assert len(jobs.keys) == num_calls
        may_be_there = str(raised.value).endswith("; the job may have been submitted: see `elche jobs`")
        assert may_be_there == isinstance(raised.value, Unreachable)


def test_a_submission_that_reached_nobody_is_not_said_to_be_there(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elche_client.client.RETRY_AFTER_S", (0.0,))
    with Client(closed_address()) as client, pytest.raises(Unreachable, match="nothing listens there") as raised:
        client.submit(job_file)
    assert "may have been submitted" not in str(raised.value)


def test_a_connection_that_is_not_answered_is_told_from_one_that_is_refused() -> None:
    """As behind a firewall. The details are gRPC's."""
    to = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7717: "
    assert explained(f"{to}getsockopt(SO_ERROR): Connection timed out").startswith("nothing comes back from there")
    assert explained(f"{to}getsockopt(SO_ERROR): No route to host").startswith("this host has no way to it")
    assert explained(f"{to}connect: Connection refused (111)").startswith("nothing listens there")


@pytest.mark.parametrize(
    "details", ["Stream removed (recvmsg:Connection timed out (110))", "Stream removed (ping timeout)"]
)
def test_a_connection_that_falls_silent_is_told_as_lost_packets(details: str) -> None:
    """As where a NAT forgets it; it was asked whether the coordinator was there, which had gone on."""
    lost = grpc.RpcError()
    lost.code, lost.details = lambda: grpc.StatusCode.UNAVAILABLE, lambda: details  # type: ignore[attr-defined]
    assert str(from_rpc(lost, "gpu1:7717")).startswith(
        "the connection to the coordinator at gpu1:7717 broke: nothing comes back from there"
    )


def test_what_is_not_asked_is_left_to_the_file(job_file: Path) -> None:
    jobs = ScriptedJobs()
    with connected(jobs) as client:
        client.submit(str(job_file))
    (spec,) = jobs.specs
    assert spec.name == "digits"
    assert not spec.settings


def test_a_watch_gives_typed_events_and_ends_after_the_result() -> None:
    jobs = ScriptedJobs(VIEW, ROUND, EPOCH, EVALUATION, RESULT)
    with connected(jobs) as client:
        view, *events = client.job("j-1").watch()
    assert view == JobView(
        job_id="j-1",
        name="digits",
        state=JobState.TRAINING,
        epoch=2,
        num_epochs=10,
        dataset_size=1000,
        epoch_committed=400,
        epoch_processed=500,
        loss=0.25,
        samples_per_s=1234.5,
        anchor=10,
        num_rounds=7,
        eta_s=None,
        ranks=(RankView(rank=0, device="cpu", state="training", round_batches=12, round_target=23),),
        submitted_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    assert events == [
        RoundReport(round=7, version=7, rank_batches=(2, 1), anchor=10, samples=96),
        EpochReport(epoch=2, loss=0.5, scalars={"lr": 0.1}, duration_s=2.0, committed=1000, rank_batches=(5, 3)),
        EvaluationReport(epoch=2, metrics={"accuracy": 0.98}, duration_s=0.1),
        JobResult(
            state=JobState.SUCCEEDED,
            epochs=3,
            metrics={"accuracy": 0.98},
            samples_per_s=1200.0,
            bound_samples_per_s=1250.0,
            bound_fraction=0.96,
            dataset_size=1000,
            committed_samples=(1000, 1000, 1000),
            dropped_samples=(0, 0, 0),
            rounds=21,
            ranks=(RankResult(device="cpu", batches=40, ms_per_batch=25.0, waited_s=0.5),),
            model="/out/model.safetensors",
            duration_s=2.5,
        ),
    ]


@pytest.mark.parametrize("number", pb.JobState.values())
def test_every_state_of_the_contract_is_known(number: int) -> None:
    name = pb.JobState.Name(number).removeprefix("JOB_STATE_").lower()
    with connected(ScriptedJobs(pb.JobView(job_id="j-1", state=number))) as client:
        (view,) = client.jobs()
    assert view.state == ("unknown" if name == "unspecified" else name)


def test_a_state_from_a_newer_coordinator_is_unknown() -> None:
    with connected(ScriptedJobs(pb.JobView(job_id="j-1", state=99))) as client:  # type: ignore[arg-type]
        assert client.jobs()[0].state is JobState.UNKNOWN


def test_events_from_a_newer_coordinator_are_passed_over_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    newer = pb.WatchJobResponse.FromString(b"\xaa\x3e\x00")  # a field of number 997
    with connected(ScriptedJobs(VIEW, newer, newer, RESULT)) as client:
        assert [type(event) for event in client.watch("j-1")] == [JobView, JobResult]
    assert [record.message for record in caplog.records] == ["job=j-1 has events that this client is too old to show"]


def test_the_result_of_a_job_that_succeeds() -> None:
    with connected(ScriptedJobs(VIEW, RESULT)) as client:
        assert client.job("j-1").result().metrics == {"accuracy": 0.98}


def test_a_failed_job_raises_with_the_users_traceback() -> None:
    with connected(ScriptedJobs(VIEW, FAILURE)) as client, pytest.raises(JobFailed) as caught:
        client.job("j-1").result()
    assert str(caught.value) == "rank 1 failed at batch 3"
    assert caught.value.traceback == "Traceback ...\nValueError: no"
    assert not caught.value.invalid


def test_cancel_ends_a_watched_job() -> None:
    with connected(ScriptedJobs(VIEW, UNTIL_CANCELLED, CANCELLED)) as client:
        handle = client.job("j-1")
        events = handle.watch()
        next(events)
        handle.cancel()
        assert next(events) == JobResult(state=JobState.CANCELLED)
        with pytest.raises(JobFailed, match="job j-1 was cancelled"):
            handle.result()


def test_the_token_travels_as_a_bearer_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = ScriptedJobs()
    with serving(jobs) as address:
        with Client(address, token="secret") as client:
            client.jobs()
        assert jobs.metadata["authorization"] == "Bearer secret"
        monkeypatch.setenv("ELCHE_TOKEN", "from the environment\n")
        with Client(address) as client:
            client.jobs()
        assert jobs.metadata["authorization"] == "Bearer from the environment"
        with Client(address, token="") as client:
            client.jobs()
        assert "authorization" not in jobs.metadata


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidJob),
        (grpc.StatusCode.UNAUTHENTICATED, NotAllowed),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TooMuch),
        (grpc.StatusCode.UNAVAILABLE, Unreachable),
        (grpc.StatusCode.FAILED_PRECONDITION, ElcheError),
    ],
)
def test_a_refusal_raises_its_error_from_every_method(
    code: grpc.StatusCode, error: type[ElcheError], job_file: Path
) -> None:
    with connected(ScriptedJobs(refusal=(code, "the reason"))) as client:
        for call in (
            client.jobs,
            lambda: client.submit(job_file),
            lambda: client.cancel("j-1"),
            lambda: list(client.job("j-1").watch()),
        ):
            with pytest.raises(error, match="the reason") as caught:
                call()
            assert type(caught.value) is error


def test_an_unknown_job_is_named() -> None:
    with connected(ScriptedJobs()) as client:
        for call in (lambda: client.cancel("j-9"), client.job("j-9").result):
            with pytest.raises(UnknownJob, match="'j-9'") as caught:
                call()
            assert caught.value.job_id == "j-9"


def test_nobody_at_the_address() -> None:
    address = closed_address()
    with Client(address) as client, pytest.raises(Unreachable, match=address):
        client.jobs()


def test_a_coordinator_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(ScriptedJobs):
        def ListJobs(self, request, context):  # noqa: N802
            self.cancelled.wait()

    jobs = Silent()
    monkeypatch.setattr("elche_client.client.CALL_TIMEOUT_S", 0.1)
    with connected(jobs) as client:
        with pytest.raises(Unreachable, match="does not answer"):
            client.jobs()
        jobs.cancelled.set()


@pytest.mark.parametrize("script", [(VIEW,), (VIEW, grpc.StatusCode.UNAVAILABLE)])
def test_a_watch_that_breaks_before_the_result(script: tuple[object, ...]) -> None:
    with serving(ScriptedJobs(*script)) as address, Client(address, reconnect_s=0) as client:
        events = client.job("j-1").watch()
        assert isinstance(next(events), JobView)
        with pytest.raises(Unreachable):
            next(events)


def test_a_watch_outlasts_a_coordinator_that_comes_back() -> None:
    class Restarted(ScriptedJobs):
        num_calls = 0

        def WatchJob(self, request, context):  # noqa: N802
            self.num_calls += 1
            yield from super().WatchJob(request, context)
            if self.num_calls == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "it stops")
            yield message(RESULT)

    with connected(Restarted(VIEW)) as client:
        kinds = [type(event) for event in client.job("j-1").watch()]
    assert kinds == [JobView, JobView, JobResult]


def test_a_watch_of_a_coordinator_that_is_gone_for_good_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host has lost power: each connection is tried for 20 s, which counted as a watch that had lasted."""
    now_s, attempts = [0.0], list[float]()

    def watch_once(self: Client, job_id: str) -> Iterator[JobView]:
        attempts.append(now_s[0])
        assert len(attempts) < 9
        if len(attempts) == 1:
            yield from watch(self, job_id)
        now_s[0] += 20
        raise Unreachable("connection timed out")

    watch = Client._watch_once
    monkeypatch.setattr(Client, "_watch_once", watch_once)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda s: None))
    with connected(ScriptedJobs(VIEW, grpc.StatusCode.UNAVAILABLE)) as client, pytest.raises(Unreachable):
        list(client.job("j-1").watch())
    assert attempts == [0, 0, 20, 40]


def test_logs_that_say_nothing_outlast_a_coordinator_that_is_lost_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks had printed nothing since the first time, which counted as if it had been away since then."""
    now_s, attempts = [0.0], list[float]()

    def logs_once(self: Client, request: pb.StreamLogsRequest, lines: RankLines) -> Iterator[LogLine]:
        attempts.append(now_s[0])
        now_s[0] += 600
        if len(attempts) < 3:
            raise Unreachable("the coordinator is killed")
        yield LogLine(rank=0, text="the end")

    monkeypatch.setattr(Client, "_logs_once", logs_once)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda s: None))
    with connected(ScriptedJobs(VIEW, UNTIL_CANCELLED)) as client:
        assert [line.text for line in client.logs("j-1", follow=True)] == ["the end"]
    assert attempts == [0, 600, 1200]


def test_a_coordinator_that_stops_breaks_the_watch() -> None:
    with serving(ScriptedJobs(VIEW, UNTIL_CANCELLED, RESULT)) as address:
        client = Client(address, reconnect_s=0.5)
        events = client.job("j-1").watch()
        next(events)
    with client, pytest.raises(Unreachable):
        next(events)


def test_a_client_that_is_closed_says_so() -> None:
    with connected(ScriptedJobs(VIEW)) as client:
        job = client.job("j-1")
    for call in (client.jobs, lambda: next(job.watch()), job.result):
        with pytest.raises(Unreachable, match="this client is closed"):
            call()


def test_a_client_that_is_closed_sends_no_folder(job_file: Path) -> None:
    """It ended the process by a segmentation fault, since it made a stub of a closed channel."""
    with connected(ScriptedJobs(VIEW)) as client:
        client.jobs()
    with pytest.raises(Unreachable, match="this client is closed"):
        client.submit(job_file)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda client: client.cancel(5), "job_id cannot be 5"),
        (lambda client: next(client.watch("\ud800")), "job_id cannot be '"),
        (lambda client: client.scale("j-1", "2"), "num_ranks cannot be '2'"),
        (lambda client: client.scale("j-1", -1), "num_ranks cannot be -1"),
        (lambda client: next(client.logs("j-1", rank=-1)), "rank cannot be -1"),
        (lambda client: client.journal("j-1", num_events=2.5), "num_events cannot be 2.5"),
        (lambda client: next(client.measure_links("vm")), "hosts must be a list, not 'vm'"),
    ],
)
def test_a_value_that_no_request_can_have_is_named(call: Callable[[Any], object], reason: str) -> None:
    with Client(closed_address()) as client, pytest.raises(InvalidJob, match=f"^{reason}"):
        call(client)


def test_leaving_a_watch_ends_its_call() -> None:
    jobs = ScriptedJobs(VIEW, UNTIL_CANCELLED)
    with connected(jobs) as client:
        events = client.watch("j-1")
        next(events)
        events.close()
        assert jobs.watcher_left.wait(timeout=400)


def test_files_that_cannot_be_jobs_are_refused_before_any_call(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "large.py").write_bytes(b"#" * (2**20 + 1))
    reasons = {"missing.py": "there is no file", ".": "is not a file", "latin.py": "not UTF-8", "large.py": "1 MiB"}
    reasons |= {"/dev/stdin": "is another file in each process"}
    with Client(closed_address()) as client:
        for name, reason in reasons.items():
            with pytest.raises(InvalidJob, match=reason):
                client.submit(tmp_path / name)


def test_a_file_of_exactly_1_mib_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "full.py"
    path.write_bytes(b"#" * 2**20)
    jobs = ScriptedJobs()
    with connected(jobs) as client:
        client.submit(path)
    assert len(jobs.specs[0].source) == 2**20


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_ranks": -1}, "number of ranks"),
        ({"num_ranks": 1.5}, "whole number"),
        ({"num_ranks": 2, "slow_factors": {2: 2.0}}, "ranks 0 to 1"),
        ({"slow_factors": {0: 0.5}}, "at least 1"),
        ({"slow_factors": {0: float("nan")}}, "at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"speed": 9}, "no setting 'speed'"),
        ({"seed": 2**63}, "seed"),
        ({"policy": "fast"}, "cadence, async, sync"),
        ({"output_dir": "out"}, "absolute"),
        ({"arguments": "--lr 1"}, "arguments must be a list, not '--lr 1'"),
        ({"requirements": "einops"}, "requirements must be a list"),
        ({"secrets": "KEY"}, "secrets must be a list"),
        ({"conditions": 5}, "conditions must be a list"),
        ({"environment": ["A=1"]}, "environment must be a mapping"),
        ({"slow_factors": [2]}, "slow_factors must be a mapping"),
        ({"name": 5}, "name must be a string, not 5"),
        ({"module": "train:job"}, "either in the file .* or in the module train:job: name one"),
    ],
)
def test_options_that_cannot_work_are_refused_before_any_call(
    options: dict[str, object], reason: str, job_file: Path
) -> None:
    with Client(closed_address()) as client, pytest.raises(InvalidJob, match=reason):
        client.submit(job_file, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["", "host", "host:", ":7717", "host:port", "host:0", "host:70000"])
def test_an_address_without_host_or_port(address: str) -> None:
    with pytest.raises(BadAddress, match="HOST:PORT"):
        Client(address)


def test_the_client_needs_neither_torch_nor_the_other_programs() -> None:
    code = (
        "import sys, elche_client.client, elche_client.local.job_run, elche_client.commands.remote;"
        "import elche_client.cli.main;"
        "print({'torch', 'numpy', 'elche_worker', 'elche_coordinator'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_the_packages_names_come_without_grpc_until_they_are_used() -> None:
    code = "import sys, elche_client; print('grpc' in sys.modules); elche_client.Client; print('grpc' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\nTrue\n"

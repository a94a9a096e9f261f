"""Tokens with roles: what each may do, by gRPC and on the page; they expire, are revoked, and outlast a crash."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from http.client import IncompleteRead
from pathlib import Path

import pytest

from elche.errors import Forbidden, InvalidJob, NotAllowed
from elche.token import Role
from elche_client import Client
from elche_client.commands.tokens import Tokens
from elche_client.events import JobState
from support.real_processes import Command, Coordinator, Mark, agent, coordinator, eventually

OWN = "correct horse battery"
DAY = timedelta(days=1)
JobFile = Callable[..., Path]


class Lab:
    """A coordinator with a token of its own, and tokens made for others."""

    def __init__(self, one: Coordinator, stack: ExitStack) -> None:
        self.coordinator = one
        self.admin = stack.enter_context(Tokens(one.address, token=OWN))
        self._stack = stack
        self.texts: dict[str, str] = {}
        for name, role in (("vera", Role.VIEWER), ("anna", Role.USER), ("bob", Role.USER), ("ops", Role.OPERATOR)):
            self.texts[name] = self.admin.make(name, role, expires=DAY)[1]
        self.texts["pool"] = self.admin.make("pool", Role.AGENT, expires=None)[1]

    def client(self, name: str) -> Client:
        return self._stack.enter_context(Client(self.coordinator.address, token=self.texts[name]))

    def http(self, name: str, path: str, *, post: bool = False) -> tuple[int, str]:
        """(status, text) of a request to the page."""
        headers = {"authorization": f"Bearer {self.texts[name]}", "content-type": "application/json"}
        request = urllib.request.Request(self.coordinator.page_url + path, b"{}" if post else None, headers)
        try:
            with urllib.request.urlopen(request, timeout=400) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def first_message(self, name: str) -> str:
        """The first of those that an open page gets."""
        headers = {"authorization": f"Bearer {self.texts[name]}"}
        request = urllib.request.Request(f"{self.coordinator.page_url}/api/stream", None, headers)
        with urllib.request.urlopen(request, timeout=400) as answer:
            return str(answer.readline().decode())

    def audit(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.coordinator.data / "audit.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """With two slots, whose agent has an agent's token; both log JSON."""
    mark, folder = Mark(), tmp_path_factory.mktemp("lab")
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, folder, env={"ELCHE_TOKEN": OWN, "ELCHE_LOG_FORMAT": "json"}))
        lab = Lab(one, stack)
        (secrets := folder / "secrets").mkdir(0o700)
        (secrets / "KEY").write_text("hunter2\n")
        more = ("--log-format", "json", "--secrets", str(secrets))
        stack.enter_context(agent(mark, folder, one.address, *more, env={"ELCHE_TOKEN": lab.texts["pool"]}))
        yield lab
        said = one.log.read_text() + (folder / "agent.log").read_text() + json.dumps(lab.audit())
        assert not any(text in said for text in (OWN, *lab.texts.values()))
        assert not any(text.encode() in (one.data / "elche.sqlite").read_bytes() for text in lab.texts.values())
    mark.assert_none_left()


def test_users_change_their_own_jobs_and_operators_all(lab: Lab, job_file: JobFile) -> None:
    anna, bob, ops, vera = (lab.client(name) for name in ("anna", "bob", "ops", "vera"))
    mine = anna.submit(job_file(), epochs=1000, num_ranks=1)
    theirs = bob.submit(job_file(), epochs=1000, num_ranks=1)
    for change in (bob.cancel, bob.pause, bob.checkpoint, lambda one: bob.scale(one, 1), bob.resume):
        with pytest.raises(Forbidden, match=f"job {mine.id} is of anna: bob needs the role operator"):
            change(mine.id)
    with pytest.raises(Forbidden, match="DrainHost needs the role operator; bob has the role user"):
        bob.drain("x")
    for use in (lambda: vera.submit(job_file()), lambda: vera.cancel(mine.id), lambda: list(vera.journal(mine.id))):
        with pytest.raises(Forbidden, match="needs the role user; vera has the role viewer"):
            use()
    assert {view.job_id for view in vera.jobs()} >= {mine.id, theirs.id}
    assert anna.cancel(mine.id).is_made
    assert ops.cancel(theirs.id).is_made
    for job in (mine, theirs):
        assert list(vera.watch(job.id))[-1].state is JobState.CANCELLED


def test_an_agent_can_do_nothing_else_and_nobody_else_is_one(lab: Lab, mark: Mark, tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="ListJobs needs the role viewer; pool has the role agent"):
        lab.client("pool").jobs()
    arguments = ("--coordinator", lab.coordinator.address, "--devices", "cpu", "--work-dir", str(tmp_path / "work"))
    environment = mark.environment({"ELCHE_TOKEN": lab.texts["ops"]})
    run = [sys.executable, "-m", "elche_worker.agent", *arguments]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 2
    assert "Attend needs the role agent; ops has the role operator" in done.stderr


def test_the_page_asks_for_the_same_roles(lab: Lab, job_file: JobFile) -> None:
    job = lab.client("anna").submit(job_file(), epochs=1000, num_ranks=1)
    cancel = f"/api/jobs/{job.id}/cancel"
    assert lab.http("vera", "/metrics")[0] == 200
    assert lab.http("vera", f"/api/jobs/{job.id}")[0] == 200
    status, text = lab.http("vera", cancel, post=True)
    assert (status, "needs the role user" in text) == (403, True)
    assert '"you":"vera, viewer"' in lab.first_message("vera")
    assert lab.http("vera", f"/api/jobs/{job.id}/journal")[0] == 403
    assert lab.http("pool", "/metrics")[0] == 403
    status, text = lab.http("bob", cancel, post=True)
    assert (status, f"job {job.id} is of anna" in text) == (403, True)
    assert lab.http("bob", "/api/agents/x/drain", post=True)[0] == 403
    assert lab.http("ops", "/api/agents/x/drain", post=True)[0] == 404
    assert lab.http("anna", cancel, post=True)[0] == 200
    assert [one["outcome"] for one in lab.audit() if one["call"] == "cancel" and one["what"] == job.id] == [
        "refused for want of a role",
        "refused: HTTP 403",
        "done",
    ]


def test_no_spelling_of_a_path_gets_around_a_role(lab: Lab, job_file: JobFile) -> None:
    job = lab.client("anna").submit(job_file(), epochs=1, num_ranks=1)
    job.result()
    for path in ("model", "journal"):
        for after in ("", "%0A", "%0D%0A", "/", "%2F", "%00", ";", "?x"):
            assert lab.http("vera", f"/api/jobs/{job.id}/{path}{after}")[0] in (403, 404, 405), after
    assert lab.http("anna", f"/api/jobs/{job.id}/journal")[0] == 200


def test_who_has_no_token_writes_nothing_into_the_audit_log(lab: Lab) -> None:
    before = lab.audit()
    for path in ("/static/jobs/x/cancel", "/download/MakeToken", "/healthz", "/", "/api/jobs/x/cancel"):
        request = urllib.request.Request(lab.coordinator.page_url + path, b"{}", {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match=r"40[15]"):
            urllib.request.urlopen(request, timeout=400)
    assert lab.audit() == before


def test_a_message_is_read_only_of_who_may_send_it(lab: Lab) -> None:
    """It is invalid, which somebody without a role does not get to know."""
    with Client(lab.coordinator.address, token="not this one at all") as stranger, pytest.raises(NotAllowed):
        stranger.scale("x" * 300, 1)
    with pytest.raises(Forbidden):
        lab.client("vera").scale("x" * 300, 1)
    with pytest.raises(InvalidJob, match="job_id has 300 characters"):
        lab.client("anna").scale("x" * 300, 1)


def test_keys_are_each_users_own(lab: Lab, job_file: JobFile) -> None:
    """The first user of a key once had it for all, and the others were told whose job has it."""
    of_anna = lab.client("anna").submit(job_file(), epochs=1, num_ranks=1, key="nightly")
    assert lab.client("anna").submit(job_file(), epochs=1, num_ranks=1, key="nightly").id == of_anna.id
    assert lab.client("bob").find("nightly") is None
    of_bob = lab.client("bob").submit(job_file(), epochs=1, num_ranks=1, key="nightly")
    assert of_bob.id != of_anna.id
    assert [handle.id for handle in (lab.client("bob").find("nightly"),) if handle] == [of_bob.id]
    of_bob.cancel()
    of_anna.result()


def test_a_users_own_loop_and_its_submitter_are_the_tokens(lab: Lab, job_file: JobFile) -> None:
    job = lab.client("anna").submit(job_file(), epochs=1, num_ranks=1)
    job.result()
    shown = json.loads(lab.http("vera", f"/api/jobs/{job.id}")[1])
    assert '"submitted_by": "anna"' in json.dumps(shown)


def test_a_token_that_is_revoked_or_has_expired_ends_what_it_has_open(lab: Lab, job_file: JobFile) -> None:
    job = lab.client("anna").submit(job_file(), epochs=100_000, num_ranks=1)
    (token, lab.texts["gone"]), (brief, lab.texts["brief"]) = (
        lab.admin.make("gone", Role.VIEWER, expires=DAY),
        lab.admin.make("brief", Role.VIEWER, expires=timedelta(seconds=2)),
    )
    ended: dict[str, BaseException] = {}

    def watch(name: str, client: Client) -> None:
        try:
            for _ in client.watch(job.id):
                pass
        except NotAllowed as error:
            ended[name] = error

    threads = [threading.Thread(target=watch, args=(name, lab.client(name))) for name in ("gone", "brief")]
    for thread in threads:
        thread.start()
    page = urllib.request.Request(
        f"{lab.coordinator.page_url}/api/stream", headers={"authorization": f"Bearer {lab.texts['gone']}"}
    )
    with urllib.request.urlopen(page, timeout=400) as stream:
        assert stream.readline().startswith(b"data: ")
        lab.admin.revoke(token.id)
        with suppress(IncompleteRead, ConnectionError):
            while stream.readline():
                pass  # until it ends
    for thread in threads:
        thread.join(400)
    assert set(ended) == {"gone", "brief"}
    said = [
        line for line in lab.coordinator.log.read_text().splitlines() if "has expired, by this machine's clock" in line
    ]
    assert [f"the token brief ({brief.id})" in line for line in said] == [True]
    with pytest.raises(NotAllowed, match="the token is wrong, expired or revoked"):
        lab.client("gone").jobs()
    assert lab.http("brief", "/metrics")[0] == 401
    assert brief.id in {one.id for one in lab.admin.all()}
    with pytest.raises(InvalidJob, match=f"no token has the id '{token.id}'"):
        lab.admin.revoke(token.id)
    assert lab.client("anna").get(job.id).state is not JobState.FAILED
    job.cancel()


def test_an_agent_whose_token_is_revoked_exits(lab: Lab, mark: Mark, tmp_path: Path) -> None:
    token, text = lab.admin.make("spot", Role.AGENT, expires=DAY)
    ops = lab.client("ops")
    before = len(ops.hosts())
    arguments = ("--coordinator", lab.coordinator.address, "--devices", "cpu", "--work-dir", str(tmp_path / "work"))
    run = [sys.executable, "-m", "elche_worker.agent", *arguments]
    environment = mark.environment({"ELCHE_TOKEN": text})
    with subprocess.Popen(run, env=environment, stderr=subprocess.PIPE, text=True) as spot:
        eventually(lambda: len(ops.hosts()) == before + 1, "it attends")
        lab.admin.revoke(token.id)
        _, said = spot.communicate(timeout=400)
    assert spot.returncode == 2
    assert "refuses this worker: the token has ended" in said
    eventually(lambda: len(ops.hosts()) == before, "it is gone")


def test_ranks_of_a_revoked_token_are_gone_although_their_agent_does_not_exit(
    mark: Mark, tmp_path: Path, job_file: JobFile
) -> None:
    """It is stopped, as one of somebody hostile might be told not to exit: its rank is there, and is not heard."""
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path, env={"ELCHE_TOKEN": OWN}))
        admin = stack.enter_context(Tokens(one.address, token=OWN))
        token, text = admin.make("spot", Role.AGENT, expires=DAY)
        spot = stack.enter_context(agent(mark, tmp_path, one.address, devices="cpu", env={"ELCHE_TOKEN": text}))
        client = stack.enter_context(Client(one.address, token=OWN))
        job = client.submit(job_file(), epochs=1000, num_ranks=1)
        eventually(lambda: client.get(job.id).state is JobState.TRAINING, "it trains")
        os.kill(spot.process.pid, signal.SIGSTOP)
        before = len(mark.living())
        admin.revoke(token.id)
        eventually(lambda: not client.hosts(), "the agent is lost")
        eventually(lambda: len(mark.living()) < before, "its rank has ended")
        os.kill(spot.process.pid, signal.SIGCONT)
        spot.process.wait(400)


def test_a_worker_takes_the_token_that_its_file_has_now(mark: Mark, tmp_path: Path, job_file: JobFile) -> None:
    """The coordinator was started with another token: workers ended their ranks and exited, although they had it."""
    (file := tmp_path / "token").write_text(OWN)
    file.chmod(0o600)
    (again := tmp_path / "again").mkdir()
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path, env={"ELCHE_TOKEN": OWN}))
        stack.enter_context(agent(mark, tmp_path, one.address, devices="cpu", env={"ELCHE_TOKEN_FILE": str(file)}))
        with Client(one.address, token=OWN) as client:
            job = client.submit(job_file(), epochs=100_000, num_ranks=1)
            eventually(lambda: client.get(job.id).state is JobState.TRAINING, "it trains")
        ranks = mark.living("elche rank")
        file.write_text(f"{OWN} staple")
        one.process.kill()
        one.process.wait()
        two = coordinator(mark, again, data=one.data, listen=one.address, env={"ELCHE_TOKEN": f"{OWN} staple"})
        stack.enter_context(two)
        client = stack.enter_context(Client(one.address, token=f"{OWN} staple"))
        before = client.get(job.id).num_rounds
        eventually(lambda: client.get(job.id).num_rounds > before, "it trains again")
        assert mark.living("elche rank") == ranks
        job = client.job(job.id)
        job.cancel()


def test_the_audit_log_says_who_did_what(lab: Lab, job_file: JobFile) -> None:
    job = lab.client("anna").submit(job_file(), epochs=1000, num_ranks=1)
    with pytest.raises(Forbidden):
        lab.client("bob").cancel(job.id)
    job.cancel()
    lines = [one for one in lab.audit() if job.id in one["what"]]
    assert [(one["who"], one["call"], one["outcome"].partition(":")[0]) for one in lines] == [
        ("anna (user)", "SubmitJob", "done"),
        ("bob (user)", "CancelJob", "refused"),
        ("anna (user)", "CancelJob", "done"),
    ]
    made = [one for one in lab.audit() if one["call"] == "MakeToken"]
    assert made[0]["who"] == "the coordinator's own token"
    assert oct((lab.coordinator.data / "audit.jsonl").stat().st_mode)[-3:] == "600"


def test_the_command_makes_lists_and_revokes(lab: Lab, elche: Callable[..., Command]) -> None:
    to = ("--coordinator", lab.coordinator.address)
    own = {"ELCHE_TOKEN": OWN}
    made = elche("token", "make", "carl", "--role", "operator", "--expires", "1h", *to, env=own)
    assert made.code == 0, made.err
    text = made.out.strip()
    assert text.startswith("elche_")
    assert "carl is operator, until " in made.err
    by_carl = json.loads(
        elche("token", "make", "dora", "--role", "viewer", "--json", *to, env={"ELCHE_TOKEN": text}).out
    )
    assert (by_carl["made_by"], by_carl["role"]) == ("carl", "viewer")
    listed = json.loads(elche("token", "list", "--json", *to, env=own).out)
    assert {"carl", "dora"} <= {one["name"] for one in listed}
    assert "token" not in listed[0]
    carl = next(one["id"] for one in listed if one["name"] == "carl")
    assert f"{carl}  operator  carl" in elche("token", "list", *to, env=own).out
    assert "of carl (operator) is revoked" in elche("token", "revoke", carl, *to, env=own).err
    refused = elche("token", "list", *to, env={"ELCHE_TOKEN": text})
    assert (refused.code, "expired or revoked" in refused.complaint) == (2, True)
    wrong = elche("token", "make", "two words", "--role", "user", *to, env=own)
    assert (wrong.code, "'two words' is not a name for a token" in wrong.complaint) == (2, True)
    lacking = elche("token", "list", *to, env={"ELCHE_TOKEN": lab.texts["anna"]})
    assert (lacking.code, "ListTokens needs the role operator" in lacking.complaint) == (2, True)


def test_a_token_that_cannot_be_printed_is_named(lab: Lab, mark: Mark) -> None:
    """With a full disk behind stdout it was made, shown to nobody, and valid for months."""
    words = ["token", "make", "erna", "--role", "user", "--coordinator", lab.coordinator.address]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "elche_client", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=mark.environment({"ELCHE_TOKEN": OWN}),
        )
    with Tokens(lab.coordinator.address, token=OWN) as tokens:
        (made,) = [one for one in tokens.all() if one.name == "erna"]
    complaint = f"elche: token {made.id} is made, but standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, complaint)


def test_tokens_outlast_a_crash_and_are_revoked_for_good(mark: Mark, tmp_path: Path) -> None:
    env, data = {"ELCHE_TOKEN": OWN}, tmp_path / "data"
    with coordinator(mark, tmp_path, env=env, data=data) as one, Tokens(one.address, token=OWN) as tokens:
        (kept, text), (gone, other) = (tokens.make(name, Role.VIEWER, expires=DAY) for name in ("kept", "gone"))
        tokens.revoke(gone.id)
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
    with coordinator(mark, tmp_path, env=env, data=data) as one:
        with Client(one.address, token=text) as client:
            assert client.jobs() == []
        with Client(one.address, token=other) as client, pytest.raises(NotAllowed):
            client.jobs()
        with Tokens(one.address, token=OWN) as tokens:
            assert [(token.id, token.name, token.role) for token in tokens.all()] == [(kept.id, "kept", Role.VIEWER)]


def test_a_coordinator_that_asks_for_no_token_makes_none(mark: Mark, tmp_path: Path) -> None:
    with (
        coordinator(mark, tmp_path) as one,
        Tokens(one.address, token="") as tokens,
        pytest.raises(InvalidJob, match="asks nobody for a token: start it with one of its own"),
    ):
        tokens.make("anna", Role.USER, expires=DAY)


def test_logs_are_json_on_request_and_have_no_secrets(lab: Lab, job_file: JobFile) -> None:
    """The agent's, too; that they have no token is looked at when all here have run."""
    client = lab.client("anna")
    job = client.submit(job_file(), num_ranks=2, epochs=1, secrets=["KEY"], environment={"COLOUR": "teal-4711"})
    assert list(client.watch(job.id))[-1].state is JobState.SUCCEEDED
    said = [lab.coordinator.log.read_text(), (lab.coordinator.log.parent / "agent.log").read_text()]
    of_coordinator, of_worker = ([json.loads(line) for line in text.splitlines()] for text in said)
    started = {(line["job"], line["rank"], line["incarnation"]) for line in of_worker if "rank" in line}
    assert {(name, rank) for name, rank, _ in started if name == job.id} == {(job.id, 0), (job.id, 1)}
    (ended,) = [line for line in of_coordinator if f"job={job.id} succeeded" in line["message"]]
    assert (ended["job"], ended["level"]) == (job.id, "info")
    assert ended["round"] > 0
    assert ended["time"].endswith("Z")
    assert not [one for one in ("hunter2", "teal-4711") if one in "".join(said)]

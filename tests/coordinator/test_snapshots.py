"""The saved state, part by part: what comes back is what was there, and a save costs what has changed."""

from pathlib import Path

import pytest

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import AgentJoined, Event, JobCancelled, JobSubmitted
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.storage.snapshots import MAX_QUEUED, Snapshots, join
from elche_coordinator.storage.sql.store import SqlStore
from elche_coordinator.storage.store import SavedState
from elche_coordinator.storage.writer import Transaction
from elche_coordinator.streams.streams import Streams
from support.effort import lines_run


class Saving:
    """A core of which states are saved, as in a database."""

    def __init__(self) -> None:
        self.core, self.streams = Coordinator(), Streams()
        self.snapshots = Snapshots(self.core, self.streams)
        self.parts: dict[str, bytes] = {}
        slots = (Slot(device="cpu"),)
        self.handle(AgentJoined(agent_id=AgentId("host"), host="host", slots=slots))

    def handle(self, event: Event) -> None:
        self.core.handle(event, now_s=1.0)
        self.snapshots.touch(self.core.last_touched)

    def submit(self, *names: str) -> None:
        for name in names:
            spec = JobSpec(name=name, source_hash="", file_name="", num_ranks=1)
            self.handle(JobSubmitted(job_id=JobId(name), spec=spec, submitted_at=1.0, key=f"key of {name}"))

    def save(self) -> SavedState:
        saved = self.snapshots.take(7, "code")
        for name in saved.gone:
            del self.parts[name]
        self.parts |= saved.parts
        return saved


def state_of(core: Coordinator) -> object:
    jobs = [job_id for job_id in core.job_ids() if core.result(job_id) is None]
    views = [core.view(job_id, 2.0) for job_id in jobs]
    return views, core.fleet.taken, core.living_keys(), core.next_deadline_s()


def test_what_was_saved_part_by_part_is_what_was_there() -> None:
    one = Saving()
    one.submit("a", "b", "c", "d")
    one.save()
    one.handle(JobCancelled(job_id=JobId("b")))
    one.submit("e")
    saved = one.save()
    assert set(saved.parts) == {"e"}
    assert saved.gone == {"b"}
    core, streams = join(saved.state, one.parts)
    assert state_of(core) == state_of(one.core)
    assert streams.ranks == {}
    event = JobCancelled(job_id=JobId("a"))
    assert core.handle(event, now_s=3.0) == one.core.handle(event, now_s=3.0)
    assert core.keys.get("key of c") == "c"


def test_what_a_bug_has_left_behind_belongs_to_the_jobs_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that it had reached was saved a second time, and that copy's commands were taken after a restart."""
    one = Saving()
    one.submit("a")
    one.save()

    def raise_bug(*given: object) -> None:
        raise KeyError

    with monkeypatch.context() as broken:
        broken.setattr(one.core._placing, "note", raise_bug)
        with pytest.raises(KeyError):
            one.handle(JobCancelled(job_id=JobId("a")))
    core, _ = join(one.save().state, one.parts)
    other = JobCancelled(job_id=JobId("none"))
    assert core.handle(other, now_s=3.0) == [], "the job that is loaded was not cancelled"
    assert core.last_touched == ["a"]
    assert one.core.handle(other, now_s=3.0), "what this one had decided is done with the next event"


def test_a_job_that_is_in_no_part_is_missed() -> None:
    one = Saving()
    one.submit("a")
    saved = one.save()
    with pytest.raises(KeyError):
        join(saved.state, {})


def test_a_job_that_waits_costs_a_save_its_names_alone() -> None:
    one = Saving()
    one.submit("first")
    few = len(one.save().state)
    one.submit(*(f"job-{number}" for number in range(300)))
    one.save()
    one.submit("another")
    saved = one.save()
    assert set(saved.parts) == {"another"}
    assert len(saved.state) - few < 300 * 200


def test_a_save_looks_at_no_job_that_waits_as_before() -> None:
    def lines_of_a_save(num_jobs: int) -> int:
        one = Saving()
        one.submit(*(f"job-{number}" for number in range(num_jobs)))
        one.save()
        one.submit("another")
        return lines_run(lambda: one.snapshots.take(7, "code"))

    # not equal: the collector of garbage may run finalizers meanwhile
    assert lines_of_a_save(400) < lines_of_a_save(20) + 100


def test_a_save_is_due_when_many_have_come() -> None:
    one = Saving()
    one.submit("runs", *(f"job-{number}" for number in range(MAX_QUEUED - 1)))
    assert not one.snapshots.is_due
    one.submit("last")
    assert one.snapshots.is_due
    one.save()
    assert not one.snapshots.is_due


def test_states_that_are_written_together_are_written_as_the_last_with_the_parts_of_both(tmp_path: Path) -> None:
    store = SqlStore.in_file(tmp_path / "elche.sqlite")
    store.write([], saved=SavedState(1, "code", b"1", parts={"old": b"old", "kept": b"kept"}))
    first, then = Transaction(last=2), Transaction(last=3)
    first.saved = SavedState(2, "code", b"2", parts={"a": b"a2", "b": b"b2", "c": b"c2"}, gone={"old"})
    then.saved = SavedState(3, "code", b"3", parts={"a": b"a3", "old": b"again"}, gone={"b"})
    first.add(then)
    store.write([], last=first.last, saved=first.saved)
    saved = store.load_state().saved
    assert saved is not None
    assert (saved.last, saved.state) == (3, b"3")
    assert saved.parts == {"kept": b"kept", "a": b"a3", "c": b"c2", "old": b"again"}

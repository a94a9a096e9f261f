"""Rows of jobs: written when they differ, and once, with everything, when a job has ended."""

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.events import (
    AgentJoined,
    Event,
    JobCancelled,
    JobSubmitted,
    LoopAttached,
    RankExited,
)
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec, Slot
from elche_coordinator.storage.job_rows import JobRows, Record

JOB = JobId("job")


class Rows:
    """A core, and the rows that its events lead to."""

    def __init__(self) -> None:
        self.core = Coordinator()
        self.rows = JobRows(self.core)

    def after(self, event: Event) -> Record | None:
        """The job's row, if the event has changed it."""
        self.core.handle(event, now_s=1.0)
        self.rows.touch(self.core.last_touched)
        return self.rows.take_changed().get(JOB)


def submitted(*, is_loop: bool = False) -> JobSubmitted:
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=1, is_loop=is_loop)
    return JobSubmitted(job_id=JOB, spec=spec, submitted_at=1.0, key="key")


def test_a_job_that_waits_has_what_it_is_submitted_with_again() -> None:
    rows = Rows()
    row = rows.after(submitted())
    assert row is not None
    assert (row["key"], row["resume"], row["num_ranks"], row["attempt"]) == ("key", "", 1, 1)
    assert row["decided"] is None
    assert "result" not in row


def test_an_event_that_changes_nothing_of_it_writes_no_row() -> None:
    rows = Rows()
    rows.after(submitted())
    rows.rows.touch([JOB])
    assert rows.rows.take_changed() == {}


def test_the_highest_incarnation_is_in_it_as_soon_as_a_rank_is_started() -> None:
    rows = Rows()
    rows.after(submitted())
    row = rows.after(AgentJoined(agent_id=AgentId("host"), host="host", slots=(Slot(device="cpu"),)))
    assert row is not None
    assert row["incarnation"] == 1


def test_what_has_ended_is_written_once_with_result_and_view() -> None:
    rows = Rows()
    rows.after(submitted())
    row = rows.after(JobCancelled(job_id=JOB))
    assert row is not None
    assert row["result"]["outcome"] == "cancelled"  # type: ignore[index]
    assert row["view"]["name"] == "job"  # type: ignore[index]
    assert rows.after(JobCancelled(job_id=JOB)) is None


def test_a_job_whose_ranks_leave_after_its_end_is_decided_is_written_with_its_view_too() -> None:
    rows = Rows()
    rows.after(submitted())
    host = AgentId("host")
    rows.after(AgentJoined(agent_id=host, host="host", slots=(Slot(device="cpu"),), folder="folder"))
    row = rows.after(JobCancelled(job_id=JOB))
    assert row is not None
    assert row["decided"]["outcome"] == "cancelled"  # type: ignore[index]
    assert "view" not in row
    rank = rows.core.jobs[JOB].ranks[Rank(0)].address
    row = rows.after(RankExited(**rank, agent_id=host, exit_code=0))
    assert row is not None
    assert row["result"]["outcome"] == "cancelled"  # type: ignore[index]
    assert [(one["host"], one["folder"]) for one in row["view"]["ranks"]] == [("host", "folder")]  # type: ignore[index]
    rows.rows.touch([JOB])
    assert rows.rows.take_changed() == {}


def test_a_loop_that_nobody_can_start_again_has_how_it_ends_without_its_coordinator() -> None:
    rows = Rows()
    spec = JobSpec(name="loop", source_hash="", file_name="loop.py", num_ranks=1, is_loop=True)
    row = rows.after(LoopAttached(job_id=JOB, spec=spec, ranks=(("host", "cpu"),), policy="sync", submitted_at=1.0))
    assert row is not None
    assert row["decided"]["error"] == "the coordinator stopped while the job ran; submit it again"  # type: ignore[index]

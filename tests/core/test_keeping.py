"""A job's checkpoints on their own: which rounds become one, which of them stay, and what ranks may say of them."""

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.events import CheckpointFailed, CheckpointSaved
from elche_coordinator.core.messages.ids import Attempt, Epoch, Incarnation, JobId, Rank, Version
from elche_coordinator.core.messages.reports import Checkpoint
from elche_coordinator.core.results.checkpoints import MAX_WRITING, Checkpoints

ADDRESS = {"job_id": JobId("job"), "incarnation": Incarnation(1)}


def checkpoints(**changes: object) -> Checkpoints:
    options = {"dataset_size": 9, "batch_size": 1, "epochs": 9, "policy": "cadence"} | changes
    some = Checkpoints(AgreedSettings(**options), Attempt(2))
    some.start(0.0)
    return some


def name(version: int) -> str:
    """What `begin` calls it."""
    return f"epoch-{version:04d}-step-{10 * version:08d}-attempt-2"


def begin(some: Checkpoints, version: int, *, now_s: float = 0.0, rank: int = 0) -> bool:
    new = some.name(Version(version), version, 10 * version)
    return some.begin(Checkpoint(version=version, name=new, path="", epoch=1, global_step=9), Rank(rank), now_s)


def saved(some: Checkpoints, version: int, *, rank: int = 0, best: int | None = None) -> Checkpoint | None:
    event = CheckpointSaved(**ADDRESS, rank=Rank(rank), version=version, path="p", size_bytes=1, duration_s=0.1)
    return some.take_saved(Rank(rank), event, Version(best) if best else None, 5.0)


def failed(some: Checkpoints, version: int, *, rank: int = 0) -> bool:
    return some.take_failed(
        Rank(rank), CheckpointFailed(**ADDRESS, rank=Rank(rank), version=version, reason="no space")
    )


def write(some: Checkpoints, *versions: int, best: int | None = None) -> list[int]:
    """Writes these, one after the other; returns which are kept."""
    for version in versions:
        assert begin(some, version)
        assert saved(some, version, best=best)
    return [one.version for one in some.kept]


# Which stay


@pytest.mark.parametrize(("keep", "stay"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_newest_stay(keep, stay):
    assert write(checkpoints(keep_checkpoints=keep), 1, 2, 3, 4, 5) == stay


@pytest.mark.parametrize(("keep", "stay"), [(1, [2, 5]), (2, [2, 4, 5]), (4, [2, 3, 4, 5])])
def test_the_best_stays_beside_them(keep, stay):
    assert write(checkpoints(keep_checkpoints=keep), 1, 2, 3, 4, 5, best=2) == stay


def test_the_last_one_is_the_newest_whoever_has_written_first():
    """A job went on from the older one, when another rank was slower to write that."""
    some = checkpoints(keep_checkpoints=2)
    begin(some, 1, rank=0)
    begin(some, 2, rank=1)
    assert saved(some, 2, rank=1)
    assert saved(some, 1, rank=0)
    assert [one.version for one in some.kept] == [1, 2]


def test_the_writer_is_told_to_keep_what_stays_once_its_own_is_whole():
    some = checkpoints(keep_checkpoints=2)
    write(some, 1, 2, 3)
    assert some.names_to_keep(None) == (name(3),)
    assert some.names_to_keep(Version(2)) == (name(2), name(3))


def test_one_that_is_being_written_is_not_removed_by_the_next():
    some = checkpoints(keep_checkpoints=1)
    write(some, 1)
    begin(some, 2)
    assert some.names_to_keep(None) == (name(2),)
    begin(some, 3)
    saved(some, 3)
    assert [one.version for one in some.kept] == [3]
    saved(some, 2)
    assert 2 in [one.version for one in some.kept]


def test_names_tell_attempts_apart():
    assert checkpoints().name(Version(7), 3, 40) == "epoch-0003-step-00000040-attempt-2"


def test_two_of_the_same_step_have_names_of_their_own():
    """A folder is never written over: the second could not be written."""
    some = checkpoints()
    begin(some, 1)
    assert some.name(Version(2), 1, 10) == f"{name(1)}-version-2", "while the first is being written"
    saved(some, 1)
    assert some.name(Version(2), 1, 10) == f"{name(1)}-version-2"


# Which rounds become one


def test_every_so_many_epochs_there_is_one_at_their_end():
    some = checkpoints(checkpoint_every_epochs=3)
    assert [epoch for epoch in range(9) if some.wants_end_of([Epoch(epoch)])] == [2, 5, 8]
    assert some.wants_end_of([Epoch(1), Epoch(2), Epoch(3)]), "several may end in one round"
    assert not some.wants_end_of([])


def test_where_the_best_is_looked_for_every_epoch_has_one():
    some = checkpoints(monitor="loss", checkpoint_every_epochs=3)
    assert all(some.wants_end_of([Epoch(epoch)]) for epoch in range(4))


def test_by_time_there_is_one_so_long_after_the_last_was_begun():
    some = checkpoints(checkpoint_every_minutes=10.0 / 60)
    assert [some.wants(at_s, []) for at_s in (0.0, 9.9, 10.0, 30.0)] == [False, False, True, True]
    begin(some, 1, now_s=12.0)
    assert [some.wants(at_s, []) for at_s in (12.0, 21.9, 22.0)] == [False, False, True]


def test_a_request_is_met_once():
    some = checkpoints()
    assert not some.wants(0.0, [])
    some.request()
    assert some.wants(0.0, [])
    begin(some, 1)
    assert not some.wants(0.0, [])


def test_a_rank_that_has_too_many_to_write_gets_no_other_unless_it_may_be_the_best():
    some, watched = checkpoints(), checkpoints(monitor="loss")
    for version in range(1, MAX_WRITING + 1):
        assert begin(some, version)
        assert begin(watched, version)
    assert not begin(some, 9)
    assert some.num_failures == 1
    assert begin(watched, 9)


# What ranks say


def test_only_its_writer_can_say_that_it_is_whole_or_not():
    some = checkpoints()
    begin(some, 1, rank=1)
    assert saved(some, 1, rank=0) is None
    assert not failed(some, 1, rank=0)
    assert not some.is_idle
    assert saved(some, 1, rank=1)
    assert some.is_idle
    assert saved(some, 1, rank=1) is None, "old news"
    assert len(some.kept) == 1


def test_one_that_cannot_be_written_is_counted_once_and_waited_for_no_more():
    some = checkpoints()
    begin(some, 1)
    assert failed(some, 1)
    assert not failed(some, 1)
    assert (some.num_failures, some.is_idle, some.kept) == (1, True, [])


def test_metrics_reach_a_checkpoint_whether_it_is_written_by_then_or_not():
    some = checkpoints()
    write(some, 1)
    begin(some, 2)
    for version in (1, 2, 3):
        some.set_metrics(Version(version), {"loss": float(version)})
    saved(some, 2)
    assert [one.metrics for one in some.shown(Version(2))] == [{"loss": 1.0}, {"loss": 2.0}]
    assert [one.is_best for one in some.shown(Version(2))] == [False, True]


def test_a_round_that_came_too_late_for_a_checkpoint_leaves_it_to_the_next():
    some = checkpoints()
    some.request()
    assert begin(some, 3)
    assert not some.wants(0.0, [])
    late = CheckpointFailed(**ADDRESS, rank=Rank(0), version=Version(3), reason="", is_late=True)
    assert some.take_failed(Rank(0), late)
    assert some.wants(0.0, [])
    assert some.is_awaited
    assert some.num_failures == 0

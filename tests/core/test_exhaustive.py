"""Everything that can happen to small jobs, with little that goes wrong (`make exhaust` for more): each goes on to its
end, with every sample once. The search finds faults that are put in.
"""

import re
from collections import Counter
from itertools import count

import pytest

from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.messages.ids import Incarnation
from elche_coordinator.core.records.ranks import present
from elche_coordinator.core.rounds.generation import Generation
from elche_coordinator.core.work.ledger import Ledger
from support import exhaustive
from support.exhaustive import Counterexample, Search
from support.small_world import small_world

OVERLAPPED = {"averaging": "overlapped", "ride_out_s": 10.0}


MOST_STATES = 1_000
"""In the gate, for a second of processor time."""
LONG = pytest.mark.long(reason="`make exhaust` looks at far more")
CASES = [
    ("kill", {}),
    ("stop", OVERLAPPED),
    ("cut", OVERLAPPED),
    ("crash", {}),
    ("leave", OVERLAPPED),
    ("scale", {}),
    ("pause", OVERLAPPED),
    ("drain", {}),
    pytest.param("save", OVERLAPPED, marks=LONG),
    pytest.param("cancel", {}, marks=LONG),
    pytest.param("kill", OVERLAPPED, marks=LONG),
    pytest.param("stop", {}, marks=LONG),
    pytest.param("cut", {}, marks=LONG),
    pytest.param("crash", OVERLAPPED, marks=LONG),
]


@pytest.mark.parametrize("deviations", [1, pytest.param(None, marks=LONG)])
def test_every_order_of_what_two_ranks_say(deviations):
    search = Search(small_world(dataset_size=1), deviations).run()
    assert search.is_whole
    assert search.num_ends > 1


@pytest.mark.parametrize(("fault", "way"), CASES)
def test_a_fault_or_what_people_do_at_any_moment(fault, way):
    search = Search(small_world(dataset_size=1, faults={fault: 1}, **way), 1, MOST_STATES).run()
    assert search.is_whole or search.num_states == MOST_STATES
    assert search.num_ends > 1


def found_by(**case: object) -> str:
    """The story in which a search finds that something is wrong."""
    with pytest.raises(Counterexample) as found:
        Search(small_world(**case), deviations=1, most_states=3_000).run()  # type: ignore[arg-type]
    return str(found.value)


def test_the_search_finds_leases_of_a_lost_rank_that_are_lost_with_it(monkeypatch):
    monkeypatch.setattr(Ledger, "release", lambda self, rank: self.rank_leases.pop(rank, None) and 0)
    assert re.search("in no place|or in none", found_by(faults={"kill": 1}))


def test_the_search_finds_that_the_model_of_the_fewest_is_kept(monkeypatch):
    def split(self):
        there = present(self.members).values()
        levels = {record.rank: self._num_received(record.rank) for record in there}
        sizes = Counter(levels.values())
        kept = min(sizes, key=lambda level: (sizes[level], level), default=0)
        return kept, []

    monkeypatch.setattr(Generation, "split", split)
    assert re.search("overlaps|the ledger", found_by(num_ranks=3, faults={"kill": 1}))


def test_the_search_finds_samples_that_are_booked_and_not_trained(monkeypatch):
    commit = Ledger.commit
    monkeypatch.setattr(Ledger, "commit", lambda self, rank, cut: commit(self, rank, self.bounds(rank)[1]))
    assert re.search("the ledger|committed", found_by(**OVERLAPPED))


def test_the_search_finds_a_job_that_waits_for_a_stopped_rank_for_ever(monkeypatch):
    monkeypatch.setattr(ManagedJob, "on_hung", lambda *_: None)
    monkeypatch.setattr(exhaustive, "LONGEST", 200)  # others of so few batches end before
    story = found_by(dataset_size=1, faults={"stop": 1})
    assert story.endswith("the job goes on and on, and never ends") or "nothing more happens" in story


def test_the_search_finds_a_job_that_stays_paused(monkeypatch):
    pause = ManagedJob.pause

    def paused_for_ever(self: ManagedJob, now_s: float, *, is_paused: bool) -> None:
        if is_paused:
            pause(self, now_s, is_paused=True)

    monkeypatch.setattr(ManagedJob, "pause", paused_for_ever)
    assert "nothing more happens" in found_by(dataset_size=1, faults={"pause": 1})


def test_the_search_finds_what_a_coordinator_that_starts_again_does_not_know(monkeypatch):
    numbers = count(1)  # of the program, and not of the coordinator's state

    def _new_incarnation(_: Coordinator) -> Incarnation:
        return Incarnation(next(numbers))

    monkeypatch.setattr(Coordinator, "_new_incarnation", _new_incarnation)
    assert "leads elsewhere when it is repeated" in found_by(faults={"crash": 1})

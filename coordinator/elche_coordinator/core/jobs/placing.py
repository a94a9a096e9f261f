"""Allocation of free slots: first to ranks to be restarted, then to queued jobs, then to jobs that want more ranks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, repeat, takewhile
from typing import Any, NamedTuple

from elche_coordinator.core.jobs.lines import Kind, Line, Lines
from elche_coordinator.core.jobs.notices import checkpoint_notice, quota_notice, slots_notice
from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.queue import asked, asked_of_host, holds_back
from elche_coordinator.core.jobs.shares import Shares
from elche_coordinator.core.messages.events import SlotsRequested
from elche_coordinator.core.messages.ids import Incarnation, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import Fleet, Place
from elche_coordinator.core.records.machine import JobPhase

HOST_GRACE_S = 600.0
"""Seconds for which a job waits for an absent host that has its checkpoint: it may be starting again. Then others try:
they may reach the same files.
"""


class _Offers:
    """Counts of slots by the conditions of jobs, cached while jobs are placed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.kept: set[Place] = set()
        """Slots that waiting jobs could have, which no job behind them gets."""
        self._offered: dict[tuple[str, ...], set[Place]] = {}
        self._num_slots: dict[tuple[str, ...], int] = {}
        self._num_free: dict[tuple[str, ...], int] = {}

    def num_free(self, spec: JobSpec) -> int:
        """Number of free slots that the job may have."""
        if spec.conditions not in self._num_free:
            self._num_free[spec.conditions] = len(self._fleet.free_for_one(spec.conditions, self.kept))
        return self._num_free[spec.conditions]

    def num_slots(self, spec: JobSpec) -> int:
        """Number of slots that meet the job's conditions."""
        if spec.conditions not in self._num_slots:
            self._num_slots[spec.conditions] = self._fleet.num_slots(spec.conditions)
        return self._num_slots[spec.conditions]

    def overlap(self, one: JobSpec, other: JobSpec) -> bool:
        """True if there is a slot that both jobs could have."""
        return one.conditions == other.conditions or not self._of(one).isdisjoint(self._of(other))

    def keep(self, spec: JobSpec) -> None:
        """Keeps the slots that a waiting job could have from jobs behind it."""
        self.kept |= self._of(spec)
        self.change()

    def change(self) -> None:
        """Drops the counts, since slots were taken or kept."""
        self._num_free.clear()

    def _of(self, spec: JobSpec) -> set[Place]:
        if spec.conditions not in self._offered:
            self._offered[spec.conditions] = set(self._fleet.offered(spec.conditions))
        return self._offered[spec.conditions]


class _Reason(NamedTuple):
    """Why a job waits."""

    reason: str
    ahead: JobId | None = None
    """The job before it that waits for the same slots."""


class Placing:
    """Gives slots to jobs. A queued job that gets too few holds back, from jobs behind it, all slots that it could use.

    While slots are given, neither the free slots nor a project's room in its quota grow. So once a job of one kind
    (`lines`) has to wait, all others of that kind do.
    """

    def __init__(
        self,
        touch: Callable[[JobId], PlacedJob | None],
        try_again: Callable[[JobId, Rank, float], None],
        new_incarnation: Callable[[], Incarnation],
    ) -> None:
        """`touch` is called with each job that changes, and returns it. `try_again` is called with a rank for which
        slots must be looked for again, at a time in seconds.
        """
        self._touch = touch
        self._try_again = try_again
        self._new_incarnation = new_incarnation
        self._lines = Lines()
        self._holders: dict[JobId, PlacedJob] = {}
        """Jobs that have processes or are to have some."""
        self._now_s = 0.0
        """Time of the last `place`."""
        self._waits: dict[Kind, tuple[JobId, _Reason, _Reason]] = {}
        """For each kind of jobs that the last `place` has left without slots, the first of them, why it waits, and why
        those behind it do.
        """
        self.asked: list[SlotsRequested] = []
        """Slots that jobs are asked to give to others, as found by the last `place`."""

    def __getstate__(self) -> dict[str, Any]:
        """The state without the queue and the holders of slots: `Coordinator.__setstate__` notes all jobs again."""
        return {**self.__dict__, "_lines": Lines(), "_holders": {}}

    @property
    def queued(self) -> set[JobId]:
        """All queued jobs."""
        return self._lines.job_ids

    def note(self, job: PlacedJob, now_s: float) -> None:
        """Updates the queue and the holders of slots for a job that is new or has changed."""
        is_queued = job.phase is JobPhase.QUEUED
        if job.phase is not JobPhase.ENDED and (not is_queued or job.roster.num_living):
            self._holders[job.id] = job
        else:
            self._holders.pop(job.id, None)
        self._lines.note(job)
        if is_queued and job.retry_at_s > now_s:
            self._try_again(job.id, Rank(0), job.retry_at_s)

    def is_behind(self, job: PlacedJob) -> bool:
        """True if a queued job gets no slots because one before it waits for them."""
        return job.phase is JobPhase.QUEUED and self._wait_of(job).ahead is not None

    def reason(self, job: PlacedJob) -> str:
        """The reason why a queued job waits."""
        return self._wait_of(job).reason

    def _wait_of(self, job: PlacedJob) -> _Reason:
        found = None if self._is_too_early(job) else self._waits.get(self._lines.kind_of(job))
        if found is None:
            return _Reason(job.reason)
        first, its_own, of_others = found
        return its_own if job.id == first else of_others

    def _is_too_early(self, job: PlacedJob) -> bool:
        """True if a queued job has failed just now, or processes of its previous attempt have not all ended."""
        return job.retry_at_s > self._now_s or job.roster.num_living > 0

    def place(self, fleet: Fleet, quotas: Mapping[str, int], now_s: float) -> None:
        """Allocates slots to all jobs that can have some. Slots that others should give are in `asked`."""
        self._now_s = now_s
        # First: the others of such a rank's job train or wait with the slots that they have.
        self._place_missing(self._by_age(), fleet)
        shares = Shares(self._holders, fleet, quotas)
        waiting, bound = self._place_queued(fleet, shares)
        kept = {place for job in waiting for place in fleet.free_places(job.spec.conditions)}
        # Once more, since `_place_queued` has made holders of jobs that waited.
        holders = self._by_age()
        self._place_more(holders, fleet, shares, kept)
        self.asked = []
        for job in (*bound, *waiting):
            # a job is asked to give slots to one waiting job at a time
            busy = {one.job_id for one in self.asked}
            others = [one for one in holders if one.id not in busy]
            self.asked += asked_of_host(job, others, fleet) if job in bound else asked(job, others, fleet, shares)

    def _by_age(self) -> list[PlacedJob]:
        """The jobs that have processes or are to have some, oldest first."""
        return sorted(self._holders.values(), key=lambda job: job.number)

    def _place_missing(self, jobs: Iterable[PlacedJob], fleet: Fleet) -> None:
        """Gives free slots to ranks to be restarted."""
        for job in jobs:
            is_full = False
            for rank, at_s in list(job.places.missing.items()):
                if at_s > self._now_s:
                    self._try_again(job.id, rank, at_s)
                    continue
                # Any free slot will do, so that where there was none for one rank, there is none for the next.
                places = None if is_full else fleet.take_again(job.id, rank, job.spec, job.ranks[rank].places)
                is_full = places is None
                if places is not None:
                    self._touch(job.id)
                    job.place_again(rank, places, fleet, self._new_incarnation)
                elif job.phase is JobPhase.STARTING:  # else its other ranks would wait in their slots
                    self._touch(job.id)
                    job.on_no_place(rank, self._now_s)
                    self.note(job, self._now_s)

    def _place_queued(self, fleet: Fleet, shares: Shares) -> tuple[list[PlacedJob], list[PlacedJob]]:
        """Gives free slots to queued jobs, in order. Returns waiting jobs for which there are enough slots in all, and
        those that wait for a slot of the host that has their checkpoint.
        """
        self._waits.clear()
        waiting: list[PlacedJob] = []
        bound: list[PlacedJob] = []
        over_quota: list[PlacedJob] = []
        offers = _Offers(fleet)

        def unless_one_waits(line: Line) -> Iterable[PlacedJob]:
            return takewhile(lambda _: line.kind not in self._waits, line.jobs())

        def leave(job: PlacedJob, wait: _Reason, of_others: _Reason | None = None) -> None:
            """The job, and all others of its kind, wait."""
            self._waits[self._lines.kind_of(job)] = job.id, wait, of_others or wait

        for job in shares.in_turn(map(unless_one_waits, self._lines)):
            spec = job.spec
            if self._is_too_early(job):
                # waits for its time, and holds no slots back meanwhile
                continue
            if spec.resume_work_folder:
                spec = self._await_host(job, fleet)
            if shares.room(job) < spec.least_ranks:
                leave(job, _Reason(job.reason))
                over_quota.append(job)
            elif offers.num_free(spec) >= spec.least_ranks * spec.group_size and self._place(
                job, fleet, shares, offers.kept
            ):
                offers.change()
            elif why := fleet.why_no_checkpoint(spec):
                # It holds no slots back: it can use only its own host's, and gets them in its turn when they come free.
                leave(job, _Reason(checkpoint_notice(spec, why)))
                bound.append(job)
            elif ahead := next((one for one in waiting if offers.overlap(spec, one.spec)), None):
                leave(job, self._behind(ahead))
            else:
                can_wait = holds_back(job, fleet)
                reason = slots_notice(
                    spec,
                    offers.num_free(spec),
                    offers.num_slots(spec),
                    fleet.unfit(spec.conditions),
                    is_possible=not spec.is_loop or can_wait,
                )
                leave(job, _Reason(reason))
                if can_wait:
                    leave(job, _Reason(reason), self._behind(job))
                    waiting.append(job)
                    offers.keep(spec)
        for job in over_quota:  # last: others of its project may have got slots after its turn
            leave(job, _Reason(quota_notice(job.spec, shares.held(job), shares.quota(job))))
        return waiting, bound

    def _await_host(self, job: PlacedJob, fleet: Fleet) -> JobSpec:
        """The job's submission; once the host that has its checkpoint has been away for `HOST_GRACE_S`, any will do."""
        if fleet.holders_of_checkpoint(job.spec):
            job.host_away_since_s = None
            return job.spec
        if job.host_away_since_s is None:
            job.host_away_since_s = self._now_s
        until_s = job.host_away_since_s + HOST_GRACE_S
        if until_s > self._now_s:
            self._try_again(job.id, Rank(0), until_s)
        else:
            self._touch(job.id)
            job.spec = replace(job.spec, resume_work_folder="")
        return job.spec

    def _behind(self, ahead: PlacedJob) -> _Reason:
        return _Reason(f"waits behind job {ahead.id}: {self.reason(ahead)}", ahead.id)

    def _place_more(self, jobs: Iterable[PlacedJob], fleet: Fleet, shares: Shares, kept: set[Place]) -> None:
        """Gives slots for which no job waits to jobs that want more ranks, one rank at a time, in turn."""
        num_free = len(set(fleet.free_places()) - kept)
        for job in shares.in_turn(repeat(job, min(num_free, job.num_lacking)) for job in jobs):
            rank = job.places.next_rank if job.num_lacking and shares.room(job) > 0 else None
            places = fleet.take_again(job.id, rank, job.spec, (), kept) if rank is not None else None
            if rank is not None and places is not None:
                self._touch(job.id)
                shares.take(job, 1)
                job.place_again(rank, places, fleet, self._new_incarnation)

    def _place(self, job: PlacedJob, fleet: Fleet, shares: Shares, kept: set[Place]) -> bool:
        """Gives the job its slots; returns False if they are too few, or a group's are not on one host."""
        spec, room = job.spec, shares.room(job)
        groups = fleet.take(job.id, spec, min(spec.num_ranks or room, room), kept)
        if not groups:
            return False
        shares.take(job, len(groups))
        self._touch(job.id)
        if job.refuse_places(len(groups)):
            for place in chain.from_iterable(groups):
                fleet.give_back(place)
        else:
            job.place(groups, fleet, self._new_incarnation)
        self.note(job, self._now_s)
        return True

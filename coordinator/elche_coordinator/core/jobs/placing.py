"""Allocation of free slots: first to ranks to be restarted, then to queued jobs, then to jobs that want more ranks."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from elche_coordinator.core.jobs.notices import quota_notice, slots_notice
from elche_coordinator.core.jobs.placed import PlacedJob
from elche_coordinator.core.jobs.queue import asked, holds_back
from elche_coordinator.core.jobs.shares import Shares
from elche_coordinator.core.messages.events import SlotsAsked
from elche_coordinator.core.messages.ids import Incarnation, JobId, Rank
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import Fleet, Place
from elche_coordinator.core.records.machine import JobPhase


class _Offers:
    """Slots by the conditions of jobs, cached while jobs are placed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.kept: set[Place] = set()
        """Slots that waiting jobs could have, which no job behind them gets."""
        self._offered: dict[tuple[str, ...], set[Place]] = {}
        self._num_slots: dict[tuple[str, ...], int] = {}
        self._num_free: dict[tuple[str, ...], int] = {}

    def num_free(self, spec: JobSpec) -> int:
        """Number of free slots that the job may have."""
        if spec.needs not in self._num_free:
            self._num_free[spec.needs] = len(self._fleet.free_for_one(spec.needs, self.kept))
        return self._num_free[spec.needs]

    def num_slots(self, spec: JobSpec) -> int:
        """Number of slots that meet the job's conditions."""
        if spec.needs not in self._num_slots:
            self._num_slots[spec.needs] = self._fleet.num_slots(spec.needs)
        return self._num_slots[spec.needs]

    def overlap(self, one: JobSpec, other: JobSpec) -> bool:
        """True if there is a slot that both jobs could have."""
        return one.needs == other.needs or not self._of(one).isdisjoint(self._of(other))

    def keep(self, spec: JobSpec) -> None:
        """Keeps the slots that a waiting job could have from jobs behind it."""
        self.kept |= self._of(spec)
        self.change()

    def change(self) -> None:
        """Drops the counts, since slots were taken or kept."""
        self._num_free.clear()

    def _of(self, spec: JobSpec) -> set[Place]:
        if spec.needs not in self._offered:
            self._offered[spec.needs] = set(self._fleet.offered(spec.needs))
        return self._offered[spec.needs]


class Placing:
    """Gives slots to jobs. A queued job for which there are too few keeps what it could use from those behind it."""

    def __init__(
        self,
        touch: Callable[[JobId], PlacedJob | None],
        try_again: Callable[[JobId, Rank, float], None],
        new_incarnation: Callable[[], Incarnation],
    ) -> None:
        """`touch` is called with each job that changes; `try_again` with the time from which a rank may be
        restarted.
        """
        self._touch = touch
        self._try_again = try_again
        self._new_incarnation = new_incarnation
        self._queued: dict[JobId, None] = {}
        """Jobs that may wait for slots; those that do not any more are dropped at the next `place`."""
        self.behind: dict[JobId, JobId] = {}
        """Queued jobs without slots, each with the job before it that waits for the same slots."""
        self._reasons: dict[JobId, str] = {}
        """Reasons of queued jobs."""
        self.asked: list[SlotsAsked] = []
        """Slots that jobs are asked to give to others, as found by the last `place`."""

    def queue(self, job: PlacedJob) -> None:
        """Adds a job to the queue."""
        self._queued[job.id] = None

    def reason(self, job: PlacedJob) -> str:
        """The reason why a queued job waits."""
        if (ahead := self.behind.get(job.id)) is not None:
            return f"waits behind job {ahead}: {self._reasons.get(ahead, '')}"
        return self._reasons.get(job.id, job.reason)

    def place(self, jobs: Mapping[JobId, PlacedJob], fleet: Fleet, quotas: Mapping[str, int], now_s: float) -> None:
        """Allocates slots to all jobs that can have some. Slots that others should give are in `asked`."""
        self._place_missing(jobs.values(), fleet, now_s)
        shares = Shares(jobs, fleet, quotas)
        waiting = self._place_queued(jobs, fleet, shares, now_s)
        kept = {place for job in waiting for place in fleet.free_places(job.spec.needs)}
        self._place_more(jobs.values(), fleet, shares, kept)
        self.asked = []
        for job in waiting:
            busy = {one.job_id for one in self.asked}
            others = [one for one in jobs.values() if one.id not in busy]
            self.asked += asked(job, others, fleet, shares)

    def _place_missing(self, jobs: Iterable[PlacedJob], fleet: Fleet, now_s: float) -> None:
        """Gives free slots to ranks to be restarted."""
        for job in jobs:
            for rank, at_s in list(job.missing.items()):
                if at_s > now_s:
                    self._try_again(job.id, rank, at_s)
                    continue
                places = fleet.take_again(job.id, rank, job.spec, job.ranks[rank].places)
                if places is not None:
                    self._touch(job.id)
                    job.place_again(rank, places, fleet, self._new_incarnation)

    def _place_queued(
        self, jobs: Mapping[JobId, PlacedJob], fleet: Fleet, shares: Shares, now_s: float
    ) -> list[PlacedJob]:
        """Gives free slots to queued jobs, in order. Returns waiting jobs for which there are enough slots in all."""
        self.behind.clear()
        self._reasons.clear()
        queued = [jobs[job_id] for job_id in self._queued if job_id in jobs]
        queued = [job for job in queued if job.phase is JobPhase.QUEUED]
        self._queued = dict.fromkeys(job.id for job in queued)
        if not queued:
            return []
        waiting: list[PlacedJob] = []
        offers = _Offers(fleet)
        for job in shares.in_turn(queued):
            spec = job.spec
            if job.retry_at_s > now_s:
                self._try_again(job.id, Rank(0), job.retry_at_s)
            elif job.roster.num_living:
                pass  # processes of its previous attempt have not all ended
            elif shares.room(job) < spec.least_ranks:
                self._reasons[job.id] = quota_notice(spec, shares.held(job), shares.quota(job))
            elif offers.num_free(spec) >= spec.least_ranks * spec.group_size and self._place(
                job, fleet, shares, offers.kept
            ):
                offers.change()
            else:
                ahead = next((one for one in waiting if offers.overlap(spec, one.spec)), None)
                num_free = 0 if ahead is not None else offers.num_free(spec)  # one job's journal lacks the others
                self._reasons[job.id] = slots_notice(
                    spec,
                    num_free,
                    offers.num_slots(spec),
                    is_possible=not spec.is_loop or holds_back(job, fleet),
                    has_older=spec.is_loop and fleet.num_slots(spec.conditions) > offers.num_slots(spec),
                )
                if ahead is not None:
                    self.behind[job.id] = ahead.id
                elif holds_back(job, fleet):
                    waiting.append(job)
                    offers.keep(spec)
        return waiting

    def _place_more(self, jobs: Iterable[PlacedJob], fleet: Fleet, shares: Shares, kept: set[Place]) -> None:
        """Gives slots for which no job waits to jobs that want more ranks, one rank at a time, in turn."""
        num_free = len(set(fleet.free_places()) - kept)
        for job in shares.in_turn(one for one in jobs for _ in range(min(num_free, one.num_lacking))):
            rank = job.next_rank if job.num_lacking and shares.room(job) > 0 else None
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
        return True

"""One record per rank: who it is, how fast it is, how far it has come."""

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median
from typing import TypedDict

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.commands import RankCommand
from elche_coordinator.core.messages.events import Gauges, RankEvent
from elche_coordinator.core.messages.ids import AgentId, Incarnation, JobId, Rank
from elche_coordinator.core.messages.spec import Build, HeaderRow
from elche_coordinator.core.records.fleet import Place
from elche_coordinator.core.records.histogram import BATCH_SECONDS, Histogram
from elche_coordinator.core.records.machine import (
    DEPARTURES,
    Departure,
    DepartureTrigger,
    Machine,
    Model,
    RankPhase,
    RankTrigger,
    rank_machine,
)

NO_GAUGES = Gauges()
WINDOW = 32
"""Batch times whose mean is a rank's present speed. With 10 % jitter this loses 1.5 % of the bound in the simulator;
the median of the last five times, which follows a change as fast but is noisier, loses 3.4 %."""
RECENT = 5
"""The newest batch times: when their median differs from the window's by more than `CHANGE_FRACTION`, the speed has
changed, and older times are dropped."""
CHANGE_FRACTION = 0.3
OUTLIER_FACTOR = 2.0
"""A batch counts at most this many times the median, so that one pause does not look like a slower device."""


class Address(TypedDict):
    """Whom a command is for."""

    job_id: JobId
    rank: Rank
    incarnation: Incarnation


def address_of(message: RankEvent | RankCommand) -> Address:
    """Whose event it is, or for whom the command."""
    return {"job_id": message.job_id, "rank": message.rank, "incarnation": message.incarnation}


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """What the coordinator knows of one incarnation of a rank."""

    rank: Rank
    incarnation: Incarnation
    agent_id: AgentId
    slot: int
    host: str
    device: str
    more_slots: tuple[int, ...] = ()
    """Of a replica group: those of its other processes, by position from 1."""
    slot_devices: tuple[str, ...] = ()
    """The device of each of its processes."""
    folder: str = ""
    """Identifies the work folder of its agent; empty: not known."""
    log_path: str = ""
    links_address: str = ""
    """Where other ranks can try whether they reach it; empty before it is ready."""
    settings: AgreedSettings | None = None
    life: Machine[RankPhase, RankTrigger] = field(default_factory=rank_machine)
    departure: Departure = Departure.STAYS
    """Whether, and how, it is to go."""
    model: Model = Model.START
    num_before: int = 0
    """Processes that were this rank before."""
    earlier_batches: int = 0
    """Committed by earlier incarnations of the rank."""

    local_step: int = 0
    """Batches trained, as reported."""
    ms_per_batch: float | None = None
    """Present time per batch, the wait for its data included; None before the first batch."""
    reported_at_s: float = 0.0
    """When `local_step` was true."""
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num_fresh: int = 0
    """How many of these are of after the last round without work."""
    is_first_kept: bool = False
    """Whether the first of these is the process's first batch."""
    gauges: Gauges = NO_GAUGES
    """Its device and loop, as last reported."""
    loss: float | None = None
    """Mean over the last batches whose losses it has reported."""
    durations: Histogram = field(default_factory=lambda: Histogram(BATCH_SECONDS))
    """Times of its batches, waits for data included."""
    num_samples: int = 0
    """Committed."""
    num_made: int = 0
    """Samples that its process has trained, as far as is known."""
    data_wait_ms: float = 0.0
    """Since its session began."""
    build: Build | None = None
    batch_size: int = 1
    """Samples in each of its batches."""

    limit_step: int = 0
    """How many batches it has been allowed in all; 0 while there is no limit."""
    base_step: int = 0
    """Batches that the last committed round contained."""
    compute_ms: float = 0.0
    """Compute time of all committed batches."""
    base_data_wait_ms: float = 0.0
    """`data_wait_ms` at the last committed round; its pace counts both."""
    waited_ms: float = 0.0
    callback_errors: int = 0
    """How often the job's callbacks have raised there."""
    divergence: float | None = None
    """L2 of what the last round changed, relative to its result; None where that was not measured."""

    discarded_in_a_row: int = 0
    """Of the last averages that it brought samples to, those that it was left out of."""
    evaluation_ms: float = 0.0
    """How long the last evaluation took here; 0 before the first."""
    evaluated_ms: float = 0.0
    """Time of all of them."""

    @property
    def tells_losses_at_rounds(self) -> bool:
        """True if its losses stay on the device until a round."""
        return self.build is not None and self.build.device_type != "cpu"

    @property
    def places(self) -> tuple[Place, ...]:
        """The slots that it has, its own first."""
        return tuple(Place(agent_id=self.agent_id, slot=slot) for slot in (self.slot, *self.more_slots))

    def address(self, job_id: JobId) -> "Address":
        """The fields that send a command to this incarnation."""
        return {"job_id": job_id, "rank": self.rank, "incarnation": self.incarnation}

    @property
    def phase(self) -> RankPhase:
        """Where the rank is in its life."""
        return self.life.phase

    @property
    def is_connected(self) -> bool:
        """True if the rank has opened its session and not left."""
        return self.phase not in (RankPhase.STARTING, RankPhase.EXITED)

    def departs(self, trigger: DepartureTrigger) -> None:
        """Moves it along `DEPARTURES`; a trigger without a row there changes nothing."""
        self.departure = DEPARTURES.get((self.departure, trigger), self.departure)

    @property
    def is_present(self) -> bool:
        """True while it trains with the others: it has not exited, and nobody has told it to."""
        return self.phase is not RankPhase.EXITED and self.departure in (Departure.STAYS, Departure.LEAVING)

    @property
    def is_ending(self) -> bool:
        """True once it was told to exit; what it says afterwards of its work does not count."""
        return self.departure not in (Departure.STAYS, Departure.LEAVING)

    @property
    def is_done_without(self) -> bool:
        """True once the others go on without it, though its process may still run."""
        return self.departure in (Departure.DISMISSED, Departure.LEFT_OUT)

    @property
    def has_model(self) -> bool:
        """True from its first committed round on: others can get the job's present model from it."""
        return self.model is Model.PRESENT

    @property
    def num_batches(self) -> int:
        """Committed by all incarnations of the rank."""
        return self.earlier_batches + self.base_step

    @property
    def round_batches(self) -> int:
        """Batches since the last committed round."""
        return self.local_step - self.base_step

    def take_over(self, before: "RankRecord") -> None:
        """What an earlier process of the rank has done; its speed too, on the same device."""
        self.num_before = before.num_before + 1
        self.earlier_batches, self.num_samples = before.num_batches, before.num_samples
        self.compute_ms, self.waited_ms, self.durations = before.compute_ms, before.waited_ms, before.durations
        if (before.agent_id, before.slot) == (self.agent_id, self.slot):
            self.ms_per_batch = before.ms_per_batch

    def on_batches(self, local_step: int, batch_ms: tuple[float, ...], now_s: float) -> None:
        """Takes in a progress report. Old news changes nothing."""
        if local_step <= self.local_step:
            return
        is_first = self.local_step == 0
        self.local_step, self.reported_at_s = local_step, now_s
        self.durations.extend(ms / 1000 for ms in batch_ms)
        known = [ms for ms in batch_ms if 0 < ms < inf]
        if not known:
            return
        self._take_times(known, is_first=is_first)

    def _take_times(self, batch_ms: list[float], *, is_first: bool) -> None:
        """Learns the rank's speed. What is not training, such as the first batch, which compiles, does not count once
        there is another; nor does what was before a time without work, when the first batches after it differ from it.
        """
        self.recent_ms.extend(batch_ms)
        self.is_first_kept |= is_first
        if self.is_first_kept and len(self.recent_ms) > 1:
            self.recent_ms.popleft()
            self.is_first_kept = False
        self.num_fresh += len(batch_ms)
        newest = list(self.recent_ms)[-min(RECENT, self.num_fresh) :]
        if abs(median(newest) / median(self.recent_ms) - 1) > CHANGE_FRACTION:
            self.recent_ms = deque(newest, maxlen=WINDOW)
        limit_ms = OUTLIER_FACTOR * median(self.recent_ms)
        self.ms_per_batch = fmean(min(ms, limit_ms) for ms in self.recent_ms)

    def note_made(self, num_samples: int) -> int:
        """Its process has trained so many in all; returns how many of them are new."""
        before, self.num_made = self.num_made, max(self.num_made, num_samples)
        return self.num_made - before

    def take_data_wait_ms(self) -> float:
        """Time in ms that it has waited for data since the last call, as reported."""
        waited_ms = self.data_wait_ms - self.base_data_wait_ms
        self.base_data_wait_ms = self.data_wait_ms
        return waited_ms

    def on_committed(self, row: HeaderRow, waited_ms: float, now_s: float) -> int:
        """Takes in its part of a committed round; returns the batches in it."""
        num_batches = row.local_step - self.base_step
        self.num_fresh = self.num_fresh if num_batches else 0
        self.base_step = row.local_step
        self.model = Model.PRESENT
        if num_batches > 0 and self.ms_per_batch is None and row.compute_us > 0:
            self.ms_per_batch = row.compute_us / 1000 / num_batches  # the round was shorter than a report's interval
        if row.local_step >= self.local_step:
            self.local_step, self.reported_at_s = row.local_step, now_s
        self.compute_ms += row.compute_us / 1000
        self.waited_ms += waited_ms
        return num_batches


RankRecords = dict[Rank, RankRecord]
"""The ranks of a generation, in the order of a header's rows."""


def staying(ranks: RankRecords) -> RankRecords:
    """Present ranks that are not about to leave."""
    return {
        rank: record
        for rank, record in ranks.items()
        if record.departure is Departure.STAYS and record.phase is not RankPhase.EXITED
    }


def num_hosts(ranks: RankRecords) -> int:
    """On how many hosts they are; two agents of one machine count as two."""
    return len({record.agent_id for record in ranks.values()})


def highest_staying(ranks: RankRecords, num: int) -> list[RankRecord]:
    """The `num` highest ranks that stay, the highest first."""
    stay = staying(ranks)
    return [stay[rank] for rank in sorted(stay, reverse=True)[:num]]


def present(ranks: RankRecords) -> RankRecords:
    """Ranks that train, or are about to: neither exited nor told to."""
    return {rank: record for rank, record in ranks.items() if record.is_present}


def fastest(members: RankRecords) -> Rank:
    """The present rank with the shortest batches; the first of those that are alike, or not measured."""
    there = present(members) or members
    return min(there.values(), key=lambda record: (_speed(record), record.rank)).rank


def _speed(record: RankRecord) -> float:
    return inf if record.ms_per_batch is None else record.ms_per_batch

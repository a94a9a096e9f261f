"""Records of ranks: identity, speed and progress."""

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from statistics import fmean, median
from typing import TypedDict

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.commands import RankCommand
from elche_coordinator.core.messages.events import Gauges, RankEvent
from elche_coordinator.core.messages.ids import AgentId, Incarnation, JobId, Rank, RoundId
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
    """The incarnation to which a command goes."""

    job_id: JobId
    rank: Rank
    incarnation: Incarnation


def address_of(message: RankEvent | RankCommand) -> Address:
    """The address of an event's or command's incarnation."""
    return {"job_id": message.job_id, "rank": message.rank, "incarnation": message.incarnation}


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """The coordinator's record of one incarnation of a rank."""

    job_id: JobId
    rank: Rank
    incarnation: Incarnation
    agent_id: AgentId
    slot: int
    """Index in the slots of its agent; of a replica group the leader's."""
    host: str
    device: str
    """As text for people."""
    more_slots: tuple[int, ...] = ()
    """Slots of a replica group's other processes, by position from 1."""
    slot_devices: tuple[str, ...] = ()
    """The device of each of its processes."""
    folder: str = ""
    """Id of its agent's work folder; empty: unknown."""
    log_path: str = ""
    exit_code: int | None = None
    """As its agent has reported it, negative for a signal; None while the process runs, and if its host was lost."""
    links_address: str = ""
    """HOST:PORT at which other ranks can test if they reach it; empty before it is ready."""
    settings: AgreedSettings | None = None
    """Those of its file; None before it is ready."""
    life: Machine[RankPhase, RankTrigger] = field(default_factory=rank_machine)
    departure: Departure = Departure.STAYS
    """If, and how, it is to leave."""
    model: Model = Model.START
    num_before: int = 0
    """Number of earlier processes of this rank."""
    earlier_batches: int = 0
    """Batches committed by earlier incarnations of the rank."""

    local_step: int = 0
    """Batches trained, as reported; it never falls, and is at least `base_step`."""
    ms_per_batch: float | None = None
    """Present time per batch in ms, including the wait for its data; None before the first batch."""
    reported_at_s: float = 0.0
    """Time of the last report of `local_step`."""
    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Newest batch times in ms, oldest first, from which `ms_per_batch` follows."""
    usual_ms: float | None = None
    """Median of `recent_ms`; None when there are none."""
    longest_ms: float = 0.0
    """Longest of `recent_ms`; 0 when there are none."""
    num_fresh: int = 0
    """Number of batch times since the last round in which the rank had no work; may exceed those in `recent_ms`."""
    is_first_kept: bool = False
    """True if the first of `recent_ms` is the process's first batch, which takes longer than others."""
    gauges: Gauges = NO_GAUGES
    """Its device and loop, as last reported."""
    loss: float | None = None
    """Mean loss of the last reported batches."""
    durations: Histogram = field(default_factory=lambda: Histogram(BATCH_SECONDS))
    """Histogram of its batch times, including waits for data."""
    num_samples: int = 0
    """Samples committed by all incarnations of the rank."""
    num_made: int = 0
    """Samples that its process has trained, as reported."""
    data_wait_ms: float = 0.0
    """Time in ms in which it has waited for data since its session began, as reported."""
    build: Build | None = None
    """None before it is ready."""
    batch_size: int = 1
    """Samples in each of its batches."""

    limit_step: int = 0
    """The limit that it was sent, as a local step; 0 while there is none."""
    base_step: int = 0
    """Local step at the last committed round."""
    compute_ms: float = 0.0
    """Compute time in ms of all committed batches."""
    base_data_wait_ms: float = 0.0
    """`data_wait_ms` at the last committed round; its pace counts both."""
    waited_ms: float = 0.0
    """Time in ms for which committed rounds have kept it from training, over all incarnations."""
    callback_errors: int = 0
    """Number of errors of the job's callbacks on it."""
    divergence: float | None = None
    """L2 distance of its values from the last round's result, relative to the result; None if not measured."""

    stopped_round: RoundId | None = None
    """Once its process has stopped without a coordinator: the round whose result it has left as a draft, or 0."""
    discarded_in_a_row: int = 0
    """Averages in a row that left the rank out although it brought samples."""
    evaluation_ms: float = 0.0
    """Duration in ms of the last evaluation here; 0 before the first."""
    evaluated_ms: float = 0.0
    """Total duration of its evaluations, in ms."""

    @property
    def reports_losses_at_rounds(self) -> bool:
        """True if its losses stay on the device until a round, so that progress reports lack them."""
        return self.build is not None and self.build.device_type != "cpu"

    @property
    def places(self) -> tuple[Place, ...]:
        """Its slots, the leader's first."""
        return _places(self.agent_id, (self.slot, *self.more_slots))

    @property
    def address(self) -> Address:
        """The address of commands to this incarnation."""
        return {"job_id": self.job_id, "rank": self.rank, "incarnation": self.incarnation}

    @property
    def phase(self) -> RankPhase:
        """The rank's phase."""
        return self.life.phase

    def is_in_job_folder(self, path: str) -> bool:
        """True if the path is in the job's folder on its host, where its log is too."""
        job_folder = self.log_path.rpartition("/")[0]
        return bool(job_folder) and path.startswith(f"{job_folder}/")

    @property
    def is_connected(self) -> bool:
        """True if the rank has opened its session and not left."""
        return self.phase not in (RankPhase.STARTING, RankPhase.EXITED)

    def departs(self, trigger: DepartureTrigger) -> None:
        """Moves its departure along `DEPARTURES`; ignores a trigger without a row there."""
        self.departure = DEPARTURES.get((self.departure, trigger), self.departure)

    @property
    def is_present(self) -> bool:
        """True while it has neither exited nor been told to."""
        # `life.phase`: each death asks this of all ranks.
        return self.life.phase is not RankPhase.EXITED and self.departure in (Departure.STAYS, Departure.LEAVING)

    @property
    def is_ending(self) -> bool:
        """True once it was told to exit; later reports of work are refused."""
        return self.departure not in (Departure.STAYS, Departure.LEAVING)

    @property
    def is_done_without(self) -> bool:
        """True once the others go on without it, though its process may still run."""
        return self.departure in (Departure.DISMISSED, Departure.LEFT_OUT)

    @property
    def has_model(self) -> bool:
        """True once it has the result of a committed round, and so the job's present model."""
        return self.model is Model.PRESENT

    @property
    def num_batches(self) -> int:
        """Batches committed by all incarnations of the rank."""
        return self.earlier_batches + self.base_step

    @property
    def round_batches(self) -> int:
        """Batches since the last committed round."""
        return self.local_step - self.base_step

    def take_over(self, before: "RankRecord") -> None:
        """Takes over the figures of the rank's previous process; its speed only on the same device."""
        self.num_before = before.num_before + 1
        self.earlier_batches, self.num_samples = before.num_batches, before.num_samples
        self.compute_ms, self.waited_ms, self.durations = before.compute_ms, before.waited_ms, before.durations
        if (before.agent_id, before.slot) == (self.agent_id, self.slot):
            self.ms_per_batch = before.ms_per_batch

    def on_batches(self, local_step: int, batch_ms: tuple[float, ...], now_s: float) -> None:
        """Records a progress report. Ignores stale reports."""
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
        """Learns the rank's speed. The first batch, in which code is compiled, does not count once there is another.
        Times from before a pause without work do not count if the first batches after it differ from them: the device
        may have become slower or faster meanwhile.
        """
        self.recent_ms.extend(batch_ms)
        self.is_first_kept |= is_first
        if self.is_first_kept and len(self.recent_ms) > 1:
            self.recent_ms.popleft()
            self.is_first_kept = False
        self.num_fresh += len(batch_ms)
        newest = list(self.recent_ms)[-min(RECENT, self.num_fresh) :]
        newest_ms, self.usual_ms = median(newest), median(self.recent_ms)
        if abs(newest_ms / self.usual_ms - 1) > CHANGE_FRACTION:
            self.recent_ms, self.usual_ms = deque(newest, maxlen=WINDOW), newest_ms
        self.longest_ms, limit_ms = max(self.recent_ms), OUTLIER_FACTOR * self.usual_ms
        self.ms_per_batch = fmean([min(ms, limit_ms) for ms in self.recent_ms])

    def note_made(self, num_samples: int) -> int:
        """Records the samples that its process has trained in all; returns the number of new ones."""
        before, self.num_made = self.num_made, max(self.num_made, num_samples)
        return self.num_made - before

    def take_data_wait_ms(self) -> float:
        """Reported time in ms of waits for data since the last call."""
        waited_ms = self.data_wait_ms - self.base_data_wait_ms
        self.base_data_wait_ms = self.data_wait_ms
        return waited_ms

    def on_committed(self, row: HeaderRow, waited_ms: float, now_s: float) -> int:
        """Records its part of a committed round; returns the batches in it."""
        num_batches = row.local_step - self.base_step
        self.num_fresh = self.num_fresh if num_batches else 0
        self.base_step = row.local_step
        self.model = Model.PRESENT
        if num_batches > 0 and self.ms_per_batch is None and row.compute_us > 0:
            self.ms_per_batch = row.compute_us / 1000 / num_batches  # the round was shorter than a report's interval
        # A rank that trains on while it averages has reported more than the round contains.
        if row.local_step >= self.local_step:
            self.local_step, self.reported_at_s = row.local_step, now_s
        self.compute_ms += row.compute_us / 1000
        self.waited_ms += waited_ms
        return num_batches


RankRecords = dict[Rank, RankRecord]
"""The ranks of a generation, in the order of a header's rows (`host_by_host`)."""


def staying(ranks: RankRecords) -> RankRecords:
    """Present ranks that are not about to leave."""
    return {
        rank: record
        for rank, record in ranks.items()
        if record.departure is Departure.STAYS and record.phase is not RankPhase.EXITED
    }


def num_hosts(ranks: RankRecords) -> int:
    """Number of their hosts; two agents of one machine count as two."""
    return len({record.agent_id for record in ranks.values()})


def host_by_host(ranks: RankRecords) -> RankRecords:
    """These ranks in rank order, but those of one host in a row, after its first. Collectives go around a ring in this
    order, so that each host sends its part to one other, however often ranks were replaced or added.
    """
    first: dict[AgentId, Rank] = {}
    for rank in sorted(ranks):
        first.setdefault(ranks[rank].agent_id, rank)
    return {rank: ranks[rank] for rank in sorted(ranks, key=lambda rank: (first[ranks[rank].agent_id], rank))}


def highest_staying(ranks: RankRecords, num: int) -> list[RankRecord]:
    """The `num` highest ranks that stay, the highest first."""
    stay = staying(ranks)
    return [stay[rank] for rank in sorted(stay, reverse=True)[:num]]


@lru_cache(maxsize=4096)
def _places(agent_id: AgentId, slots: tuple[int, ...]) -> tuple[Place, ...]:
    return tuple(Place(agent_id=agent_id, slot=slot) for slot in slots)


def present(ranks: RankRecords) -> RankRecords:
    """Ranks that have neither exited nor been told to."""
    return {rank: record for rank, record in ranks.items() if record.is_present}


def fastest(members: RankRecords) -> Rank:
    """The present rank with the shortest batches; the first of equal or unmeasured ones."""
    there = present(members) or members
    times = {rank: inf if record.ms_per_batch is None else record.ms_per_batch for rank, record in there.items()}
    return min(there, key=lambda rank: (times[rank], rank))

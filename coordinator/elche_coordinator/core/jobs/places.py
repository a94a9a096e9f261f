"""The ranks that a job should have, and their slots: starts ranks, and records missing ones."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from elche_coordinator.core.messages.commands import StartRank
from elche_coordinator.core.messages.ids import Incarnation, Rank
from elche_coordinator.core.messages.spec import JobSpec
from elche_coordinator.core.records.fleet import Fleet, Place
from elche_coordinator.core.records.machine import JobPhase, Model, RankPhase
from elche_coordinator.core.records.outbox import Outbox
from elche_coordinator.core.records.ranks import RankRecord, staying
from elche_coordinator.core.records.roster import Roster

NextIncarnation = Callable[[], Incarnation]


class Places:
    """Starts a job's ranks. `num_wanted` is their number; 0 until it is placed, if the submission has none."""

    def __init__(self, roster: Roster, outbox: Outbox, num_wanted: int) -> None:
        self.num_wanted = num_wanted
        self.missing: dict[Rank, float] = {}
        """Ranks to restart, with the earliest time of each."""
        self._roster = roster
        self._outbox = outbox

    def place(
        self, groups: list[tuple[Place, ...]], spec: JobSpec, fleet: Fleet, next_incarnation: NextIncarnation
    ) -> None:
        """Starts one rank in each place, or group of places of one host, and no others."""
        self._roster.clear()  # drops ranks of the previous attempt
        self.num_wanted = spec.num_ranks or len(groups)
        loop_slots = tuple(places[0].slot for places in groups) if spec.is_loop else ()
        for index, places in enumerate(groups):
            self._start(Rank(index), places, fleet, next_incarnation(), spec, Model.START, loop_slots=loop_slots)

    def add(
        self,
        rank: Rank,
        places: tuple[Place, ...],
        spec: JobSpec,
        fleet: Fleet,
        next_incarnation: NextIncarnation,
        *,
        phase: JobPhase,
    ) -> None:
        """Restarts a rank, or adds one. In a job that is starting it begins as the others; later it gets their model,
        not the job's checkpoint.
        """
        self.missing.pop(rank, None)
        model = Model.START
        if phase is not JobPhase.STARTING:
            model = Model.NONE if spec.resume else Model.START
            # Others train on beyond that checkpoint: to load it would only cost time, and the host may not have it.
            spec = replace(spec, resume="")
        self._start(rank, places, fleet, next_incarnation(), spec, model, warms_up=phase is JobPhase.TRAINING)

    def _start(
        self,
        rank: Rank,
        places: tuple[Place, ...],
        fleet: Fleet,
        incarnation: Incarnation,
        spec: JobSpec,
        model: Model,
        *,
        warms_up: bool = False,
        loop_slots: tuple[int, ...] = (),
    ) -> None:
        first, *others = places
        agent = fleet.agents[first.agent_id]
        devices = tuple(agent.slots[place.slot].device for place in places)
        record = RankRecord(
            job_id=self._outbox.job_id,
            rank=rank,
            incarnation=incarnation,
            agent_id=first.agent_id,
            slot=first.slot,
            more_slots=tuple(place.slot for place in others),
            host=agent.host,
            folder=agent.folder,
            device=f"{len(devices)}x {devices[0].partition(':')[0]}" if others else devices[0],
            slot_devices=devices,
            life=self._roster.new_life(),
            model=model,
        )
        self._roster.add(record)
        self._outbox.add(
            StartRank(
                **record.address,
                agent_id=first.agent_id,
                slot=first.slot,
                more_slots=record.more_slots,
                spec=spec,
                warms_up=warms_up,
                loop_slots=loop_slots,
            )
        )

    def need_again(self, rank: Rank, at_s: float) -> None:
        """Notes that the lost rank should be restarted from `at_s` on, unless there are enough ranks."""
        if self.num_held < self.num_wanted:
            self.missing[rank] = at_s

    def want(self, num_ranks: int) -> int:
        """Sets the number of ranks. Returns how many of the staying ranks are too many."""
        self.num_wanted = num_ranks
        for rank in sorted(self.missing, reverse=True)[: max(0, self.num_held - num_ranks)]:
            del self.missing[rank]
        return max(0, len(staying(self._roster.ranks)) + len(self.missing) - num_ranks)

    @property
    def num_held(self) -> int:
        """Number of ranks that run or will be restarted."""
        return self._roster.num_living + len(self.missing)

    @property
    def num_lacking(self) -> int:
        """Number of ranks to add."""
        return max(0, self.num_wanted - self.num_held)

    @property
    def num_without_leaving(self) -> int:
        """Number of ranks to add if all that run leave."""
        return max(0, self.num_wanted - len(self.missing))

    @property
    def next_rank(self) -> Rank:
        """The rank to add next: the lowest unused one."""
        living = {rank for rank, one in self._roster.ranks.items() if one.phase is not RankPhase.EXITED}
        taken = living | self.missing.keys()
        return next(rank for rank in map(Rank, count()) if rank not in taken)

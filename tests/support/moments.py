"""Moments in jobs' lives, and each event as it would come then: what the table of all outcomes is made of."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elche.settings import AgreedSettings
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.jobs.managed_job import ManagedJob
from elche_coordinator.core.messages import events as ev
from elche_coordinator.core.messages.ids import AgentId, GenerationId, Incarnation, JobId, Rank, RoundId, Version
from elche_coordinator.core.messages.spec import EpochWork, HeaderRow, JobSpec, Slot
from elche_coordinator.core.records.machine import Departure, JobPhase
from support.stories import at_phase, in_mid_training
from support.watched import LONG_ROUNDS, WatchedCoordinator, WatchedSimulation, ranks

JOB = JobId("job")
SETTINGS = AgreedSettings(
    dataset_size=3_000,
    batch_size=10,
    epochs=2,
    has_evaluation=True,
    checkpoint_every_epochs=1,
    checkpoint_every_minutes=None,
    ride_out_s=0.0,
    **LONG_ROUNDS,
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A coordinator as it is then, and the job of which events tell."""

    name: str
    now_s: float
    core: bytes

    def again(self) -> Coordinator:
        """The coordinator at this moment."""
        core: Coordinator = pickle.loads(self.core)
        return core


def moments() -> Iterator[Moment]:
    """All of them, in the order of a job's life."""
    yield Moment("the job is not known", 0.0, pickle.dumps(WatchedCoordinator()))
    for name, reach in REACH.items():
        simulation = WatchedSimulation(settings=SETTINGS, ranks=ranks(25.0, 57.5), start_ms=10.0, build_ms=10.0)
        reach(simulation)
        yield Moment(name, simulation.clock.now_s, pickle.dumps(simulation.core))
    for name, core in _submitted():
        yield Moment(name, 0.0, pickle.dumps(core))
    yield Moment("an attached loop", 0.0, pickle.dumps(_attached(is_open=True)))
    yield Moment("an attached loop, ended", 0.0, pickle.dumps(_attached(is_open=False)))


def _queued(simulation: WatchedSimulation) -> None:
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=2)
    simulation.handle(ev.JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0))


def _attached(*, is_open: bool) -> Coordinator:
    spec = JobSpec(name="loop", source_hash="", file_name="", num_ranks=2)
    core, devices = WatchedCoordinator(), (("host", "cpu"), ("host", "cpu"))
    core.handle(ev.LoopAttached(job_id=JOB, spec=spec, ranks=devices, policy="", submitted_at=0.0), now_s=0.0)
    addresses = core.addresses(JOB)
    for address in addresses:
        core.handle(ev.SessionOpened(**address), now_s=0.0)
    for address in addresses if not is_open else ():
        core.handle(ev.LoopLeft(**address), now_s=0.0)
    return core


def _submitted() -> Iterator[tuple[str, Coordinator]]:
    """A loop that is submitted, from its queue to its end."""
    spec = JobSpec(name="loop", source_hash="hash", file_name="loop.py", num_ranks=2, is_loop=True)
    core, host, slots = WatchedCoordinator(), AgentId("host"), (Slot(device="cpu"),) * 2
    core.handle(ev.JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0), now_s=0.0)
    yield "a submitted loop, queued", core
    core.handle(ev.AgentJoined(agent_id=host, host="host", slots=slots), now_s=0.0)
    addresses = core.addresses(JOB)
    yield "a submitted loop, starting", core
    for address in addresses:
        core.handle(ev.RankStarted(**address, agent_id=host, log_path="/log"), now_s=0.0)
        core.handle(ev.SessionOpened(**address), now_s=0.0)
        core.handle(ev.LoopBegan(**address, policy="El Che"), now_s=0.0)
    yield "a submitted loop", core
    core.handle(ev.JobCancelled(job_id=JOB), now_s=0.0)
    yield "a submitted loop, stopping", core
    for address in addresses:
        core.handle(ev.RankExited(**address, agent_id=host, exit_code=0), now_s=0.0)
    yield "a submitted loop, ended", core


def _entered(number: int) -> Callable[[WatchedSimulation], None]:
    def reach(simulation: WatchedSimulation) -> None:
        in_mid_training(simulation)

        def is_there() -> bool:
            opened = simulation.generation.rounds[0]
            return len(opened.entered) == number and not opened.results

        simulation.run_until(is_there)

    return reach


def _received(simulation: WatchedSimulation) -> None:
    in_mid_training(simulation)
    simulation.run_until(lambda: any(list(opened.results) == [Rank(0)] for opened in simulation.generation.rounds))


def _regrouping(simulation: WatchedSimulation) -> None:
    in_mid_training(simulation)
    simulation.kill(1)
    simulation.run_until(lambda: simulation.generation.abandoned is not None)


def _forming(simulation: WatchedSimulation) -> None:
    _regrouping(simulation)
    simulation.run_until(lambda: simulation.job.run.membership.forming is not None)  # type: ignore[union-attr]


def _paused(simulation: WatchedSimulation) -> None:
    in_mid_training(simulation)
    simulation.handle(ev.PauseRequested(job_id=JOB, is_paused=True))
    simulation.run_until(lambda: not simulation.generation.rounds)


def _leaving(simulation: WatchedSimulation) -> None:
    in_mid_training(simulation)
    simulation.handle(ev.LeaveRequested(**simulation.processes[Rank(0)].address))


def _dismissed(simulation: WatchedSimulation) -> None:
    _leaving(simulation)
    simulation.run_until(lambda: simulation.job.ranks[Rank(0)].departure is Departure.DISMISSED)


def _left_out(simulation: WatchedSimulation) -> None:
    in_mid_training(simulation)
    simulation.freeze(0)
    simulation.run_until(lambda: simulation.job.ranks[Rank(0)].departure is Departure.LEFT_OUT)


def _gone_back(simulation: WatchedSimulation) -> None:
    in_mid_training(simulation)
    simulation.handle(ev.DrainRequested(agent_id=AgentId("host"), is_drained=True))
    simulation.kill(0)
    simulation.kill(1)
    at_phase(simulation, JobPhase.QUEUED)


def _cancelled(simulation: WatchedSimulation) -> None:
    in_mid_training(simulation)
    simulation.handle(ev.JobCancelled(job_id=JOB))


def _ended(simulation: WatchedSimulation) -> None:
    simulation.run()


REACH: dict[str, Callable[[WatchedSimulation], None]] = {
    "queued": _queued,
    "starting": lambda simulation: at_phase(simulation, JobPhase.STARTING),
    "grouping": lambda simulation: at_phase(simulation, JobPhase.GROUPING),
    "first round": lambda simulation: at_phase(simulation, JobPhase.TRAINING),
    "training": in_mid_training,
    "one in a round": _entered(1),
    "both in a round": _entered(2),
    "one has the result": _received,
    "one asked to leave": _leaving,
    "one dismissed": _dismissed,
    "one left out": _left_out,
    "paused": _paused,
    "one has died": _regrouping,
    "regrouping": _forming,
    "gone back": _gone_back,
    "finishing": lambda simulation: at_phase(simulation, JobPhase.FINISHING),
    "stopping": _cancelled,
    "ended": _ended,
}


def given(core: Coordinator) -> dict[str, ev.Event]:
    """Each event by its name, of rank 0, its present process, its generation and its open round."""
    job = core.jobs.get(JOB)
    record = job.ranks.get(Rank(0)) if job is not None else None
    generation = job.generation_id if job is not None else GenerationId(1)
    standing = job.run.generation if isinstance(job, ManagedJob) else None
    round_id = standing.rounds[0].id if standing is not None and standing.rounds else RoundId(1)
    header = () if standing is None else tuple(_row(core, rank) for rank in standing.members)
    host = AgentId("host")
    address: Any = {"job_id": JOB, "rank": Rank(0), "incarnation": record.incarnation if record else Incarnation(1)}
    settings = (
        record.settings
        if record is not None and record.settings is not None
        else AgreedSettings(dataset_size=100, batch_size=10, epochs=1)
    )
    step = record.local_step + 1 if record is not None else 1
    num_made = record.num_made + 10 if record is not None else 10
    spec = JobSpec(name="job", source_hash="", file_name="", num_ranks=2)
    of_round = {**address, "generation": generation, "round": round_id}
    work = EpochWork(epoch=0, num_batches=1, num_samples=10, loss_sum=1.0)
    all_of_them: list[ev.Event] = [
        ev.BatchesTrained(**address, local_step=step, num_processed=num_made, batch_ms=(25.0,)),
        ev.ReserveRecalled(**address, num_samples=0),
        ev.RoundEntered(**of_round),
        ev.ResultReceived(**of_round, header=header, collective_ms=5.0),
        ev.HeaderReported(**of_round, header=header),
        ev.RoundFailed(**of_round, reason="it broke"),
        ev.RankReady(**address, settings=settings, device="cpu"),
        ev.GroupFormed(**address, generation=generation),
        ev.GenerationAbandoned(**address, generation=generation, reason="a collective failed"),
        ev.PingSent(**address),
        ev.PingAnswered(**address),
        ev.LeaveRequested(**address),
        ev.RankStopped(**address, round=round_id),
        ev.LinksProbed(**address, ranks=(Rank(1),)),
        ev.EvaluationDone(**address, epoch=0, sums={"loss": (1.0, 1)}, duration_ms=1.0),
        ev.CheckpointSaved(**address, version=Version(1), path="checkpoints/1", size_bytes=1, duration_s=1.0),
        ev.CheckpointFailed(**address, version=Version(1), reason="the disk is full"),
        ev.EpochMetricsTaken(**address, epoch=0),
        ev.UserEventRecorded(**address, text="a word"),
        ev.FinalStateSaved(**address, path="model.safetensors"),
        ev.BestKept(**address),
        ev.LoopProgressed(
            **address,
            num_steps=1,
            epoch=0,
            num_epochs=1,
            epoch_size=100,
            epoch_done=10,
            batch_size=10,
            anchor=1,
            averaging_ms=1.0,
        ),
        ev.LoopEpochEnded(**address, work=work, duration_s=1.0),
        ev.SessionOpened(**address),
        ev.LoopBegan(**address, policy="El Che"),
        ev.LoopLeft(**address),
        ev.RankFailed(**address, error="it raised"),
        ev.SessionLost(**address),
        ev.RankStarted(**address, agent_id=host, log_path="/log"),
        ev.RankExited(**address, agent_id=host, exit_code=-9),
        ev.StacksReported(**address, agent_id=host, text="a stack"),
        ev.AgentJoined(agent_id=AgentId("another"), host="another", slots=(Slot(device="cpu"),)),
        ev.AgentLost(agent_id=host),
        ev.JobSubmitted(job_id=JOB, spec=spec, submitted_at=0.0),
        ev.LoopAttached(job_id=JOB, spec=spec, ranks=(("host", "cpu"),), policy="", submitted_at=0.0),
        ev.JobCancelled(job_id=JOB),
        ev.JobBroken(job_id=JOB, reason="a record is gone"),
        ev.CheckpointRequested(job_id=JOB),
        ev.PauseRequested(job_id=JOB, is_paused=True),
        ev.PauseRequested(job_id=JOB, is_paused=False),
        ev.ScaleRequested(job_id=JOB, num_ranks=1),
        ev.SlotsRequested(job_id=JOB, num_ranks=1, by=JobId("another")),
        ev.DrainRequested(agent_id=host, is_drained=True),
        ev.HostFitnessChanged(agent_id=host, problem="its disk is full"),
        ev.QuotasSet(quotas={"default": 1}),
        ev.JobsForgotten(job_ids=(JOB,)),
        ev.DeadlinePassed(),
    ]
    return {_name(event): event for event in all_of_them}


def _name(event: ev.Event) -> str:
    more = {True: " (pause)", False: " (go on)"}.get(getattr(event, "is_paused", None), "")  # type: ignore[call-overload]
    return type(event).__name__ + more


def _row(core: Coordinator, rank: Rank) -> HeaderRow:
    """What a rank that has trained all that it says would bring into a round."""
    job = core.trainings[JOB]
    assert job.run.training is not None
    record = job.ranks[rank]
    cut = job.run.training.ledger.bounds(rank)[0]
    return HeaderRow(weight=0, cut=cut, local_step=record.base_step, compute_us=0, version=job.run.training.version)

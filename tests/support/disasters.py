"""What befalls a simulated job at random: deaths, hangs, ends of the coordinator; and whole random runs of these."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.commands import SendOutcome
from elche_coordinator.core.messages.events import (
    AgentJoined,
    CheckpointFailed,
    CheckpointRequested,
    DrainRequested,
    JobBroken,
    PauseRequested,
    ScaleRequested,
    SlotsRequested,
)
from elche_coordinator.core.messages.ids import JobId, Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import JobPhase
from elche_coordinator.simulator.simulation import JOB, RankModel, Simulation
from elche_coordinator.simulator.synthetic import Saved, SyntheticRank
from support.watched import LONG_ROUNDS, WatchedSimulation, ranks

WITH_PARTITIONS = 10_000
WITH_SHORT_ROUNDS = 100_000
WITH_RIVALS = 200_000
WITH_HOSTS = 10_000_000
WITH_STARTS = 20_000_000
WITH_DISKS = 30_000_000
WITH_BURSTS = 40_000_000
WITH_NAPS = 50_000_000
"""Seeds from these on may have them; so those below stay what they were."""
MOST_LOSSES = 4
"""How often all ranks die, or a host is lost, in one run: a job that goes back each time would not end."""
BLAME = "look at these samples"
"""The end of the error of a job whose ranks have died on the same samples."""
IN_VAIN = "attempts in a row have reached no checkpoint"
"""The error of a job that has gone back too often."""
LIMIT_S = 20_000.0
"""Virtual time in which every random run must have ended."""


def deaths(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Kills a rank now and then, but never the last one that has the model."""
    random = Random(seed)

    def strike() -> None:
        job = simulation.job
        if job.result is not None or not job.is_open:
            return
        alive, with_model = _alive(simulation)
        victim = random.choice(alive or [Rank(0)])
        others_have_it = len(with_model) > 2 or (with_model and victim not in with_model)
        if alive and job.phase is JobPhase.TRAINING and others_have_it:
            simulation.kill(victim)
        simulation.clock.after(random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def hangs(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Stops a rank's process now and then, for a while, when at least two others have the model."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is not None or not simulation.job.is_open:
            return
        alive, with_model = _alive(simulation)
        awake = [rank for rank in alive if not simulation.processes[rank].is_frozen]
        if awake and len(with_model) > 2:
            victim = simulation.processes[random.choice(awake)]
            victim.clock.freeze()
            simulation.clock.after(random.choice([0.3, 3.0, 8.0]), victim.clock.thaw)
        simulation.clock.after(random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def flaps(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Breaks a rank's session now and then, for up to two seconds."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is not None or not simulation.job.is_open:
            return
        if simulation.processes:
            simulation.cut_off(random.choice(list(simulation.processes)), random.choice([0.02, 0.2, 2.0]))
        simulation.clock.after(random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def crashes(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Ends the coordinator now and then, for up to three seconds."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is None:
            simulation.crash(random.choice([0.0, 0.1, 1.0, 3.0]), saves_every=random.choice([10, 40, 200, 10_000]))
            simulation.clock.after(3.0 + random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def partitions(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Breaks links between two ranks now and then, or all links of one, for a while."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is not None:
            return
        one, *others = random.sample(range(len(simulation.ranks)), len(simulation.ranks))
        if simulation.job.run.training is not None and simulation.training.started is not None:
            simulation.part(*((one, other) for other in others[: random.choice([1, 1, len(others)])]))
        simulation.clock.after(random.choice([0.5, 5.0, 40.0]), simulation.part)
        simulation.clock.after(45.0 + random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def _alive(simulation: WatchedSimulation) -> tuple[list[Rank], list[Rank]]:
    """The ranks whose processes live, and those of them that are present and have the model."""
    alive = [rank for rank, process in simulation.processes.items() if process.is_alive]
    there = simulation.job.ranks
    return alive, [rank for rank in alive if there[rank].is_present and there[rank].has_model]


def operators(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """People pause the job for a moment, or scale it."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is not None or not simulation.job.is_open:
            return
        match random.choice(["pause", "scale"]):
            case "pause":
                simulation.handle(PauseRequested(job_id=JOB, is_paused=True))
                simulation.clock.after(1.0, lambda: simulation.handle(PauseRequested(job_id=JOB, is_paused=False)))
            case "scale":
                num_ranks = random.randint(1, len(simulation.ranks))
                simulation.handle(ScaleRequested(job_id=JOB, num_ranks=num_ranks))
        simulation.clock.after(random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def rivals(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Another job of higher priority is given some or all of the slots now and then, and leaves them at once."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is not None or not simulation.job.is_open:
            return
        if simulation.job.phase in (JobPhase.GROUPING, JobPhase.TRAINING):
            num_ranks = random.choice([1, 1, len(simulation.ranks)])
            simulation.handle(SlotsRequested(job_id=JOB, num_ranks=num_ranks, by=JobId("rival")))
        simulation.clock.after(random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def losses(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Some or all ranks die, those with the only model too; or a host is lost, and comes back later."""
    random = Random(seed)

    def strike(left: int) -> None:
        if simulation.job.result is not None or not left:
            return
        alive = [rank for rank, process in simulation.processes.items() if process.is_alive]
        if random.random() < 0.5:
            for rank in random.sample(alive, random.randint(0, len(alive))):
                simulation.kill(rank)
        elif hosts := sorted(simulation.core.fleet.agents):
            _lose(simulation, random.choice(hosts), random.choice([0.0, 0.5, 20.0]))
        simulation.clock.after(random.expovariate(1 / every_s), lambda: strike(left - 1))

    simulation.clock.after(random.expovariate(1 / every_s), lambda: strike(MOST_LOSSES))


def _lose(simulation: WatchedSimulation, agent_id: Any, away_s: float) -> None:
    """The host's processes are gone, and it comes back without them."""
    agent = simulation.core.fleet.agents[agent_id]
    simulation.lose_host(agent_id)
    back = AgentJoined(agent_id=agent_id, host=agent.host, slots=agent.slots, folder=agent.folder)
    simulation.clock.after(away_s, lambda: simulation.handle(back))


def drains(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Hosts are drained for a while, with too little notice or enough."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is not None:
            return
        if hosts := sorted(simulation.core.fleet.agents):
            host = random.choice(hosts)
            simulation.handle(DrainRequested(agent_id=host, is_drained=True))
            allowed = DrainRequested(agent_id=host, is_drained=False)
            simulation.clock.after(random.choice([0.0, 0.3, 5.0]), lambda: simulation.handle(allowed))
        simulation.clock.after(6.0 + random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def savings(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """People ask for checkpoints."""
    random = Random(seed)

    def strike() -> None:
        if simulation.job.result is None:
            simulation.handle(CheckpointRequested(job_id=JOB))
            simulation.clock.after(random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def starts(simulation: WatchedSimulation, seed: int) -> None:
    """Ranks die in the first moments, as they start or build their first group."""
    random = Random(f"starts {seed}")

    def strike() -> None:
        alive = [rank for rank, process in simulation.processes.items() if process.is_alive]
        if simulation.job.result is None and alive:
            simulation.kill(random.choice(alive))

    for _ in range(random.randint(1, 3)):
        simulation.clock.after(random.uniform(0.0, random.choice([0.3, 1.0])), strike)


def bursts(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Much goes wrong at one instant now and then: ranks die and hang, hosts are drained, people ask for other ranks
    and for checkpoints, and the coordinator ends before it has done what it said.
    """
    random = Random(f"bursts {seed}")

    def strike() -> None:
        if simulation.job.result is not None or not simulation.job.is_open:
            return
        acts = [_kill_one, _hang_one, _drain_one, _scale, _save, _flap_one]
        for act in random.choices(acts, k=random.randint(2, 6)):
            act(simulation, random)
        if random.random() < 0.5:
            simulation.crash(random.choice([0.0, 0.5, 3.0]), saves_every=random.choice([10, 200]))
            for act in random.choices(acts, k=random.randint(0, 3)):  # while it is away
                act(simulation, random)
        simulation.clock.after(4.0 + random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def naps(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """Everything stands still now and then, as on a laptop that is closed: ranks, and the coordinator too or not. They
    go on one after the other.
    """
    random = Random(f"naps {seed}")

    def strike() -> None:
        if simulation.job.result is not None or not simulation.job.is_open:
            return
        stopped = [one.clock for one in simulation.processes.values() if one.is_alive and not one.is_frozen]
        away_s = random.choice([0.3, 5.0, 40.0, 400.0])
        if random.random() < 0.7 and simulation.is_awake:
            simulation.sleep(away_s + random.choice([0.0, 0.05, 1.0]))
        for clock in stopped:
            clock.freeze()
            simulation.clock.after(away_s + random.choice([0.0, 0.01, 0.5]), clock.thaw)
        simulation.clock.after(away_s + 5.0 + random.expovariate(1 / every_s), strike)

    simulation.clock.after(random.expovariate(1 / every_s), strike)


def doubts(simulation: WatchedSimulation, seed: int, *, every_s: float) -> None:
    """A coordinator that has started again finds that the job's state contradicts itself, a few times."""
    random = Random(f"doubts {seed}")

    def strike(left: int) -> None:
        if simulation.job.result is None and left:
            simulation.handle(JobBroken(job_id=JOB, reason="its state contradicted itself", may_go_back=True))
            simulation.clock.after(random.expovariate(1 / every_s), lambda: strike(left - 1))

    simulation.clock.after(random.expovariate(1 / every_s), lambda: strike(MOST_LOSSES - 1))


def _kill_one(simulation: WatchedSimulation, random: Random) -> None:
    alive, with_model = _alive(simulation)
    if alive and len(with_model) > 2:
        simulation.kill(random.choice(alive))


def _hang_one(simulation: WatchedSimulation, random: Random) -> None:
    alive, with_model = _alive(simulation)
    awake = [rank for rank in alive if not simulation.processes[rank].is_frozen]
    if awake and len(with_model) > 2:
        clock = simulation.processes[random.choice(awake)].clock
        clock.freeze()
        simulation.clock.after(random.choice([0.3, 5.0]), clock.thaw)


def _drain_one(simulation: WatchedSimulation, random: Random) -> None:
    if hosts := sorted(simulation.core.fleet.agents):
        host = random.choice(hosts)
        simulation.handle(DrainRequested(agent_id=host, is_drained=True))
        allowed = DrainRequested(agent_id=host, is_drained=False)
        simulation.clock.after(random.choice([0.0, 0.3, 3.0]), lambda: simulation.handle(allowed))


def _scale(simulation: WatchedSimulation, random: Random) -> None:
    simulation.handle(ScaleRequested(job_id=JOB, num_ranks=random.randint(1, len(simulation.ranks))))


def _save(simulation: WatchedSimulation, random: Random) -> None:
    simulation.handle(CheckpointRequested(job_id=JOB))


def _flap_one(simulation: WatchedSimulation, random: Random) -> None:
    if simulation.processes:
        simulation.cut_off(random.choice(list(simulation.processes)), random.choice([0.02, 0.2, 2.0]))


def checkpoint_before(settings: dict[str, Any], dice: Random) -> Saved | None:
    """The checkpoint of an earlier job with these settings and a number of ranks of its own; None if that is none."""
    often = settings | {"checkpoint_every_epochs": 1, "checkpoint_every_minutes": 0.01, "monitor": None}
    speeds = [dice.choice([10.0, 30.0, 100.0]) for _ in range(dice.randint(1, 6))]
    before = Simulation(settings=AgreedSettings(**often), ranks=ranks(*speeds), seed=dice.randrange(1000))
    seen = list[Saved]()
    with suppress(TimeoutError):  # it has ended
        wanted = dice.randint(1, 6)

        def has_made_enough() -> bool:
            seen.extend(one for one in before.saved.values() if one not in seen)
            return len(seen) >= wanted or before.job.result is not None

        before.run_until(has_made_enough, limit_s=LIMIT_S)
    sound = [one for one in seen if json.loads(one.training)["ledger"]["epoch"] < settings["epochs"]]
    return sound[-1] if sound and settings.get("max_steps") is None else None


class OnFullDisk(SyntheticRank):
    """A rank that can write checkpoints of every second version only."""

    def _write_checkpoint(self, outcome: SendOutcome) -> None:
        if outcome.version % 2:
            super()._write_checkpoint(outcome)
        else:
            self._send(CheckpointFailed(**self.address, version=outcome.version, reason="No space left on device"))


@dataclass(frozen=True, slots=True)
class RandomRun:
    """One random job and what befalls it, all from one seed."""

    seed: int
    settings: dict[str, Any]
    disasters: tuple[str, ...]
    simulation: WatchedSimulation

    def run(self) -> None:
        """Raises `AssertionError` or `TimeoutError` when the job does not end as it must."""
        result = self.simulation.run(limit_s=LIMIT_S)
        if BLAME in result.error and {"deaths", "losses"} & {*self.disasters}:
            return  # three deaths by chance on the same samples, before which none had died: so do samples that kill
        if IN_VAIN in result.error and {"losses", "doubts"} & {*self.disasters}:
            return
        assert result.outcome is Outcome.SUCCEEDED, result.error
        self.simulation.assert_ended_cleanly()
        self.simulation.assert_exactly_once()

    def describe(self, num_steps: int = 40) -> str:
        """What it was, and its last events with what they led to."""
        lines = [f"seed {self.seed}: {json.dumps(self.settings)}", f"befallen by {', '.join(self.disasters)}"]
        for step in self.simulation.core.steps[-num_steps:]:
            lines.append(f"{step.at_s:10.4f} {step.event}")
            lines += [f"           -> {str(command)[:300]}" for command in step.commands]
        return "\n".join(lines)


def random_run(seed: int) -> RandomRun:
    """The random run of a seed."""
    dice = Random(seed)
    settings: dict[str, Any] = {
        "policy": dice.choice(["cadence", "cadence", "async", "sync"]),
        "averaging": dice.choice(["blocking", "overlapped"]),
        "dataset_size": dice.choice([300, 1000, 4000]),
        "epochs": dice.choice([1, 2, 3]),
        "batch_size": 10,
        "has_evaluation": dice.random() < 0.5,
        "wants_metrics": dice.random() < 0.5,
        "checkpoint_every_epochs": dice.choice([None, 1]),
        "checkpoint_every_minutes": dice.choice([None, 0.02]),
        "max_batch_diff": dice.choice([None, None, None, 5]),
        "ride_out_s": dice.choice([0.0, 0.5, 3.0, 10.0]),
    }
    has_short = seed >= WITH_SHORT_ROUNDS and Random(f"anchor {seed}").random() < 0.7
    settings |= {"anchor": 1} if has_short else LONG_ROUNDS
    settings["eval_size"] = dice.choice([0, 40]) if settings["has_evaluation"] else 0
    speeds = [dice.choice([5.0, 25.0, 30.0, 57.5, 100.0]) for _ in range(dice.randint(1, 6))]
    models, world = ranks(*speeds, jitter=dice.choice([0, 0.1])), dict[str, Any]()
    if seed >= WITH_HOSTS:
        models, world = _wider(settings, models, Random(f"wider {seed}"))
    more = Random(f"starts {seed}")
    if seed >= WITH_STARTS:
        settings["backend"] = more.choice(["auto", "gloo", "cpu"])
    simulation = WatchedSimulation(
        settings=AgreedSettings(**settings),
        ranks=models,
        group_size=dice.choice([1, 1, 1, 2]),
        seed=seed,
        build_ms=dice.choice([0, 15, 200]),
        sync_ms=dice.choice([1, 10, 60]),
        persist_ms=dice.choice([0, 1, 30]),
        latency_ms=dice.choice([0.1, 1, 20]),
        crashes=True,
        check_every=10,
        **world,
    )
    if simulation.group_size > 1:
        simulation.num_hosts = 1  # which has the slots of a whole group
    if seed >= WITH_STARTS:
        simulation.collective.death_seen_s = more.choice([None, 0.01, 0.5])
    if seed >= WITH_DISKS and more.random() < 0.7 and settings.get("restore") != "best":
        simulation.disks = {}
    befallen = []
    if seed >= WITH_BURSTS and Random(f"resumed {seed}").random() < 0.5:
        simulation.resumed = checkpoint_before(settings, Random(f"before {seed}"))
        befallen += ["resumed"] if simulation.resumed is not None else []
    simulation.start()
    if seed >= WITH_STARTS and more.random() < 0.5:
        befallen.append("starts")
        starts(simulation, seed)
    for name, disaster, share, every in (
        ("deaths", deaths, 0.7, (0.7, 3.0)),
        ("hangs", hangs, 0.4, (4.0,)),
        ("crashes", crashes, 0.8, (0.3, 2.0)),
        ("operators", operators, 0.3, (2.0,)),
        ("flaps", flaps, 0.4, (0.3, 2.0)),
    ):
        if dice.random() < share:
            befallen.append(name)
            disaster(simulation, seed + len(name), every_s=dice.choice(every))
    if seed >= WITH_PARTITIONS and len(speeds) > 1 and dice.random() < 0.4:
        befallen.append("partitions")
        partitions(simulation, seed + len("partitions"), every_s=dice.choice((1.0, 10.0)))
    if seed >= WITH_RIVALS and dice.random() < 0.5:
        befallen.append("rivals")
        rivals(simulation, seed + len("rivals"), every_s=dice.choice((1.0, 10.0)))
    for name, disaster, every in (
        ("losses", losses, (2.0, 8.0)),
        ("drains", drains, (3.0,)),
        ("savings", savings, (1.0, 5.0)),
    ):
        if seed >= WITH_HOSTS and dice.random() < 0.4:
            befallen.append(name)
            disaster(simulation, seed + len(name), every_s=dice.choice(every))
    if seed >= WITH_BURSTS:
        befallen += _more(simulation, seed)
    return RandomRun(seed, settings, tuple(befallen), simulation)


def _more(simulation: WatchedSimulation, seed: int) -> list[str]:
    """Bursts of disasters, times in which all stands still, and a coordinator that doubts the job's state."""
    dice, befallen = Random(f"more {seed}"), []
    if dice.random() < 0.7:
        befallen.append("bursts")
        bursts(simulation, seed, every_s=dice.choice((1.0, 4.0)))
    for name, disaster, share in (("naps", naps, 0.5), ("doubts", doubts, 0.3)):
        if seed >= WITH_NAPS and dice.random() < share:
            befallen.append(name)
            disaster(simulation, seed, every_s=dice.choice((1.0, 8.0)))
    return befallen


def _wider(settings: dict[str, Any], models: list[RankModel], dice: Random) -> tuple[list[RankModel], dict[str, Any]]:
    """More that a job may be: changes its settings; its ranks, and what else is of its simulation."""
    settings["max_steps"] = dice.choice([None, None, 7, 60, 200])
    settings["drop_last"] = dice.random() < 0.2
    settings["keep_checkpoints"] = dice.choice([1, 3])
    settings["max_batch_diff"] = dice.choice([None, None, None, 0, 5]) if settings["policy"] != "sync" else None
    settings["keeps_state"] = dice.random() < 0.3
    world: dict[str, Any] = {
        "num_hosts": dice.choice([1, 2, 3]),
        "start_ms": dice.choice([0, 300.0]),
        "evaluation_ms": dice.choice([1.0, 20.0, 2_000.0]),
        "checkpoint_ms": dice.choice([1.0, 50.0, 3_000.0]),
        "send_twice": dice.random() < 0.2,
        "broken_rounds": frozenset(dice.choice([(), (), (3, 4), range(5, 40, 7)])),
        "new_rank": OnFullDisk if dice.random() < 0.2 else SyntheticRank,
    }
    if settings["has_evaluation"] and dice.random() < 0.5:
        metric = Random(f"metric {dice.random()}")
        values = [metric.random() for _ in range(10)]
        world["evaluate"] = lambda epoch: {"loss": values[epoch]}
        settings |= {"monitor": "loss", "patience": dice.choice([None, 1, 2]), "restore": dice.choice(["best", "last"])}
        settings["eval_size"] = 0
    changed = []
    for model in models:
        changes = tuple(
            (dice.uniform(0, 20), dice.choice([5.0, 50.0, 300.0])) for _ in range(dice.choice([0, 0, 1, 3]))
        )
        changed.append(
            replace(
                model,
                changes=tuple(sorted(changes)),
                batch_size=dice.choice([None, None, None, 7, 20]),
                first_ms=dice.choice([(), (), (1_000.0,), (400.0, 300.0)]),
                tail=dice.choice([(0.0, 1.0), (0.1, 10.0)]),
            )
        )
    return changed, world

"""`max_batch_diff`: no rank gets further ahead of the slowest than the user allows, and none waits forever."""

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from elche.policies import POLICIES
from elche_coordinator.core.messages.commands import SendLease, SendSyncNow, SendThrottle
from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.pacing.counts import within
from elche_coordinator.simulator.simulation import RankModel
from elche_coordinator.simulator.synthetic import SyntheticRank
from support.rounds import LONG_ROUNDS
from support.watched import WatchedSimulation, ranks

VERY_UNEQUAL = (5.0, 20.0, 60.0)
ALL_WAYS = [
    pytest.param(policy, averaging, diff, id=f"{policy}-{averaging}-{diff}")
    for policy in LONG_ROUNDS
    for averaging in ("blocking", "overlapped")
    for diff in (0, 1, 3, 10)
]
Steps = dict[Rank, int]


def waits(process: SyntheticRank) -> bool:
    """Whether it has entered a round and trains only when that is over."""
    return process._is_averaging and not process._overlaps


def works(process: SyntheticRank) -> bool:
    """Whether it has something to train and may."""
    return bool(process._leases) and not waits(process)


@dataclass
class Limit:
    """How far a rank may go, and what that was measured by."""

    step: int
    bases: Steps
    """Every rank's batches in the last committed round, then."""
    slowest_of: list[Rank]
    """The ranks that had work and waited in no round, then."""


@dataclass
class Watch:
    """Compares what ranks have truly trained with what they may, at every event.

    A rank that begins a batch cannot know three things, and they are allowed for. A peer that had no work, or waited in
    a round, when the limit was sent has gone on since: those it may have left behind. A round that it has received may
    not be committed yet: its lead may be counted from that round. While it trains on during an averaging its base is
    about to change: its lead may be counted from the base of the time at which the limit was sent.
    """

    simulation: WatchedSimulation
    limits: dict[Rank, Limit] = field(default_factory=dict)
    most_ahead: int = 0
    """Of any rank that works before any other, counted from the last committed round, without allowances."""
    num_looked: int = 0
    versions: Steps = field(default_factory=dict)
    entered: dict[Rank, tuple[int, int]] = field(default_factory=dict)
    """The last round that the process has entered, and its batches then."""
    received: Steps = field(default_factory=dict)
    """Its batches in the last result that it has received."""

    @property
    def max_batch_diff(self) -> int:
        return max(1, self.simulation.settings.max_batch_diff or 0)  # in lockstep: a batch, side by side

    def run(self) -> Outcome:
        """Runs the job to its end and looks at every event."""
        self.simulation.run_until(self.looks_until_the_end, limit_s=1_000)
        return self.simulation.run().outcome

    def looks_until_the_end(self) -> bool:
        job = self.simulation.job
        if job.run.training is not None:
            self.note_rounds()
            bases = {rank: record.base_step for rank, record in job.ranks.items()}
            self.note_limits(bases)
            self.look(bases)
        return job.result is not None

    def note_rounds(self) -> None:
        for rank, process in self.simulation.processes.items():
            if process.parameters.version > self.versions.get(rank, 0):
                self.versions[rank] = process.parameters.version
                self.received[rank] = self.entered[rank][1]
            if process._last_entered != self.entered.get(rank, (0, 0))[0]:
                self.entered[rank] = (process._last_entered, process.local_step)

    def note_limits(self, bases: Steps) -> None:
        """Every limit is right when it is sent: nobody who works is left further behind."""
        steps, self.num_looked = self.simulation.core.steps[self.num_looked :], len(self.simulation.core.steps)
        for command in (command for step in steps for command in step.commands if isinstance(command, SendThrottle)):
            limit = Limit(step=command.limit_step, bases=bases, slowest_of=self.known_to_work())
            self.limits[command.rank] = limit
            ahead = limit.step - bases[command.rank]
            for other in limit.slowest_of:
                made = self.simulation.processes[other].local_step - bases[other]
                assert ahead - made <= self.max_batch_diff, (
                    f"rank {command.rank} may go {ahead}, rank {other} is at {made}"
                )

    def known_to_work(self) -> list[Rank]:
        """As the core has it."""
        training = self.simulation.job.run.training
        is_blocking = self.simulation.settings.averaging == "blocking"
        rounds = self.simulation.generation.rounds
        entered = rounds[0].entered if rounds and is_blocking else {}
        return [
            rank
            for rank, record in self.simulation.job.ranks.items()
            if rank not in entered and training.ledger.uncommitted_batches(rank)[1] > record.round_batches
        ]

    def look(self, bases: Steps) -> None:
        """Every rank keeps its limit, and no rank is too far ahead of one that the limit was measured by."""
        processes = self.simulation.processes
        working = [rank for rank, process in processes.items() if works(process)]
        made = {rank: processes[rank].local_step - bases[rank] for rank in working}
        if made:
            self.most_ahead = max(self.most_ahead, max(made.values()) - min(made.values()))
        for rank, limit in self.limits.items():
            process = processes[rank]
            assert process.local_step <= limit.step, (
                f"rank {rank} is at {process.local_step}, its limit is {limit.step}"
            )
            counted_from = [bases, self.received] + [limit.bases] * process._overlaps
            for other in limit.slowest_of:
                if other in working and not waits(process):
                    ahead = min(self.lead(rank, other, start) for start in counted_from)
                    assert ahead <= self.max_batch_diff, f"rank {rank} is {ahead} batches ahead of rank {other}"

    def lead(self, rank: Rank, other: Rank, start: Steps) -> int:
        mine, theirs = (self.simulation.processes[one].local_step - start.get(one, 0) for one in (rank, other))
        return mine - theirs


# The bound


@pytest.mark.parametrize(("policy", "averaging", "diff"), ALL_WAYS)
def test_in_a_long_epoch_no_rank_is_ever_too_far_ahead(simulate, policy, averaging, diff):
    """Without any allowance: the bound holds of what ranks have truly trained, at every event. Of asynchronous rounds
    that overlap the base changes while ranks train on, which may be a batch more.
    """
    watch = Watch(
        simulate(ranks(*VERY_UNEQUAL), dataset_size=2_000, policy=policy, averaging=averaging, max_batch_diff=diff)
    )
    assert watch.run() is Outcome.SUCCEEDED
    may_be_more = (policy, averaging) == ("async", "overlapped") and diff > 1
    assert watch.most_ahead == max(1, diff) + may_be_more


@pytest.mark.parametrize(("dataset_size", "epochs"), [(500, 3), (37, 5)])
@pytest.mark.parametrize(("policy", "averaging", "diff"), ALL_WAYS)
def test_short_epochs_keep_the_bound_too(simulate, policy, averaging, diff, dataset_size, epochs):
    simulation = simulate(
        ranks(*VERY_UNEQUAL),
        policy=policy,
        averaging=averaging,
        max_batch_diff=diff,
        dataset_size=dataset_size,
        epochs=epochs,
        has_evaluation=True,
    )
    assert Watch(simulation).run() is Outcome.SUCCEEDED


@pytest.mark.parametrize("policy", LONG_ROUNDS)
def test_in_lockstep_all_ranks_make_equally_many_batches_in_a_round(simulate, policy):
    """But for those at an epoch's end, where some have nothing left and others have gone on into the next one."""
    size, num_looked, position = 2_000, 0, 0
    simulation = simulate(
        ranks(*VERY_UNEQUAL, jitter=0.3),
        dataset_size=size,
        epochs=3,
        policy=policy,
        averaging="blocking",
        max_batch_diff=0,
    )
    assert simulation.run().outcome is Outcome.SUCCEEDED
    for report in simulation.rounds:
        if 0.1 * size < position % size < 0.8 * size:
            num_looked += 1
            assert len(set(report.rank_batches)) == 1, (position, report.rank_batches)
        position += report.samples
    assert num_looked > 10


@pytest.mark.parametrize("seed", range(12))
def test_any_job_with_a_bound_ends(simulate, seed):
    """Also with rounds that are given up, slow disks and networks, evaluations, and more ranks than batches."""
    random = Random(seed)
    models = [
        RankModel(batch_ms=random.choice([0.3, 1, 5, 20, 60]), jitter_fraction=random.choice([0, 0.1, 0.5]))
        for _ in range(random.randint(1, 6))
    ]
    broken = {round_id for round_id in range(1, 300) if random.random() < random.choice([0.0, 0.3])}
    simulation = simulate(
        models,
        dataset_size=random.choice([random.randint(3, 20), random.randint(20, 400)]),
        batch_size=3,
        epochs=random.choice([1, 3]),
        policy=random.choice(LONG_ROUNDS),
        averaging=random.choice(["blocking", "overlapped"]),
        anchor=random.choice([1, 5, 10, 50]),
        drop_last=random.random() < 0.3,
        max_batch_diff=random.choice([0, 1, 2, 3, 10]),
        has_evaluation=random.random() < 0.5,
        latency_ms=random.choice([0.01, 0.5, 30]),
        persist_ms=random.choice([0, 1, 30]),
        sync_ms=random.choice([0.0, 5.0, 100.0]),
        evaluation_ms=random.choice([0.0, 20.0, 1_000.0]),
        send_twice=random.random() < 0.2,
        broken_rounds=frozenset(i for i in broken if not {i - 4, i - 3, i - 2, i - 1} <= broken),
        seed=seed,
    )
    assert Watch(simulation).run() is Outcome.SUCCEEDED


@pytest.mark.parametrize("diff", [1, 3])
@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
@pytest.mark.parametrize("policy", LONG_ROUNDS)
def test_given_up_rounds_leave_the_bound_as_it_is(simulate, policy, averaging, diff):
    """Counted from the last committed round, however many were given up since."""
    broken = frozenset({1, 3, 4, 6, 7, 8, 9, 12})
    options = {"policy": policy, "averaging": averaging, "max_batch_diff": diff, "broken_rounds": broken}
    watch = Watch(simulate(ranks(*VERY_UNEQUAL), dataset_size=1_200, backend="cpu", **options))
    assert watch.run() is Outcome.SUCCEEDED
    assert watch.simulation.generation.num_given_up >= 6


# Bugs that these rules had


@pytest.mark.parametrize(
    ("batch_ms", "options"),
    [
        pytest.param((1, 60), {"dataset_size": 30, "max_batch_diff": 1, "latency_ms": 30}, id="far away"),
        pytest.param((0.3, 20), {"dataset_size": 100, "max_batch_diff": 1, "latency_ms": 30}, id="far away and longer"),
        pytest.param((0.3, 1, 5), {"dataset_size": 150, "max_batch_diff": 3, "has_evaluation": True}, id="evaluating"),
    ],
)
def test_a_rank_at_its_limit_goes_on_when_the_slowest_has_entered_a_round(simulate, batch_ms, options):
    """The slowest rank's entry is the last thing that anybody says: then nobody is behind, and the limit must rise."""
    simulation = simulate(ranks(*batch_ms), anchor=1, epochs=4, averaging="blocking", **options)
    assert simulation.run(limit_s=1_000).outcome is Outcome.SUCCEEDED


def test_how_far_away_ranks_are_is_learned_from_the_first_round(simulate):
    """So much further ahead they get work, and so much later they may be."""
    simulation = simulate(ranks(5, 5), dataset_size=300, latency_ms=30)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert 60 <= simulation.training.round_trip_ms < 120, "there, back, and a write of the disk"


# Limits


@pytest.mark.parametrize(("policy", "averaging", "diff"), ALL_WAYS)
def test_limits_only_rise(simulate, policy, averaging, diff):
    options = {"policy": policy, "averaging": averaging, "max_batch_diff": diff, "broken_rounds": frozenset({1, 4, 5})}
    simulation = simulate(ranks(*VERY_UNEQUAL, jitter=0.3), dataset_size=300, epochs=2, **options)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    for rank in range(3):
        limits = [command.limit_step for command in simulation.sent(SendThrottle, rank=rank)]
        assert len(limits) > 1
        assert all(before < after for before, after in pairwise(limits))


@pytest.mark.parametrize("policy", LONG_ROUNDS)
def test_every_rank_has_a_limit_before_it_has_work(simulate, policy):
    """Or it would train what it has got before the limit comes."""
    simulation = simulate(ranks(0.3, 60), policy=policy, max_batch_diff=1, dataset_size=300)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    for rank in (0, 1):
        commands = [type(command) for step in simulation.core.steps for command in step.commands if told(command, rank)]
        assert commands.index(SendThrottle) < commands.index(SendLease)


def told(command: object, rank: int) -> bool:
    return isinstance(command, SendThrottle | SendLease) and command.rank == rank


def test_a_rank_that_waits_in_a_round_gets_no_higher_limit(simulate):
    """What it may do after the round counts from that round, which is not committed yet."""
    simulation = simulate(ranks(*VERY_UNEQUAL), max_batch_diff=3, dataset_size=500, epochs=6, has_evaluation=True)
    too_early = []

    def has_ended() -> bool:
        training = simulation.job.run.training
        step = simulation.core.steps[-1]
        if training is not None and training.version and simulation.generation.rounds:
            entered = [
                rank for rank in simulation.generation.rounds[0].entered if rank != getattr(step.event, "rank", None)
            ]
            too_early.extend(c for c in step.commands if isinstance(c, SendThrottle) and c.rank in entered)
        return simulation.job.result is not None

    simulation.run_until(has_ended)
    assert too_early == []


@pytest.mark.parametrize(("policy", "averaging", "diff"), ALL_WAYS)
def test_announced_targets_lie_near_each_other(simulate, policy, averaging, diff):
    """Of the ranks that make any batch before the round, counted from the last committed one; who is there already
    (under `async` all are) is asked for nothing.
    """
    options = {"policy": policy, "averaging": averaging, "max_batch_diff": diff}
    simulation = simulate(ranks(*VERY_UNEQUAL, jitter=0.3), dataset_size=400, epochs=2, **options)
    num_announced = 0

    def has_ended() -> bool:
        nonlocal num_announced
        if any(isinstance(command, SendSyncNow) for command in simulation.core.steps[-1].commands):
            (opened,) = simulation.generation.rounds
            targets = {rank: step - simulation.job.ranks[rank].base_step for rank, step in opened.targets.items()}
            asked = [num for rank, num in targets.items() if num > simulation.job.ranks[rank].round_batches]
            assert not asked or max(asked) - min(num for num in targets.values() if num) <= diff, targets
            num_announced += 1
        return simulation.job.result is not None

    simulation.run_until(has_ended)
    assert num_announced >= len(simulation.rounds) > 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_without_a_bound_no_limit_is_sent(simulate, policy, averaging):
    simulation = simulate(ranks(*VERY_UNEQUAL), dataset_size=400, epochs=2, policy=policy, averaging=averaging)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.sent(SendThrottle) == []


@pytest.mark.parametrize(("diff", "first"), [(0, 1), (1, 1), (7, 7)])
def test_the_first_batches_may_be_as_many_as_the_bound_allows(simulate, diff, first):
    simulation = simulate(ranks(5, 5), dataset_size=2_000, max_batch_diff=diff)
    simulation.run_until(lambda: len(simulation.sent(SendThrottle)) >= 2)
    assert [command.limit_step for command in simulation.sent(SendThrottle)][:2] == [first, first]


def test_sync_needs_no_limit(simulate):
    simulation = simulate(ranks(*VERY_UNEQUAL), dataset_size=400, policy="sync", max_batch_diff=1)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.sent(SendThrottle) == []


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_a_rank_whose_peers_have_no_work_is_not_limited(simulate, averaging):
    """Two batches for three ranks: who has none is no reason for the others to wait, nor has it to go first."""
    simulation = simulate(ranks(*VERY_UNEQUAL), dataset_size=20, epochs=6, max_batch_diff=1, averaging=averaging)
    assert Watch(simulation).run() is Outcome.SUCCEEDED
    assert simulation.clock.now_s < 6 * 0.15


def test_one_rank_alone_is_limited_by_its_own_reports_only(simulate):
    """Each of its limits comes a way there and back, and a write of the disk, after the batch that raises it."""
    bounded, free = (simulate(ranks(5), dataset_size=2_000, max_batch_diff=diff) for diff in (10, None))
    assert bounded.run().duration_s == pytest.approx(free.run().duration_s, rel=0.05)


@pytest.mark.parametrize("policy", LONG_ROUNDS)
def test_a_bound_that_nobody_reaches_costs_nothing(simulate, policy):
    """Equal ranks with room for what their reports tell late."""
    bounded, free = (
        simulate(ranks(5, 5, 5), dataset_size=2_000, policy=policy, max_batch_diff=diff) for diff in (30, None)
    )
    assert bounded.run().duration_s == pytest.approx(free.run().duration_s, rel=0.02)


def test_the_slowest_rank_sets_the_pace(simulate):
    """With a bound of one batch all ranks train as many as the slowest, within one per round."""
    simulation = simulate(ranks(*VERY_UNEQUAL), dataset_size=1_200, max_batch_diff=1)
    result = simulation.run()
    assert all(max(report.rank_batches) - min(report.rank_batches) <= 1 for report in simulation.rounds[:-2])
    assert result.duration_s < 40 * 0.060 * 1.5


# Counts


@pytest.mark.parametrize(
    ("counts", "diff", "bounded"),
    [
        ((40, 10, 3), 5, (8, 8, 3)),
        ((40, 10, 3), 0, (3, 3, 3)),
        ((4, 3), 1, (4, 3)),
        ((7, 0, 2), 1, (3, 0, 2)),
        ((0, 0), 1, (0, 0)),
        ((9,), 1, (9,)),
        ((40, 10, 3), None, (40, 10, 3)),
    ],
)
def test_counts_within_a_bound(counts, diff, bounded):
    assert tuple(within({Rank(rank): num for rank, num in enumerate(counts)}, diff).values()) == bounded

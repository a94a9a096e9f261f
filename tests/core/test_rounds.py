"""What docs/protocol.md says of a round, paragraph by paragraph, under every policy, way to average and backend."""

from dataclasses import dataclass, field

import pytest

from elche.settings import AgreedSettings
from elche_coordinator.core.messages.commands import SendLease, SendOutcome, SendSyncNow
from elche_coordinator.core.messages.events import BatchesTrained, Event, ResultReceived, RoundEntered, RoundFailed
from elche_coordinator.core.messages.ids import Epoch
from elche_coordinator.core.messages.reports import Outcome
from elche_coordinator.core.records.machine import RankPhase
from elche_coordinator.core.rounds.generation import MAX_GIVEN_UP
from elche_coordinator.simulator.simulation import RankModel
from support.rounds import (
    BATCH_SIZE,
    BROKEN,
    OFTEN,
    WAYS,
    every_way,
    headers,
    is_result_of,
    until_round_is_open,
)
from support.watched import WatchedSimulation, ranks


@dataclass(kw_only=True)
class Noted(WatchedSimulation):
    """Notes what is booked when a round commits."""

    booked: dict[int, dict[int, int]] = field(default_factory=dict)
    """By version, where each rank's committed samples end."""

    def handle(self, event: Event) -> None:
        """As always."""
        super().handle(event)
        if isinstance(event, ResultReceived) and self.job.run.training is not None:
            leases = self.training.ledger.rank_leases
            now = {int(rank): one.committed for rank, one in leases.items()}
            self.booked.setdefault(self.training.version, now)


@pytest.fixture(
    scope="module",
    params=[(*way, backend) for way in WAYS for backend in ("gloo", "cpu")],
    ids="-".join,
)
def trained(request: pytest.FixtureRequest) -> "Noted":
    """A job that has ended: three unequal ranks with jitter, two epochs with a tail; some rounds given up by `cpu`."""
    policy, averaging, backend = request.param
    settings = AgreedSettings(
        **(OFTEN | {"dataset_size": 403}),
        batch_size=BATCH_SIZE,
        epochs=2,
        policy=policy,
        averaging=averaging,
        backend=backend,
        has_evaluation=True,
    )
    simulation = Noted(
        settings=settings,
        ranks=ranks(5, 11.5, 7, jitter=0.2),
        latency_ms=2.0,
        sync_ms=60.0,
        broken_rounds=BROKEN if backend == "cpu" else frozenset(),
    )
    assert simulation.run().outcome is Outcome.SUCCEEDED
    simulation.assert_exactly_once()
    simulation.assert_ended_cleanly()
    return simulation


# P2, announce


def test_announce_targets_lie_within_leased_work(trained):
    if trained.settings.policy == "sync":
        pytest.skip("shares differ by a batch: who has done its own joins when that ends")
    leased = dict.fromkeys(range(3), 0)
    for step in trained.core.steps:
        for command in step.commands:
            if isinstance(command, SendLease):
                leased[command.rank] += -(-command.lease.size // BATCH_SIZE)
            elif isinstance(command, SendSyncNow):
                assert command.after_step <= leased[command.rank]


def test_announce_only_one_round_is_open_and_each_id_is_new(trained):
    """But under `sync`, where rounds are granted ahead; their ids are in order all the same."""
    last = dict.fromkeys(range(3), 0)
    over = set()
    for step in trained.core.steps:
        if isinstance(step.event, ResultReceived | RoundFailed):
            over.add(step.event.round)
        for command in step.commands:
            if isinstance(command, SendSyncNow):
                assert command.round >= last[command.rank]
                is_new = command.round > last[command.rank]
                assert command.round - 1 in over or not is_new or command.round == 1 or command.count > 1
                last[command.rank] = command.round + command.count - 1


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_announce_revisions_raise_a_target_by_at_most_one_anchor_and_end_at_the_first_entry(simulate, averaging):
    """Ranks that become faster right after they were measured."""
    models = [RankModel(batch_ms=50, jitter_fraction=0.3, changes=((at_s, ms),)) for at_s, ms in [(3, 2), (9, 90)]]
    simulation = simulate(models, dataset_size=4_000, averaging=averaging)
    first, anchors, entered, num_revised = {}, {}, set(), 0

    def has_ended() -> bool:
        nonlocal num_revised
        step = simulation.core.steps[-1]
        if isinstance(step.event, RoundEntered):
            entered.add(step.event.round)
        for command in step.commands:
            if isinstance(command, SendSyncNow):
                assert command.round not in entered
                key = command.rank, command.round
                num_revised += key in first and isinstance(step.event, BatchesTrained)
                anchors.setdefault(key, simulation.training.policy.anchor)
                assert command.after_step <= first.setdefault(key, command.after_step) + anchors[key]
        return simulation.job.result is not None

    simulation.run_until(has_ended)
    assert num_revised > 5


def test_announce_a_rank_whose_work_ends_earlier_joins_when_it_ends(simulate):
    """Under `sync` a rank with one batch less than the others has its last round's target beyond its work."""
    simulation = simulate(ranks(5, 5), dataset_size=30, policy="sync")
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert [report.rank_batches for report in simulation.rounds[1:]] == [(1, 1), (1, 1)]


# P3, enter


def test_enter_the_header_says_which_samples_and_batches_are_in_the_snapshot(trained):
    """The weight is what the rank has trained since the last average, given-up rounds included."""
    cuts, steps = [0, 0, 0], [0, 0, 0]
    for report in trained.rounds:
        header = headers(trained)[report.round]
        assert [row.weight for row in header] == [row.cut - cut for row, cut in zip(header, cuts, strict=True)]
        assert report.samples == sum(row.weight for row in header)
        made = [row.local_step - step for row, step in zip(header, steps, strict=True)]
        assert list(report.rank_batches) == made
        cuts, steps = [row.cut for row in header], [row.local_step for row in header]
    assert sum(cuts) == 2 * 403


def test_enter_comes_before_the_result_and_after_the_announcement(trained):
    announced, entered = set(), set()
    for step in trained.core.steps:
        event = step.event
        if isinstance(event, RoundEntered):
            assert event.round in announced
            entered.add((event.rank, event.round))
        elif isinstance(event, ResultReceived | RoundFailed):
            assert (event.rank, event.round) in entered
        for command in step.commands:
            if isinstance(command, SendSyncNow):
                announced |= set(range(command.round, command.round + command.count))


@every_way
def test_enter_a_rank_that_has_entered_is_shown_as_averaging(simulate, policy, averaging):
    simulation = simulate(ranks(5, 20), policy=policy, averaging=averaging, sync_ms=50, **OFTEN)
    until_round_is_open(simulation, num_committed=3)
    opened = simulation.generation.rounds[0]
    assert [simulation.job.ranks[rank].phase for rank in opened.entered] == [RankPhase.AVERAGING]


# P4, average


def test_average_the_first_round_has_weight_zero_and_spreads_the_start_state(trained):
    first = trained.rounds[0]
    assert [row.weight for row in headers(trained)[first.round]] == [0, 0, 0]
    assert (first.version, first.samples, first.rank_batches) == (1, 0, (0, 0, 0))


@every_way
def test_average_a_rank_without_samples_takes_part_with_weight_zero(simulate, policy, averaging):
    simulation = simulate(ranks(5, 5, 5, 5), dataset_size=3, epochs=3, policy=policy, averaging=averaging)
    assert simulation.run().outcome is Outcome.SUCCEEDED
    rows = [row for header in headers(simulation).values() for row in header]
    assert all(len(header) == 4 for header in headers(simulation).values())
    assert any(row.weight == 0 and row.version > 0 for row in rows)


def test_average_every_member_gets_the_same_header_and_result(trained):
    told: dict[int, set] = {}
    for event in trained.events(ResultReceived):
        told.setdefault(event.round, set()).add((event.header, event.digest))
    assert all(len(each) == 1 for each in told.values())


# P5, received


def test_a_round_commits_when_the_last_member_has_received_it_and_not_before(trained):
    receivers: dict[int, set] = {}
    for step in trained.core.steps:
        if isinstance(step.event, ResultReceived):
            receivers.setdefault(step.event.round, set()).add(step.event.rank)
        for command in step.commands:
            if isinstance(command, SendOutcome):
                assert receivers[command.round] == {0, 1, 2}
                assert isinstance(step.event, ResultReceived)


@every_way
def test_received_by_one_is_not_received_by_all(simulate, policy, averaging):
    """The last word of a member is missing: nothing is committed, and no round follows."""
    simulation = simulate(ranks(5, 11.5), policy=policy, averaging=averaging, **OFTEN)
    until_round_is_open(simulation, num_committed=3)
    tell, kept = simulation.handle, []
    simulation.handle = lambda event: kept.append(event) if is_result_of(event, 1) else tell(event)
    with pytest.raises(TimeoutError):
        simulation.run(limit_s=30)
    assert simulation.training.version == 3
    committed = [event for event in kept if event.round == simulation.generation.rounds[0].id]
    simulation.handle = tell
    for event in kept:
        simulation.handle(event)
    assert committed
    assert simulation.run().outcome is Outcome.SUCCEEDED


# P6, outcome


def test_outcome_is_told_before_the_next_round_is_announced(trained):
    for step in trained.core.steps:
        kinds = [type(command) for command in step.commands]
        if SendOutcome in kinds and SendSyncNow in kinds:
            assert max(i for i, kind in enumerate(kinds) if kind is SendOutcome) < kinds.index(SendSyncNow)


def test_outcome_versions_are_given_at_commit_one_after_the_other(trained):
    assert [report.version for report in trained.rounds] == list(range(1, len(trained.rounds) + 1))
    ids = [report.round for report in trained.rounds]
    assert ids == sorted(set(ids))
    assert not set(ids) & trained.broken_rounds
    for report in trained.rounds:
        told = [command for command in trained.sent(SendOutcome) if command.round == report.round]
        assert [(command.rank, command.version) for command in told] == [(rank, report.version) for rank in range(3)]


def test_outcome_books_exactly_the_cuts_and_work_beyond_stays_with_its_rank(trained):
    for report in trained.rounds[1:]:
        header = headers(trained)[report.round]
        booked = trained.booked[report.version]
        assert booked == {rank: header[rank].cut for rank in booked}
    assert trained.job.result.committed_samples == (403, 403)


# P7, apply


def test_apply_newer_steps_belong_to_the_next_cut(trained):
    """An overlapped round's snapshot is what was trained at entry, though ranks train on."""
    trained_more = 0
    reported = dict.fromkeys(range(3), 0)
    for step in trained.core.steps:
        if isinstance(step.event, BatchesTrained):
            reported[step.event.rank] = step.event.local_step
        elif isinstance(step.event, ResultReceived):
            row = step.event.header[step.event.rank]
            assert row.local_step <= trained.processes[step.event.rank].local_step
            trained_more += reported[step.event.rank] > row.local_step
    assert (trained_more > 0) == (trained.settings.averaging == "overlapped")


def test_apply_no_snapshot_is_taken_while_a_round_is_under_way(trained):
    under_way = dict.fromkeys(range(3))
    for step in trained.core.steps:
        event = step.event
        if isinstance(event, RoundEntered):
            assert under_way[event.rank] is None
            under_way[event.rank] = event.round
        elif isinstance(event, ResultReceived | RoundFailed):
            assert under_way[event.rank] == event.round
            under_way[event.rank] = None


def test_apply_the_last_round_has_every_sample_and_is_the_final_state(trained):
    last = [command for command in trained.sent(SendOutcome) if command.save_final]
    assert [command.version for command in last] == [trained.rounds[-1].version]
    for process in trained.processes.values():
        assert process.parameters.version == trained.rounds[-1].version
        assert [list(process.parameters.seen[Epoch(epoch)]) for epoch in (0, 1)] == [[(0, 403)]] * 2


# sync


@pytest.mark.parametrize("backend", ["gloo", "cpu"])
def test_sync_no_rank_trains_beyond_the_last_round_granted(simulate, backend):
    broken = frozenset({4, 20}) if backend == "cpu" else frozenset()
    simulation = simulate(ranks(5, 11.5, 7), policy="sync", dataset_size=900, backend=backend, broken_rounds=broken)
    granted, num_looked = dict.fromkeys(range(3), 0), 0

    def has_ended() -> bool:
        nonlocal num_looked
        steps, num_looked = simulation.core.steps[num_looked:], len(simulation.core.steps)
        for command in (command for step in steps for command in step.commands):
            if isinstance(command, SendSyncNow):
                assert command.stop_after
                granted[command.rank] = max(granted[command.rank], command.after_step + command.count - 1)
        assert all(process.local_step <= granted[rank] for rank, process in simulation.processes.items())
        return simulation.job.result is not None

    simulation.run_until(has_ended)


@pytest.mark.parametrize("broken", [{2}, {5}, {5, 6, 7, 8}, {16}, {31}, {61}])
def test_sync_a_given_up_round_does_not_break_the_others_that_are_granted(simulate, broken):
    """The others commit in order; the first after it has the work of both."""
    simulation = simulate(ranks(5, 11.5), policy="sync", dataset_size=600, epochs=2, broken_rounds=frozenset(broken))
    assert simulation.run().outcome is Outcome.SUCCEEDED
    ids = [report.round for report in simulation.rounds]
    assert ids == [round_id for round_id in range(1, max(ids) + 1) if round_id not in broken]
    for report in simulation.rounds[1:]:
        lost = next(n for n in range(MAX_GIVEN_UP) if report.round - n - 1 not in broken)
        assert max(report.rank_batches) <= 1 + lost


@pytest.mark.parametrize(
    ("broken", "num_rounds"),
    [({17}, 60), ({5, 17, 29}, 58), ({30, 31}, 60), ({28, 29, 30, 31}, 58), ({60, 61}, 60)],
)
def test_sync_a_given_up_round_costs_no_other_batch_its_round(simulate, broken, num_rounds):
    """Targets were counted from the last commit by open rounds, as if none had been given up: two fell on one batch,
    the next batch had none, and rounds were left open when the job had trained everything.
    """
    simulation = simulate(ranks(5, 11.5), policy="sync", dataset_size=600, epochs=2, broken_rounds=frozenset(broken))
    assert simulation.run().outcome is Outcome.SUCCEEDED
    assert simulation.generation.rounds == []
    assert len(simulation.rounds) == num_rounds
    assert all(max(report.rank_batches) > 0 for report in simulation.rounds[1:])


# P4.6, outer optimizer and error feedback: they change at commit, and the core's part in that is the version


def test_outer_state_belongs_to_a_version_which_only_a_commit_raises(trained):
    """Every row says the version that its rank had: as many as rounds were committed, however many were given up."""
    for num_committed, report in enumerate(trained.rounds):
        assert {row.version for row in headers(trained)[report.round]} == {num_committed}

"""Plans of jobs, as `elche plan` shows them: exact where they can be, and worse where devices or links are."""

import re
from pathlib import Path
from typing import Any

import pytest

from elche.errors import InvalidJob
from elche.plan import Plan, PlanRequest
from elche_coordinator.simulator.planned import FIXED_S, averaging_s, memory, plan, sent_bytes

MB = 10**6
FAST: dict[str, Any] = {"link_bytes_per_s": 1e12, "round_trip_s": 1e-5}
SLOW: dict[str, Any] = {"link_bytes_per_s": 50e6 / 8, "round_trip_s": 0.04}
"""The link of docs/benchmarks.md: 50 Mbit/s, 20 ms each way."""


def request(*batch_ms: float, model_bytes: int = 2_500_000, **options: Any) -> PlanRequest:
    return PlanRequest(batch_ms=batch_ms, model_bytes=model_bytes, **{**FAST, **options})


def assert_adds_up(planned: Plan) -> None:
    for one in planned.devices:
        assert one.training + one.waiting + one.averaging + one.lost == pytest.approx(1)
        assert one.batches_per_s == pytest.approx(one.training * 1000 / one.batch_ms)
    assert planned.batches_per_s == pytest.approx(sum(one.batches_per_s for one in planned.devices))
    assert planned.batches_per_s <= planned.bound_batches_per_s * (1 + 1e-9)


def test_one_device_makes_what_it_can_and_sends_nothing():
    planned = plan(request(25.0, epoch_batches=4000))
    assert planned.bound_batches_per_s == 40
    assert planned.batches_per_s == pytest.approx(40, rel=0.01)
    assert planned.sent_bytes_per_round == planned.averaging_s == 0
    assert planned.epoch_s == pytest.approx(100, rel=0.01)
    assert_adds_up(planned)


def test_two_devices_on_a_fast_link_make_twice_as_much():
    planned = plan(request(25.0, 25.0))
    assert planned.batches_per_s == pytest.approx(80, rel=0.01)
    assert planned.rounds_per_minute > 600, "overlapped rounds begin with one batch, not with ten"
    assert_adds_up(planned)


def test_a_slow_link_costs_what_averagings_take_where_ranks_wait_for_them():
    blocking = {**SLOW, "averaging": "blocking"}
    planned = plan(request(25.0, 57.5, **blocking))
    assert planned.averaging_s == pytest.approx(0.56 + FIXED_S), "docs/benchmarks.md has measured 599 ms"
    assert planned.sent_bytes_per_round == pytest.approx(5e6), "and 2.50 MB from each of the two"
    assert 0.93 < planned.bound_fraction < 0.97
    assert planned.devices[0].averaging == pytest.approx(planned.rounds_per_minute / 60 * planned.averaging_s)
    assert_adds_up(planned)
    short = plan(request(25.0, 57.5, epoch_batches=50, **blocking))
    assert short.rounds_per_minute > 5 * planned.rounds_per_minute, "an epoch ends with a round"


def test_failures_cost_what_the_device_would_have_made_and_more():
    planned = plan(request(25.0, 50.0, mtbf_s=3600.0, restart_s=40.0))
    assert planned.loss_per_failure_s is not None
    assert 20 <= planned.loss_per_failure_s < 30, "half of the restart on average, and work that was not averaged"
    kept = 3600 / (3600 + 2 * planned.loss_per_failure_s)
    assert all(one.lost == pytest.approx(1 - kept) for one in planned.devices)
    assert planned.batches_per_s == pytest.approx(60 * kept, rel=0.01)
    assert_adds_up(planned)


def test_a_device_alone_goes_back_to_its_checkpoint():
    planned = plan(request(25.0, mtbf_s=7200.0, restart_s=30.0))
    assert planned.loss_per_failure_s == 30 + 300, "checkpoints are ten minutes apart"


def test_what_averagings_send_follows_from_the_ring():
    three = request(1.0, 1.0, 1.0, model_bytes=300 * MB, link_bytes_per_s=100e6, round_trip_s=0.1)
    assert sent_bytes(three) == pytest.approx(400 * MB)
    assert averaging_s(three) == pytest.approx(4 + 4 * 2 * 0.1 + FIXED_S)
    half = request(1.0, 1.0, 1.0, model_bytes=300 * MB, compress="bf16")
    assert sent_bytes(half) == pytest.approx(200 * MB)


@pytest.mark.parametrize(
    ("case", "options"),
    [("**the default**", {}), ("`compress` is set", {"compress": "int8"})],
)
def test_memory_is_what_the_documentation_says(case: str, options: Any):
    text = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(case)} \| ([0-9.]+) P \| ([0-9.]+) P", text, re.MULTILINE)
    assert found is not None
    planned = memory(request(1.0, 1.0, model_bytes=MB, **options), overlaps=True)
    assert (planned.rounds, planned.while_averaging) == (float(found[1]) * MB, float(found[2]) * MB)
    assert (planned.parameters, planned.gradients, planned.optimizer) == (MB, MB, 2 * MB), "a loop with AdamW"


@pytest.mark.parametrize(("optimizer", "num_copies"), [("adam", 2), ("momentum", 1), ("sgd", 0)])
def test_memory_grows_with_what_the_optimizer_keeps(optimizer: str, num_copies: int):
    planned = memory(request(1.0, model_bytes=MB, optimizer=optimizer), overlaps=True)
    assert planned.optimizer == num_copies * MB
    assert planned.rounds == 0, "one device alone keeps nothing"


def test_averaging_that_overlaps_is_refused_where_each_batch_is_averaged():
    with pytest.raises(InvalidJob, match="averaging is auto or blocking with policy sync"):
        plan(request(25.0, 25.0, policy="sync", averaging="overlapped"))

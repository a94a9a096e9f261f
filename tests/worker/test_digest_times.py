"""Ranks send a digest of some rounds' results, for little of their time, and one whose memory is corrupt is found."""

import pytest
import torch

from elche_worker import outer
from elche_worker.rank import digest_times
from elche_worker.rank.digest_times import COST_FRACTION, LEAST_EVERY, DigestTimes
from support.replicas import Make


class Clock:
    """A clock that a digest advances by its cost."""

    def __init__(self, *, round_s: float, cost_s: float) -> None:
        self.now_s, self._round_s, self._cost_s = 0.0, round_s, cost_s
        self.spent_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def compute(self) -> int:
        self.now_s += self._cost_s
        self.spent_s += self._cost_s
        return 7

    def rounds_with_one(self, num: int, times: DigestTimes) -> set[int]:
        sent = set()
        for number in range(1, num + 1):
            self.now_s += self._round_s
            if times.digest(number, self.compute) is not None:
                sent.add(number)
        return sent


@pytest.mark.parametrize("cost_s", [0.0, 0.001, 0.1, 2.0])
def test_digests_cost_a_thousandth_of_the_time(cost_s: float) -> None:
    """Once their cost is known, with rounds of a second."""
    clock = Clock(round_s=1.0, cost_s=cost_s)
    times = DigestTimes(clock=clock)
    clock.rounds_with_one(LEAST_EVERY, times)
    clock.spent_s, begun_s = 0.0, clock.now_s
    more = clock.rounds_with_one(20 * times.every, times)
    assert more
    assert clock.spent_s <= 1.05 * COST_FRACTION * (clock.now_s - begun_s)


def test_ranks_of_unequal_cost_have_rounds_in_common() -> None:
    sent = []
    for cost_s in (0.0, 0.02, 0.1):
        clock = Clock(round_s=1.0, cost_s=cost_s)
        sent.append(clock.rounds_with_one(1000, DigestTimes(clock=clock)))
    quick, slow, slowest = sent
    assert quick == set(range(LEAST_EVERY, 1001, LEAST_EVERY))
    assert {number for number in slowest if number > LEAST_EVERY} <= slow <= quick
    assert 128 in slowest


def test_a_job_that_verifies_sends_one_after_every_round() -> None:
    clock = Clock(round_s=1.0, cost_s=100.0)
    assert clock.rounds_with_one(5, DigestTimes(is_always=True, clock=clock)) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("averaging", ["blocking", "overlapped"])
def test_one_flipped_bit_in_what_a_rank_keeps_makes_its_digest_another(
    world: Make, averaging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last result, from which the next one is made: it would stay, and be in a model that only this rank has."""
    monkeypatch.setattr(digest_times, "COST_FRACTION", 1e9)  # rounds of this model are shorter than its digests
    ranks = world(3, averaging=averaging, outer_optimizer=outer.Nesterov(lr=0.7, momentum=0.5))
    for number in range(1, 2 * LEAST_EVERY + 1):
        if number == 2 * LEAST_EVERY:
            last = ranks.ranks[1].replica.averaging.reduction._memories["float32"].last
            last[:1].view(torch.int32).bitwise_xor_(torch.tensor(1 << 22, dtype=torch.int32))
        for rank in ranks.ranks:
            rank.train(1)
        held = ranks.round(number, *((1, 1, 1) if averaging == "overlapped" else ()))
        digests = [one.digest for one in held]
        if number % LEAST_EVERY:
            assert digests == [None] * 3
        elif number == LEAST_EVERY:
            assert digests[0] is not None
            assert len(set(digests)) == 1
    assert digests[0] == digests[2] != digests[1]

"""The environment of ranks: their threads, how Python hashes texts, and what PyTorch logs."""

import pytest

from elche import processors
from elche.processors import environment_of_ranks, threads_per_rank


@pytest.mark.parametrize(
    ("num_processors", "num_ranks", "expected"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 1, 3), (4, 1, 4), (4, 2, 2), (16, 3, 5), (4, 9, 1), (64, 0, 64)],
)
def test_ranks_share_the_processors_and_of_two_each_gets_one(
    num_processors: int, num_ranks: int, expected: int
) -> None:
    assert threads_per_rank(num_ranks, num_processors) == expected


def test_threads_that_wait_soon_sleep_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "num_cores", lambda: 8)

    def said(given: dict[str, str]) -> dict[str, str]:
        return {name: text for name, text in environment_of_ranks(2, given).items() if "OMP" in name}

    assert said({"HOME": "/"}) == {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "1000"}
    assert said({"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active"}) == {"OMP_NUM_THREADS": "7"}
    assert said({"GOMP_SPINCOUNT": "9"}) == {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "9"}


def test_texts_are_hashed_alike_on_every_rank_unless_the_environment_says_otherwise() -> None:
    assert environment_of_ranks(2, {})["PYTHONHASHSEED"] == "0"
    assert environment_of_ranks(2, {"PYTHONHASHSEED": "7"})["PYTHONHASHSEED"] == "7"


def test_torch_logs_no_stacks_of_a_store_that_has_ended_unless_the_environment_says_otherwise() -> None:
    """A loop that went on without rank 0 printed three of them: torch calls a closed connection a warning."""
    assert environment_of_ranks(2, {})["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    assert environment_of_ranks(2, {"TORCH_CPP_LOG_LEVEL": "INFO"})["TORCH_CPP_LOG_LEVEL"] == "INFO"

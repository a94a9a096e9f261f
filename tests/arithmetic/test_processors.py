"""How many threads compute on each rank."""

from pathlib import Path

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
    monkeypatch.setattr(processors, "processors", lambda: 8)
    assert environment_of_ranks(2, {"HOME": "/"}) == {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "1000"}
    assert environment_of_ranks(2, {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active"}) == {"OMP_NUM_THREADS": "7"}
    assert environment_of_ranks(2, {"GOMP_SPINCOUNT": "9"}) == {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "9"}


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, [3]),
        ("0::/", {"cpu.max": "50000 100000"}, [1]),
        ("0::/a", {"a/cpu.max": "max 100000"}, []),
        (
            "4:cpu,cpuacct:/a\n5:memory:/x",
            {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"},
            [4],
        ),
        ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, []),
        ("0::/a", {"a/cpu.max": "what is this"}, []),
    ],
)
def test_a_container_has_as_many_processors_as_it_gets_time(
    tmp_path: Path, group: str, files: dict[str, str], expected: list[int]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "of-process").write_text(group + "\n")
    assert list(processors._quotas(tmp_path, tmp_path / "of-process")) == expected


def test_without_control_groups_the_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processors, "OF_PROCESS", tmp_path / "none")
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda _: set(range(5)))
    assert processors.processors() == 5
    monkeypatch.setattr(processors, "_quotas", lambda *_: iter([3, 9]))
    assert processors.processors() == 3

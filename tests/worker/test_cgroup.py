"""A container's limits, as the kernel shows them; a machine's memory says nothing in one."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from elche.cgroup import cpu_limit, memory_limit_bytes, num_cores
from elche_worker.device import kinds
from elche_worker.device.kinds import GIB, kind_of


def kernel(root: Path, groups: str, files: Mapping[str, str]) -> Path:
    """A root with what the kernel shows of control groups."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2, V1 = "0::/\n", "9:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n"
UNLIMITED_V1 = "9223372036854771712"


def test_a_container_of_version_2(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{2 * GIB}\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
    root = kernel(tmp_path, V2, files)
    assert memory_limit_bytes(root) == 2 * GIB
    assert cpu_limit(root) == 1.5


def test_a_container_of_version_1_sees_its_own_folder_under_the_hosts_path(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    root = kernel(tmp_path, V1, files)
    assert memory_limit_bytes(root) == 3 * GIB
    assert cpu_limit(root) == 0.5
    assert num_cores(root) == 1


def test_the_least_of_the_groups_around_it_holds(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/system.slice/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/system.slice/elche.service/memory.max": "max\n",
        "sys/fs/cgroup/system.slice/elche.service/cpu.max": "max 100000\n",
    }
    root = kernel(tmp_path, "0::/system.slice/elche.service\n", files)
    assert memory_limit_bytes(root) == GIB
    assert cpu_limit(root) is None


@pytest.mark.parametrize("groups", ["", "nonsense", V2, V1])
def test_without_limits_all_of_the_machine_counts(tmp_path: Path, groups: str) -> None:
    root = kernel(tmp_path, groups, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"})
    assert memory_limit_bytes(root) is None
    assert cpu_limit(root) is None
    assert num_cores(root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("limit", [GIB, int(UNLIMITED_V1), None])
def test_a_cpus_memory_is_what_its_container_may_use(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(kinds, "memory_limit_bytes", lambda: limit)
    cpu = torch.device("cpu")
    assert kind_of(cpu).memory(cpu).total == (GIB if limit == GIB else machine)

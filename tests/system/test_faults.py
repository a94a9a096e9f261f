"""What befalls a host: its memory runs out, its clock jumps. Of this machine's kernel, as root."""

import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes.conftest import cluster, job_file, shared_cluster
from processes.test_lost_ranks import Story, begin, succeeds

from elche_client import Client
from elche_client.events import MembershipReport
from support.real_processes import Mark, agent, coordinator, eventually

__all__ = ["begin", "cluster", "job_file", "shared_cluster"]

pytestmark = pytest.mark.system

CGROUPS = Path("/sys/fs/cgroup/memory")
DAY_S = 86_400

CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset_s;
__attribute__((constructor)) static void attach(void) {
  const char *path = getenv("CLOCK_OFFSET");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file >= 0) offset_s = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t id, struct timespec *at) {
  int failed = syscall(SYS_clock_gettime, id, at);
  if (!failed && id == CLOCK_REALTIME && offset_s) at->tv_sec += *offset_s;
  return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


@contextmanager
def little_memory(num_bytes: int) -> Iterator[Path]:
    """A control group whose processes may take so much more memory before the kernel kills one."""
    group = CGROUPS / "elche-test"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("control groups cannot be made here")
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), "its processes have ended")
        group.rmdir()


def test_a_rank_that_the_kernel_kills_for_its_memory(begin: Callable[..., Story]) -> None:
    hungry = "FOLDER.joinpath('hungry').exists() and IS_FIRST and RANK == 1"
    story = begin(
        "step = train_step",
        f"def train_step(model, batch):\n    if {hungry}:\n        global hoard\n        hoard = b'x' * (1 << 30)\n"
        "    return step(model, batch)",
        "import dataclasses\njob = dataclasses.replace(job, train_step=train_step)",
    )
    with little_memory(256 << 20) as group:
        eventually(lambda: story.pids(1, "batch"), "it trains")
        (group / "cgroup.procs").write_text(str(story.pids(1)[0]))
        (story.folder / "hungry").touch()
        story.await_return(1)
        succeeds(story, survivors=(0, 2))
    (lost, *_) = story.of(MembershipReport)
    assert "was killed by signal 9 (often: out of memory)" in lost.text


@pytest.fixture
def jumping_clock(tmp_path: Path) -> Path:
    """A library that shifts the clock of processes that load it by the number of seconds in $CLOCK_OFFSET."""
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler here")
    return library


@pytest.mark.long
def test_clocks_that_jump_cost_nothing(begin: Callable[..., Story], jumping_clock: Path, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_bytes(struct.pack("l", 0))
    mark = Mark()
    env = {"LD_PRELOAD": str(jumping_clock), "CLOCK_OFFSET": str(offset)}
    now = ["python", "-c", "import time; print(int(time.time()))"]
    with ExitStack() as stack:
        one = stack.enter_context(coordinator(mark, tmp_path, env=env))
        stack.enter_context(agent(mark, tmp_path, one.address, devices="cpu,cpu,cpu", env=env))
        client = stack.enter_context(Client(one.address, token=""))
        story = begin(client=client)
        eventually(lambda: all(len(story.pids(rank, "batch")) for rank in range(3)), "it trains")
        before_s = int(subprocess.run(now, capture_output=True, check=True, env={**os.environ, **env}).stdout)
        for days in (1, -1, 400):
            with offset.open("r+b") as file:
                file.write(struct.pack("l", days * DAY_S))
            num_batches = len(story.notes(0))
            eventually(lambda num=num_batches: len(story.notes(0)) > num + 50, "it trains on")
        after_s = int(subprocess.run(now, capture_output=True, check=True, env={**os.environ, **env}).stdout)
        assert after_s - before_s > 399 * DAY_S, "the clock has jumped"
        story.hurry()
        succeeds(story, survivors=(0, 1, 2))
        assert not story.of(MembershipReport)
    mark.assert_none_left()

"""Run by test_launchers.py in a network namespace, which Ray needs: a cluster of its own, and elche on it."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import elche_ray
from elche_client.events import JobState
from support.fleets import LINEAR, NUM_SAMPLES, SLOWLY, WORKER, is_exact_so_far, lab
from support.real_processes import Mark

SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}


def new_node(cluster: Cluster) -> Any:
    """A node that is there. Ray gives one 30 s to begin, which is too short on a busy machine, and raises then."""
    for _ in range(3):
        with suppress(Exception):
            return cluster.add_node(num_cpus=1, include_log_monitor=False)
    return cluster.add_node(num_cpus=1, include_log_monitor=False)


def tell(folder: Path, mark: Mark) -> None:
    head = {"num_cpus": 1, "_system_config": SOON, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    lost = new_node(cluster)
    engine = ("--on", "ray", cluster.address)
    ray.init(cluster.address, namespace="elche", log_to_driver=False)
    with lab(mark, folder, {}) as one:
        one.up(*engine, "--agents", "2")
        one.until_attended(2)
        job = one.train(3)
        one.up(*engine, "--agents", "3")
        assert one.states(*engine) == ["running", "running", "waiting"]
        new_node(cluster)
        one.until_ranks(job, 3)

        killed_s = time.monotonic()
        ray.kill(ray.get_actor("elche-0"), no_restart=False)
        one.until_lost(1)
        one.until_ranks(job, 3)
        print(f"an actor that was killed: three ranks again after {time.monotonic() - killed_s:.1f} s")

        lost_s = time.monotonic()
        cluster.remove_node(lost, allow_graceful=False)
        one.until_ranks(job, 2)
        new_node(cluster)
        one.until_ranks(job, 3)
        print(f"a node that was lost: three ranks again after {time.monotonic() - lost_s:.1f} s")
        is_exact_so_far(job)

        one.up(*engine, "--agents", "1")
        one.until_attended(1)
        os.kill(min(mark.living("elche_worker.agent")), signal.SIGTERM)  # a notice does the same
        one.until_attended(0)
        one.until_attended(1)
        assert one.elche("down", *engine).code == 0
        one.until_attended(0)

        path = folder / "script.py"
        path.write_text(LINEAR.read_text() + SLOWLY)
        result = elche_ray.run(path, elche_ray.Scaling(num_agents=2), address=cluster.address, epochs=3)
        assert (result.state, result.committed_samples) == (JobState.SUCCEEDED, (NUM_SAMPLES,) * 3)
        os.environ |= one.env
        outside = elche_ray.run(path, coordinator=one.address, worker=WORKER.removesuffix(" --devices cpu"), epochs=1)
        assert outside.state is JobState.SUCCEEDED
    print("all told")


if __name__ == "__main__":
    tell(Path(sys.argv[1]), Mark(sys.argv[2]))

"""What the worker's part of `elche run` does first, and what later, beside what takes longest."""

import subprocess
import sys

SPAWNER_FIRST = """
import io, os, sys
from elche_worker.agent import for_run

class Spawner:
    def __init__(self, *_, **__):
        print(sorted({"grpc", "torch", "numpy", "click"} & set(sys.modules)))
        sys.exit()

for_run.SpawnerProcess = Spawner
sys.stdin, sys.argv = io.StringIO('{"num_ranks": 1}'), ["", str(os.getppid())]
for_run.main()
"""


def test_the_process_that_imports_torch_is_started_before_the_agent_imports_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", SPAWNER_FIRST], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


THREADS = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
import torch
from elche_worker.rank.spawner import _take_threads

said = []
for number in (0, 2, 3):
    _take_threads(number)
    said.append((os.environ["OMP_NUM_THREADS"], torch.get_num_threads()))
print(said)
"""


def test_a_rank_computes_with_the_threads_of_its_agent_and_not_of_the_process_that_it_was_forked_from() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert done.stdout == "[('2', 2), ('2', 2), ('3', 3)]\n"

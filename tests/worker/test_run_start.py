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

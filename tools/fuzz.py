"""Fuzzes for as long as it is told: `make fuzz MINUTES=60`. Stops at the first fault.

Each test of tests/fuzz that calls our code in its own process is run in turn, guided by coverage (tools/guided.py).
What reached new code is kept in .fuzz, and the next run goes on from it. The tests with a real coordinator, whose
coverage is not seen here, get a tenth of the time, with other seeds than the gate's. A fault prints its input, and the
command that makes it again.
"""

import argparse
import ast
import os
import random
import re
import secrets
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "fuzz"
CALLS = TESTS / "test_calls.py"
"""The tests with a real coordinator."""
KEPT = ROOT / ".fuzz"
LONGEST = 512
"""Bytes of an input: enough for a dozen changes of each part of an example."""
SEEDS = 50
"""Random inputs with which a target begins. From each, hypothesis draws an example, mostly of what is in
tests/fuzz/corpus.
"""
EXAMPLES = 50
"""Of each test with a real coordinator, in one turn."""
STARTS_S = 15.0
"""What a test takes to begin: a target has at least twice as long."""


def main() -> int:
    """Fuzzes each target for its part of the time; exit code 1 at the first fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="", help="part of the tests' names")
    chosen = parser.parse_args()
    if find_spec("atheris") is None:
        print("atheris is missing: it exists for Linux on x86-64, and not yet for the newest Python", file=sys.stderr)
        return 1
    tests = [test for test in targets() if chosen.only in test]
    each_s = 60 * chosen.minutes * (0.9 if chosen.only in CALLS.name else 1.0) / max(1, len(tests))
    end_s = time.monotonic() + 60 * chosen.minutes
    for test in tests:
        if not guided(test, max(STARTS_S, each_s - STARTS_S)):
            return 1
    while (chosen.only in CALLS.name or not tests) and time.monotonic() < end_s:
        if not with_coordinator():
            return 1
    print("no fault")
    return 0


def targets() -> list[str]:
    """The tests that hypothesis gives examples and that have no real coordinator, as pytest names them."""
    found = []
    for path in sorted(set(TESTS.glob("test_*.py")) - {CALLS}):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("given(" in ast.unparse(one) for one in node.decorator_list):
                found.append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def guided(test: str, seconds: float) -> bool:
    """Fuzzes a target, and prints what it has reached. False for a fault."""
    folder = KEPT / test.partition("::")[2]
    if not folder.exists():
        folder.mkdir(parents=True)
        for number in range(SEEDS):
            (folder / f"seed-{number}").write_bytes(random.Random(number).randbytes(LONGEST // 2))
    options = [f"-max_total_time={seconds:.0f}", f"-max_len={LONGEST}", "-len_control=0", "-rss_limit_mb=0"]
    options += ["-timeout=100", "-print_final_stats=1", f"-artifact_prefix={folder}.fault-"]
    command = [sys.executable, str(ROOT / "tools" / "guided.py"), test, str(folder), *options]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = ended.stdout.decode(errors="replace")
    begun, done = (re.search(rf"{when} +cov: (\d+)", said) for when in ("INITED", "DONE"))
    if ended.returncode or begun is None or done is None:
        print(re.sub(r"INFO: Instrumenting .*\n|#\d.*\n", "", said)[-20_000:], file=sys.stderr)
        inputs = sorted(folder.parent.glob(f"{folder.name}.fault-*"), key=lambda path: path.stat().st_mtime)
        with_input = f" {inputs[-1]}" if inputs else ""
        print(f"a fault; `{sys.executable} tools/guided.py {test}{with_input}` makes it again", file=sys.stderr)
        return False
    runs, per_s = re.findall(r"stat::(?:number_of_executed_units|average_exec_per_sec): +(\d+)", said)
    print(f"{folder.name}: {runs} runs, {per_s} a second, edges {begun[1]} -> {done[1]}", flush=True)
    return True


def with_coordinator() -> bool:
    """One turn of the tests with a real coordinator. False for a fault."""
    seed = secrets.randbits(32)
    command = ["-m", "pytest", "-x", "--timeout", "3600", f"--hypothesis-seed={seed}", str(CALLS.relative_to(ROOT))]
    print(f"with a real coordinator, seed {seed}", flush=True)
    env = {**os.environ, "FUZZ_EXAMPLES": str(EXAMPLES)}
    if subprocess.run([sys.executable, *command], cwd=ROOT, env=env, check=False).returncode == 0:
        return True
    again = " ".join([f"FUZZ_EXAMPLES={EXAMPLES}", sys.executable, *command])
    print(f"a fault: its example is above; `{again}` makes it again", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())

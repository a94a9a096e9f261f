"""`python -m elche_worker.replaying RUN`: the replay of `elche replay`, in a process of its own.

Prints the outcome as one line of JSON, or as text. Exit code 0: equal to the run, 1: it differs, 2: refused.
"""

import argparse
import json
import os
import sys

from elche.errors import ElcheError
from elche_worker.replaying.replayer import Replayed, replay


def main(arguments: list[str]) -> int:
    """Repeats a run and says whether it is the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--until-round", type=int)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        done = replay(
            given.run, until_round=given.until_round, attempt=given.attempt, device=given.device, out=given.out
        )
    except ElcheError as error:
        print(json.dumps({"error": str(error)}) if given.json else f"elche: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_values(done)) if given.json else "\n".join(_lines(done)))
    return 1 if done.difference else 0


def _values(done: Replayed) -> dict[str, object]:
    names = ("round", "generation", "attempt", "version", "samples", "num_compared", "difference", "notes")
    return {name: getattr(done, name) for name in names} | {"num_processes": len(done.ranks), "model": str(done.path)}


def _lines(done: Replayed) -> list[str]:
    what = f"round {done.round} of attempt {done.attempt}: version {done.version}, {done.samples} samples"
    lines = [f"{what}, of {len(done.ranks)} rank processes, repeated in this one", *done.notes, f"model  {done.path}"]
    if done.difference:
        return [*lines, f"it differs from the run, first in {done.difference}"]
    rounds = "round" if done.num_compared == 1 else "rounds"
    told = f"equal to the run in the {done.num_compared} {rounds} whose digests it has"
    return [*lines, told if done.num_compared else "the run has no digests to compare: record them with --verify"]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destructors of groups whose other ranks are gone may wait for them

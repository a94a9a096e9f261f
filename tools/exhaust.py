"""Looks at everything that can happen to small jobs: each order of messages, with faults at any moment, and acts of
people: a rank leaves, the job is paused, scaled, drained, saved, cancelled.

For each case it allows one deviation from the usual order, then two, and so on, until it has looked at everything or at
so many states. Prints how far it has come, or a story that ends where it must not, and exits with 1 then.

    python tools/exhaust.py --states 20000
    python tools/exhaust.py --only 'three ranks.*kill'
"""

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.exhaustive import Counterexample, Search
from support.small_world import ACTS, FAULTS, small_world

WAYS: dict[str, dict[str, Any]] = {
    "blocking": {},
    "overlapped, rides out": {"averaging": "overlapped", "ride_out_s": 10.0},
    "sync, rides out": {"policy": "sync", "ride_out_s": 10.0},
    "async, overlapped": {"policy": "async", "averaging": "overlapped"},
    "two epochs, evaluated and saved": {
        "epochs": 2,
        "dataset_size": 2,
        "has_evaluation": True,
        "eval_size": 2,
        "checkpoint_every_epochs": 1,
    },
}


WITH_ACTS = ("blocking", "overlapped, rides out")
"""In these, faults befall the job beside what people do."""


@dataclass(frozen=True, slots=True)
class CaseSearch:
    """The search of one case so far."""

    name: str
    num_states: int
    num_steps: int
    num_ends: int
    extent: str
    story: str
    processor_s: float


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and what they stand for."""
    wrong = [*((one,) for one in FAULTS), *combinations(FAULTS, 2)]
    for number, ranks in ((2, "two"), (3, "three")):
        for way, settings in WAYS.items():
            yield f"{ranks} ranks, {way}: nothing", {"num_ranks": number, **settings}
            for faults in wrong if number == 2 else wrong[:4]:
                given = {"num_ranks": number, "faults": dict.fromkeys(faults, 1), **settings}
                yield f"{ranks} ranks, {way}: {' and '.join(faults)}", given
                if len(faults) == 1:
                    yield f"{ranks} ranks, {way}: {faults[0]}, early deadlines", {**given, "early": 1}
            for act in ACTS:
                given = {"num_ranks": number, "faults": {act: 1 + (act == "scale")}, **settings}
                yield f"{ranks} ranks, {way}: {act}", given
                for fault in FAULTS if number == 2 and way in WITH_ACTS else ():
                    yield f"{ranks} ranks, {way}: {act} and {fault}", {**given, "faults": {**given["faults"], fault: 1}}


def look(case: tuple[str, dict[str, Any], int]) -> CaseSearch:
    """Looks at one case."""
    name, given, most_states = case
    began_s, extent, search = time.process_time(), "incomplete", Search(small_world(**given))
    deviations, num_before, num_steps, story = 0, 0, 0, ""
    while not story:
        search = Search(small_world(**given), deviations, most_states)
        try:
            search.run()
        except Counterexample as found:
            story = f"{name}: {found}"
        num_steps += search.num_steps
        if not search.is_whole:
            break
        extent = f"complete up to {deviations} deviations from the usual order"
        if search.num_states == num_before:
            extent = "complete"
            break
        deviations, num_before = deviations + 1, search.num_states
    used_s = time.process_time() - began_s
    return CaseSearch(name, search.num_states, num_steps, search.num_ends, extent, story, used_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=20_000, help="at most so many for each case")
    parser.add_argument("--only", default="", help="cases whose names match")
    options = parser.parse_args(arguments)
    chosen = [(name, given, options.states) for name, given in cases() if re.search(options.only, name)]
    num_states, used_s, bad = 0, 0.0, []
    with multiprocessing.get_context("spawn").Pool() as pool:
        for one in pool.imap(look, chosen):
            print(f"{one.name}: {one.num_states} states, {one.num_ends} ends; {one.extent}", flush=True)
            num_states, used_s = num_states + one.num_states, used_s + one.processor_s
            if one.story:
                bad.append(one.name)
                print(one.story, flush=True)
    print(f"{len(chosen)} cases, {num_states} states, {used_s:.0f} s of processor time, {len(bad)} bad {bad or ''}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

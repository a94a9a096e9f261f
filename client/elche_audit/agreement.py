"""What checkpoints and the job's record say beside the rounds, against what the ranks' files have."""

from collections.abc import Sequence
from typing import Any

from elche_audit.coverage import gaps, overlaps, ranges_of, words
from elche_audit.rank_file import Start
from elche_audit.run_folder import RECORD, CheckpointBooks

SETTLED = ("epochs", "max_steps", "drop_last", "batch_size")
"""Settings that decide which samples are trained, where they are numbers."""


def unlike_settings(start: Start) -> list[str]:
    """The settings with which a rank did not train, a line each."""
    return [
        f"the job is set to {name} {start.settings[name]}, and it was to train with {getattr(start, name)}"
        for name in SETTLED
        if type(start.settings.get(name)) in (int, bool) and start.settings[name] != getattr(start, name)
    ]


def ledger_faults(books: CheckpointBooks, sizes: list[int], last_lease: int) -> list[str]:
    """The positions that a checkpoint's ledger has twice, or not at all, a line each; and a lease that it would give
    again. `last_lease`: the highest id of those that ranks have trained.
    """
    places = [piece for piece in books.places if piece.epoch >= books.epoch]
    epochs = {piece.epoch for piece in places}
    found = [f"its ledger has {line}" for line in overlaps(places)]
    found += [f"its ledger lacks {words(*one)}" for one in gaps(ranges_of(places), sizes) if one[0] in epochs]
    newest = max([last_lease, *(lease for _, lease in books.leases)])
    if books.next_lease is not None and newest >= books.next_lease:
        found.append(f"the next lease is to be {books.next_lease}, and lease {newest} was given")
    return found


def other_seeds(seeds: Sequence[tuple[str, Any]]) -> list[str]:
    """The first of these that differs from the first one, where both are known: with another seed a position of an
    epoch is another sample.
    """
    known = [(where, seed) for where, seed in seeds if seed is not None]
    return [
        f"seed {known[0][1]} of {known[0][0]} is not seed {seed} of {where}"
        for where, seed in known
        if seed != known[0][1]
    ][:1]


def record_faults(
    result: dict[str, Any],
    sizes: list[int],
    dataset_size: int,
    rounds: set[tuple[int, int, int]],
    steps: dict[int, set[int]],
) -> list[str]:
    """What the record says that no rank has made. `rounds`: number, version and samples of each; `steps`: the job's
    batches in each version.
    """
    found = []
    if result.get("dataset_size", 0) not in (0, dataset_size):
        found.append(
            f"{RECORD} is of a data set of {result['dataset_size']} samples, and the ranks' has {dataset_size}"
        )
    best = result["model_is"].removeprefix("best of epoch ")
    if best.isdecimal() and best != result["model_is"] and int(best) > len(sizes):
        found.append(f"{RECORD} says that the model is of epoch {best}, and the job has no such epoch")
    for number, version, samples in result["round_reports"]:
        if (number, version, samples) not in rounds:
            found.append(f"{RECORD} has round {number} (version {version}) with {samples} samples: no ranks made it")
    for path, version, step in result["checkpoints"]:
        if step not in steps.get(version, ()):
            found.append(f"{RECORD} has checkpoint {path} of version {version} with {step} batches: no ranks made it")
    return found

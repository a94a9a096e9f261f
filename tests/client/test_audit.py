"""The auditor finds and names each fault that is planted into a run's files, and proves runs in which ranks die.

The files are written here byte by byte, by the format in docs/audit.md, not by the program that writes them in a run.
"""

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import elche_audit
from elche.v1 import job_pb2
from elche_audit import rank_file
from elche_client.cli.main import main

JOB = "digits-1"
SIZE, BATCH, EPOCHS = 32, 4, 2
LAYOUTS = {
    "batch": (1, "<QIQIQ"),
    "entered": (2, "<QQQQQQQ"),
    "received": (3, "<QQQQQIBQQ"),
    "lost": (4, "<QQ"),
    "committed": (5, "<QQQ"),
    "ended": (6, "<Q"),
    "skipped": (7, "<QIQIQ"),
    "joined": (8, "<QQIIB"),
    "evaluated": (9, "<QIQQ"),
    "decided": (11, "<B"),
}
LEFT_OUT, NOT_FINITE, HAS_DIGEST = 1, 2, 4
VERSION, SAMPLES, OUT, ROWS, FLAGS, HEADER, DIGEST = range(3, 10)
"""Places in a record of a result, after its kind, generation and round."""


@dataclass
class Log:
    """One rank process, and what it has written."""

    start: dict[str, Any]
    records: list[list[Any]] = field(default_factory=list)
    cut: int = 0
    step: int = 0
    version: int = 0
    in_result: int = 0
    booked: int = 0
    """Batches that are in committed rounds."""

    def batches(self) -> list[list[Any]]:
        return [record for record in self.records if record[0] in ("batch", "skipped")]

    def find(self, kind: str, number: int = -1) -> list[Any]:
        return [record for record in self.records if record[0] == kind][number]

    def to_bytes(self) -> bytes:
        text = json.dumps(self.start).encode()
        data = b"ELCHEAUD" + struct.pack("<HHI", 2, 0, len(text)) + text
        crc = crc32(data)
        data += struct.pack("<I", crc)
        for kind, *numbers in self.records:
            number, layout = LAYOUTS[kind]
            record = bytes([number]) + struct.pack(layout, *numbers)
            crc = crc32(record, crc)
            data += record + struct.pack("<I", crc)
        return data


def rest_after(ranges: list[list[int]]) -> list[list[int]]:
    """The positions of an epoch that are in none of the ranges."""
    starts = [0, *(end for _, end in sorted(ranges))]
    return [[a, b] for a, b in zip(starts, [*(start for start, _ in sorted(ranges)), SIZE], strict=True) if a < b]


@dataclass
class Run:
    """A run of two ranks, as its files contain it."""

    folder: Path
    logs: dict[str, Log] = field(default_factory=dict)
    cadence: list[job_pb2.RecordedRound] = field(default_factory=list)
    manifests: dict[str, dict[str, Any]] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    attempt: int = 1
    generation: int = 1
    round: int = 0
    version: int = 0
    samples: int = 0
    steps: int = 0
    lease: int = 0
    covered: dict[int, list[list[int]]] = field(default_factory=dict)

    def begin(self, rank: int, incarnation: int, *, resume: str = "", version: int = 0, samples: int = 0) -> str:
        start = {"job": JOB, "rank": rank, "incarnation": incarnation, "resume": resume, "version": version}
        start |= {"samples": samples, "dataset_size": SIZE, "batch_size": BATCH, "epochs": EPOCHS}
        start |= {"drop_last": False, "max_steps": None, **self.options}
        name = f"rank-{rank}-{incarnation}.bin"
        self.logs[name] = Log(start, version=version)
        return name

    def train(self, name: str, epoch: int, offset: int, size: int, lease: int = 0) -> None:
        log = self.logs[name]
        self.lease += not lease
        for at in range(offset, offset + size, BATCH):
            log.step += 1
            part = min(BATCH, offset + size - at)
            log.cut += part
            log.records.append(["batch", lease or self.lease, epoch, at, part, log.step])

    def enter(self, *names: str) -> None:
        self.round += 1
        for name in names:
            log = self.logs[name]
            numbers = [self.version, log.cut, log.step, log.cut - log.in_result]
            log.records.append(["entered", self.attempt, self.generation, self.round, *numbers])

    def average(self, *names: str, without: str = "", left_out: str = "") -> None:
        """A committed round of these ranks. `without` dies before it has the result."""
        self.enter(*names)
        logs = {name: self.logs[name] for name in names}
        self.samples += sum(log.cut - log.in_result for log in logs.values())
        out = logs[left_out].cut - logs[left_out].in_result if left_out else 0
        self.version += 1
        parts = []
        for name, log in logs.items():
            batches = log.batches()[log.booked :]
            slices = [job_pb2.Slice(epoch=one[2], offset=one[3], size=one[4]) for one in batches]
            parts.append(job_pb2.RankPart(slices=slices, num_batches=len(slices)))
            self.steps += len(batches)
            for one in batches:
                self.covered.setdefault(one[2], []).append([one[3], one[3] + one[4]])
            log.booked, log.in_result, log.version = log.step, log.cut, self.version
            if name != without:
                flags = LEFT_OUT * (name == left_out)
                result = [self.version, self.samples, out, len(names), flags, 7000 + self.round, 0]
                log.records.append(["received", self.generation, self.round, *result])
        for name, log in logs.items():
            if name != without:
                log.records.append(["committed", self.round, self.version, self.steps])
        self.cadence.append(job_pb2.RecordedRound(parts=parts, generation=self.generation))

    def checkpoint(self) -> str:
        name = f"epoch-version-{self.version}"
        complete = [epoch for epoch, ranges in self.covered.items() if sum(b - a for a, b in ranges) == SIZE]
        epoch = len(complete)
        books = {
            str(one): {"free": rest_after(ranges), "committed": ranges}
            for one, ranges in self.covered.items()
            if one >= epoch
        }
        training = {"attempt": self.attempt, "version": self.version, "samples": self.samples}
        training |= {"global_step": self.steps, "ledger": {"epoch": epoch, "books": json.loads(json.dumps(books))}}
        self.manifests[name] = {"format": 2, "job": JOB, "training": training}
        return name

    def end(self, state: str = "succeeded", **more: Any) -> None:
        for log in self.logs.values():
            log.records.append(["ended", log.step])
        sizes = [sum(end - start for start, end in self.covered.get(epoch, [])) for epoch in range(EPOCHS)]
        self.record = {"job_id": JOB, "state": state, "committed_samples": sizes, **more}

    def write(self) -> None:
        audit = self.folder / "audit" / JOB
        audit.mkdir(parents=True, exist_ok=True)
        for name, log in self.logs.items():
            (audit / name).write_bytes(log.to_bytes())
        (self.folder / "run.json").write_text("{}")
        rounds = b"".join(job_pb2.JobSpec(replay=[one]).SerializeToString() for one in self.cadence)
        (self.folder / "cadence.binpb").write_bytes(rounds)
        if self.record is not None:
            (self.folder / "record.json").write_text(json.dumps(self.record))
        for name, manifest in self.manifests.items():
            text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
            folder = self.folder / "checkpoints" / JOB / name
            folder.mkdir(parents=True, exist_ok=True)
            whole = {**manifest, "checksum": hashlib.sha256(text.encode()).hexdigest()}
            (folder / "manifest.json").write_text(json.dumps(whole))


A, B = "rank-0-1.bin", "rank-1-2.bin"


def begun(folder: Path, **options: Any) -> Run:
    """Two ranks have the initial model, and have trained the first epoch in two rounds."""
    run = Run(folder, options=options)
    run.begin(0, 1)
    run.begin(1, 2)
    run.average(A, B)
    for start in (0, 16):
        run.train(A, 0, start, 8)
        run.train(B, 0, start + 8, 8)
        run.average(A, B)
    run.checkpoint()
    return run


def whole(folder: Path, **options: Any) -> Run:
    """The second epoch too, with a checkpoint in its middle."""
    run = begun(folder, **options)
    for start in (0, 16):
        run.train(A, 1, start, 8)
        run.train(B, 1, start + 8, 8)
        run.average(A, B)
        run.checkpoint()
    run.end()
    return run


def judged(run: Run) -> tuple[int, str]:
    run.write()
    verdict = elche_audit.judge(run.folder)
    return elche_audit.exit_code(verdict), "\n".join(elche_audit.lines(verdict))


# Faults

Fault = Callable[[Run], None]


def lease_given_twice(run: Run) -> None:
    run.logs[B].batches()[0][1] = 1


def positions_twice(run: Run) -> None:
    for one in run.logs[B].batches()[-2:]:
        one[3] -= 8


def slice_beyond_its_epoch(run: Run) -> None:
    run.logs[A].batches()[-1][3] = SIZE


def batch_of_no_epoch(run: Run) -> None:
    run.logs[A].batches()[-1][2] = EPOCHS


def round_that_lost_a_cut(run: Run) -> None:
    for log in run.logs.values():
        for record in log.records:
            if record[0] == "received" and record[VERSION] >= 3:
                record[SAMPLES] -= 8


def round_with_samples_of_nobody(run: Run) -> None:
    for log in run.logs.values():
        for record in log.records:
            if record[0] == "received" and record[VERSION] >= 3:
                record[SAMPLES] += 8


def version_made_of_an_older_one(run: Run) -> None:
    """Rank 1 has not heard of version 6, which rank 0 has made alone, and makes version 7 of version 5."""
    for log in run.logs.values():
        log.records.pop()
    run.average(A)
    run.average(B)
    run.logs[B].find("entered")[4] -= 1


def record_that_lost_a_cut(run: Run) -> None:
    del run.cadence[2].parts[1].slices[:]


def record_with_another_slice(run: Run) -> None:
    run.cadence[3].parts[0].slices[0].offset += 4


def record_with_another_generation(run: Run) -> None:
    run.cadence[-1].generation += 1


def record_with_one_round_more(run: Run) -> None:
    run.cadence.append(run.cadence[-1])


def header_that_differs(run: Run) -> None:
    run.logs[B].find("received")[HEADER] += 1


def parameters_that_differ(run: Run) -> None:
    for number, log in enumerate(run.logs.values()):
        log.find("received", 2)[FLAGS] |= HAS_DIGEST
        log.find("received", 2)[DIGEST] = 99 + number


def two_leaders(run: Run) -> None:
    """The last round was made twice: each rank alone, each told that it is committed."""
    for name, generation in ((A, 2), (B, 3)):
        for kind, place in (("entered", 2), ("received", 1)):
            run.logs[name].find(kind)[place] = generation
        run.logs[name].find("received")[ROWS] = 1


def committed_as_another_version(run: Run) -> None:
    run.logs[B].find("committed", 3)[2] += 1


def entered_with_another_version(run: Run) -> None:
    run.logs[B].find("entered", 3)[4] -= 1


def committed_with_another_number_of_batches(run: Run) -> None:
    for log in run.logs.values():
        log.find("committed", 2)[3] += 2


def cut_that_was_not_trained(run: Run) -> None:
    run.logs[A].find("entered", 3)[5] += 4


def batches_that_were_not_trained(run: Run) -> None:
    run.logs[A].find("entered", 3)[6] += 1


def weight_that_was_not_trained(run: Run) -> None:
    run.logs[A].find("entered", 3)[7] += 4


def result_of_a_round_that_was_given_up(run: Run) -> None:
    records = run.logs[B].records
    records.insert(records.index(run.logs[B].find("received")), ["lost", 1, run.round])


def batch_left_out_of_a_file(run: Run) -> None:
    run.logs[A].records.remove(run.logs[A].batches()[2])


def one_entry_too_many(run: Run) -> None:
    for log in run.logs.values():
        log.find("received", 2)[ROWS] = 1


def two_outcomes(run: Run) -> None:
    run.record = None
    for number, log in enumerate(run.logs.values(), 3):
        log.records.insert(-1, ["decided", number])


def outcome_that_there_is_not(run: Run) -> None:
    run.logs[A].records.insert(-1, ["decided", 9])


def skipped_tail(run: Run) -> None:
    """Rank 1 does not train its last lease, and the coordinator ends the job in spite of it."""
    log = run.logs[B]
    for one in log.batches()[-2:]:
        log.records.remove(one)
    entered = log.find("entered")
    entered[5:] = [entered[5] - 8, entered[6] - 2, 0]
    log.find("ended")[1] -= 2
    for one in run.logs.values():
        one.find("received")[SAMPLES] -= 8
    del run.cadence[-1].parts[1].slices[:]
    assert run.record is not None
    run.record["committed_samples"][-1] -= 8
    run.manifests.popitem()


def result_with_other_samples(run: Run) -> None:
    assert run.record is not None
    run.record["committed_samples"][1] -= 4


def checkpoint_of_a_version_that_nobody_made(run: Run) -> None:
    run.manifests["epoch-version-5"]["training"]["version"] = 9


def checkpoint_of_another_version(run: Run) -> None:
    run.manifests["epoch-version-3"]["training"]["version"] = 4


def checkpoint_without_a_slice(run: Run) -> None:
    run.manifests["epoch-version-4"]["training"]["ledger"]["books"]["1"]["committed"] = [[0, 4], [8, 16]]


def checkpoint_with_a_slice_too_many(run: Run) -> None:
    run.manifests["epoch-version-4"]["training"]["ledger"]["books"]["1"]["committed"].append([20, 24])


def checkpoint_of_another_epoch(run: Run) -> None:
    run.manifests["epoch-version-4"]["training"]["ledger"]["epoch"] = 2


def checkpoint_with_other_samples(run: Run) -> None:
    run.manifests["epoch-version-3"]["training"]["samples"] += 1


def checkpoint_with_other_steps(run: Run) -> None:
    run.manifests["epoch-version-3"]["training"]["global_step"] += 1


def another_extent(run: Run) -> None:
    run.logs[B].start["epochs"] = EPOCHS + 1


def went_back_to_a_version_of_nobody(run: Run) -> None:
    run.attempt, run.version, run.samples, run.generation = 2, 9, 64, 5
    name = run.begin(0, 3, resume="checkpoint", version=9, samples=64)
    run.average(name)


def in_groups(run: Run, *groups: tuple[int, int, int]) -> None:
    """Each rank begins in generation 1: its place, the number of ranks, and 1 if through the coordinator."""
    for log, group in zip(run.logs.values(), groups, strict=True):
        log.records.insert(0, ["joined", 1, 1, *group])


def average_without_a_member(run: Run) -> None:
    in_groups(run, (0, 3, 0), (1, 3, 0))


def place_that_there_is_not(run: Run) -> None:
    in_groups(run, (0, 2, 0), (2, 2, 0))


def group_that_averages_in_two_ways(run: Run) -> None:
    in_groups(run, (0, 2, 0), (1, 2, 1))


def round_of_an_older_generation(run: Run) -> None:
    """A round of generation 2 is committed, and after it one of generation 1."""
    for log in run.logs.values():
        log.find("entered", 3)[2] = log.find("received", 3)[1] = 2
    run.cadence[3].generation = 2


def commit_after_the_end(run: Run) -> None:
    records = run.logs[A].records
    records.insert(records.index(run.logs[A].find("committed")), ["decided", 1])


def another_data_set(run: Run) -> None:
    """Of as many samples in whole batches: a position is another sample."""
    run.logs[B].start |= {"dataset_size": SIZE + 3, "drop_last": True}


def another_file(run: Run) -> None:
    run.logs[B].start["source"] = "1a2b"


def another_seed(run: Run) -> None:
    run.logs[B].start["settings"] = {"seed": 2}


def checkpoint_with_books_of_a_complete_epoch(run: Run) -> None:
    run.manifests["epoch-version-4"]["training"]["ledger"]["books"]["0"] = {"committed": [[0, 16]]}


def another_batch_size(run: Run) -> None:
    run.logs[B].start["batch_size"] = 2 * BATCH


def another_group_size(run: Run) -> None:
    run.logs[B].start["members"] = 2


def another_treatment_of_outliers(run: Run) -> None:
    run.logs[B].start["outliers"] = "skip"


def set_to_more_epochs(run: Run) -> None:
    for log in run.logs.values():
        log.start["settings"] = {"epochs": EPOCHS + 1}


def outcome_that_the_rank_ignores(run: Run) -> None:
    """It enters the last round after it, of which it is not told that it is committed."""
    log = run.logs[A]
    log.records.insert(log.records.index(log.find("entered")), ["decided", 1])
    log.records.remove(log.find("committed"))


def ledger_of(run: Run, version: int) -> Any:
    return run.manifests[f"epoch-version-{version}"]["training"]["ledger"]


def checkpoint_that_frees_what_is_committed(run: Run) -> None:
    ledger_of(run, 4)["books"]["1"]["free"] = [[8, 32]]


def checkpoint_that_has_lost_positions(run: Run) -> None:
    ledger_of(run, 4)["books"]["1"]["free"] = [[20, 32]]


def checkpoint_with_a_lease_of_two_ranks(run: Run) -> None:
    ledger_of(run, 4)["books"]["1"]["free"] = [[24, 32]]
    ledger_of(run, 4)["rank_leases"] = {"0": {"leases": [[9, 1, 16, 8]]}, "1": {"leases": [[10, 1, 20, 4]]}}


def checkpoint_in_which_another_rank_has_the_lease(run: Run) -> None:
    ledger_of(run, 4)["books"]["1"]["free"] = [[24, 32]]
    ledger_of(run, 4)["rank_leases"] = {"1": {"leases": [[7, 1, 16, 8]]}}


def checkpoint_that_gives_a_lease_again(run: Run) -> None:
    ledger_of(run, 4)["next_lease"] = 6


def checkpoint_of_another_data_set(run: Run) -> None:
    run.manifests["epoch-version-4"]["training"] |= {"dataset_size": SIZE + 8, "epoch_size": SIZE + 8}


def checkpoint_with_another_seed(run: Run) -> None:
    for seed, manifest in enumerate(run.manifests.values()):
        manifest["training"]["seed"] = seed // 2


def checkpoint_with_another_seed_than_is_set(run: Run) -> None:
    for log in run.logs.values():
        log.start["settings"] = {"seed": 7}
    run.manifests["epoch-version-4"]["training"]["seed"] = 0


def recorded(run: Run, **more: Any) -> None:
    """The record says so, too, and the ranks were told how the job has ended."""
    assert run.record is not None
    run.record |= more
    for log in run.logs.values():
        log.records.insert(-1, ["decided", 1])


def record_of_another_data_set(run: Run) -> None:
    recorded(run, dataset_size=SIZE + 8)


def record_with_another_number_of_rounds(run: Run) -> None:
    recorded(run, rounds=6)


def record_with_samples_that_were_left_out(run: Run) -> None:
    recorded(run, discarded=8)


def record_of_a_round_with_other_samples(run: Run) -> None:
    recorded(run, round_reports=[{"round": 3, "version": 3, "samples": 12}])


def record_of_a_checkpoint_with_other_batches(run: Run) -> None:
    recorded(run, checkpoints=[{"path": "/there/epoch-version-4", "version": 4, "global_step": 13}])


def record_of_the_best_of_no_epoch(run: Run) -> None:
    recorded(run, model_is=f"best of epoch {EPOCHS + 1}")


FAULTS: dict[Fault, str] = {
    another_batch_size: r"rank 1 .*: it was to train with another batch size than rank 0",
    another_treatment_of_outliers: r"rank 1 .*: it was to train with another treatment of outliers than rank 0",
    another_group_size: r"rank 1 .*: it was to train with another size of its replica group than rank 0",
    set_to_more_epochs: r"rank 0 .*: the job is set to epochs 3, and it was to train with 2",
    outcome_that_the_rank_ignores: r"rank 0 .*: it went on after the job had succeeded",
    checkpoint_that_frees_what_is_committed: r"checkpoint .*-4 .*: its ledger has epoch 1: positions 8 to 11 .* twice",
    checkpoint_that_has_lost_positions: r"checkpoint .*-4 .*: its ledger lacks epoch 1: positions 16 to 19",
    checkpoint_with_a_lease_of_two_ranks: r"checkpoint .*: positions 20 to 23 .* by lease 9 of rank 0, and by lease 10",
    checkpoint_in_which_another_rank_has_the_lease: r"checkpoint .*-4 .*: rank 1 has lease 7, and rank 0 .* trained it",
    checkpoint_that_gives_a_lease_again: r"checkpoint .*-4 .*: the next lease is to be 6, and lease 6 was given",
    checkpoint_of_another_data_set: r"checkpoint epoch-version-4 .* is of epochs of 40 samples, and the ranks' have 32",
    checkpoint_with_another_seed: r"seed 0 of checkpoint epoch-version-3 is not seed 1 of checkpoint epoch-version-5",
    checkpoint_with_another_seed_than_is_set: r"seed 7 of the ranks' settings is not seed 0 of checkpoint epoch-v",
    record_of_another_data_set: r"record.json is of a data set of 40 samples, and the ranks' has 32",
    record_with_another_number_of_rounds: r"record.json has rounds 6, and the ranks 5",
    record_with_samples_that_were_left_out: r"record.json has discarded 8, and the ranks 0",
    record_of_a_round_with_other_samples: r"record.json has round 3 \(version 3\) with 12 samples: no ranks made it",
    record_of_a_checkpoint_with_other_batches: r"record.json has checkpoint .* of version 4 with 13 batches: no ranks",
    record_of_the_best_of_no_epoch: r"record.json says that the model is of epoch 3, and the job has no such epoch",
    average_without_a_member: r"rank 0 \(rank-0-1.bin\): the result of round 1 is of 2 ranks, and generation 1 has 3",
    place_that_there_is_not: r"rank 1 .*: it has place 2 of generation 1, which has 2 ranks",
    group_that_averages_in_two_ways: r"generation 1 has two contents: to rank 0 .* 2 ranks and rank 1 .* through the",
    round_of_an_older_generation: r"round 5 of generation 1 made version 5, and generation 2 the version before it",
    commit_after_the_end: r"rank 0 .*: round 5 was committed after the job had succeeded",
    another_data_set: r"rank 1 .*: it was to train with another size of the data set than rank 0",
    another_file: r"rank 1 .*: it was to train with another file than rank 0",
    another_seed: r"rank 1 .*: it was to train with other settings than rank 0",
    checkpoint_with_books_of_a_complete_epoch: r"checkpoint epoch-version-4 .* has books of epoch 0, and says that",
    lease_given_twice: r"lease 1 was given twice: to rank 0 \(rank-0-1.bin\), and to rank 1 \(rank-1-2.bin\)",
    positions_twice: r"epoch 1: positions 16 to 19 \(4 samples\) twice: by rank 0 .* in version 5, and by rank 1",
    slice_beyond_its_epoch: r"epoch 1: positions 32 to 35 .* of rank 0 .* are outside the epochs",
    batch_of_no_epoch: r"epoch 2: positions .* of rank 0 .* are outside the epochs",
    round_that_lost_a_cut: r"round 3 .* has lost samples.*: its ranks brought 16, and its result counts 8",
    round_with_samples_of_nobody: r"round 3 .* has too many: its ranks brought 16, and its result counts 24",
    version_made_of_an_older_one: r"round 7 of generation 1 made version 7 of version 5",
    record_that_lost_a_cut: r"version 3 has two contents: cadence.binpb says .*epoch 0 \[16, 24\) .*, and .*\[24, 32\)",
    record_with_another_slice: r"version 4 has two contents: cadence.binpb says",
    record_with_another_generation: r"version 5 has two contents: cadence.binpb says a round of generation 2",
    record_with_one_round_more: r"no rank made a round of generation 1 .*, number 6 of 6 in cadence.binpb",
    header_that_differs: r"version 5 .*two contents: the header differs between rank-0-1.bin and rank-1-2.bin",
    parameters_that_differ: r"version 3 .*two contents: the digest of the parameters differs",
    two_leaders: r"version 5 has two contents: round 5 of generation 2, and round 5 of generation 3",
    committed_as_another_version: r"rank 1 .*: round 4 was committed as version 5, and its result is 4",
    entered_with_another_version: r"rank 1 .*: it entered round 4 with version 2, and has received 3",
    committed_with_another_number_of_batches: r"version 3: the coordinator counts 10 batches, and ranks made 8",
    cut_that_was_not_trained: r"rank 0 .*: it brought 28 samples to round 4, and has trained 24",
    batches_that_were_not_trained: r"rank 0 .*: it brought 7 batches to round 4, and has trained 6",
    weight_that_was_not_trained: r"rank 0 .*: it brought 12 new samples to round 4, and has trained 8",
    result_of_a_round_that_was_given_up: r"rank 1 .*: it received a result of round 5, which it had not entered",
    batch_left_out_of_a_file: r"rank 0 .*: batch 4 follows batch 2",
    one_entry_too_many: r"round 3 .* was entered by 2 ranks, and its result is of 1",
    two_outcomes: r"the job has two outcomes: rank 0 .* was told failed, and rank 1 .* was told cancelled",
    outcome_that_there_is_not: r"rank 0 \(rank-0-1.bin\): the job has outcome 9, which is unknown",
    skipped_tail: r"epoch 1: positions 24 to 31 \(8 samples\) are in no round of the final parameters",
    result_with_other_samples: r"epoch 1: record.json says 28 samples, and the ranks' rounds have 32",
    checkpoint_of_a_version_that_nobody_made: r"checkpoint epoch-version-5: no round made its version 9",
    checkpoint_of_another_version: r"checkpoint epoch-version-3 .*: it says 32 samples, and the ranks 48",
    checkpoint_without_a_slice: r"checkpoint .*-4 .* differ at epoch 1: positions 4 to 7 .*: the ranks' rounds",
    checkpoint_with_a_slice_too_many: r"checkpoint .*-4 .* differ at epoch 1: positions 20 to 23 .*: no round",
    checkpoint_of_another_epoch: r"checkpoint epoch-version-4 .* differ at epoch 1",
    checkpoint_with_other_samples: r"checkpoint epoch-version-3 .*: it says 33 samples, and the ranks 32",
    checkpoint_with_other_steps: r"checkpoint epoch-version-3 .*: it says 9 batches, and the ranks 8",
    another_extent: r"rank 1 .*: it was to train other epochs than the other ranks",
    went_back_to_a_version_of_nobody: r"attempt 2 goes on from version 9, and version 5 was the last one",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_named(tmp_path: Path, fault: Fault) -> None:
    run = whole(tmp_path)
    fault(run)
    code, text = judged(run)
    assert code == 1, text
    assert re.search(f"refuted: {FAULTS[fault]}", text), text


# Runs as a faulty system would leave them: all files agree with one another


def dropped(run: Run, name: str) -> None:
    """The rank has given the last round up, though the others have committed it."""
    records = run.logs[name].records
    del records[-2:]
    records.append(["lost", run.generation, run.round])


def rest_of(run: Run, epoch: int = 1, start: int = 0, end: int = SIZE) -> Run:
    """Rank 0 trains the rest alone, and the job ends."""
    run.train(A, epoch, start, end - start)
    run.average(A)
    run.end()
    return run


def lease_in_two_rounds_of_two_ranks(folder: Path) -> Run:
    run = begun(folder)
    run.train(A, 1, 0, 8, lease=70)
    run.average(A, B)
    run.train(B, 1, 0, 8, lease=70)
    run.average(A, B)
    return rest_of(run, start=8)


def batch_again_after_memory_ran_out(folder: Path) -> Run:
    """It has made the batch in halves, and counts it once more."""
    run = begun(folder)
    run.train(A, 1, 0, BATCH, lease=70)
    run.train(A, 1, 0, 16, lease=70)
    run.average(A, B)
    return rest_of(run, start=16)


def member_that_was_left_out_of_a_commit_and_trains_on(folder: Path) -> Run:
    """Rank 1 has lost round 4, and brings its work to round 5 with the parameters of the version before."""
    run = begun(folder)
    run.train(A, 1, 0, 8)
    run.average(A)
    run.train(B, 1, 8, 8)
    run.average(A, B)
    run.logs[B].find("entered")[4] = 3
    return rest_of(run, start=16)


def member_whose_work_is_dropped(folder: Path) -> Run:
    """Rank 1 has lost round 4, and forgets what it had brought."""
    run = begun(folder)
    run.train(A, 1, 0, 8)
    run.train(B, 1, 8, 8)
    run.average(A, B)
    dropped(run, B)
    run.average(A, B)
    run.logs[B].find("entered")[4] = 3
    return rest_of(run, start=16)


def commit_of_a_round_that_lacks_a_member(folder: Path) -> Run:
    """Rank 1 takes part in round 4 and has its result, which is of rank 0 alone."""
    run = begun(folder)
    run.train(A, 1, 0, 16)
    run.train(B, 1, 16, 16)
    run.average(A, B)
    for log in run.logs.values():
        log.find("received")[ROWS] = 1
        log.find("received")[SAMPLES] -= 16
        log.find("committed")[3] -= 4
    del run.cadence[-1].parts[1]
    run.end()
    return run


def trained_before_it_had_a_model(folder: Path) -> Run:
    run = begun(folder)
    third = run.begin(2, 3)
    run.train(third, 1, 0, 8)
    run.average(A, B, third)
    run.logs[third].find("entered")[4] = 0
    return rest_of(run, start=8)


def trained_before_anybody_had_a_model(folder: Path) -> Run:
    run = Run(folder)
    run.begin(0, 1)
    run.train(A, 0, 0, SIZE)
    run.average(A)
    return rest_of(run)


def epoch_that_ends_early(folder: Path) -> Run:
    """Epoch 0 is evaluated without its last samples, and the job ends early after that."""
    run = Run(folder)
    run.begin(0, 1)
    run.average(A)
    run.train(A, 0, 0, 24)
    run.average(A)
    run.logs[A].records.append(["evaluated", run.round, 0, 0, 40])
    run.train(A, 1, 0, 8)
    run.average(A)
    run.end(ended_early="no patience")
    return run


def evaluation_of_a_result_that_it_has_not(folder: Path) -> Run:
    run = begun(folder)
    run.logs[B].records.append(["evaluated", 9, 0, 0, 40])
    return rest_of(run)


def evaluation_counted_as_training(folder: Path) -> Run:
    run = begun(folder)
    run.logs[A].records.append(["evaluated", run.round, 0, 0, 12])
    run.samples += 12
    return rest_of(run)


def early_end_that_claims_a_whole_epoch(folder: Path) -> Run:
    run = begun(folder)
    run.train(A, 1, 0, 8)
    run.average(A, B)
    run.end(ended_early="no patience")
    assert run.record is not None
    run.record["committed_samples"][1] = SIZE
    return run


def early_end_of_which_ranks_were_not_told(folder: Path) -> Run:
    run = begun(folder)
    run.logs[A].records.append(["decided", 4])
    run.end(ended_early="no patience")
    return run


def two_outcomes_for_one_rank(folder: Path) -> Run:
    run = begun(folder)
    run.logs[A].records += [["decided", 1], ["decided", 4]]
    return rest_of(run)


def record_with_an_epoch_too_many(folder: Path) -> Run:
    run = rest_of(begun(folder))
    assert run.record is not None
    run.record["committed_samples"].append(SIZE)
    return run


def record_with_other_batches(folder: Path) -> Run:
    run = rest_of(begun(folder))
    run.cadence[-1].parts[0].num_batches -= 1
    return run


def commit_that_nobody_made(folder: Path) -> Run:
    run = begun(folder)
    run.logs[A].records.append(["committed", 9, 9, run.steps])
    return rest_of(run)


def commit_before_the_result(folder: Path) -> Run:
    run = rest_of(begun(folder))
    records = run.logs[B].records
    at = records.index(run.logs[B].find("committed"))
    records[at - 1], records[at] = records[at], records[at - 1]
    return run


def commit_before_the_round(folder: Path) -> Run:
    run = rest_of(begun(folder))
    records = run.logs[B].records
    records.insert(records.index(run.logs[B].find("entered")), run.logs[B].find("committed"))
    return run


def commit_with_two_contents(folder: Path) -> Run:
    """To a rank that has no result of the round, so that nothing else contradicts it."""
    run = begun(folder)
    run.train(A, 1, 0, SIZE)
    run.average(A)
    run.logs[B].records += [["committed", run.round, run.version, run.steps + more] for more in (0, 1)]
    run.end()
    return run


def evaluation_of_an_epoch_that_there_is_not(folder: Path) -> Run:
    run = rest_of(begun(folder))
    run.logs[A].records.insert(-1, ["evaluated", run.round, EPOCHS, 0, 40])
    return run


def end_after_other_batches(folder: Path) -> Run:
    run = rest_of(begun(folder))
    run.logs[B].find("ended")[1] += 1
    return run


def left_out_and_not_told(folder: Path) -> Run:
    """The result of round 4 says that samples were left out of it, and each rank that its own are in it."""
    run = begun(folder)
    run.train(A, 1, 0, 16)
    run.train(B, 1, 16, 16)
    run.average(A, B, left_out=B)
    run.logs[B].find("received")[FLAGS] = 0
    run.end()
    return run


def round_given_up_that_it_has(folder: Path) -> Run:
    run = begun(folder)
    run.logs[B].records.append(["lost", 1, run.round])
    return rest_of(run)


def two_rounds_at_once(folder: Path) -> Run:
    run = begun(folder)
    run.enter(A, B)
    return rest_of(run)


def round_entered_twice(folder: Path) -> Run:
    run = begun(folder)
    run.train(A, 1, 0, 16)
    run.enter(A)
    run.logs[A].records.append(["lost", 1, run.round])
    run.round -= 1
    run.average(A)
    return rest_of(run, start=16)


def rounds_in_disorder(folder: Path) -> Run:
    """As two coordinators would number them."""
    run = begun(folder)
    run.round, run.generation = 0, 2
    return rest_of(run)


def place_of_two(folder: Path) -> Run:
    run = begun(folder)
    for log in run.logs.values():
        log.records.append(["joined", 1, 2, 0, 2, 0])
    run.generation = 2
    return rest_of(run)


def round_of_another_generation(folder: Path) -> Run:
    run = begun(folder)
    run.logs[A].records.append(["joined", 1, 2, 0, 1, 0])
    return rest_of(run)


def two_processes_of_one_rank(folder: Path) -> Run:
    run = begun(folder)
    again = run.begin(0, 3)
    run.average(A, B, again)
    run.logs[again].find("entered")[4] = 0
    return rest_of(run)


def process_that_was_replaced(folder: Path) -> Run:
    """Rank 1 was started again, and its old process comes back."""
    run = begun(folder)
    again = run.begin(1, 3)
    run.average(A, again)
    run.logs[again].find("entered")[4] = 0
    run.train(B, 1, 0, 16)
    run.logs[B].version = run.version
    run.average(A, B)
    run.logs[B].find("entered")[4] = 3
    return rest_of(run, start=16)


def file_of_another_process(folder: Path) -> Run:
    run = rest_of(begun(folder))
    run.logs[B].start["incarnation"] = 7
    return run


def process_of_two_attempts(folder: Path) -> Run:
    run = begun(folder)
    run.attempt = 2
    return rest_of(run)


def again(run: Run, *names: str, start: int = 0) -> Run:
    """An attempt that went back trains epoch 1 from there."""
    half = (SIZE - start) // 2
    for name, at in zip(names, (start, start + half), strict=True):
        run.train(name, 1, at, half)
    run.average(*names)
    run.end()
    return run


def attempt_number_of_another(folder: Path) -> Run:
    run, names = went_back(folder)
    run.attempt = 1
    return again(run, *names)


def trained_again_after_going_back(folder: Path) -> Run:
    run, names = went_back(folder)
    run.train(names[0], 0, 24, 8)
    return again(run, *names)


def lease_of_both_attempts(folder: Path) -> Run:
    """The job goes back to version 4, in which rank 0's lease is, and leases it again."""
    run, _ = went_back(folder)
    del run.logs["rank-0-3.bin"], run.logs["rank-1-4.bin"]
    run.version, run.samples, run.steps = 4, 48, 12
    names = [run.begin(rank, 3 + rank, resume="checkpoint", version=4, samples=48) for rank in (0, 1)]
    run.covered[1] = [[0, 16]]
    return again(run, *names)


def went_back_with_other_samples(folder: Path) -> Run:
    run, names = went_back(folder)
    run.samples += 8
    for name in names:
        run.logs[name].start["samples"] += 8
    return again(run, *names)


def ranks_of_two_checkpoints(folder: Path) -> Run:
    run, names = went_back(folder)
    run.logs[names[1]].start |= {"version": 2, "samples": 16}
    again(run, *names)
    run.logs[names[1]].find("entered", 0)[4] = 2
    return run


def went_back_to_an_abandoned_branch(folder: Path) -> Run:
    """Attempt 3 goes on from version 4 of attempt 1, and the job had gone back before that to make another one."""
    run, names = went_back(folder)
    run.attempt, run.version, run.samples, run.steps, run.covered[1] = 1, 4, 48, 12, [[0, 16]]
    old = run.checkpoint()
    run.attempt, run.version, run.samples, run.steps, run.covered[1] = 2, 3, 32, 8, []
    for name, at in zip(names, (16, 24), strict=True):
        run.train(name, 1, at, 8)
    run.average(*names)
    run.attempt, run.generation, run.round = 3, 9, 0
    names = [run.begin(rank, 5 + rank, resume=f"/there/{old}", version=4, samples=48) for rank in (0, 1)]
    run.covered[1] = [[0, 16]]
    return again(run, *names, start=16)


def checkpoint_of_the_thrown_rounds(folder: Path) -> Run:
    """After the job went back, its checkpoint has what was thrown away, too."""
    run, names = went_back(folder)
    run.train(names[0], 1, 16, 8)
    run.average(*names)
    run.covered[1].append([0, 16])
    run.samples, run.steps = run.samples + 16, run.steps + 4
    run.checkpoint()
    run.samples, run.steps, run.covered[1] = run.samples - 16, run.steps - 4, [[16, 24]]
    run.train(names[0], 1, 0, 16)
    run.train(names[1], 1, 24, 8)
    run.average(*names)
    run.end()
    return run


def resumed_another_training(folder: Path) -> Run:
    run = resumed(folder)
    (place,) = (folder / "before" / "checkpoints" / JOB).glob("*-4/manifest.json")
    manifest = json.loads(place.read_text())
    del manifest["checksum"]
    manifest["training"] |= {"dataset_size": SIZE + 8, "epoch_size": SIZE + 8}
    place.write_text(json.dumps(manifest))
    return run


def lease_with_a_hole(folder: Path) -> Run:
    run = begun(folder)
    run.train(A, 1, 0, 8, lease=70)
    run.train(A, 1, 16, 16, lease=70)
    run.average(A, B)
    run.train(B, 1, 8, 8)
    run.average(A, B)
    run.end()
    return run


def leases_out_of_order(folder: Path) -> Run:
    """What the coordinator would book of a part of these is not what the rank has trained."""
    run = begun(folder)
    run.train(A, 1, 0, 16, lease=71)
    run.train(A, 1, 16, 16, lease=70)
    run.average(A, B)
    run.end()
    return run


def incarnation_of_two_processes(folder: Path) -> Run:
    run = begun(folder)
    log = run.logs.pop(B)
    log.start["incarnation"] = 1
    run.logs["rank-1-1.bin"] = log
    return rest_of(run)


def trained_while(run: Run, name: str, before: int) -> Run:
    """The rank enters round 4 with this version and without samples, and trains until it has the result."""
    run.average(A, B, name)
    run.logs[name].find("entered")[4] = before
    heard = [run.logs[name].records.pop(), run.logs[name].records.pop()]
    run.train(name, 1, 0, 8)
    run.logs[name].records += reversed(heard)
    run.average(A, B, name)
    return rest_of(run, start=8)


def trained_while_it_joined(folder: Path) -> Run:
    run = begun(folder)
    return trained_while(run, run.begin(2, 3), 0)


def trained_with_an_older_model(folder: Path) -> Run:
    """It has loaded a checkpoint that the others have left behind."""
    run = begun(folder)
    third = run.begin(2, 3, version=1)
    return trained_while(run, third, 1)


def two_leaders_that_both_end_the_job(folder: Path) -> Run:
    """One ends it, and the other goes back to version 3 and ends it as well."""
    run, names = went_back(folder)
    for name in (A, B):
        run.logs[name].records.append(["decided", 1])
    return again(run, *names)


def record_that_lost_the_last_round(folder: Path) -> Run:
    """It has the samples of the newest checkpoint, as if the job had gone back."""
    run = begun(folder)
    run.train(A, 1, 0, 8)
    run.average(A, B)
    run.logs[A].records.append(["decided", 4])
    run.end("cancelled")
    assert run.record is not None
    run.record["committed_samples"] = [SIZE, 0]
    return run


def version_that_was_skipped(folder: Path) -> Run:
    run = rest_of(begun(folder))
    for log in run.logs.values():
        log.find("received")[VERSION] += log is run.logs[A]
        log.find("committed")[2] += log is run.logs[A]
    return run


def resumed_a_checkpoint_of_its_own_attempt(folder: Path) -> Run:
    run = resumed(folder)
    run.logs[A].find("entered")[1] = 1
    run.manifests.clear()
    return run


FAULTY: dict[Callable[[Path], Run], str] = {
    lease_with_a_hole: r"rank 0 .*: lease 70 goes on with position 16 of epoch 1, after position 7 of epoch 1",
    leases_out_of_order: r"rank 0 .*: it trained lease 70 after lease 71",
    incarnation_of_two_processes: r"incarnation 1 is of two processes: rank 0 \(rank-0-1.bin\), and rank 1 \(rank-1-1",
    trained_while_it_joined: r"rank 2 .*: it trained batch 1 before it had the job's model",
    trained_with_an_older_model: r"rank 2 .*: it trained 8 samples with version 1, and round 4 made version 4",
    two_leaders_that_both_end_the_job: r"rank 0 .* was told in attempt 1 that the job has succeeded, and attempt 2",
    record_that_lost_the_last_round: r"epoch 1: record.json says 0 samples, and the ranks' rounds have 8",
    version_that_was_skipped: r"round 4 of generation 1 made version 5 of version 3",
    resumed_a_checkpoint_of_its_own_attempt: r"attempt 1 has resumed checkpoint epoch-version-4 of attempt 1",
    lease_in_two_rounds_of_two_ranks: r"lease 70 was given twice: to rank 0 .*, and to rank 1",
    batch_again_after_memory_ran_out: r"epoch 1: positions 0 to 3 \(4 samples\) twice: by rank 0 .*, and by rank 0",
    member_that_was_left_out_of_a_commit_and_trains_on: r"rank 1 \(rank-1-2.bin\) brought 8 samples to round 5 of "
    "generation 1 with version 3, which makes version 5",
    member_whose_work_is_dropped: r"rank 1 .*: it brought 0 new samples to round 5, and has trained 8",
    commit_of_a_round_that_lacks_a_member: r"round 4 .* was entered by 2 ranks, and its result is of 1",
    trained_before_it_had_a_model: r"rank 2 \(rank-2-3.bin\) brought 8 samples to round 4 .* with version 0",
    trained_before_anybody_had_a_model: r"rank 0 .* brought 32 samples to round 1 of generation 1 with version 0",
    epoch_that_ends_early: r"rank 0 .* evaluated epoch 0 with version 2, which lacks epoch 0: positions 24 to 31",
    evaluation_of_a_result_that_it_has_not: r"rank 1 .*: it evaluated round 9, whose result it has not received",
    evaluation_counted_as_training: r"round 4 .* has too many: its ranks brought 32, and its result counts 44",
    early_end_that_claims_a_whole_epoch: r"epoch 1: record.json says 32 samples, and the ranks' rounds have 8",
    early_end_of_which_ranks_were_not_told: r"two outcomes: record.json says ended early, and its ranks .* cancelled",
    two_outcomes_for_one_rank: r"rank 0 .*: it was told that the job has succeeded, and another outcome after that",
    record_with_an_epoch_too_many: r"epoch 2: record.json says 32 samples, and the job has no such epoch",
    record_with_other_batches: r"version 4 has two contents: cadence.binpb says .* in 7 batches, and .* in 8 batches",
    commit_that_nobody_made: r"rank 0 .* was told that round 9 is committed as version 9, and no ranks made it",
    commit_before_the_result: r"rank 1 .*: round 3 was committed before it had the result",
    commit_before_the_round: r"rank 1 .*: it entered round 3 after that was committed",
    commit_with_two_contents: r"rank 1 .*: round 4 was committed twice: as version 4 with 16 batches and version",
    evaluation_of_an_epoch_that_there_is_not: r"rank 0 .* evaluated epoch 2 with version 4, and the job has no such",
    end_after_other_batches: r"rank 1 .*: it ended after 5 batches, and has trained 4",
    left_out_and_not_told: r"round 4 .* left out 16 samples, and its ranks say that it was 0",
    round_given_up_that_it_has: r"rank 1 .*: it gave up round 3, which it had not entered, or whose result it had",
    two_rounds_at_once: r"rank 0 .*: it entered round 5 before round 4 had an end",
    round_entered_twice: r"rank 0 .*: it entered round 4 of generation 1 twice",
    rounds_in_disorder: r"round 1 of generation 2 made version 4, and round 3 the version before it",
    place_of_two: r"two processes had place 0 of generation 2: rank 0 .*, and rank 1",
    round_of_another_generation: r"rank 0 .*: it entered round 4 of generation 1 as one of generation 2",
    two_processes_of_one_rank: r"round 4 .* has two processes of one rank: rank 0 \(rank-0-1.bin\), and rank 0 \(",
    process_that_was_replaced: r"rank 1 \(rank-1-2.bin\) is in round 5 .*, after rank-1-3.bin had taken its place",
    file_of_another_process: r"rank 1 \(rank-1-2.bin\): it has what rank-1-7.bin is to have",
    process_of_two_attempts: r"rank 0 .*: it entered round 4 of attempt 2, and had trained in 1",
    attempt_number_of_another: r"lease 1 was given twice: to rank 0 \(rank-0-1.bin\), and to rank 0 \(rank-0-3.bin\)",
    trained_again_after_going_back: r"epoch 0: positions 24 to 27 .* twice: by rank 1 .* in version 3, and by rank 0",
    lease_of_both_attempts: r"epoch 1: positions 0 to 3 \(4 samples\) twice: by rank 0 .* 4, and by rank 0 .* 5",
    went_back_with_other_samples: r"attempt 2 goes on from version 3 with 40 samples, and that has 32",
    ranks_of_two_checkpoints: r"rank 0 .* has resumed version 3 with 32 samples, and attempt 2 began with version 2",
    went_back_to_an_abandoned_branch: r"attempt 3 goes on from version 4 of attempt 1 \(checkpoint epoch-version-4\)",
    checkpoint_of_the_thrown_rounds: r"checkpoint epoch-version-4 .*: its books differ at epoch 1: positions 0 to 15",
    resumed_another_training: r"checkpoint epoch-version-4, which was resumed, is of epochs of 40 samples",
}


@pytest.mark.parametrize("faulty", FAULTY, ids=lambda one: one.__name__)
def test_a_run_of_a_faulty_system_is_refuted_and_its_fault_is_named(
    tmp_path: Path, faulty: Callable[[Path], Run]
) -> None:
    code, text = judged(faulty(tmp_path))
    assert code == 1, text
    assert re.search(f"refuted: .*({FAULTY[faulty]})", text), text


def test_of_many_faults_of_one_kind_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.train(A, EPOCHS, 0, 30 * BATCH)
    code, text = judged(run)
    assert code == 1
    assert text.count("are outside the epochs") == 20
    assert "refuted: and 10 more of this kind" in text


# What cannot be judged


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def shortened(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:-size])


def damaged_record(run: Run) -> None:
    flipped(run.folder / "audit" / JOB / A, 400)


def damaged_last_record(run: Run) -> None:
    flipped(run.folder / "audit" / JOB / A, -1)


def record_after_the_last_one(run: Run) -> None:
    run.train(A, 1, 0, BATCH)
    run.write()


def damaged_head(run: Run) -> None:
    flipped(run.folder / "audit" / JOB / A, 30)


def another_format(run: Run) -> None:
    flipped(run.folder / "audit" / JOB / A, 8)


def missing_file(run: Run) -> None:
    (run.folder / "audit" / JOB / B).unlink()


def file_that_was_cut(run: Run) -> None:
    shortened(run.folder / "audit" / JOB / B, 300)


def missing_rounds(run: Run) -> None:
    (run.folder / "cadence.binpb").unlink()


def damaged_rounds(run: Run) -> None:
    flipped(run.folder / "cadence.binpb", 0)


def damaged_manifest(run: Run) -> None:
    path = run.folder / "checkpoints" / JOB / "epoch-version-4" / "manifest.json"
    path.write_text(path.read_text().replace('"samples": 48', '"samples": 47'))


def another_jobs_file(run: Run) -> None:
    run.logs[A].start["job"] = "letters-2"
    run.write()


def another_jobs_record(run: Run) -> None:
    (run.folder / "record.json").write_text('{"job_id": "letters-2"}')


def another_jobs_checkpoint(run: Run) -> None:
    """Of the same version, as of the same training that was begun twice."""
    run.manifests["epoch-version-4"]["job"] = "letters-2"
    run.write()


def damaged_result(run: Run) -> None:
    (run.folder / "record.json").write_text("{")


def record_of_no_checkpoint(run: Run) -> None:
    assert run.record is not None
    run.record["checkpoints"] = [{}]
    run.write()


def full_disk(run: Run) -> None:
    for log in run.logs.values():
        log.records = log.records[: log.records.index(log.find("entered", 3))]
    run.write()


def full_disk_of_a_submitted_job(run: Run) -> None:
    """Its checkpoints, written when there was room again, are of rounds that are in no file."""
    full_disk(run)
    (run.folder / "record.json").unlink()


def no_files(run: Run) -> None:
    for path in (run.folder / "audit" / JOB).iterdir():
        path.unlink()


def two_jobs(run: Run) -> None:
    (run.folder / "audit" / "letters-2").mkdir()


LACKS: dict[Fault, str] = {
    damaged_record: r"rank-0-1.bin is damaged at byte \d+: ",
    damaged_last_record: r"rank-0-1.bin is damaged at byte \d+: the checksum of a record does not match",
    record_after_the_last_one: r"rank-0-1.bin is damaged at byte \d+: there is no record of type 1",
    damaged_head: r"rank-0-1.bin is damaged: the checksum of its head",
    another_format: r"rank-0-1.bin has format 18, and this version of elche reads 2",
    missing_file: r"round 1 of generation 1 .* had 2 ranks, and the files of 1 contain it",
    file_that_was_cut: r"round \d of generation 1 .* had 2 ranks, and the files of 1 contain it",
    missing_rounds: r"cadence.binpb, the record of rounds, is missing",
    damaged_rounds: r"cadence.binpb is damaged at byte 0",
    damaged_manifest: r"checkpoint epoch-version-4: its manifest is damaged",
    another_jobs_file: r"rank-0-1.bin is a file of job letters-2",
    another_jobs_record: r"record.json is that of job letters-2",
    another_jobs_checkpoint: r"checkpoint epoch-version-4 is of job letters-2, not of digits-1",
    damaged_result: r"record.json is damaged",
    record_of_no_checkpoint: r"record.json is damaged",
    full_disk: r"all files of ranks end before the job did",
    full_disk_of_a_submitted_job: r"checkpoint epoch-version-4 has version 4, and all files .* end with 3",
    no_files: r"there is no file of any rank",
    two_jobs: r".*audit files of 2 jobs",
}


@pytest.mark.parametrize("fault", LACKS, ids=lambda fault: fault.__name__)
def test_what_is_missing_or_damaged_is_named_and_nothing_is_judged(tmp_path: Path, fault: Fault) -> None:
    run = whole(tmp_path)
    run.write()
    fault(run)
    verdict = elche_audit.judge(tmp_path)
    text = "\n".join(elche_audit.lines(verdict))
    assert elche_audit.exit_code(verdict) == 2, text
    assert re.search(f"cannot be judged: {LACKS[fault]}", text), text


def test_a_job_that_goes_on_is_not_judged(tmp_path: Path) -> None:
    run = begun(tmp_path)
    code, text = judged(run)
    assert code == 2
    assert "record.json is missing, no rank was told the job's outcome, and not all epochs are complete" in text
    assert "32 of 64 samples are in version 3 so far" in text


def test_rounds_before_a_base_that_are_on_another_host_or_were_on_a_full_disk_are_missing(tmp_path: Path) -> None:
    """Attempt 2 goes on from version 5, which rank 1 has made alone after rank 0 had left."""
    run, _ = went_back(tmp_path)
    del run.logs["rank-0-3.bin"], run.logs["rank-1-4.bin"]
    run.attempt, run.generation, run.round, run.version, run.samples, run.steps = 1, 2, 4, 4, 48, 12
    run.covered[1], run.lease = [[0, 16]], 70
    run.train(B, 1, 16, 8)
    run.average(B)
    run.attempt, run.generation, run.round = 2, 9, 0
    name = run.begin(0, 3, resume="checkpoint", version=5, samples=run.samples)
    run.train(name, 1, 24, 8)
    run.average(name)
    run.end()
    code, text = judged(run)
    assert code == 0, text
    whole_log = run.logs.pop(B)
    (tmp_path / "audit" / JOB / B).unlink()
    code, text = judged(run)
    assert code == 2, text
    run.logs[B] = whole_log
    for log in (run.logs[A], run.logs[B]):
        log.records = log.records[: log.records.index(log.find("entered", 3))]
    code, text = judged(run)
    assert code == 2, text
    assert "attempt 2 goes on from version 5, and the files of ranks of earlier attempts end with 3" in text


def test_a_state_in_which_no_job_ends_is_not_judged(tmp_path: Path) -> None:
    run = whole(tmp_path)
    assert run.record is not None
    run.record["state"] = "training"
    code, text = judged(run)
    assert code == 2, text
    assert "record.json says that the job is training: has it ended?" in text


# What is proven


def test_a_job_that_keeps_its_best_model_says_which_that_is(tmp_path: Path) -> None:
    run = whole(tmp_path)
    assert run.record is not None
    run.record["model_is"] = "best of epoch 0"
    code, text = judged(run)
    assert code == 0, text
    assert "is in version 5 once; its model is the best of epoch 0 (" in text


def test_a_job_that_waited_to_go_back_when_it_was_cancelled_has_no_samples_in_its_record(tmp_path: Path) -> None:
    run, _ = went_back(tmp_path)
    del run.logs["rank-0-3.bin"], run.logs["rank-1-4.bin"]
    run.end("cancelled")
    assert run.record is not None
    run.record["committed_samples"] = []
    code, text = judged(run)
    assert code == 0, text
    assert "note: record.json has no samples: the job had gone back and not trained again, or" in text


def test_a_job_that_went_back_and_was_cancelled_before_another_round_has_its_checkpoints_samples(
    tmp_path: Path,
) -> None:
    run, names = went_back(tmp_path)
    for name in names:
        run.logs[name].records.clear()
    run.end("cancelled")
    code, text = judged(run)
    assert code == 0, text
    assert "32 of 64 samples are in version 3, each once; the job was cancelled" in text
    assert "not in the model: 8 samples (2 batches) of rank 0, incarnation 1: the job went back to version 3" in text


def test_a_whole_run_is_proven(tmp_path: Path) -> None:
    code, text = judged(whole(tmp_path))
    assert code == 0, text
    assert "digits-1 is proven: each of 64 samples of 2 epochs is in version 5 once" in text
    assert "2 files of ranks, 16 batches, 5 rounds, 3 checkpoints" in text


def test_a_rank_is_killed_and_its_work_is_trained_by_another(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.train(A, 1, 0, 8)
    run.train(B, 1, 8, 8)
    run.logs[B].records.append(["torn", b""])
    run.generation = 2
    run.train(A, 1, 8, 24)
    run.average(A)
    dead = run.logs[B].records
    dead.pop()
    run.end()
    dead.pop()
    run.write()
    with (tmp_path / "audit" / JOB / B).open("ab") as file:
        file.write(bytes([1]) * 11)
    verdict = elche_audit.judge(tmp_path)
    text = "\n".join(elche_audit.lines(verdict))
    assert elche_audit.exit_code(verdict) == 0, text
    assert "not in the model: 8 samples (2 batches) of rank 1, incarnation 2: its process was killed" in text
    assert "rank 1 (rank-1-2.bin) ends within a record, of which 11 bytes are there" in text


def test_wherever_a_file_is_cut_its_whole_records_are_read(tmp_path: Path) -> None:
    begun(tmp_path).write()
    path = tmp_path / "audit" / JOB / A
    data, last = path.read_bytes(), 1 + struct.calcsize(LAYOUTS["committed"][1]) + 4
    whole_file = rank_file.read(path)
    for size in range(1, last):
        path.write_bytes(data[: len(data) - last + size])
        cut = rank_file.read(path)
        assert (cut.torn_bytes, cut.commits, cut.results) == (size, whole_file.commits[:-1], whole_file.results)


def test_a_rank_dies_after_it_has_brought_its_part(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.train(A, 1, 0, 8)
    run.train(B, 1, 8, 8)
    run.average(A, B, without=B)
    run.generation = 2
    run.train(A, 1, 16, 16)
    run.average(A)
    run.end()
    run.logs[B].records.pop()
    code, text = judged(run)
    assert code == 0, text
    assert "not in the model" not in text


def test_a_round_is_given_up_and_its_work_goes_into_the_next_one(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.train(A, 1, 0, 16)
    run.train(B, 1, 16, 16)
    run.enter(A, B)
    for log in run.logs.values():
        log.records.append(["lost", 1, run.round])
    run.generation = 2
    run.average(A, B)
    run.end()
    code, text = judged(run)
    assert code == 0, text


def test_a_round_of_many_batches_is_read_from_the_record(tmp_path: Path) -> None:
    run = Run(tmp_path, options={"dataset_size": 400, "epochs": 1})
    run.begin(0, 1)
    run.average(A)
    run.train(A, 0, 0, 400)
    run.average(A)
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "note" not in text, text


def test_ranks_of_a_round_are_compared_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Their files are found in another one: rank-10 comes before rank-2."""
    run = Run(tmp_path)
    ten, two = run.begin(10, 1), run.begin(2, 2)
    run.average(two, ten)
    for epoch in range(EPOCHS):
        run.train(two, epoch, 0, 16)
        run.train(ten, epoch, 16, 16)
        run.average(two, ten)
    run.end()
    code, text = judged(run)
    assert code == 0, text


def test_of_two_rounds_with_one_version_that_is_committed_with_which_a_rank_has_gone_on(tmp_path: Path) -> None:
    """Nobody has heard of it, and the watcher was away."""
    run = begun(tmp_path)
    run.train(A, 1, 0, 16)
    run.average(A)
    samples, steps = run.samples, run.steps
    run.train(B, 1, 16, 16)
    run.version, run.generation = 3, 2
    run.average(B)
    for log in run.logs.values():
        log.records.pop()
    del run.cadence[3:]
    run.generation, run.version, run.samples, run.steps, run.covered[1] = 3, 4, samples, steps, [[0, 16]]
    run.train(A, 1, 16, 16)
    run.average(A)
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "not in the model: 16 samples (4 batches) of rank 1, incarnation 2: its process has left before" in text


def test_a_submitted_job_has_no_record_and_its_last_round_is_known_by_what_ranks_were_told(tmp_path: Path) -> None:
    run = whole(tmp_path)
    run.manifests.clear()
    run.write()
    for name in ("run.json", "cadence.binpb", "record.json"):
        (tmp_path / name).unlink()
    assert elche_audit.exit_code(elche_audit.judge(tmp_path)) == 0


def test_a_last_round_of_which_nobody_has_heard_is_known_by_its_checkpoint(tmp_path: Path) -> None:
    run = whole(tmp_path)
    for log in run.logs.values():
        log.records.remove(log.find("committed"))
    run.cadence.pop()
    code, text = judged(run)
    assert code == 0, text


def test_a_checkpoint_of_a_later_attempt_shows_nothing_of_an_earlier_ones_round(tmp_path: Path) -> None:
    run, names = went_back(tmp_path)
    for name in (A, B):
        run.logs[name].records.pop()
    run.cadence.pop()
    run.train(names[0], 1, 0, 20)
    run.train(names[1], 1, 20, 12)
    run.average(*names)
    run.checkpoint()
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "not in the model: 8 samples (2 batches) of rank 0, incarnation 1: its process has left before" in text


def test_of_two_dead_ranks_that_was_left_out_which_has_brought_what_is_missing(tmp_path: Path) -> None:
    run = begun(tmp_path)
    third = run.begin(2, 3)
    run.average(A, B, third)
    run.logs[third].find("entered")[4] = 0
    run.train(A, 1, 0, 8)
    run.train(B, 1, 8, 8)
    run.train(third, 1, 16, 16)
    run.average(A, B, third, left_out=third, without=third)
    del run.logs[B].records[-2:]
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "not in the model: 16 samples (4 batches) of rank 2, incarnation 3: left out of the average" in text
    assert "except 16 that were left out of averages" in text


def test_wherever_the_record_of_rounds_is_cut_its_whole_rounds_are_read(tmp_path: Path) -> None:
    run = whole(tmp_path)
    run.write()
    path = tmp_path / "cadence.binpb"
    data, last = path.read_bytes(), len(job_pb2.JobSpec(replay=run.cadence[-1:]).SerializeToString())
    for size in range(1, last):
        path.write_bytes(data[: len(data) - last + size])
        verdict = elche_audit.judge(tmp_path)
        assert elche_audit.exit_code(verdict) == 0, verdict
        assert verdict.notes[0] == "cadence.binpb ends within a round: `elche run` was killed"


def test_a_checkpoint_that_is_being_written_is_not_judged(tmp_path: Path) -> None:
    run = whole(tmp_path)
    run.write()
    draft = tmp_path / "checkpoints" / JOB / ".epoch-version-6"
    draft.mkdir()
    (draft / "manifest.json").write_text("{")
    assert elche_audit.exit_code(elche_audit.judge(tmp_path)) == 0


def test_ranks_train_on_while_an_averaging_goes_on(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.train(A, 1, 0, 16)
    run.train(B, 1, 16, 8)
    run.average(A, B)
    records = run.logs[B].records
    heard = [records.pop(), records.pop()]
    run.train(B, 1, 24, 8)
    records += reversed(heard)
    run.average(A, B)
    run.end()
    code, text = judged(run)
    assert code == 0, text


def went_back(tmp_path: Path) -> tuple[Run, list[str]]:
    """The job has lost version 4 and goes on from version 3 with two new rank processes."""
    run = begun(tmp_path)
    samples, steps = run.samples, run.steps
    run.train(A, 1, 0, 8)
    run.train(B, 1, 8, 8)
    run.average(A, B)
    run.attempt, run.generation, run.version, run.samples, run.steps = 2, 7, 3, samples, steps
    run.round, run.lease, run.covered[1] = 0, 0, []
    return run, [run.begin(rank, 3 + rank, resume="checkpoint", version=3, samples=samples) for rank in (0, 1)]


def test_the_job_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    run, names = went_back(tmp_path)
    run.train(names[0], 1, 0, 20)
    run.train(names[1], 1, 20, 12)
    run.average(*names)
    run.checkpoint()
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "not in the model: 8 samples (2 batches) of rank 0, incarnation 1: the job went back to version 3" in text


def test_a_last_round_of_which_nobody_has_heard_is_known_by_the_attempt_that_went_on_from_it(tmp_path: Path) -> None:
    """Its ranks were stopped while no coordinator answered, and newer checkpoints have taken the place of theirs."""
    run = begun(tmp_path)
    run.train(A, 1, 0, 8)
    run.train(B, 1, 8, 8)
    run.average(A, B)
    for name in (A, B):
        run.logs[name].records.remove(run.logs[name].find("committed"))
    run.cadence.pop()
    run.attempt, run.generation, run.round, run.lease = 2, 7, 0, 0
    names = [run.begin(rank, 3 + rank, resume="checkpoint", version=4, samples=run.samples) for rank in (0, 1)]
    run.train(names[0], 1, 16, 8)
    run.train(names[1], 1, 24, 8)
    run.average(*names)
    run.checkpoint()
    run.end()
    code, text = judged(run)
    assert code == 0, text


def test_a_rank_is_added_after_the_job_went_back(tmp_path: Path) -> None:
    """The added rank begins without a checkpoint, at version 0, and gets the model from the others."""
    run, names = went_back(tmp_path)
    run.train(names[0], 1, 0, 20)
    added = run.begin(2, 5)
    run.average(*names, added)
    run.logs[added].find("entered")[4] = 0
    run.train(added, 1, 20, 12)
    run.average(*names, added)
    run.checkpoint()
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "the job went back to version 3" in text


def digested(run: Run, at: int, **values: int) -> None:
    """The named ranks, `a` or `b`, have told these digests with their results number `at`."""
    for name, value in values.items():
        record = run.logs[{"a": A, "b": B}[name]].find("received", at)
        record[FLAGS] |= HAS_DIGEST
        record[DIGEST] = value


def test_ranks_tell_digests_of_some_rounds_each_of_its_own(tmp_path: Path) -> None:
    run = whole(tmp_path)
    digested(run, 2, a=5, b=5)
    digested(run, 3, a=6)
    digested(run, 4, b=7)
    code, text = judged(run)
    assert code == 0, text
    digested(run, 2, b=6)
    code, text = judged(run)
    assert code == 1, text
    assert "version 3 (round 3 of generation 1) has two contents: the digest of the parameters differs" in text


def test_samples_that_were_left_out_of_an_average_are_named(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.train(A, 1, 0, 16)
    run.train(B, 1, 16, 16)
    run.average(A, B, left_out=B)
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "not in the model: 16 samples (4 batches) of rank 1, incarnation 2: left out of the average" in text
    assert "except 16 that were left out of averages" in text


@pytest.mark.parametrize(
    ("nonfinite", "outliers", "code"),
    [("fail", "keep", 1), ("ignore", "keep", 1), ("fail", "skip", 0), ("skip", "keep", 0), ("", "", 0)],
)
def test_samples_are_left_out_of_averages_only_where_a_setting_says_so(
    tmp_path: Path, nonfinite: str, outliers: str, code: int
) -> None:
    run = begun(tmp_path, nonfinite=nonfinite, outliers=outliers)
    run.train(A, 1, 0, 16)
    run.train(B, 1, 16, 16)
    run.average(A, B, left_out=B)
    run.end()
    told, text = judged(run)
    assert told == code, text
    assert ("left out 16 samples, and by its settings the job leaves out none" in text) == bool(code)


@pytest.mark.parametrize(("nonfinite", "code"), [("fail", 1), ("skip", 0), ("ignore", 0)])
def test_values_that_are_not_finite_are_in_no_round_of_a_job_that_fails_at_them(
    tmp_path: Path, nonfinite: str, code: int
) -> None:
    run = whole(tmp_path, nonfinite=nonfinite)
    run.logs[A].find("received")[FLAGS] |= NOT_FINITE
    told, text = judged(run)
    assert told == code, text
    assert (f"has values of {A} that are not finite, and by its settings the job fails at these" in text) == bool(code)


def test_a_dead_rank_that_was_left_out_is_known_by_the_others(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.train(A, 1, 0, 16)
    run.train(B, 1, 16, 16)
    run.average(A, B, left_out=B, without=B)
    run.end()
    code, text = judged(run)
    assert code == 0, text
    assert "except 16 that were left out of averages" in text


def test_samples_of_skipped_batches_are_counted(tmp_path: Path) -> None:
    run = whole(tmp_path)
    for log, number in ((run.logs[A], 2), (run.logs[A], 3), (run.logs[B], -1)):
        log.batches()[number][0] = "skipped"
    code, text = judged(run)
    assert code == 0, text
    assert "once; 12 samples of 3 batches were skipped as None (" in text
    run.logs[A].batches()[2][3] += 8
    assert judged(run)[0] == 1, "their positions are those of trained batches to all other checks"


def test_a_watcher_that_was_away_lacks_a_round(tmp_path: Path) -> None:
    run = whole(tmp_path)
    del run.cadence[2]
    code, text = judged(run)
    assert code == 0, text
    assert "note: cadence.binpb has 4 rounds, and the ranks' files have 5" in text


def test_a_last_round_of_which_no_rank_has_heard_is_known_by_the_record(tmp_path: Path) -> None:
    run = whole(tmp_path)
    run.manifests.popitem()
    for log in run.logs.values():
        log.records.remove(log.find("committed"))
    code, text = judged(run)
    assert code == 0, text
    run.cadence.pop()
    code, text = judged(run)
    assert code == 1
    assert "epoch 1: positions 16 to 31 (16 samples) are in no round of the final parameters" in text


@pytest.mark.parametrize(("options", "size"), [({"drop_last": True, "batch_size": 12}, 24), ({"max_steps": 14}, 24)])
def test_a_last_epoch_that_is_shorter(tmp_path: Path, options: dict[str, Any], size: int) -> None:
    run = Run(tmp_path, options=options)
    run.begin(0, 1)
    run.average(A)
    for epoch in range(EPOCHS):
        run.train(A, epoch, 0, size if epoch or "max_steps" not in options else SIZE)
        run.average(A)
    run.end()
    code, text = judged(run)
    assert code == 0, text
    run.logs[A].batches()[-1][3] += 4
    assert judged(run)[0] == 1


@pytest.mark.parametrize(
    ("state", "more", "words"),
    [
        ("cancelled", {}, "the job was cancelled"),
        ("failed", {}, "the job was failed"),
        ("succeeded", {"ended_early": "no patience"}, "the job has ended early"),
    ],
)
def test_a_job_that_did_not_train_all(tmp_path: Path, state: str, more: dict[str, Any], words: str) -> None:
    run = begun(tmp_path)
    run.end(state, **more)
    code, text = judged(run)
    assert code == 0, text
    assert f"32 of 64 samples are in version 3, each once; {words}" in text


@pytest.mark.parametrize(
    ("outcome", "words"),
    [(2, "the job has ended early"), (3, "the job was failed"), (4, "the job was cancelled")],
)
def test_ranks_that_were_told_the_outcome_are_enough_without_a_record(tmp_path: Path, outcome: int, words: str) -> None:
    """A submitted job has no `record.json`. Rank 1 was killed within a record, and then the job was cancelled."""
    run = begun(tmp_path)
    run.train(A, 1, 0, 8)
    run.train(B, 1, 8, 8)
    run.logs[A].records += [["decided", outcome], ["ended", run.logs[A].step]]
    run.write()
    shortened(tmp_path / "audit" / JOB / B, 20)
    verdict = elche_audit.judge(tmp_path)
    text = "\n".join(elche_audit.lines(verdict))
    assert elche_audit.exit_code(verdict) == 0, text
    assert f"32 of 64 samples are in version 3, each once; {words}" in text
    assert "not in the model: 4 samples (1 batches) of rank 1, incarnation 2: its process was killed" in text
    assert "rank 1 (rank-1-2.bin) ends within a record" in text


def test_ranks_that_were_told_of_success_have_trained_all(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.logs[A].records += [["decided", 1], ["ended", run.logs[A].step]]
    code, text = judged(run)
    assert code == 1, text
    assert "epoch 1: positions 0 to 31 (32 samples) are in no round of the final parameters" in text


def resumed(tmp_path: Path, *, is_joined: bool = False) -> Run:
    """A run goes on from a checkpoint of another. If `is_joined`, a rank without a checkpoint joins it."""
    before = begun(tmp_path / "before")
    before.train(A, 1, 0, 8)
    before.average(A, B)
    name = before.checkpoint()
    before.write()
    run = Run(tmp_path / "after", attempt=2, version=before.version, samples=before.samples, steps=before.steps)
    run.covered = {epoch: [list(pair) for pair in ranges] for epoch, ranges in before.covered.items()}
    place = str(tmp_path / "before" / "checkpoints" / JOB / name)
    run.begin(0, 1, resume=place, version=run.version, samples=run.samples)
    run.train(A, 1, 8, 24)
    if is_joined:
        run.begin(1, 2)
    run.average(*run.logs)
    if is_joined:
        run.logs[B].find("entered")[4] = 0
    run.checkpoint()
    run.end()
    return run


def test_a_resumed_run_is_judged_together_with_its_checkpoint(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    code, text = judged(run)
    assert code == 0, text
    assert "each of 64 samples of 2 epochs is in version 5 once" in text


def test_a_rank_is_added_to_a_resumed_run(tmp_path: Path) -> None:
    run = resumed(tmp_path, is_joined=True)
    code, text = judged(run)
    assert code == 0, text
    assert "each of 64 samples of 2 epochs is in version 5 once (2 files of ranks" in text


def test_a_resumed_run_that_was_cancelled_before_its_first_round_has_its_checkpoints_samples(tmp_path: Path) -> None:
    """It was refuted: its record has the checkpoint's samples, and no rank has entered a round."""
    run = resumed(tmp_path)
    run.logs[A].records.clear()
    run.manifests.clear()
    run.logs[A].step = 0
    run.cadence.clear()
    run.end("cancelled")
    assert run.record is not None
    run.record["committed_samples"] = [32, 8]
    code, text = judged(run)
    assert code == 0, text
    assert "40 of 64 samples are in version 4, each once; the job was cancelled" in text
    run.record["committed_samples"] = [32, 12]
    code, text = judged(run)
    assert code == 1, text
    assert "epoch 1: record.json says 12 samples, and the ranks' rounds have 8" in text


def test_a_resumed_run_whose_checkpoint_is_gone(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    run.logs[A].start["resume"] = str(tmp_path / "gone")
    code, text = judged(run)
    assert code == 2, text
    assert f"the run has resumed {tmp_path}/gone: checkpoint gone: its manifest cannot be read" in text


def test_the_checkpoint_of_a_run_that_was_resumed_from_a_url_is_copied(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    (place,) = (tmp_path / "before" / "checkpoints" / JOB).glob("*-4")
    run.logs[A].start["resume"] = f"s3://bucket/digits-0/{place.name}"
    code, text = judged(run)
    copy = run.folder / "checkpoints" / "digits-0" / place.name
    assert code == 2, text
    assert f"the run has resumed s3://bucket/digits-0/{place.name}: elche audit reads no URLs" in text
    assert f": copy the checkpoint of version 4 to {copy}" in text
    shutil.copytree(place, copy)
    code, text = judged(run)
    assert code == 0, text


def test_a_resumed_run_began_with_another_number_of_samples(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    run.logs[A].start["samples"] += 8
    code, text = judged(run)
    assert code == 1, text
    assert "has version 4 with 40 samples, and ranks have resumed version 4 with 48" in text


def test_a_resumed_run_trains_again_what_its_checkpoint_has(tmp_path: Path) -> None:
    run = resumed(tmp_path)
    run.logs[A].batches()[0][3] = 0
    code, text = judged(run)
    assert code == 1, text
    assert re.search(r"epoch 1: positions 0 to 3 \(4 samples\) twice: by .*checkpoint", text), text


def test_the_files_of_several_hosts_are_one_run(tmp_path: Path) -> None:
    run = whole(tmp_path / "one")
    run.write()
    there = tmp_path / "two" / "audit" / JOB
    there.mkdir(parents=True)
    (tmp_path / "one" / "audit" / JOB / B).rename(there / B)
    assert elche_audit.exit_code(elche_audit.judge(tmp_path / "one", tmp_path / "two")) == 0
    alone = elche_audit.judge(tmp_path / "one")
    assert elche_audit.exit_code(alone) == 2
    assert len(alone.missing) == 4, "three rounds are named, and the number of others"
    assert alone.missing[-1] == "and 2 more rounds like these"


def test_a_rank_that_joined_is_not_judged_without_those_that_had_the_model(tmp_path: Path) -> None:
    """It was refuted: round 4 made version 4 of version 0. Rank 1, of the same host, has left before it."""
    run = begun(tmp_path)
    third = run.begin(2, 3)
    run.average(A, third)
    run.logs[third].find("entered")[4] = 0
    rest_of(run).write()
    (tmp_path / "audit" / JOB / A).unlink()
    verdict = elche_audit.judge(tmp_path)
    assert (verdict.violations, elche_audit.exit_code(verdict)) == ([], 2)


def test_a_folder_and_its_copy_are_judged_as_one(tmp_path: Path) -> None:
    run = whole(tmp_path / "one")
    run.write()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    verdict = elche_audit.judge(tmp_path / "one", tmp_path / "one", tmp_path / "copy")
    text = "\n".join(elche_audit.lines(verdict))
    assert elche_audit.exit_code(verdict) == 0, text
    assert "2 files of ranks, 16 batches, 5 rounds, 3 checkpoints" in text


def test_two_files_of_one_rank_process_that_differ_are_not_judged(tmp_path: Path) -> None:
    run = whole(tmp_path / "one")
    run.write()
    shutil.copytree(tmp_path / "one", tmp_path / "older")
    shortened(tmp_path / "older" / "audit" / JOB / B, 50)
    verdict = elche_audit.judge(tmp_path / "one", tmp_path / "older")
    text = "\n".join(elche_audit.lines(verdict))
    assert elche_audit.exit_code(verdict) == 2, text
    assert f"cannot be judged: {B} differs between {tmp_path}/older/audit/{JOB} and {tmp_path}/one/audit/{JOB}" in text


# The command


def test_the_command_prints_a_summary_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = whole(tmp_path)
    run.write()
    assert main(["audit", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("digits-1 is proven: each of 64 samples")
    lease_given_twice(run)
    run.write()
    assert main(["audit", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "refuted"
    assert len(told["violations"]) == 1
    assert told["epoch_samples"] == [SIZE, SIZE]
    assert main(["audit", str(tmp_path / "gone")]) == 2
    assert f"cannot be judged: there is no folder {tmp_path / 'gone'}" in capsys.readouterr().out

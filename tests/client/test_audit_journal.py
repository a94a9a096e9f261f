"""The auditor compares ranks' files with the coordinator's journal, where there is one."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client.test_audit import JOB, Run, judged, whole

Lines = list[dict[str, Any]]


def journal_of(run: Run) -> Lines:
    """What the coordinator has noted of a run: its leases, and each rank's word of each round."""
    lines: Lines = [{"journal": 2, "job": JOB, "num_dropped": 0, "wall_s": 0.0}]
    entered: dict[tuple[int, int], list[dict[str, int]]] = {}
    for log in run.logs.values():
        leased: dict[int, list[Any]] = {}
        for _, lease, epoch, offset, size, _ in log.batches():
            leased.setdefault(lease, [epoch, offset, 0])[2] += size
        address = {"job_id": JOB, "rank": log.start["rank"], "incarnation": log.start["incarnation"]}
        commands = [
            {"SendLease": {**address, "lease": {"id": lease, "epoch": epoch, "offset": offset, "size": size}}}
            for lease, (epoch, offset, size) in leased.items()
        ]
        lines.append({"at": 1.0, "event": {"RankReady": address}, "commands": [{"SendThrottle": address}, *commands]})
        for record in log.records:
            if record[0] == "entered":
                row = {"weight": record[7], "cut": record[5], "local_step": record[6], "compute_us": 1}
                entered.setdefault((record[2], record[3]), []).append(row)
    for log in run.logs.values():
        address = {"job_id": JOB, "rank": log.start["rank"], "incarnation": log.start["incarnation"]}
        for record in log.records:
            if record[0] == "received":
                where = {"generation": record[1], "round": record[2], "header": entered[record[1], record[2]]}
                lines.append({"at": 2.0, "event": {"ResultReceived": {**address, **where}}})
    return json.loads(json.dumps(lines))


def stored(run: Run, lines: Lines) -> None:
    run.folder.mkdir(exist_ok=True)
    (run.folder / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def leases(lines: Lines) -> Lines:
    return [one["SendLease"] for line in lines for one in line.get("commands", ()) if "SendLease" in one]


def test_a_run_with_its_journal_is_proven(tmp_path: Path) -> None:
    run = whole(tmp_path)
    stored(run, journal_of(run))
    code, text = judged(run)
    assert code == 0, text


def lease_that_was_not_given(lines: Lines) -> None:
    commands = lines[2]["commands"]
    commands.remove(commands[-1])


def lease_of_other_positions(lines: Lines) -> None:
    leases(lines)[2]["lease"]["offset"] += 4


def lease_of_another_epoch(lines: Lines) -> None:
    leases(lines)[3]["lease"]["epoch"] = 0


def lease_that_is_too_short(lines: Lines) -> None:
    leases(lines)[0]["lease"]["size"] -= 4


def lease_with_two_contents(lines: Lines) -> None:
    again = json.loads(json.dumps(leases(lines)[0]))
    again["lease"]["size"] += 4
    lines[1]["commands"].append({"SendLease": again})


def header_with_other_samples(lines: Lines) -> None:
    for line in lines:
        told = line.get("event", {}).get("ResultReceived", {})
        if told.get("round") == 3:
            told["header"][1]["weight"] += 4


def header_with_another_cut(lines: Lines) -> None:
    for line in lines:
        told = line.get("event", {}).get("ResultReceived", {})
        if told.get("round") == 3:
            told["header"][0]["cut"] -= 4


def header_of_one_rank_alone(lines: Lines) -> None:
    lines[-1]["event"]["ResultReceived"]["header"].append({"weight": 4, "cut": 4, "local_step": 1})


def header_told_later(lines: Lines) -> None:
    """Its rows were asked for when the round was in doubt."""
    lines[-1]["event"] = {"HeaderReported": lines[-1]["event"]["ResultReceived"]}
    lines[-1]["event"]["HeaderReported"]["header"][0]["cut"] = 0


A, B = "rank 0 (rank-0-1.bin)", "rank 1 (rank-1-2.bin)"
FAULTS: dict[Callable[[Lines], None], str] = {
    lease_that_was_not_given: f"{B} has trained samples of lease 8, which journal.jsonl has not",
    lease_of_other_positions: f"{A} has trained epoch 1: positions 0 to 3 (4 samples) of lease 5, and in journal.jsonl "
    "that has epoch 1: positions 4 to 11 (8 samples)",
    lease_of_another_epoch: f"{A} has trained epoch 1: positions 16 to 19 (4 samples) of lease 7, and in journal.jsonl "
    "that has epoch 0: positions 16 to 23 (8 samples)",
    lease_that_is_too_short: f"{A} has trained epoch 0: positions 4 to 7 (4 samples) of lease 1, and in journal.jsonl "
    "that has epoch 0: positions 0 to 3 (4 samples)",
    lease_with_two_contents: "journal.jsonl has lease 1 of rank 0 with two contents",
    header_with_other_samples: "the header of round 3 of generation 1 in journal.jsonl lacks what "
    f"{B} has brought: 8 samples, up to 16 in 4 batches",
    header_with_another_cut: "the header of round 3 of generation 1 in journal.jsonl lacks what "
    f"{B} has brought: 8 samples, up to 16 in 4 batches",
    header_of_one_rank_alone: "journal.jsonl has round 5 of generation 1 with two headers",
    header_told_later: "journal.jsonl has round 5 of generation 1 with two headers",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_the_journal_has_otherwise_is_found(tmp_path: Path, fault: Callable[[Lines], None]) -> None:
    run = whole(tmp_path)
    lines = journal_of(run)
    fault(lines)
    stored(run, lines)
    code, text = judged(run)
    assert code == 1
    assert FAULTS[fault] in text


def test_of_a_journal_without_its_beginning_only_what_it_has_is_compared(tmp_path: Path) -> None:
    run = whole(tmp_path)
    lines = journal_of(run)
    lines[0]["num_dropped"] = 1
    lease_that_was_not_given(lines)
    stored(run, lines)
    code, text = judged(run)
    assert code == 0, text


def test_the_journal_of_a_run_that_failed_is_read_where_the_coordinator_left_it(tmp_path: Path) -> None:
    run = whole(tmp_path)
    lines = journal_of(run)
    lease_with_two_contents(lines)
    folder = tmp_path / "coordinator" / "journals"
    folder.mkdir(parents=True)
    (folder / f"{JOB}.jsonl.gz").write_bytes(gzip.compress("".join(f"{json.dumps(one)}\n" for one in lines).encode()))
    code, text = judged(run)
    assert (code, f"{JOB}.jsonl.gz has lease 1 of rank 0 with two contents" in text) == (1, True)


def without_a_size(lines: Lines) -> None:
    del leases(lines)[0]["lease"]["size"]


def of_another_job(lines: Lines) -> None:
    lines[0]["job"] = "other"


def of_another_format(lines: Lines) -> None:
    lines[0]["journal"] = 99


DAMAGES: dict[Callable[[Lines], None], str] = {
    without_a_size: "journal.jsonl, the journal, is damaged in line 2",
    of_another_job: f"journal.jsonl is the journal of job other, not of {JOB}",
    of_another_format: "journal.jsonl has format 99, and this version of elche reads 2",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_with_a_journal_that_cannot_be_read_the_run_is_undecided(
    tmp_path: Path, damage: Callable[[Lines], None]
) -> None:
    run = whole(tmp_path)
    lines = journal_of(run)
    damage(lines)
    stored(run, lines)
    code, text = judged(run)
    assert code == 2
    assert DAMAGES[damage] in text


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"[]\n", b"{}\n", b'{"journal":2,"job":"digits-1","num_dropped":0}\nnull\n']
)
def test_a_file_that_is_no_journal_is_named(tmp_path: Path, data: bytes) -> None:
    run = whole(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(data)
    code, text = judged(run)
    assert code == 2
    assert "journal.jsonl, the journal, is damaged in line " in text

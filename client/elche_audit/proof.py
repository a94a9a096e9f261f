"""Judges a run by the files of its ranks, and compares them with the coordinator's record and the checkpoints."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elche_audit.agreement import ledger_faults, other_seeds, record_faults, unlike_settings
from elche_audit.coverage import CoveredPiece, Ranges, difference, gaps, overlaps, words
from elche_audit.history import Attempt, AuditedRound, attempts_of, contents, positions
from elche_audit.journal import faults
from elche_audit.rank_file import Damaged, Joined, RankFile, Start
from elche_audit.run_folder import CADENCE, RECORD, CheckpointBooks, ReportedRound, RunFolder, read_books, read_run
from elche_audit.verdict import Thrown, Verdict

MAX_LINES = 20
"""Most lines about one kind of violation."""
AGREED = {
    "dataset_size": "another size of the data set",
    "batch_size": "another batch size",
    "members": "another size of its replica group",
    "nonfinite": "another treatment of values that are not finite",
    "outliers": "another treatment of outliers",
    "source": "another file",
    "code": "another module or folder",
    "settings": "other settings",
    "arguments": "other arguments",
}
"""What all ranks of a job have alike, since with it a position of an epoch is another sample; and its words."""
MAX_LACKING = 3
"""Most lines about rounds whose ranks' files are missing."""


def judge(folder: Path, *others: Path) -> Verdict:
    """Reads a run's folder, and those of its job on other hosts, and judges it."""
    run = read_run(folder, *others)
    verdict = Verdict(run.job, missing=list(run.missing), notes=list(run.notes), num_files=len(run.files))
    verdict.num_checkpoints = len(run.checkpoints)
    verdict.num_batches = sum(len(file.batches) for file in run.files)
    if run.files:
        _Judge(run, verdict).judge()
    return verdict


class _Judge:
    """The checks, in the order in which later ones build upon earlier ones."""

    def __init__(self, run: RunFolder, verdict: Verdict) -> None:
        self._run = run
        self._verdict = verdict
        self._attempts = attempts_of(run)
        starts = [file.start for file in run.files]
        self._sizes = starts[0].epoch_sizes()
        self._full_size = starts[0].full_size
        self._is_whole = run.has_all_files
        """True if all rounds are known, so that what is in none of them was not trained."""
        self._base: CheckpointBooks | None = None
        """The checkpoint from which the run has resumed."""
        self._chains: dict[int, list[AuditedRound]] = {}
        """By attempt: the rounds of this folder that its model consists of."""
        self._steps: dict[int, set[int]] = {}
        """By version: the job's batches with it, in each attempt that has made it."""
        self._thrown_rounds: list[tuple[AuditedRound, int]] = []
        """Committed rounds before whose version the job went back, with the version to which it went."""

    def judge(self) -> None:
        """Makes all checks."""
        self._check_files()
        self._check_leases()
        if self._run.journal is not None:
            self._refute(faults(self._run.journal, self._run.files))
        # First, since attempts can be linked only if none lacks a file.
        for attempt in self._attempts:
            self._check_attempt(attempt)
        self._link_attempts()
        for attempt in self._attempts:
            self._check_steps(attempt)
            self._check_commits(attempt)
            self._check_evaluations(attempt)
        self._check_ends()
        self._check_outcomes()
        if self._is_whole:
            self._check_checkpoints()
        self._check_record()
        self._check_coverage()
        self._name_thrown()

    def _refute(self, lines: Sequence[str]) -> None:
        self._verdict.violations += lines[:MAX_LINES]
        if len(lines) > MAX_LINES:
            self._verdict.violations.append(f"and {len(lines) - MAX_LINES} more of this kind")

    def _lack(self, line: str) -> None:
        """Names something missing without which the rounds are not all known."""
        self._is_whole = False
        self._verdict.missing.append(line)

    # The files by themselves

    def _check_files(self) -> None:
        processes = dict[int, RankFile]()
        for file in self._run.files:
            self._refute(file.problems)
            self._refute([f"{file.who}: {line}" for line in unlike_settings(file.start)])
            other = processes.setdefault(file.start.incarnation, file)
            if other is not file:
                self._refute([f"incarnation {file.start.incarnation} is of two processes: {other.who}, and {file.who}"])
            self._refute([_outside(file, one) for one in _pieces(file) if not self._is_inside(one)])
            if file.name != (named := f"rank-{file.start.rank}-{file.start.incarnation}.bin"):
                self._refute([f"{file.who}: it has what {named} is to have"])
            first = self._run.files[0]
            for name, words_of in AGREED.items():
                if getattr(file.start, name) != getattr(first.start, name):
                    self._refute([f"{file.who}: it was to train with {words_of} than {first.who}"])
            if file.start.epoch_sizes() != self._sizes:
                self._refute([f"{file.who}: it was to train other epochs than the other ranks"])

    def _is_inside(self, piece: CoveredPiece) -> bool:
        return piece.epoch < len(self._sizes) and piece.size > 0 and piece.end <= self._sizes[piece.epoch]

    def _check_leases(self) -> None:
        owners: dict[tuple[int, int], RankFile] = {}
        found = []
        for file in self._run.files:
            for lease in dict.fromkeys(batch.lease for batch in file.batches):
                owner = owners.setdefault((file.attempt, lease), file)
                # Each attempt counts its leases anew, and a process that was in no round does not know its attempt.
                if owner is not file and file.attempt:
                    found.append(f"lease {lease} was given twice: to {owner.who}, and to {file.who}")
        self._refute(found)

    # Attempts

    def _link_attempts(self) -> None:
        """Makes each attempt's chain of rounds: those of earlier attempts before its checkpoint, then its own."""
        chain: list[AuditedRound] = []
        before: Attempt | None = None
        for attempt in self._attempts:
            if before is not None:
                chain = self._go_back(chain, attempt, before)
            elif attempt.base:
                self._read_base(attempt)
            before = attempt
            chain = [*chain, *(attempt.rounds[version] for version in sorted(attempt.rounds))]
            self._chains[attempt.number] = chain

    def _read_base(self, attempt: Attempt) -> None:
        loaded = [file.start for file in attempt.files if file.start.resume]
        resume = next((start.resume for start in loaded if start.version == attempt.base), "")
        place = self._run.folder.joinpath("checkpoints", *Path(resume).parts[-2:]) if "://" in resume else Path(resume)
        if "://" in resume and not os.path.exists(place):
            text = f"the run has resumed {resume}: elche audit reads no URLs"
            self._lack(f"{text}: copy the checkpoint of version {attempt.base} to {place}")
            return
        try:
            self._base = read_books(place / "manifest.json")
        except Damaged as error:
            self._lack(f"the run has resumed {resume}: {error}")
            return
        for had, has in zip(self._base.sizes, (attempt.files[0].start.dataset_size, self._full_size), strict=True):
            if had not in (None, has):
                what = f"checkpoint {self._base.name}, which was resumed, is of epochs of {had} samples"
                self._refute([f"{what}, and the run's have {has}"])
                break
        if 0 < attempt.number <= self._base.attempt:
            of = f"checkpoint {self._base.name} of attempt {self._base.attempt}"
            self._refute([f"attempt {attempt.number} has resumed {of}: it is not a later one"])
        told = (self._base.version, self._base.samples)
        if told != (attempt.base, attempt.base_samples):
            self._refute(
                [
                    f"checkpoint {self._base.name} has version {told[0]} with {told[1]} samples, and ranks have "
                    f"resumed version {attempt.base} with {attempt.base_samples}"
                ]
            )

    def _go_back(self, chain: list[AuditedRound], attempt: Attempt, before: Attempt) -> list[AuditedRound]:
        """The rounds that stay when the job goes back."""
        first = self._base.version if self._base is not None else 0
        last = chain[-1].version if chain else first
        kept = [one for one in chain if one.version <= attempt.base]
        self._thrown_rounds += [(one, attempt.base) for one in chain if one.version > attempt.base]
        if not self._is_whole:
            return kept
        goes_on = f"attempt {attempt.number} goes on from version {attempt.base}"
        if attempt.base and not first <= attempt.base <= last:
            # No file tells of an attempt whose ranks' files are all missing, or were on a full disk.
            if attempt.number > before.number + 1 or not any(file.has_ended for file in before.files):
                self._lack(f"{goes_on}, and the files of ranks of earlier attempts end with {last}")
            else:
                self._refute([f"{goes_on}, and version {last} was the last one"])
        elif kept and kept[-1].version == attempt.base:
            self._check_base(kept[-1], attempt, goes_on)
        return kept

    def _check_base(self, made: AuditedRound, attempt: Attempt, goes_on: str) -> None:
        """The version from which an attempt goes on is the one that the rounds before it have made."""
        if attempt.base_samples != made.result.samples:
            self._refute([f"{goes_on} with {attempt.base_samples} samples, and that has {made.result.samples}"])
        names = {Path(file.start.resume).name for file in attempt.files}
        for books in self._run.checkpoints:
            if books.name in names and books.version == attempt.base and books.attempt != made.attempt:
                self._refute(
                    [
                        f"{goes_on} of attempt {books.attempt} (checkpoint {books.name}), and the job had gone back "
                        f"before that and made it anew in attempt {made.attempt}"
                    ]
                )

    def _check_attempt(self, attempt: Attempt) -> None:
        lacking, version, samples = list[str](), attempt.base, attempt.base_samples
        self._refute(_other_bases(attempt))
        self._refute(_places_twice(attempt))
        self._refute(_other_groups(attempt))
        self._refute(_disorder(attempt))
        for rival in attempt.rivals:
            other = attempt.rounds[rival.version]
            self._refute([f"version {rival.version} has two contents: {other.words}, and {rival.words}"])
        for one in map(attempt.rounds.__getitem__, sorted(attempt.rounds)):
            is_next = one.version == version + 1
            if not is_next:
                lacking.append(f"no file has the round that made version {version + 1} of attempt {attempt.number}")
            # Without the number of samples of the round before, this one's cannot be checked.
            self._check_round(one, samples if is_next else None)
            version, samples = one.version, one.result.samples
            if not one.is_whole:
                lacking.append(_lacks_ranks(one))
        for line in lacking[:MAX_LACKING]:
            self._lack(line)
        if len(lacking) > MAX_LACKING:
            self._lack(f"and {len(lacking) - MAX_LACKING} more rounds like these")

    def _check_round(self, one: AuditedRound, samples: int | None) -> None:
        """`samples`: those of the version before; None if that is not known."""
        found = [*_differing(one), *_processes_twice(one), *_outdated(one)]
        num_rows = one.result.num_rows
        out = sum(part.samples for part in one.parts if part.is_left_out)
        if one.is_whole and out != one.result.left_out:
            found.append(f"{one.words} left out {one.result.left_out} samples, and its ranks say that it was {out}")
        found += _against_settings(one, self._run.files[0].start)
        newest = max(entry.version for entry in one.entries.values())
        # Of a round that is not whole, the files of those that had the model may be missing.
        if one.is_whole and one.version != newest + 1:
            found.append(f"{one.words} made version {one.version} of version {newest}")
        if len(one.entries) > num_rows:
            found.append(f"{one.words} was entered by {len(one.entries)} ranks, and its result is of {num_rows}")
        brought = sum(part.samples for part in one.parts)
        counted = brought if samples is None else one.result.samples - samples
        if one.is_whole and brought != counted:
            found.append(
                f"{one.words} (version {one.version}) has lost samples, or has too many: its ranks brought {brought}, "
                f"and its result counts {counted}"
            )
        self._refute(found)

    def _check_steps(self, attempt: Attempt) -> None:
        """The batches that the coordinator counts with each committed round are those that the ranks have trained."""
        steps, made = 0, dict[int, int]()
        if self._base is not None:
            steps = made[self._base.version] = self._base.global_step
        for one in self._chains[attempt.number]:
            steps += sum(len(part.batches) for part in one.parts)
            made[one.version] = steps
        for version, count in made.items():
            self._steps.setdefault(version, set()).add(count)
        told = {(commit.version, commit.global_step) for file in attempt.files for commit in file.commits}
        differ = [(version, count) for version, count in sorted(told) if count != made.get(version, count)]
        if differ and self._is_whole:
            version, count = differ[0]  # later ones follow from the first
            self._refute([f"version {version}: the coordinator counts {count} batches, and ranks made {made[version]}"])

    def _check_commits(self, attempt: Attempt) -> None:
        """The coordinator commits no other rounds than those that ranks have made."""
        made = {one.number: one.version for one in attempt.rounds.values()}
        told = {(one.round, one.version): file for file in attempt.files for one in file.commits}
        if self._is_whole:
            self._refute(
                [
                    f"{file.who} was told that round {number} is committed as version {version}, and no ranks made it"
                    for (number, version), file in told.items()
                    if made.get(number) != version
                ]
            )

    def _check_evaluations(self, attempt: Attempt) -> None:
        """An epoch is evaluated once all of it is trained, or at last."""
        chain = self._chains[attempt.number]
        evaluated = {part: file for file in attempt.files for part in file.evaluations}
        self._refute(
            [
                f"{file.who} evaluated epoch {epoch} with version {version}, and the job has no such epoch"
                for (version, epoch), file in evaluated.items()
                if epoch >= len(self._sizes)
            ]
        )
        if not self._is_whole or not chain:
            return
        for (version, epoch), file in evaluated.items():
            trained = self._with_base([one for one in chain if one.version <= version])
            absent = gaps(trained, self._sizes[: epoch + (version < chain[-1].version)])
            self._refute(
                [f"{file.who} evaluated epoch {epoch} with version {version}, which lacks {words(*absent[0])}"]
                if absent
                else []
            )

    def _check_ends(self) -> None:
        """Files that end before the job did, as on a full disk, do not show that samples were not trained."""
        last = self._attempts[-1] if self._attempts else None
        has_end = last is not None and any(file.has_ended for file in last.files)
        if self._run.result is None or self._run.result["state"] != "succeeded" or has_end:
            return
        if last is None or gaps(self._with_base(self._chains[last.number]), self._sizes):
            self._lack("all files of ranks end before the job did: could they be written? (see the ranks' logs)")

    def _check_outcomes(self) -> None:
        """Once the outcome is decided, the job does not begin again."""
        last = self._attempts[-1].number
        self._refute(
            [
                f"{file.who} was told in attempt {file.attempt} that the job has {file.outcome}, and attempt {last} "
                "went on"
                for file in self._run.files
                if file.outcome and 0 < file.attempt < last
            ]
        )

    @property
    def _is_told(self) -> bool:
        """True if a rank with the last rounds was told the outcome: the job has ended with them."""
        last = self._attempts[-1]
        return any(file.outcome and file.name in last.booked for file in last.files)

    # Checkpoints

    def _check_checkpoints(self) -> None:
        for books in self._run.checkpoints:
            self._check_checkpoint(books)
            self._check_ledger(books)
        seeds = [("the ranks' settings", self._run.files[0].start.settings.get("seed"))]
        bases = [self._base] if self._base is not None else []
        seeds += [(f"checkpoint {books.name}", books.seed) for books in [*bases, *self._run.checkpoints]]
        self._refute(other_seeds(seeds))

    def _check_ledger(self, books: CheckpointBooks) -> None:
        """The checkpoint's books agree with one another, with the ranks' leases and with the job."""
        where = f"checkpoint {books.name} (version {books.version})"
        own = [one for one in self._chains.get(books.attempt, ()) if one.attempt == books.attempt]
        booked = [
            batch.lease for one in own if one.version <= books.version for part in one.parts for batch in part.batches
        ]
        self._refute([f"{where}: {line}" for line in ledger_faults(books, self._sizes, max(booked, default=0))])
        start = self._run.files[0].start
        for had, has in zip(books.sizes, (start.dataset_size, self._full_size), strict=True):
            if had not in (None, has):
                self._refute([f"{where} is of epochs of {had} samples, and the ranks' have {has}"])
                return
        owners = {lease: rank for rank, lease in books.leases}
        for file in self._run.files:
            taken = {batch.lease for batch in file.batches} if file.attempt == books.attempt else set()
            for lease in sorted(taken & owners.keys()):
                if owners[lease] != file.start.rank:
                    self._refute([f"{where}: rank {owners[lease]} has lease {lease}, and {file.who} trained it"])

    def _check_checkpoint(self, books: CheckpointBooks) -> None:
        chain = self._chains.get(books.attempt)
        if chain is None:
            self._lack(f"checkpoint {books.name}: there is no file of attempt {books.attempt}")
            return
        rounds = [one for one in chain if one.version <= books.version]
        if not rounds or rounds[-1].version != books.version:
            last = chain[-1].version if chain else 0
            files = next(one.files for one in self._attempts if one.number == books.attempt)
            if books.version > last and not any(file.has_ended for file in files):  # as on a full disk
                said = f"checkpoint {books.name} has version {books.version}, and all files of ranks end with {last}"
                self._lack(f"{said}: could they be written? (see the ranks' logs)")
                return
            self._refute([f"checkpoint {books.name}: no round made its version {books.version}; the last is {last}"])
            return
        base = self._base
        steps = sum(len(part.batches) for one in rounds for part in one.parts)
        expected = {
            "samples": (books.samples, rounds[-1].result.samples),
            "batches": (books.global_step, steps + (base.global_step if base is not None else 0)),
        }
        where = f"checkpoint {books.name} (version {books.version})"
        self._refute(
            [
                f"{where}: it says {told} {what}, and the ranks {made}"
                for what, (told, made) in expected.items()
                if told != made
            ]
        )
        if stale := [epoch for epoch in books.books if epoch < books.epoch]:
            self._refute([f"{where}: it has books of epoch {stale[0]}, and says that this is complete"])
        trained = self._with_base(rounds)
        if (differs := difference(books.ranges(self._full_size), trained)) is not None:
            has = "the ranks' rounds have them" if self._has(trained, differs) else "no round of the ranks has them"
            self._refute([f"{where}: its books differ at {words(*differs)}: {has}"])

    def _has(self, ranges: Ranges, one: tuple[int, int, int]) -> bool:
        return any(start <= one[1] < end for start, end in ranges.get(one[0], []))

    def _with_base(self, rounds: Sequence[AuditedRound]) -> Ranges:
        """All positions of the rounds, and of the checkpoint from which the run has resumed."""
        return positions(rounds, self._base_pieces())

    def _base_pieces(self) -> list[CoveredPiece]:
        if self._base is None:
            return []
        source = f"checkpoint {self._base.name}"
        ranges = self._base.ranges(self._full_size)
        return [CoveredPiece(epoch, start, end, source) for epoch in ranges for start, end in ranges[epoch]]

    # The coordinator's record

    def _check_record(self) -> None:
        """Compares the rounds that the run's watcher has recorded with those in the ranks' files."""
        recorded = self._run.rounds
        if recorded is None or not self._is_whole:
            return
        made = [attempt.rounds[version] for attempt in self._attempts for version in sorted(attempt.rounds)]
        if len(recorded) == len(made):
            self._refute([_differs(*pair) for pair in zip(recorded, made, strict=True) if not _is_same(*pair)])
            return
        rest = iter(made)  # a watcher that was away may lack rounds, but every recorded one was made
        for number, entry in enumerate(recorded, 1):
            if not any(_is_same(entry, one) for one in rest):
                self._refute([f"no rank made {_text(entry)}, number {number} of {len(recorded)} in {CADENCE}"])
                return
        self._verdict.notes.append(f"{CADENCE} has {len(recorded)} rounds, and the ranks' files have {len(made)}")

    # Epochs

    def _check_coverage(self) -> None:
        verdict = self._verdict
        rounds = self._at_end(self._chains[self._attempts[-1].number] if self._attempts else [])
        pieces = [*self._base_pieces(), *(piece for one in rounds for piece in one.pieces())]
        self._refute(overlaps(pieces))
        trained = self._with_base(rounds)
        verdict.version = rounds[-1].version if rounds else self._base.version if self._base is not None else 0
        verdict.num_rounds = len(rounds)
        verdict.epoch_sizes = self._sizes
        verdict.epoch_samples = self._samples(trained)
        verdict.left_out = sum(part.samples for one in rounds for part in one.parts if part.is_left_out)
        batches = [batch for one in rounds for part in one.parts for batch in part.batches if batch.is_skipped]
        verdict.skipped_batches, verdict.skipped_samples = len(batches), sum(batch.size for batch in batches)
        self._check_result(gaps(trained, self._sizes))

    def _samples(self, trained: Ranges) -> list[int]:
        """By epoch, the number of these positions."""
        return [sum(end - start for start, end in trained.get(epoch, [])) for epoch in range(len(self._sizes))]

    def _at_end(self, chain: list[AuditedRound]) -> list[AuditedRound]:
        """The rounds of the model with which the job ended: not all if it had gone back to a checkpoint, or to its
        start, and then failed or was cancelled before another round.
        """
        result = self._run.result
        if result is None or result["state"] == "succeeded":
            return chain
        told = result["committed_samples"]
        if self._is_told:
            return chain
        if not told and chain:
            self._verdict.notes.append(
                f"{RECORD} has no samples: the job had gone back and not trained again, or `elche run` got no result"
            )
            return chain
        versions = {books.version for books in self._run.checkpoints}
        versions |= {file.start.version for file in self._run.files if not file.attempt}
        told = [*told, *[0] * len(self._sizes)][: len(self._sizes)]
        if told != self._samples(self._with_base(chain)):
            for version in sorted(versions, reverse=True):
                kept = [one for one in chain if one.version <= version]
                if told == self._samples(self._with_base(kept)):
                    self._thrown_rounds += [(one, version) for one in chain[len(kept) :]]
                    return kept
        return chain

    def _check_result(self, absent: list[tuple[int, int, int]]) -> None:
        verdict, result = self._verdict, self._run.result
        verdict.is_complete = not absent
        if result is None:
            outcome = self._told_outcome()
            verdict.state = "succeeded" if outcome == "ended early" else outcome
            if outcome == "succeeded" and self._is_whole:
                self._refute(_untrained(absent))
            elif absent and not outcome:
                lacks = f"{RECORD} is missing, no rank was told the job's outcome, and not all epochs are complete"
                self._lack(f"{lacks}: has the job ended?")
                samples, total = sum(verdict.epoch_samples), sum(verdict.epoch_sizes)
                verdict.notes.append(f"{samples} of {total} samples are in version {verdict.version} so far")
            return
        verdict.model_is = result["model_is"]
        verdict.state = result["state"]
        # A job may be cancelled, or fail, after it was decided that it ends early.
        has_ended_early = verdict.state == "succeeded" and bool(result["ended_early"])
        outcome = self._told_outcome()
        of_ranks = ("succeeded" if outcome == "ended early" else outcome, outcome == "ended early")
        if outcome and of_ranks != (verdict.state, has_ended_early):
            says = "ended early" if has_ended_early else verdict.state
            self._refute([f"the job has two outcomes: {RECORD} says {says}, and its ranks were told {outcome}"])
        # The record has no number for epochs that were not begun.
        told = [*result["committed_samples"], *[0] * len(self._sizes)]
        if more := [epoch for epoch in range(len(self._sizes), len(told)) if told[epoch]]:
            self._refute([f"epoch {more[0]}: {RECORD} says {told[more[0]]} samples, and the job has no such epoch"])
        if self._is_whole and (result["committed_samples"] or verdict.state == "succeeded"):
            self._refute(
                [
                    f"epoch {epoch}: {RECORD} says {told[epoch]} samples, and the ranks' rounds have {samples}"
                    for epoch, samples in enumerate(verdict.epoch_samples)
                    if told[epoch] != samples
                ]
            )
        if verdict.state == "succeeded" and not has_ended_early and self._is_whole:
            self._refute(_untrained(absent))
        if self._is_whole:
            self._check_figures(result)

    def _check_figures(self, result: dict[str, Any]) -> None:
        """The record's figures are those of the ranks' rounds."""
        made = [one for attempt in self._attempts for one in attempt.rounds.values()]
        rounds = {(one.number, one.version, sum(part.samples for part in one.parts)) for one in made}
        size = self._run.files[0].start.dataset_size
        self._refute(record_faults(result, self._sizes, size, rounds, self._steps))
        if self._is_told and result["committed_samples"]:
            last = self._attempts[-1]
            out = sum(part.samples for one in last.rounds.values() for part in one.parts if part.is_left_out)
            has = {"rounds": last.last, "discarded": out}
            self._refute(
                [
                    f"{RECORD} has {name} {result[name]}, and the ranks {has[name]}"
                    for name in has
                    if name in result and result[name] != has[name]
                ]
            )

    def _told_outcome(self) -> str:
        """The job's outcome as its ranks were told it, after which nothing is committed; empty if no file has it."""
        outcomes = {file.outcome: file for file in self._run.files if file.outcome}
        if len(outcomes) > 1:
            told = ", and ".join(f"{file.who} was told {outcome}" for outcome, file in outcomes.items())
            self._refute([f"the job has two outcomes: {told}"])
        return next(iter(outcomes), "")

    # What is not in the final parameters

    def _name_thrown(self) -> None:
        found: dict[tuple[int, int, str], Thrown] = {}

        def add(file: RankFile, samples: int, batches: int, reason: str) -> None:
            key = (file.start.rank, file.start.incarnation, reason)
            thrown = found.setdefault(key, Thrown(*key[:2], 0, 0, reason))
            thrown.samples += samples
            thrown.batches += batches

        for one, version in self._thrown_rounds:
            for part in one.parts:
                add(part.file, part.samples, len(part.batches), f"the job went back to version {version}")
        for attempt in self._attempts:
            for one in attempt.rounds.values():
                for part in one.parts:
                    if part.is_left_out:
                        add(part.file, part.samples, len(part.batches), "left out of the average (nonfinite, outliers)")
        booked = {name: count for attempt in self._attempts for name, count in attempt.booked.items()}
        for file in self._run.files:
            rest = file.batches[booked.get(file.name, 0) :]
            if rest:
                add(file, sum(batch.size for batch in rest), len(rest), _reason(file))
        self._verdict.thrown = [one for one in found.values() if one.samples]


def _differing(one: AuditedRound) -> list[str]:
    """The values of a round that two ranks tell differently, a line each."""
    found = []
    told: dict[str, tuple[int, str]] = {}
    for name, result in one.results.items():
        for what, value in result.content.items():
            first = told.setdefault(what, (value, name))
            if first[0] != value:
                two = f"{what} differs between {first[1]} and {name}"
                found.append(f"version {one.version} ({one.words}) has two contents: {two}")
    return found


def _against_settings(one: AuditedRound, start: Start) -> list[str]:
    """What a committed round has that the job's settings rule out, a line each."""
    found = []
    if one.result.left_out and start.nonfinite and "skip" not in (start.nonfinite, start.outliers):
        found.append(f"{one.words} left out {one.result.left_out} samples, and by its settings the job leaves out none")
    if start.nonfinite == "fail":
        found += [
            f"{one.words} has values of {name} that are not finite, and by its settings the job fails at these"
            for name, result in one.results.items()
            if not result.is_finite
        ]
    return found


def _other_bases(attempt: Attempt) -> list[str]:
    """The ranks that have resumed another version than the attempt's first ones, a line each."""
    return [
        f"{file.who} has resumed version {file.start.version} with {file.start.samples} samples, and attempt "
        f"{attempt.number} began with version {attempt.base} and {attempt.base_samples}"
        for file in attempt.files
        if file.start.resume and (file.start.version, file.start.samples) != (attempt.base, attempt.base_samples)
    ]


def _places_twice(attempt: Attempt) -> list[str]:
    """The places of a generation that two processes have had, a line each."""
    found, taken = [], dict[tuple[int, int], RankFile]()
    for file in attempt.files:
        for one in file.records:
            if isinstance(one, Joined):
                other = taken.setdefault((one.generation, one.position), file)
                if other is not file:
                    where = f"place {one.position} of generation {one.generation}"
                    found.append(f"two processes had {where}: {other.who}, and {file.who}")
    return found


def _other_groups(attempt: Attempt) -> list[str]:
    """The ranks that were told another group of a generation than the first one, a line each."""
    found, groups = [], dict[int, tuple[Joined, RankFile]]()
    for file in attempt.files:
        for one in file.records:
            if isinstance(one, Joined):
                first, other = groups.setdefault(one.generation, (one, file))
                if (first.world_size, first.is_relayed) != (one.world_size, one.is_relayed):
                    told = " and ".join(f"{who.who} {_group(it)}" for it, who in ((first, other), (one, file)))
                    found.append(f"generation {one.generation} has two contents: to {told}")
    return found


def _group(one: Joined) -> str:
    return f"{one.world_size} ranks{' through the coordinator' * one.is_relayed}"


def _disorder(attempt: Attempt) -> list[str]:
    """The rounds that are older than the one before them: of an older number, of an older generation, or of an older
    process, a line each.
    """
    found, number, generation, newest = [], 0, 0, dict[int, RankFile]()
    for version in sorted(attempt.rounds):
        one = attempt.rounds[version]
        if one.number <= number:
            found.append(f"{one.words} made version {version}, and round {number} the version before it")
        if one.generation < generation:
            found.append(f"{one.words} made version {version}, and generation {generation} the version before it")
        number, generation = one.number, one.generation
        for part in one.parts:
            last = newest.setdefault(part.file.start.rank, part.file)
            if part.file.start.incarnation < last.start.incarnation:
                found.append(f"{part.file.who} is in {one.words}, after {last.name} had taken its place")
            else:
                newest[part.file.start.rank] = part.file
    return found


def _processes_twice(one: AuditedRound) -> list[str]:
    """The ranks of which two processes were in the round, a line each."""
    found, first = [], dict[int, RankFile]()
    for part in one.parts:
        other = first.setdefault(part.file.start.rank, part.file)
        if other is not part.file:
            found.append(f"{one.words} has two processes of one rank: {other.who}, and {part.file.who}")
    return found


def _outdated(one: AuditedRound) -> list[str]:
    """The ranks that brought samples with other parameters than those of the version before, or before they had the
    job's model, a line each.
    """
    return [
        f"{part.file.who} brought {part.samples} samples to {one.words} with version {version}, which makes version "
        f"{one.version}"
        for part in one.parts
        if part.samples and not 0 < (version := one.entries[part.file.name].version) == one.version - 1
    ]


def _lacks_ranks(one: AuditedRound) -> str:
    return (
        f"{one.words} (version {one.version}) had {one.result.num_rows} ranks, and the files of {len(one.entries)} "
        "contain it: the file of a rank is missing, or not whole"
    )


def _untrained(absent: Sequence[tuple[int, int, int]]) -> list[str]:
    return [f"{words(*one)} are in no round of the final parameters" for one in absent]


def _pieces(file: RankFile) -> list[CoveredPiece]:
    return [CoveredPiece(one.epoch, one.offset, one.offset + one.size) for one in file.batches]


def _outside(file: RankFile, piece: CoveredPiece) -> str:
    return f"{words(piece.epoch, piece.start, piece.end)} of {file.who} are outside the epochs of the job"


def _reason(file: RankFile) -> str:
    if file.has_ended:
        return "its process has left before a round took them"
    return "its process was killed, or has crashed, before a round took them"


def _is_same(entry: ReportedRound, one: AuditedRound) -> bool:
    return entry == _reported(one)


def _reported(one: AuditedRound) -> ReportedRound:
    """The round as it is to be in the coordinator's record."""
    batches = tuple(len(part.batches) for part in one.parts if part.batches)
    return ReportedRound(one.generation, contents(one.parts), batches)


def _differs(entry: ReportedRound, one: AuditedRound) -> str:
    made = _reported(one)
    return f"version {one.version} has two contents: {CADENCE} says {_text(entry)}, and the ranks made {_text(made)}"


def _text(entry: ReportedRound) -> str:
    parts = "; ".join(
        ", ".join(f"epoch {epoch} [{start}, {end})" for epoch, start, end in part) + f" in {number} batches"
        for part, number in zip(entry.parts, entry.batches, strict=True)
    )
    return f"a round of generation {entry.generation} with {parts or 'no samples'}"

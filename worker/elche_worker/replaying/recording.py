"""Reads what the rank processes of a run have written, and refuses a recording that lacks anything a replay needs."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elche.errors import InvalidJob
from elche_audit.rank_file import Damaged, Entered, Joined, Lost, RankFile, Received, TrainedBatch, read
from elche_worker.rank.audited import source_digest
from elche_worker.rank.bundle import code_folder

AUDIT, COMMAND, RECORD = "audit", "run.json", "record.json"

RoundKey = tuple[int, int]
"""Generation and number of a round."""


@dataclass(slots=True)
class RecordedAveraging:
    """One averaging, by the files of the processes that entered it."""

    generation: int
    number: int
    entries: dict[str, Entered] = field(default_factory=dict)
    """By name of the file."""
    results: dict[str, Received] = field(default_factory=dict)
    lost: dict[str, Lost] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The round for people."""
        return f"round {self.number} of generation {self.generation}"

    @property
    def result(self) -> Received:
        """The result, as one of the ranks has received it."""
        return next(iter(self.results.values()))

    @property
    def has_header(self) -> bool:
        """True if any rank that lost the round had received its header."""
        return any(one.has_header for one in self.lost.values())


@dataclass(frozen=True, slots=True)
class Recording:
    """One attempt of a run: from its beginning, or from the checkpoint to which it went back."""

    folder: Path
    job: str
    attempt: int
    source: str
    """The job's file."""
    file_name: str
    code: Path | None
    """The folder with which the job was sent, in which its ranks ran; None: it was a single file."""
    working_folder: Path | None
    """Working directory of the ranks; None: this process's."""
    environment: Mapping[str, str]
    files: Mapping[str, RankFile]
    """By name, in order of rank and incarnation: the processes that were in any round."""
    generations: Mapping[int, Mapping[str, Joined]]
    """By number: its members' places, by file."""
    rounds: Mapping[RoundKey, RecordedAveraging]
    last: RecordedAveraging
    """The round whose result is the replay's."""

    def resume(self, file: RankFile) -> str:
        """The checkpoint from which the process began; empty if it began without one. Raises `InvalidJob`."""
        place = file.start.resume
        if not place or "://" in place or Path(place).exists():
            return place
        moved = self.folder / "checkpoints" / self.job / Path(place).name
        if not moved.exists():
            raise InvalidJob(f"{self.folder}: the checkpoint {Path(place).name}, from which it went on, is missing")
        return str(moved.absolute())


def read_recording(folder: Path, *, until_round: int | None, attempt: int | None) -> Recording:
    """Reads an attempt up to a round. None means the newest attempt, or its newest round with a result. Raises
    `InvalidJob`, naming what is missing.
    """
    places = [one for one in sorted((folder / AUDIT).glob("*")) if one.is_dir()]
    if len(places) != 1:
        found = f"files of {len(places)} jobs" if places else "no files of ranks: it was not run with --audit true"
        raise InvalidJob(f"{folder} has {found}")
    (place,) = places
    every = _files(place)
    attempts = sorted({file.attempt for file in every.values() if file.attempt})
    if not attempts:
        raise InvalidJob(f"{place}: no rank has entered a round")
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        raise InvalidJob(f"{folder} has attempts {', '.join(map(str, attempts))}, and none with number {chosen}")
    files = {name: file for name, file in every.items() if file.attempt == chosen}
    rounds, generations = _rounds(files), _generations(files)
    _check_whole(rounds, generations, place)
    with_result = [one for one in rounds.values() if one.results]
    if not with_result:
        raise InvalidJob(f"{place}: no round of attempt {chosen} has a result")
    newest = max(with_result, key=lambda one: (one.result.version, one.number))
    last = newest if until_round is None else _find(rounds, until_round, newest)
    command = _json(folder / COMMAND)
    if chosen == attempts[-1]:
        _check_end(folder, newest)
    code = _code(folder, place, files)
    source, file_name = _source(place, files, code)
    return Recording(
        folder=folder,
        job=place.name,
        attempt=chosen,
        source=source,
        file_name=file_name,
        code=code,
        working_folder=code or _working_folder(command),
        environment={str(name): str(value) for name, value in dict(command.get("environment", {})).items()},
        files=files,
        generations=generations,
        rounds=rounds,
        last=last,
    )


def _files(place: Path) -> dict[str, RankFile]:
    files: list[RankFile] = []
    for path in place.glob("rank-*.bin"):
        try:
            files.append(read(path))
        except Damaged as error:
            raise InvalidJob(f"{place}: {error}") from None
    for file in files:
        start = file.start
        if file.problems:
            raise InvalidJob(f"{place}: {file.problems[0]}")
        if start.job != place.name:
            raise InvalidJob(f"{place}: {file.name} is a file of job {start.job}")
        if start.members > 1:
            raise InvalidJob(f"{place}: {start.members} processes share each model: such a run has no replay")
    return {file.name: file for file in sorted(files, key=lambda one: (one.start.rank, one.start.incarnation))}


def _rounds(files: Mapping[str, RankFile]) -> dict[RoundKey, RecordedAveraging]:
    rounds: dict[RoundKey, RecordedAveraging] = {}
    for name, file in files.items():
        for one in file.records:
            if isinstance(one, Entered | Received | Lost):
                known = rounds.setdefault((one.generation, one.round), RecordedAveraging(one.generation, one.round))
                if isinstance(one, Entered):
                    known.entries[name] = one
                elif isinstance(one, Received):
                    known.results[name] = one
                else:
                    known.lost[name] = one
    return rounds


def _generations(files: Mapping[str, RankFile]) -> dict[int, dict[str, Joined]]:
    generations: dict[int, dict[str, Joined]] = {}
    for name, file in files.items():
        for one in file.records:
            if isinstance(one, Joined):
                generations.setdefault(one.generation, {})[name] = one
    return generations


def _check_whole(
    rounds: Mapping[RoundKey, RecordedAveraging], generations: Mapping[int, Mapping[str, Joined]], place: Path
) -> None:
    """Raises `InvalidJob` if the file of a rank that was in a round is missing, or lacks the round."""
    for one in rounds.values():
        if lacking := sorted(one.entries.keys() - generations.get(one.generation, {}).keys()):
            raise InvalidJob(f"{place}: {lacking[0]} does not say which place its rank had in {one.words}")
        if not one.results and not one.has_header:
            continue
        places = generations[one.generation].values()
        num_rows = one.result.num_rows if one.results else next(iter(places)).world_size
        if len(one.entries) != num_rows or len(generations.get(one.generation, {})) != num_rows:
            raise InvalidJob(f"{place}: {one.words} had {num_rows} ranks, and files of {len(one.entries)} contain it")
        if sorted((its.position, its.world_size) for its in places) != [(at, num_rows) for at in range(num_rows)]:
            raise InvalidJob(f"{place}: the ranks of {one.words} do not agree on their places in it")
        if len({result.version for result in one.results.values()}) > 1:
            raise InvalidJob(f"{place}: {one.words} has two versions")


def _find(rounds: Mapping[RoundKey, RecordedAveraging], number: int, newest: RecordedAveraging) -> RecordedAveraging:
    of_number = [one for one in rounds.values() if one.number == number]
    if number > newest.number or number < 1:
        raise InvalidJob(f"there is no round {number}: the recording has rounds 1 to {newest.number}")
    if not of_number:
        raise InvalidJob(f"no rank has entered round {number}: it was given up before")
    found = [one for one in of_number if one.results]
    if not found:
        raise InvalidJob(f"round {number} has no result: its ranks have lost it")
    return found[-1]


def _check_end(folder: Path, newest: RecordedAveraging) -> None:
    """Raises `InvalidJob` if the run has trained more samples than the files tell of."""
    record = _json(folder / RECORD)
    committed = record.get("committed_samples")
    if record.get("state") != "succeeded" or not isinstance(committed, list):
        return
    total = sum(one for one in committed if isinstance(one, int))
    if newest.result.samples < total:
        raise InvalidJob(
            f"{folder}: the ranks' files end with {newest.words}, after {newest.result.samples} of {total} samples"
        )


def _code(folder: Path, place: Path, files: Mapping[str, RankFile]) -> Path | None:
    """The folder with which the job was sent, if it was, as its ranks have unpacked it."""
    name = next(iter(files.values())).start.code
    if not name:
        return None
    if not re.fullmatch("[0-9a-f]{64}", name):
        raise InvalidJob(f"{place}: the job is the module {name[:100]}, and a replay needs a file")
    code = folder / code_folder(name)
    if not code.is_dir():
        raise InvalidJob(f"{folder}: {code.name}, the folder of the job, is missing: each of its hosts has it")
    return code


def _working_folder(command: Mapping[str, Any]) -> Path | None:
    """The working directory of a run on this machine, if it is known and still there."""
    folder = str(command.get("folder", ""))
    return Path(folder) if os.path.isabs(folder) and os.path.isdir(folder) else None


def _source(place: Path, files: Mapping[str, RankFile], code: Path | None) -> tuple[str, str]:
    """The job's file as it was, and its original path, beside which its imports and data are found. It is in `code`, if
    the job was sent with its folder.
    """
    starts = [file.start for file in files.values()]
    start = starts[0]
    if any(one.source != start.source or one.settings != start.settings for one in starts):
        raise InvalidJob(f"{place}: its ranks have trained two different jobs")
    if code is not None and source_digest(source := _text(code / start.file_name)) == start.source:
        return source, start.file_name
    for path in (Path(start.file_name), place / f"job-{start.source}.py"):
        if source_digest(source := _text(path)) == start.source:
            return source, start.file_name
    raise InvalidJob(f"{place}: job-{start.source}.py, the job's file, is missing, and {start.file_name} is another")


def _text(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise InvalidJob(f"{path} is damaged, or cannot be read") from None
    return content if isinstance(content, dict) else {}


def worth_repeating(file: RankFile, last: RecordedAveraging) -> list[Any]:
    """The process's records up to the last round: no batches that are in no round."""
    kept: list[Any] = []
    for one in file.records:
        if isinstance(one, Entered | Joined) and _is_after(one, last):
            break
        kept.append(one)
        if isinstance(one, Received | Lost) and (one.generation, one.round) == (last.generation, last.number):
            break
    while kept and isinstance(kept[-1], TrainedBatch | Joined):
        kept.pop()
    return kept


def _is_after(one: Entered | Joined, last: RecordedAveraging) -> bool:
    if isinstance(one, Joined):
        return one.generation > last.generation
    return (one.generation, one.round) > (last.generation, last.number)

"""Reads the file of one rank process. The format is in docs/audit.md."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct, calcsize, unpack_from
from typing import Any
from zlib import crc32

MAGIC, FORMAT = b"ELCHEAUD", 2
"""The first bytes of every file, and the number of its format."""
HEAD = Struct("<8sHHI")
CRC = Struct("<I")
"""The checksum after each record, of all bytes before it but the checksums."""
MAX_START_BYTES = 1 << 20
"""Largest description of the process, which follows the head."""
MAX_EPOCHS = 1 << 20
"""Most epochs of a run. No job has as many; a list of the epochs that a damaged file says would not fit any memory."""
MAX_NUMBER = 2**64
BATCH, ENTERED, RECEIVED, LOST, COMMITTED, ENDED, SKIPPED, JOINED, EVALUATED, LOST_LATE, DECIDED = range(1, 12)
LAYOUTS = {
    BATCH: "<QIQIQ",
    ENTERED: "<QQQQQQQ",
    RECEIVED: "<QQQQQIBQQ",
    LOST: "<QQ",
    COMMITTED: "<QQQ",
    ENDED: "<Q",
    SKIPPED: "<QIQIQ",
    JOINED: "<QQIIB",
    EVALUATED: "<QIQQ",
    LOST_LATE: "<QQ",
    DECIDED: "<B",
}
"""The numbers of each record, between its type and its checksum."""
OUTCOMES = {1: "succeeded", 2: "ended early", 3: "failed", 4: "cancelled"}
"""The outcome of a job by its number in a record of type DECIDED."""
LEFT_OUT, NOT_FINITE, HAS_DIGEST = 1, 2, 4
"""Bits of `Received.flags`."""
LEVEL_BIT = 4
"""The first of those that are the level of compression."""


class Damaged(Exception):
    """A file cannot be read. The text names it and says where."""


@dataclass(frozen=True, slots=True)
class Start:
    """The data with which a rank process began."""

    job: str
    rank: int
    incarnation: int
    resume: str
    """The checkpoint from which it began, or the URL from which one was read; empty if it began without one."""
    version: int
    samples: int
    """Version of that checkpoint, and the job's samples in it; 0 without one."""
    dataset_size: int
    batch_size: int
    epochs: int
    drop_last: bool
    max_steps: int | None
    nonfinite: str = ""
    outliers: str = ""
    """The settings of these names; empty if the file does not say."""
    members: int = 1
    """Processes of its replica group."""
    device: str = ""
    label: str = ""
    """The device's name for display."""
    threads: int = 0
    """Threads with which it has computed."""
    torch: str = ""
    """The version of PyTorch."""
    warms_up: bool = False
    """True if it has trained a batch without effect before it was ready."""
    file_name: str = ""
    source: str = ""
    """Digest of the job's file, which names the copy beside this file."""
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    code: str = ""
    """The job's module, or the digest of its folder, if it is not in a file alone."""

    def check(self) -> None:
        """Raises `ValueError` for values that no rank has."""
        numbers = [self.rank, self.incarnation, self.version, self.samples, self.epochs]
        numbers += [self.dataset_size, self.batch_size, 0 if self.max_steps is None else self.max_steps]
        # Not isinstance: to Python, true and false are numbers, too.
        if not all(type(one) is int and 0 <= one < MAX_NUMBER for one in numbers):
            raise ValueError
        if not isinstance(self.job, str) or not isinstance(self.resume, str) or not isinstance(self.drop_last, bool):
            raise ValueError
        texts = [
            self.device,
            self.label,
            self.torch,
            self.file_name,
            self.source,
            self.code,
            self.nonfinite,
            self.outliers,
        ]
        if not all(isinstance(one, str) for one in [*texts, *self.arguments]) or not isinstance(self.settings, dict):
            raise ValueError
        if not isinstance(self.arguments, list) or not isinstance(self.warms_up, bool):
            raise ValueError
        if not all(type(one) is int and 0 <= one < MAX_NUMBER for one in (self.members, self.threads)):
            raise ValueError
        if self.epochs > MAX_EPOCHS or min(self.dataset_size, self.batch_size) < 1:
            raise ValueError

    def epoch_sizes(self) -> list[int]:
        """Samples that are trained in each epoch."""
        kept = self.dataset_size - self.dataset_size % self.batch_size * self.drop_last
        total = kept * self.epochs
        if self.max_steps is not None:
            total = min(total, self.max_steps * self.batch_size)
        # `drop_last` keeps nothing of a dataset that is smaller than a batch, and range takes no step of 0.
        return [min(kept, total - start) for start in range(0, total, kept or 1)]

    @property
    def full_size(self) -> int:
        """Samples that are trained in an epoch that nothing ends early."""
        return self.dataset_size - self.dataset_size % self.batch_size * self.drop_last


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A batch that is done: `size` positions of an epoch's permutation from `offset` on."""

    lease: int
    """Id of the lease of which it is."""
    epoch: int
    offset: int
    size: int
    step: int
    """Number of the process's batches, with this one."""
    is_skipped: bool = False
    """True if the job's data gave None for it: it counts as trained, and has changed nothing."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A round that the rank has entered, and what it brings."""

    attempt: int
    generation: int
    round: int
    version: int
    """Version of its model before the round."""
    cut: int
    """Samples that its snapshot contains, in the order of its leases."""
    step: int
    """Batches that its snapshot contains."""
    weight: int
    """Samples since its last round."""


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a round, as the rank has received it."""

    generation: int
    round: int
    version: int
    samples: int
    left_out: int
    """Samples of the round whose values were left out of the average."""
    num_rows: int
    flags: int
    header: int
    digest: int

    @property
    def is_left_out(self) -> bool:
        """True if the rank's values were left out of the average."""
        return bool(self.flags & LEFT_OUT)

    @property
    def is_finite(self) -> bool:
        """True if the rank's values were finite."""
        return not self.flags & NOT_FINITE

    @property
    def level(self) -> int:
        """With `compress="auto"`, the level of compression; else 0."""
        return self.flags >> LEVEL_BIT

    @property
    def content(self) -> dict[str, int]:
        """The values that must be equal on all ranks that tell them, by name."""
        content = {
            "the version": self.version,
            "the number of samples": self.samples,
            "the samples that were left out": self.left_out,
            "the number of ranks": self.num_rows,
            "the header": self.header,
            "the level of compression": self.level,
        }
        if self.flags & HAS_DIGEST:
            content["the digest of the parameters"] = self.digest
        return content


@dataclass(frozen=True, slots=True)
class Committed:
    """A round that the coordinator has said to be committed."""

    round: int
    version: int
    global_step: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A round of which the rank has received no result."""

    generation: int
    round: int
    has_header: bool
    """True if it has received the round's header."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A generation, to which the rank's next rounds belong."""

    attempt: int
    generation: int
    position: int
    world_size: int
    is_relayed: bool
    """True if the coordinator adds the ranks' values up."""


@dataclass(frozen=True, slots=True)
class EvaluatedPart:
    """An evaluation of a round's result, or of the rank's part of one."""

    round: int
    epoch: int
    offset: int
    size: int


Record = TrainedBatch | Entered | Received | Lost | Joined | EvaluatedPart


@dataclass(slots=True)
class RankFile:
    """The records of one rank process, in order."""

    name: str
    start: Start
    batches: list[TrainedBatch] = field(default_factory=list)
    rounds: list[Entered] = field(default_factory=list)
    results: dict[tuple[int, int], Received] = field(default_factory=dict)
    """Results by generation and round."""
    commits: list[Committed] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    """The process's records, in order."""
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """Version and epoch of each result that it has evaluated."""
    problems: list[str] = field(default_factory=list)
    """Records that contradict those before them."""
    has_ended: bool = False
    """True if the process has ended in order."""
    outcome: str = ""
    """The job's outcome, of `OUTCOMES`; empty if the process has not been told of it."""
    torn_bytes: int = 0
    """Bytes of a last record that was not written to its end."""

    @property
    def who(self) -> str:
        """The rank and its file, for people."""
        return f"rank {self.start.rank} ({self.name})"

    @property
    def attempt(self) -> int:
        """The attempt in which it has trained; 0 if it was in no round."""
        return self.rounds[0].attempt if self.rounds else 0


def read(path: Path) -> RankFile:
    """Reads and checks a file. Raises `Damaged`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    file, at, crc = _read_start(path.name, data)
    reader = _Reader(file)
    while at < len(data):
        kind = data[at]
        layout = LAYOUTS.get(kind)
        if layout is None or file.has_ended:
            raise Damaged(f"{path.name} is damaged at byte {at}: there is no record of type {kind}")
        end = at + 1 + calcsize(layout)
        if end + CRC.size > len(data):
            file.torn_bytes = len(data) - at
            return file
        # Continues the checksum before it: a record that is left out, repeated or moved is noticed as well.
        crc = crc32(data[at:end], crc)
        if CRC.unpack_from(data, end)[0] != crc:
            raise Damaged(f"{path.name} is damaged at byte {at}: the checksum of a record does not match")
        reader.take(kind, unpack_from(layout, data, at + 1))
        at = end + CRC.size
    return file


def _read_start(name: str, data: bytes) -> tuple[RankFile, int, int]:
    if len(data) < HEAD.size:
        raise Damaged(f"{name} is damaged: it has {len(data)} bytes, less than its head")
    magic, version, _, length = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise Damaged(f"{name} is not an audit file of a rank")
    if version != FORMAT:
        raise Damaged(f"{name} has format {version}, and this version of elche reads {FORMAT}")
    end = HEAD.size + length
    if length > MAX_START_BYTES or end + CRC.size > len(data):
        raise Damaged(f"{name} is damaged: its head is not whole")
    crc = crc32(data[:end])
    if CRC.unpack_from(data, end)[0] != crc:
        raise Damaged(f"{name} is damaged: the checksum of its head does not match")
    try:
        start = Start(**json.loads(data[HEAD.size : end]))
        start.check()
    except (ValueError, TypeError, RecursionError):
        raise Damaged(f"{name} is damaged: its head has other fields than those of format {version}") from None
    return RankFile(name, start), end + CRC.size, crc


class _Reader:
    """Adds records to a file, and notes those that contradict earlier ones."""

    def __init__(self, file: RankFile) -> None:
        self._file = file
        self._cut, self._step = 0, 0
        self._in_result = 0
        """Samples that the last result contains."""
        self._version = file.start.version
        self._open: Entered | None = None
        self._entered: set[tuple[int, int]] = set()
        """Generation and number of each round that it has entered."""
        self._received: dict[int, int] = {}
        """Version of each round's result."""
        self._committed: dict[int, Committed] = {}
        """What it was first told of each round."""
        self._joined: Joined | None = None

    def take(self, kind: int, numbers: tuple[Any, ...]) -> None:
        """Adds a record."""
        if self._file.outcome and kind not in (COMMITTED, DECIDED, ENDED):
            self._add_problem(f"it went on after the job had {self._file.outcome}: by a record of type {kind}")
        if kind in (BATCH, SKIPPED):
            self._take_batch(TrainedBatch(*(*numbers, kind == SKIPPED)))
        elif kind == ENTERED:
            self._take_entry(Entered(*numbers))
        elif kind == RECEIVED:
            self._take_result(Received(*numbers))
        elif kind in (LOST, LOST_LATE):
            self._take_loss(Lost(*(*numbers, kind == LOST_LATE)))
        elif kind == JOINED:
            self._take_group(Joined(*(*numbers[:-1], bool(numbers[-1]))))
        elif kind == EVALUATED:
            self._take_evaluation(EvaluatedPart(*numbers))
        elif kind == COMMITTED:
            self._take_commit(Committed(*numbers))
        elif kind == DECIDED:
            self._take_outcome(numbers[0])
        else:
            self._file.has_ended = True
            if numbers[0] != self._step:
                self._add_problem(f"it ended after {numbers[0]} batches, and has trained {self._step}")

    def _take_batch(self, batch: TrainedBatch) -> None:
        self._step += 1
        self._cut += batch.size
        if batch.step != self._step:
            self._add_problem(f"batch {batch.step} follows batch {self._step - 1}")
            # Counts on from what is told: one missing batch is one problem, not one for each batch after it.
            self._step = batch.step
        if not self._version:
            self._add_problem(f"it trained batch {batch.step} before it had the job's model")
        self._check_lease(batch)
        self._file.batches.append(batch)
        self._file.records.append(batch)

    def _check_lease(self, batch: TrainedBatch) -> None:
        """A lease is consecutive positions of one epoch, and a rank trains its leases in their order: otherwise the
        coordinator would book other positions for a cut.
        """
        last = self._file.batches[-1] if self._file.batches else None
        if last is None or batch.lease > last.lease:
            return
        if batch.lease < last.lease:
            self._add_problem(f"it trained lease {batch.lease} after lease {last.lease}")
        elif (batch.epoch, batch.offset) != (last.epoch, last.offset + last.size):
            self._add_problem(
                f"lease {batch.lease} goes on with position {batch.offset} of epoch {batch.epoch}, after position "
                f"{last.offset + last.size - 1} of epoch {last.epoch}"
            )

    def _take_entry(self, entry: Entered) -> None:
        expected = {
            "samples": (entry.cut, self._cut),
            "batches": (entry.step, self._step),
            "new samples": (entry.weight, self._cut - self._in_result),
        }
        for what, (told, trained) in expected.items():
            if told != trained:
                self._add_problem(f"it brought {told} {what} to round {entry.round}, and has trained {trained}")
        if entry.version != self._version:
            self._add_problem(
                f"it entered round {entry.round} with version {entry.version}, and has received {self._version}"
            )
        if self._open is not None:
            self._add_problem(f"it entered round {entry.round} before round {self._open.round} had an end")
        if (entry.generation, entry.round) in self._entered:
            self._add_problem(f"it entered round {entry.round} of generation {entry.generation} twice")
        if entry.round in self._committed:
            self._add_problem(f"it entered round {entry.round} after that was committed")
        self._entered.add((entry.generation, entry.round))
        if self._file.rounds and entry.attempt != self._file.attempt:
            self._add_problem(
                f"it entered round {entry.round} of attempt {entry.attempt}, and had trained in {self._file.attempt}"
            )
        group = self._joined
        if group is not None and (group.attempt, group.generation) != (entry.attempt, entry.generation):
            self._add_problem(
                f"it entered round {entry.round} of generation {entry.generation} as one of generation "
                f"{group.generation}"
            )
        self._file.rounds.append(entry)
        self._file.records.append(entry)
        self._open = entry

    def _take_group(self, group: Joined) -> None:
        if group.position >= group.world_size:
            where = f"place {group.position} of generation {group.generation}"
            self._add_problem(f"it has {where}, which has {group.world_size} ranks")
        self._joined = group
        self._file.records.append(group)

    def _take_result(self, result: Received) -> None:
        entry, group = self._open, self._joined
        if entry is None or (entry.generation, entry.round) != (result.generation, result.round):
            self._add_problem(f"it received a result of round {result.round}, which it had not entered")
            return
        if group is not None and group.world_size != result.num_rows:
            self._add_problem(
                f"the result of round {result.round} is of {result.num_rows} ranks, and generation "
                f"{group.generation} has {group.world_size}"
            )
        if self._cut > entry.cut and entry.version != result.version - 1:
            self._add_problem(
                f"it trained {self._cut - entry.cut} samples with version {entry.version}, and round {result.round} "
                f"made version {result.version}"
            )
        self._open, self._in_result, self._version = None, entry.cut, result.version
        self._file.results[result.generation, result.round] = result
        self._file.records.append(result)
        self._received[result.round] = result.version

    def _take_loss(self, lost: Lost) -> None:
        if self._open is None or (self._open.generation, self._open.round) != (lost.generation, lost.round):
            self._add_problem(f"it gave up round {lost.round}, which it had not entered, or whose result it had")
        self._open = None
        self._file.records.append(lost)

    def _take_evaluation(self, part: EvaluatedPart) -> None:
        if part.round not in self._received:
            self._add_problem(f"it evaluated round {part.round}, whose result it has not received")
        else:
            self._file.evaluations.append((self._received[part.round], part.epoch))
        self._file.records.append(part)

    def _take_commit(self, commit: Committed) -> None:
        has = self._received.get(commit.round, commit.version)
        if has != commit.version:
            self._add_problem(
                f"round {commit.round} was committed as version {commit.version}, and its result is {has}"
            )
        if self._open is not None and self._open.round == commit.round:
            self._add_problem(f"round {commit.round} was committed before it had the result")
        # It is told again with each order on the round's result: to evaluate it, to save it.
        first = self._committed.setdefault(commit.round, commit)
        if (commit.version, commit.global_step) != (first.version, first.global_step):
            told = " and ".join(f"version {one.version} with {one.global_step} batches" for one in (first, commit))
            self._add_problem(f"round {commit.round} was committed twice: as {told}")
        if self._file.outcome:
            self._add_problem(f"round {commit.round} was committed after the job had {self._file.outcome}")
        self._file.commits.append(commit)

    def _take_outcome(self, number: int) -> None:
        if self._file.outcome not in ("", OUTCOMES.get(number)):
            self._add_problem(f"it was told that the job has {self._file.outcome}, and another outcome after that")
        self._file.outcome = OUTCOMES.get(number, "")
        if not self._file.outcome:
            self._add_problem(f"the job has outcome {number}, which is unknown")

    def _add_problem(self, text: str) -> None:
        self._file.problems.append(f"{self._file.who}: {text}")

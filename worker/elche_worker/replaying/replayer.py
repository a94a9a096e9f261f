"""The order of a replay: each rank goes on until it needs a result for which others must have entered the round."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elche.errors import InvalidJob
from elche_audit.rank_file import Entered, EvaluatedPart, Joined, Lost, RankFile, Received, TrainedBatch
from elche_worker.collectives.operations import Collectives
from elche_worker.rank.acts import JoinGeneration
from elche_worker.replaying.collectives import Repeated, ReplayedMeeting
from elche_worker.replaying.ranks import ReplayDiffers, ReplayedRank, device_for
from elche_worker.replaying.recording import RecordedAveraging, Recording, read_recording, worth_repeating


@dataclass(frozen=True, slots=True)
class Replayed:
    """Outcome of a replay: the state of the run when the round's result had come."""

    round: int
    generation: int
    attempt: int
    version: int
    samples: int
    """Samples of the job in this version."""
    model: nn.Module
    """The round's result, in the model of the lowest rank that received it, without the newer steps of that rank."""
    optimizers: Sequence[Optimizer]
    """Of that rank."""
    ranks: Sequence[ReplayedRank]
    """All repeated processes; `rank`, `incarnation`, and `replica` with `model` and `optimizers`. Those that are in the
    round have trained as many newer batches as they had when the result came.
    """
    num_compared: int
    """Rounds of which digests were compared with the run's."""
    difference: str
    """The first round that differs from the run, and in what; empty if none was seen to."""
    notes: Sequence[str]
    """Conditions that may cause differences."""
    path: Path | None
    """The written model."""


@dataclass(slots=True)
class _Course:
    """Progress of one process's repetition."""

    file: RankFile
    records: list[Any]
    next: int = 0

    @property
    def is_over(self) -> bool:
        return self.next >= len(self.records)


@dataclass(slots=True)
class _Replayer:
    recording: Recording
    device: str
    output_dir: Path
    ranks: dict[str, ReplayedRank] = field(default_factory=dict)
    entered: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    compared: set[tuple[int, int]] = field(default_factory=set)
    difference: str = ""
    _meetings: dict[int, ReplayedMeeting | None] = field(default_factory=dict)

    def run(self) -> None:
        """Repeats all processes up to the recording's last round."""
        courses = [_Course(one, worth_repeating(one, self.recording.last)) for one in self.recording.files.values()]
        while not all(course.is_over for course in courses):
            if not sum(self._go_on(course) for course in courses):
                waiting = next(course for course in courses if not course.is_over)
                raise InvalidJob(
                    f"{self.recording.folder}: {waiting.file.who} waits for a round that others never enter"
                )

    def _go_on(self, course: _Course) -> int:
        """Repeats what can be, until a result is needed for which others must come. Returns how much that was."""
        began = course.next
        if course.is_over or (isinstance(course.records[began], Received | Lost) and not self._has_all(course)):
            return 0
        joins = isinstance(course.records[began], Joined)
        if joins:  # it makes ranks, which are active by themselves
            self._meet(course.records[began].generation)
        rank = self.ranks[course.file.name]
        with rank.active():
            while not course.is_over:
                one = course.records[course.next]
                if isinstance(one, Received | Lost) and not self._has_all(course):
                    break
                if isinstance(one, Joined) and one.generation not in self._meetings:
                    break
                self._repeat(rank, one)
                course.next += 1
        return course.next - began

    def _has_all(self, course: _Course) -> bool:
        """True if all ranks that entered the next outcome's round have entered it, or none had its header."""
        one = course.records[course.next]
        known = self.recording.rounds[one.generation, one.round]
        needs_all = known.results or known.has_header
        return not needs_all or self.entered.get((one.generation, one.round), set()) >= known.entries.keys()

    def _repeat(self, rank: ReplayedRank, one: Any) -> None:
        if isinstance(one, TrainedBatch):
            rank.train(one)
        elif isinstance(one, Entered):
            rank.enter(one)
            self.entered.setdefault((one.generation, one.round), set()).add(rank.name)
        elif isinstance(one, EvaluatedPart):
            rank.evaluate(one)
        elif isinstance(one, Received | Lost):
            key = (one.generation, one.round)
            told = one if isinstance(one, Received) else None
            was_compared, differs = rank.compare(rank.apply(), told, self.recording.rounds[key].words)
            self.compared |= {key} if was_compared else set()
            self.difference = self.difference or differs

    def _meet(self, generation: int) -> None:
        """Builds the groups of a generation, of all its members, as soon as the first of them uses it."""
        if generation in self._meetings:
            return
        places = self.recording.generations[generation]
        size = next(iter(places.values())).world_size
        # A generation of which a rank was lost before it entered any round never has a result.
        self._meetings[generation] = ReplayedMeeting(size) if len(places) == size else None
        acts = {
            name: JoinGeneration(one.attempt, generation, one.position, size, "cpu" if one.is_relayed else "gloo")
            for name, one in places.items()
        }
        for name in places:
            if name not in self.ranks:
                self.ranks[name] = self._new_rank(self.recording.files[name])
        for name, act in acts.items():
            self.ranks[name].replica.join_generation(act)
        for name in acts:
            if problem := self.ranks[name].replica.finish_build(generation):
                raise InvalidJob(f"generation {generation} cannot be built in one process: {problem}")

    def _new_rank(self, file: RankFile) -> ReplayedRank:
        device = device_for(file.start.device, self.device)

        def meet(act: JoinGeneration) -> Collectives:
            meeting = self._meetings[act.generation]
            inner = None if meeting is None else meeting.collectives(act, torch.device(device))
            return Repeated(file.name, act, inner, self.recording.rounds)

        return ReplayedRank(file, self.recording, device=device, output_dir=self.output_dir, meet=meet)


def replay(
    run: str | Path,
    *,
    until_round: int | None = None,
    attempt: int | None = None,
    device: str = "auto",
    out: str | Path | None = None,
) -> Replayed:
    """Repeats a run that was recorded with `audit`, in this process, up to a round, or to its end: with ranks that die
    and join, and overlapped rounds. On CPUs of one kind the parameters are those of the run, bit for bit.

    `run` is the run's folder. Rounds are numbered as in its timeline; a run that went back to a checkpoint began a new
    `attempt`, and the newest is repeated. Each rank is repeated on the `device` that it had, or on another. With `out`
    the model is written there, as a run writes it. Raises `InvalidJob` if the recording lacks anything.

        replayed = elche_worker.replay("runs/digits-20260101-120000", until_round=17)
        replayed.model, replayed.optimizers, replayed.difference
    """
    recording = read_recording(Path(run).absolute(), until_round=until_round, attempt=attempt)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch if out is None else out).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        replayer = _Replayer(recording, device, folder)
        try:
            replayer.run()
        except ReplayDiffers as error:
            raise InvalidJob(f"{recording.folder} cannot be repeated: {error}") from None
        return _result(replayer, recording.last, writes=out is not None)


def _result(replayer: _Replayer, last: RecordedAveraging, *, writes: bool) -> Replayed:
    recording = replayer.recording
    ranks = [replayer.ranks[name] for name in recording.files if name in replayer.ranks]
    shown = next(rank for rank in ranks if rank.name in last.results)
    path: Path | None = None
    with shown.active():
        if writes:
            path = shown.save(last.number)
        shown.replica.keep_result()
    for rank in ranks:
        rank.replica.loader.stop()
    return Replayed(
        round=last.number,
        generation=last.generation,
        attempt=recording.attempt,
        version=last.result.version,
        samples=last.result.samples,
        model=shown.replica.model,
        optimizers=shown.replica.optimizers,
        ranks=ranks,
        num_compared=len(replayer.compared),
        difference=replayer.difference,
        notes=_notes(recording, replayer.device),
        path=path,
    )


def _notes(recording: Recording, device: str) -> list[str]:
    notes = []
    versions = {file.start.torch for file in recording.files.values()} - {torch.__version__}
    if versions:
        notes.append(f"the run had PyTorch {', '.join(sorted(versions))}, and this is {torch.__version__}")
    devices = {file.start.device for file in recording.files.values()}
    if any(not one.startswith("cpu") for one in (*devices, device) if one != "auto"):
        notes.append("ranks on GPUs: sums within kernels, and between ranks over NCCL, may have another order here")
    return notes

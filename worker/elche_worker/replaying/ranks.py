"""A recorded process, which trains again: a replica with a process's own surroundings."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from elche.errors import InvalidJob
from elche_audit.rank_file import Entered, EvaluatedPart, RankFile, Received, TrainedBatch
from elche_worker.collectives.operations import CollectiveFailed, Collectives
from elche_worker.data.lease_loader import LeasedPart
from elche_worker.device.kinds import kind_of
from elche_worker.device.rng import capture_rng_state, restore_rng_state, seed_all
from elche_worker.device.streams import new_streams
from elche_worker.rank.acts import EnterRound, JoinGeneration, TrainBatch, UseResult
from elche_worker.rank.main import build
from elche_worker.rank.parts import AppliedResult
from elche_worker.rank.replica import Replica
from elche_worker.rank.replica_group import ReplicaGroup
from elche_worker.replaying.recording import Recording
from elche_worker.session.launch import Launch
from elche_worker.user.callbacks import be_this_rank
from elche_worker.user.loading import load_job, with_settings

MODULE = "elche_job"
"""Under which the job's file is imported."""


class ReplayDiffers(Exception):
    """The replay does not do what the run did. The text says where."""


class ReplayedRank:
    """One recorded process. Between its acts other ranks of the replay have the process's random numbers."""

    def __init__(
        self,
        file: RankFile,
        recording: Recording,
        *,
        device: str,
        output_dir: Path,
        meet: Callable[[JoinGeneration], Collectives],
    ) -> None:
        start = file.start
        self.name, self.who = file.name, file.who
        self.rank, self.incarnation = start.rank, start.incarnation
        self._threads = start.threads
        self._num_leased = 0
        self._rounds = recording.rounds
        self._module: Any = None
        self._code, self._folder = recording.code, recording.working_folder
        self._modules: dict[str, Any] = {}
        """Those that it has imported from the job's folder."""
        self._argv = [recording.file_name, *start.arguments]
        self._environment = {**recording.environment, "ELCHE_RANK": str(start.rank)}
        self._view: Any = None
        self._random: dict[str, Any] | None = None
        launch = Launch(
            coordinator="",
            secret="",
            job_id=recording.job,
            rank=start.rank,
            incarnation=start.incarnation,
            device=device,
            label=start.label,
            source=recording.source,
            file_name=recording.file_name,
            output_dir=str(output_dir),
            settings=start.settings,
            verify_rounds=True,
            warms_up=start.warms_up,
            resume=recording.resume(file),
            arguments=start.arguments,
        )
        self._streams = new_streams(torch.device(device))
        with self.active():
            self.replica, self._kept = self._begin(launch, meet)
        self._view = self.replica.view

    def _begin(self, launch: Launch, meet: Callable[[JoinGeneration], Collectives]) -> tuple[Replica, list[object]]:
        """As a rank's process begins. Samples are fetched when they are trained, in this process: what is drawn for a
        batch depends on the batch alone.
        """
        seed_all(0)
        job = with_settings(load_job(launch.source, launch.file_name), launch.settings)
        self._module = sys.modules[MODULE]
        job = replace(job, audit=False, timeline=False, num_workers=0)
        kind_of(torch.device(launch.device)).select(torch.device(launch.device))
        wake: Callable[[], None] = lambda: None  # noqa: E731
        parts, kept = build(launch, job, ReplicaGroup(), wake=wake, timeline=None, streams=self._streams)
        parts.loader.fetch_in_step()
        replica = Replica(
            launch,
            job,
            parts,
            channel=cast(Any, None),
            streams=self._streams,
            wake=wake,
            send=lambda message: None,
            meet=meet,
        )
        replica.rehearse(warms_up=launch.warms_up)
        return replica, kept

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context with the process's own random numbers, arguments, environment, folder and modules."""
        had = {name: os.environ.get(name) for name in self._environment}
        before = capture_rng_state()
        os.environ.update(self._environment)
        here, argv, sys.argv = Path.cwd(), sys.argv, self._argv
        if self._folder is not None:
            os.chdir(self._folder)
        if self._code is not None:
            sys.path.append(str(self._code))
            sys.modules.update(self._modules)
        if self._module is not None:
            sys.modules[MODULE] = self._module
        if self._view is not None:
            be_this_rank(self._view)
        if self._threads and self._threads != torch.get_num_threads():
            torch.set_num_threads(self._threads)
        if self._random is not None:
            restore_rng_state(self._random)
        try:
            with self._streams.compute():
                yield
        finally:
            self._random = capture_rng_state()
            restore_rng_state(before)
            if self._code is not None:
                self._modules = _modules_of(self._code)
                for name in self._modules:
                    del sys.modules[name]
                sys.path.remove(str(self._code))
            os.chdir(here)
            sys.argv = argv
            for name, value in had.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def train(self, batch: TrainedBatch) -> None:
        """Trains a recorded batch."""
        replica = self.replica
        self._num_leased += 1
        lease = LeasedPart(
            id=self._num_leased, epoch=batch.epoch, offset=batch.offset, size=batch.size, granted=batch.lease
        )
        replica.take_lease(lease)
        num_skipped = replica.meter.num_skipped
        replica.train(TrainBatch(replica.progress.samples, replica.rates.factor))
        if (replica.local_step, replica.meter.num_skipped - num_skipped) != (batch.step, batch.is_skipped):
            what = "was skipped" if batch.is_skipped else "was not skipped"
            raise ReplayDiffers(f"batch {batch.step} of {self.who} {what} in the run, unlike here")

    def enter(self, entry: Entered) -> None:
        """Enters a recorded round."""
        row = self.replica.row(entry.round, entry.generation)
        here = (row.attempt, row.version, row.cut, row.local_step, row.weight)
        if here != (entry.attempt, entry.version, entry.cut, entry.step, entry.weight):
            raise ReplayDiffers(f"{self.who} enters round {entry.round} with other work than in the run")
        results = self._rounds[entry.generation, entry.round].results.values()
        level = max((one.level for one in results), default=0)
        # With the recorded level: from the times of the replay another one would follow.
        self.replica.enter_round(EnterRound(replace(row, level=level), keeps_result=True))

    def apply(self) -> AppliedResult | None:
        """Applies the round's result; None if this rank has lost it."""
        try:
            return self.replica.apply_result()
        except CollectiveFailed:
            return None

    def compare(self, applied: AppliedResult | None, told: Received | None, words: str) -> tuple[bool, str]:
        """Compares a result with the recorded one; returns True if digests were compared, and what differs, or ""."""
        if (applied is None) != (told is None):
            has = "a result" if told is not None else "no result"
            raise ReplayDiffers(f"{self.who} has {has} of {words} in the run, unlike here")
        if applied is None or told is None:
            return False, ""
        averaged, has_digest = applied.averaged, "the digest of the parameters" in told.content
        here = (averaged.version, averaged.samples, len(averaged.rows), averaged.is_discarded)
        if here != (told.version, told.samples, told.num_rows, told.is_left_out):
            return False, f"{words} on {self.who}: version, samples, or who is left out"
        if has_digest and applied.digest is not None and applied.digest != told.digest:
            return True, f"{words} on {self.who}: the parameters"
        return has_digest and applied.digest is not None, ""

    def evaluate(self, act: EvaluatedPart) -> None:
        """Evaluates the newest result, as the rank did: the job's functions may draw random numbers."""
        self.replica.use_result(self._use(act.round, act.epoch, act.offset, act.size, evaluates=True))

    def save(self, round_id: int) -> Path:
        """Writes the newest result as a run writes its model."""
        self.replica.use_result(self._use(round_id, saves_final=True))
        return Path(self.replica.launch.model_path)

    def _use(
        self,
        round_id: int,
        epoch: int = 0,
        offset: int = 0,
        size: int = 0,
        *,
        evaluates: bool = False,
        saves_final: bool = False,
    ) -> UseResult:
        version = self.replica.version
        return UseResult(
            round_id,
            version,
            evaluates=evaluates,
            epoch=epoch,
            offset=offset,
            size=size,
            calls_back=False,
            saves_final=saves_final,
        )


def device_for(recorded: str, wanted: str) -> str:
    """The device on which a rank is repeated: the recorded one, or one of the wanted kind."""
    device = recorded or "cpu" if wanted == "auto" else wanted
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidJob(
            f"the run was on {recorded}, and there is no GPU here: --device cpu repeats it with other sums"
        )
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        return "cuda:0"
    return device


def _modules_of(folder: Path) -> dict[str, Any]:
    """The imported modules that are in a folder, also packages without a file of their own."""
    found = {}
    for name, module in sys.modules.items():
        own = getattr(module, "__dict__", {})  # not by `getattr`, at which some modules import others, or raise
        place = own.get("__file__") or next(iter(own.get("__path__", ())), "")
        if isinstance(place, str) and place.startswith(f"{folder}{os.sep}"):
            found[name] = module
    return found

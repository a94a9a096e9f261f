"""Simulated runs that leave what real ones leave for `elche audit`: files of ranks, checkpoints, records."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elche.header import header_digest
from elche.v1 import job_pb2
from elche_coordinator.core.messages import commands
from elche_coordinator.core.messages.ids import GenerationId, RoundId
from elche_coordinator.core.messages.reports import JobResult, RoundReport
from elche_coordinator.core.messages.spec import HeaderRow
from elche_coordinator.journal.coding import encode
from elche_coordinator.simulator.collective import Parameters, RoundEntry
from elche_coordinator.simulator.simulation import JOB, Simulation
from elche_coordinator.simulator.synthetic import Saved
from elche_worker.rank.audited import OUTCOMES
from elche_worker.telemetry.audit import AuditLog


def audited(simulation: Simulation, folder: Path) -> None:
    """Has the ranks of a simulation that has not begun write audit files and checkpoints below the folder."""
    base, settings, extent = simulation.new_rank, simulation.settings, simulation.settings.extent
    checkpoints = folder / "checkpoints" / JOB
    if (first := simulation.resumed) is not None:
        _write_manifest(folder / "before" / first.name, first.training)

    class AuditedRank(base):  # type: ignore[misc, valid-type]
        """A synthetic rank that writes what a real one writes."""

        def __init__(self, address: Any, *, resumed: Saved | None = None, **more: Any) -> None:
            super().__init__(address, resumed=resumed, **more)
            place = str(checkpoints / resumed.name) if resumed else ""
            if resumed is not None and resumed is first:
                # Who joins later loads none: the simulation gives it one, of which nothing is used.
                place = "" if simulation.job.resumption.resume else str(folder / "before" / resumed.name)
            head = {
                "job": JOB,
                "rank": address["rank"],
                "incarnation": address["incarnation"],
                "resume": place,
                "version": self.parameters.version,
                "samples": num_samples(self.parameters),
                "dataset_size": settings.dataset_size,
                "batch_size": settings.batch_size,
                "epochs": extent.epochs,
                "drop_last": extent.drop_last,
                "max_steps": extent.max_steps,
                "nonfinite": settings.nonfinite,
                "outliers": settings.outliers,
                "members": 1,
            }
            name = f"rank-{address['rank']}-{address['incarnation']}.bin"
            self._audit = AuditLog(folder / "audit" / JOB / name, head)
            self._groups: dict[GenerationId, tuple[int, int, int, bool]] = {}

        def _take(self, command: commands.SessionCommand) -> None:
            if self.is_alive:
                match command:
                    case commands.SendFormGroup():
                        is_relayed = command.backend == "cpu"
                        group = (command.attempt, command.position, command.world_size, is_relayed)
                        self._groups[command.generation] = group
                    case commands.SendOutcome():
                        version, step = command.version, command.global_step
                        self._audit.committed(round_id=command.round, version=version, global_step=step)
                    case commands.SendShutdown():
                        if command.outcome:
                            self._audit.decided(OUTCOMES[command.outcome])
                        self._audit.end(self.local_step)
                    case _:
                        pass
            super()._take(command)

        def _finish_batch(self, duration_s: float) -> None:
            if self.is_alive:
                lease = self._leases[0]
                size = min(self._batch_size, lease.size)
                where = {"lease": lease.id, "epoch": lease.epoch, "offset": lease.offset, "size": size}
                self._audit.batch(**where, step=self.local_step + 1)
            super()._finish_batch(duration_s)

        def _enter(self, round_id: RoundId) -> None:
            generation = self._generations[round_id]
            group = self._groups.pop(generation, None)
            if group is not None:
                attempt, position, size, is_relayed = group
                where = {"attempt": attempt, "generation": generation, "position": position}
                self._audit.joined(**where, world_size=size, is_relayed=is_relayed)
            self._audit.entered(
                attempt=self.attempt,
                generation=generation,
                round_id=round_id,
                version=self.parameters.version,
                cut=self._processed,
                step=self.local_step,
                weight=self._weight,
            )
            super()._enter(round_id)

        def _apply(
            self,
            round_id: RoundId,
            header: tuple[HeaderRow, ...],
            result: Parameters,
            entry: RoundEntry,
            collective_s: float,
        ) -> None:
            self._audit.received(
                generation=entry.generation,
                round_id=round_id,
                version=result.version,
                samples=num_samples(result),
                left_out=0,
                num_rows=len(header),
                is_left_out=False,
                is_finite=True,
                header=header_digest(header),
                digest=None,
            )
            super()._apply(round_id, header, result, entry, collective_s)

        def give_up(self, round_id: RoundId, entry: RoundEntry) -> None:
            if self.is_alive and self.is_in(entry):
                self._audit.lost(generation=entry.generation, round_id=round_id)
            super().give_up(round_id, entry)

        def _finish_chore(self, outcome: commands.SendOutcome) -> None:
            if self.is_alive and (part := outcome.evaluate) is not None:
                self._audit.evaluated(round_id=outcome.round, epoch=part.epoch, offset=part.offset, size=part.size)
            super()._finish_chore(outcome)

        def _finish_checkpoint(
            self, outcome: commands.SendOutcome, order: commands.WriteCheckpoint, parameters: Parameters
        ) -> None:
            if self.is_alive:
                _write_manifest(checkpoints / order.name, order.training)
                for other in checkpoints.iterdir():
                    if simulation.disks is None and other.name not in (*order.keep, order.name):
                        shutil.rmtree(other)
            super()._finish_checkpoint(outcome, order, parameters)

    simulation.new_rank = AuditedRank


def _write_manifest(place: Path, training: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "manifest.json").write_text(json.dumps({"format": 2, "job": JOB, "training": json.loads(training)}))


def num_samples(parameters: Parameters) -> int:
    """Samples that the parameters were trained with."""
    return sum(interval.size for interval in parameters.seen.values())


def write_records(simulation: Simulation, result: JobResult, folder: Path) -> None:
    """Writes the coordinator's record of rounds, and the result, as `elche run` does."""
    rounds = [
        job_pb2.RecordedRound(
            generation=report.recorded.generation,
            parts=[
                job_pb2.RankPart(
                    slices=[job_pb2.Slice(epoch=one.epoch, offset=one.offset, size=one.size) for one in part.slices],
                    num_batches=part.num_batches,
                    newer_batches=part.newer_batches,
                )
                for part in report.recorded.parts
            ],
        )
        for report in simulation.reports
        if isinstance(report, RoundReport)
    ]
    data = b"".join(job_pb2.JobSpec(replay=[one]).SerializeToString() for one in rounds)
    (folder / "run.json").write_text("{}")
    (folder / "cadence.binpb").write_bytes(data)
    record: dict[str, Any] = {
        "job_id": JOB,
        "state": str(result.outcome),
        "committed_samples": list(result.committed_samples),
    }
    record |= {"ended_early": result.ended_early, "rounds": result.rounds, "model_is": result.model_is}
    record |= {"discarded": result.discarded_samples, "dataset_size": result.dataset_size}
    record["checkpoints"] = [asdict(one) for one in result.checkpoints]
    reports = [report for report in simulation.reports if isinstance(report, RoundReport)]
    record["round_reports"] = [{"round": one.round, "version": one.version, "samples": one.samples} for one in reports]
    (folder / "record.json").write_text(json.dumps(record))
    write_journal(simulation, folder)


def write_journal(simulation: Simulation, folder: Path) -> None:
    """Writes the journal of a job from its first event on, as `elche journal JOB --json` prints it."""
    lines: list[Any] = [{"journal": 2, "job": JOB, "num_dropped": 0, "wall_s": 0.0}]
    for step in simulation.core.steps:
        lines.append({"at": step.at_s, "event": encode(step.event), "commands": list(map(encode, step.commands))})
    (folder / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

"""`elche resume`, `replay` and `checkpoints`: earlier trainings."""

import json
import os
import subprocess
import sys
import time
from codecs import BOM_UTF8
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import click
from google.protobuf.message import DecodeError

from elche.errors import InvalidJob
from elche.manifest import SOURCE, DamagedCheckpoint, checkpoints_in, newest_whole, read_manifest
from elche.own_modules import ALL, edited, read_modules
from elche.v1.job_pb2 import JobSpec
from elche_client.client import Client
from elche_client.commands.naming import find, folder_or_job, known_as_folder, of_job
from elche_client.commands.remote import watch
from elche_client.display.notices import print_notice
from elche_client.display.record import to_json
from elche_client.display.summary import checkpoints_table, wide_console
from elche_client.events import Checkpoint
from elche_client.local.job_run import CADENCE, COMMAND, LocalRun, require_installed
from elche_client.local.script_run import ScriptRun
from elche_client.options import JobOptions

DEPTH = 4
"""Number of folders above a checkpoint that are searched for its run's folder."""
TOLD_BYTES = 256 << 20
"""Size of a checkpoint from which on it is told that it is read."""
RECORD = "record.json"
COMMAND_TYPES = {
    "file": str,
    "folder": str,
    "name": str,
    "resume": str,
    "settings": dict,
    "arguments": list,
    "environment": dict,
    "slow_factors": dict,
}


class How(TypedDict, total=False):
    """How a run of this machine is made and shown: fields of `LocalRun`."""

    device: str
    out: Path | None
    as_json: bool
    shows_logs: bool


def resume_job(job_id: str, options: JobOptions, address: str, *, as_json: bool) -> int:
    """Resumes a job at a coordinator and watches it. Raises `InvalidJob` for what is neither a job nor a folder."""
    if options.num_ranks or options.slow_factors or options.verify_rounds:
        raise InvalidJob(f"job {job_id} is resumed with its own number of ranks; only settings can be replaced")
    if options.arguments or options.environment:
        raise InvalidJob(
            f"job {job_id} is resumed with its own arguments and environment; submit it again to change them"
        )
    with folder_or_job(job_id, address), Client(address) as client:
        _, handle = of_job(client, job_id, lambda known: client.resume(known, **options.settings))
    print_notice(f"resumed as job {handle.id}")
    return watch(handle.id, address, as_json=as_json)


def resume_here(place: str, file: Path | None, options: JobOptions, **how: Unpack[How]) -> int:
    """Resumes a training on this machine from a checkpoint, or from the newest one below a folder."""
    if "://" in place:
        if file is None:
            raise InvalidJob(f"the job's file is needed too: elche resume {place} FILE")
        return LocalRun(path=file, options=replace(options, resume=place), **how).run()
    damaged: list[DamagedCheckpoint] = []
    with known_as_folder(place):
        folder, manifest = newest_whole(Path(place), damaged.append, _tell_check)
    command = _command_of(folder)
    is_loop = "loop" in manifest["training"]
    if file is None:
        more = f"set more epochs in the script: elche resume {folder} {manifest['file_name']}" if is_loop else ""
        _refuse_complete(Path(place), options, more)
    kind = ScriptRun if is_loop else partial(LocalRun, is_checked=True)
    options = replace(
        options,
        resume=str(folder.resolve()),
        num_ranks=options.num_ranks or int(manifest["num_ranks"]),
        settings={**manifest["settings"], **options.settings},
        name=options.name or ("" if file else command.get("name") or Path(manifest["file_name"]).stem),
        arguments=options.arguments or tuple(command.get("arguments", ())),
        environment={**command.get("environment", {}), **options.environment},
    )
    there = {rank: factor for rank, factor in _slow_factors(command).items() if rank < options.num_ranks}
    options = replace(options, slow_factors=options.slow_factors or there)
    path = file or _source(folder, Path(manifest["file_name"]))
    if not is_loop:  # whose processes keep no modules, and whose name may be any text
        _tell_edited(folder, manifest["job"])
    for error in damaged:
        print_notice(str(error))
    older = "; what was trained after it is trained again" if damaged else ""
    print_notice(f"resuming from {folder}{older}")
    working_folder = None if file else _working_folder(command)
    return kind(path=path, options=options, working_folder=working_folder, **how).run()


def _tell_check(folder: Path, num_bytes: int) -> None:
    """Tells what a large checkpoint's user waits for."""
    if num_bytes >= TOLD_BYTES:
        print_notice(f"reading {folder}, {num_bytes / 2**30:.1f} GiB, to see that it is as it was written")


def _working_folder(command: dict[str, Any]) -> Path | None:
    """The working directory of a run's ranks, from which their file reads relative paths; None for this process's."""
    folder = command.get("folder", "")
    if not os.path.isabs(folder):  # of a version that did not note it
        return None
    if not os.path.isdir(folder):
        print_notice(f"the run's working directory, {folder}, is gone: relative paths are read from {Path.cwd()}")
        return None
    return Path(folder)


def _command_of(checkpoint: Path) -> dict[str, Any]:
    """The arguments of the run that has written the checkpoint; empty if the checkpoint was moved. Raises `InvalidJob`
    if they are damaged: without them another training would go on.
    """
    with suppress(ValueError, RecursionError):
        command = _read_above(checkpoint, COMMAND)
        if isinstance(command, dict) and _is_command(command):
            return command
    raise InvalidJob(
        f"the {COMMAND} of the run that has written {checkpoint} is damaged: move the checkpoint elsewhere to resume "
        "without the run's arguments and environment"
    )


def _read_above(checkpoint: Path, name: str) -> Any:
    """A JSON file of the run that has written the checkpoint; {} if the checkpoint was moved. Raises `OSError` for a
    file that cannot be read, `ValueError` or `RecursionError` for one that is no JSON.
    """
    for folder in [checkpoint.resolve(), *checkpoint.resolve().parents][: DEPTH + 1]:
        if os.path.isfile(folder / name):
            return json.loads((folder / name).read_text(encoding="utf-8"))
    return {}


def _slow_factors(command: dict[str, Any]) -> dict[int, float]:
    """The ranks that a run's command slows, and the factors. Raises `ValueError` or `TypeError` for others."""
    return {int(rank): float(factor) for rank, factor in command.get("slow_factors", {}).items()}


def _is_command(command: dict[str, Any]) -> bool:
    """True if what is there of a run's command has the right types, and its texts are such as a system has."""
    if not all(isinstance(command.get(name, type_()), type_) for name, type_ in COMMAND_TYPES.items()):
        return False
    try:
        _slow_factors(command)
    except (ValueError, TypeError):
        return False
    environment = command.get("environment", {})
    paths = (command.get("file", ""), command.get("folder", ""))
    return all(map(_is_given, (*paths, *command.get("arguments", ()), *environment, *environment.values())))


def _is_given(text: object) -> bool:
    """True for a text that a file can have as its path, and a process as an argument."""
    try:
        return isinstance(text, str) and b"\0" not in os.fsencode(text)
    except UnicodeError:
        return False


def _refuse_complete(run: Path, options: JobOptions, more: str) -> None:
    """Raises `InvalidJob` for the folder of a complete run, unless the settings ask for more epochs or steps.

    `more` says how to train a loop of the user's own further, which takes no settings.
    """
    try:
        record = json.loads((run / RECORD).read_text(encoding="utf-8"))
        is_complete = record["state"] == "succeeded" and not record.get("ended_early")
        num_epochs = int(record["epochs"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return
    wanted = options.settings.get("epochs", 0)
    if is_complete and isinstance(wanted, int) and wanted <= num_epochs and "max_steps" not in options.settings:
        raise InvalidJob(
            f"the training in {run} is complete, with {num_epochs} epochs: there is nothing to resume unless "
            + (f"you {more}" if more else f"--epochs is more than {num_epochs}")
        )


def _text_of(path: Path) -> bytes:
    """A file's content without a byte order mark, and with line ends as Python reads them: a copy may lack both."""
    return path.read_bytes().removeprefix(BOM_UTF8).replace(b"\r\n", b"\n")


def _source(folder: Path, original: Path) -> Path:
    """The user's file at its original path, so that its imports are found; the checkpoint's copy if it has changed."""
    copy = folder / SOURCE
    try:
        if _text_of(original) == _text_of(copy):
            return original
        what = "has changed since the checkpoint"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    if not copy.is_file() or not copy.stat().st_size:
        raise InvalidJob(f"{original} {what}, and the checkpoint has no copy of it: elche resume {folder} FILE")
    print_notice(f"{original} {what}; its copy in the checkpoint is used. Name FILE to use another")
    return copy.absolute()


def _tell_edited(folder: Path, job_id: str = "*") -> None:
    """Tells of the user's own modules that have changed since the job of a checkpoint, or a run in a folder, began."""
    for above in [folder.resolve(), *folder.resolve().parents][: DEPTH + 1]:
        kept = sorted(above.glob(ALL.replace("*", job_id)))  # several jobs may share a folder
        for files in filter(None, map(edited, map(read_modules, kept))):
            print_notice(f"{files} has changed since the run began; it is imported as it is now")
        if kept:  # above are those of other runs
            break


def replay_run(folder: Path, options: JobOptions, **how: Unpack[How]) -> int:
    """Repeats the rounds of a run on this machine. Raises `InvalidJob` for a folder that cannot be replayed."""
    try:
        command: dict[str, Any] = json.loads((folder / COMMAND).read_text(encoding="utf-8"))
        recording = (folder / CADENCE).read_bytes()
        slow_factors = _slow_factors(command)
        settings, num_ranks = command["settings"], int(command["num_ranks"])
        resume, path = command["resume"], Path(command["file"])
        rounds = JobSpec.FromString(recording).replay
        if not _is_command(command):
            raise ValueError
    except OSError as error:
        raise InvalidJob(
            f"{folder} holds no run of `elche run`: {error.filename} is missing. --one-process repeats what a worker "
            "has of a submitted job with --audit true"
        ) from None
    except DecodeError:
        raise InvalidJob(f"{folder / CADENCE} was not written by elche run, or is damaged") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InvalidJob(f"{folder / COMMAND} was not written by elche run, or is damaged") from None
    num_recorded = sum(one.size for recorded in rounds for part in recorded.parts for one in part.slices)
    if num_recorded < (num_trained := _num_trained(folder, resume)):
        raise InvalidJob(
            f"{folder / CADENCE} lacks rounds: it has {num_recorded} of {num_trained} samples, as when the coordinator "
            "was away. --one-process repeats the run if it had --audit true"
        )
    _tell_edited(folder)
    options = replace(
        options,
        replay=recording,
        num_ranks=options.num_ranks or num_ranks,
        slow_factors=options.slow_factors or slow_factors,
        settings={**settings, **options.settings},
        resume=resume,
        name=options.name or command.get("name", ""),
        arguments=options.arguments or tuple(command.get("arguments", ())),
        environment={**command.get("environment", {}), **options.environment},
    )
    working_folder = _working_folder(command)
    return LocalRun(path=_source(folder, path), options=options, working_folder=working_folder, **how).run()


def _num_trained(folder: Path, resumed: str) -> int:
    """The samples that a run has trained; 0 if it has not succeeded, or if that is not known."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, InvalidJob):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        before = read_manifest(Path(resumed))["training"]["samples"] if resumed else 0
        return sum(record["committed_samples"]) - int(before) if record["state"] == "succeeded" else 0
    return 0


def replay_here(
    folder: Path,
    options: JobOptions,
    *,
    until_round: int | None,
    attempt: int | None,
    device: str,
    out: Path | None,
    as_json: bool,
) -> int:
    """Repeats a run in one process, as it was, and returns its exit code. Raises `InvalidJob` for options that would
    change it.
    """
    changes = (options.settings, options.num_ranks, options.slow_factors, options.arguments, options.environment)
    if any(changes) or options.verify_rounds:
        raise InvalidJob("in one process a run is repeated as it was: leave out settings, --ranks, --slow and --verify")
    require_installed()
    made = out or Path("runs") / f"{folder.resolve().name}-replay-{time.strftime('%Y%m%d-%H%M%S')}"
    if (made / COMMAND).exists():
        raise InvalidJob(f"{made} holds an earlier run; remove it or name another folder with --out")
    arguments = [str(folder), "--out", str(made), "--device", device]
    arguments += [] if until_round is None else ["--until-round", str(until_round)]
    arguments += [] if attempt is None else ["--attempt", str(attempt)]
    arguments += ["--json"] if as_json else []
    return subprocess.call([sys.executable, "-P", "-m", "elche_worker.replaying", *arguments])


def list_checkpoints(job: str, address: str, *, as_json: bool) -> int:
    """Prints the checkpoints below a folder, or of a job at a coordinator."""
    if os.path.exists(job):
        with known_as_folder(job):
            found = _here(Path(job))
    else:
        found = _of_job(job, address)
    if as_json:
        click.echo(to_json([asdict(one) for one in found]))
        return 0
    wide_console().print(checkpoints_table(found) if found else "no checkpoints")
    return 0


def _here(folder: Path) -> list[Checkpoint]:
    whole = checkpoints_in(folder, lambda _, error: print_notice(str(error)))
    manifests = {path: read_manifest(path) for path in whole}
    newest_evaluations = list(manifests.values())[-1]["training"].get("evaluations", {})
    found = []
    for path, manifest in manifests.items():
        try:
            found.append(_described(path, manifest, newest_evaluations))
        except (KeyError, TypeError, AttributeError):
            raise InvalidJob(f"{path} is damaged: its manifest lacks the training's state; remove it") from None
    try:
        return _with_recorded(found, _read_above(folder, RECORD).get("checkpoints", []))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the record only adds metrics
        return found


def _with_recorded(found: list[Checkpoint], recorded: list[dict[str, Any]]) -> list[Checkpoint]:
    """Adds metrics from the run's record, since no manifest has the evaluation of the last checkpoint."""
    by_name = {Path(one["path"]).name: one for one in recorded}
    return [
        replace(one, metrics=row["metrics"], is_best=row["is_best"])
        if (row := by_name.get(Path(one.path).name)) and row["metrics"]
        else one
        for one in found
    ]


def _described(path: Path, manifest: dict[str, Any], evaluations: dict[str, Any]) -> Checkpoint:
    """A checkpoint by its manifest. Metrics come from `evaluations`, since it is evaluated after it is written."""
    training = manifest["training"]
    size_bytes = sum(file["bytes"] for file in manifest["files"].values())
    if (loop := training.get("loop")) is not None:
        num_steps = loop["num_steps"]
        return Checkpoint(
            version=num_steps, path=str(path), epoch=loop["epoch"], global_step=num_steps, size_bytes=size_bytes
        )
    return Checkpoint(
        version=training["version"],
        path=str(path),
        epoch=training["ledger"]["epoch"],
        global_step=training["global_step"],
        size_bytes=size_bytes,
        metrics=evaluations["by_version"].get(str(training["version"]), {}),
        is_best=evaluations["best_version"] == training["version"],
    )


def _of_job(job_id: str, address: str) -> list[Checkpoint]:
    with folder_or_job(job_id, address), Client(address) as client:
        views = {view.job_id: view for view in client.jobs()}
        known = job_id if job_id in views else find(job_id, list(views.values()))
    return list(views[known].checkpoints)

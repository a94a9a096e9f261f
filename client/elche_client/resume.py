"""What `elche resume`, `replay` and `checkpoints` do: a training that was begun before, gone on with or repeated."""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from elche.errors import InvalidJob
from elche.manifest import SOURCE, checkpoints_in, newest, read_manifest
from elche_client.client import Client
from elche_client.commands import watch
from elche_client.events import Checkpoint
from elche_client.local_run import CADENCE, COMMAND, LocalRun
from elche_client.options import JobOptions
from elche_client.output import PIPE_WIDTH, print_notice
from elche_client.record import to_json
from elche_client.script_run import ScriptRun
from elche_client.summary import checkpoints_table

DEPTH = 4  # folders above a checkpoint, of which one may be that of its run
RECORD = "record.json"


def resume_job(job_id: str, options: JobOptions, address: str, *, as_json: bool) -> int:
    """Goes on with a coordinator's job, and shows it."""
    if options.num_ranks or options.slow_factors or options.verify_rounds:
        raise InvalidJob(f"job {job_id} is resumed with its own ranks; only settings can be replaced")
    if options.arguments or options.environment:
        raise InvalidJob(f"job {job_id} is resumed with its own arguments and environment; submit it for other ones")
    with Client(address) as client:
        handle = client.resume(job_id, **options.settings)
    print_notice(f"goes on as job {handle.id}")
    return watch(handle.id, address, as_json=as_json)


def resume_here(
    place: str,
    file: Path | None,
    options: JobOptions,
    *,
    device: str,
    out: Path | None,
    as_json: bool,
    shows_logs: bool = True,
) -> int:
    """Goes on on this machine from a checkpoint, or from the newest below a folder."""
    if "://" in place:
        if file is None:
            raise InvalidJob(f"name the job's file: elche resume {place} FILE")
        return LocalRun(
            path=file,
            options=replace(options, resume=place),
            device=device,
            out=out,
            as_json=as_json,
            shows_logs=shows_logs,
        ).run()
    folder = newest(Path(place))
    manifest = read_manifest(folder)
    command = _command_above(folder)
    if file is None:
        _refuse_complete(Path(place), options)
    kind = ScriptRun if "loop" in manifest["training"] else LocalRun
    options = replace(
        options,
        resume=str(folder.resolve()),
        num_ranks=options.num_ranks or int(manifest["num_ranks"]),
        settings={**manifest["settings"], **options.settings},
        name=options.name or ("" if file else command.get("name") or Path(manifest["file_name"]).stem),
        arguments=options.arguments or tuple(command.get("arguments", ())),
        environment={**command.get("environment", {}), **options.environment},
    )
    path = file or _source(folder, Path(manifest["file_name"]))
    print_notice(f"goes on from {folder}")
    return kind(path=path, options=options, device=device, out=out, as_json=as_json, shows_logs=shows_logs).run()


def _command_above(checkpoint: Path) -> dict[str, Any]:
    """What the run that has written the checkpoint was started with; empty when it lies elsewhere now."""
    for folder in list(checkpoint.resolve().parents)[:DEPTH]:
        with suppress(OSError, ValueError):
            command = json.loads((folder / COMMAND).read_text(encoding="utf-8"))
            return command if isinstance(command, dict) else {}
    return {}


def _refuse_complete(run: Path, options: JobOptions) -> None:
    """Raises `InvalidJob` for the folder of a run that has reached its end, unless its end is put off."""
    try:
        record = json.loads((run / RECORD).read_text(encoding="utf-8"))
        is_complete = record["state"] == "succeeded" and not record.get("ended_early")
        num_epochs = int(record["epochs"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    wanted = options.settings.get("epochs", 0)
    if is_complete and isinstance(wanted, int) and wanted <= num_epochs and "max_steps" not in options.settings:
        raise InvalidJob(
            f"the training in {run} is complete, with {num_epochs} epochs: there is nothing to go on with, "
            f"unless --epochs says more than {num_epochs}"
        )


def _source(folder: Path, original: Path) -> Path:
    """The user's file where it was, so that what lies beside it is found; the checkpoint's copy if it has changed."""
    copy = folder / SOURCE
    try:
        if original.read_bytes() == copy.read_bytes():
            return original
        print_notice(f"{original} has changed since; the checkpoint's copy is used, unless FILE is given")
    except OSError:
        pass
    return copy


def replay_run(
    folder: Path, options: JobOptions, *, device: str, out: Path | None, as_json: bool, shows_logs: bool = True
) -> int:
    """Repeats the rounds of a run on this machine."""
    try:
        command: dict[str, Any] = json.loads((folder / COMMAND).read_text(encoding="utf-8"))
        recording = (folder / CADENCE).read_bytes()
        slow_factors = {int(rank): float(factor) for rank, factor in command["slow_factors"].items()}
        settings, num_ranks = command["settings"], int(command["num_ranks"])
    except OSError as error:
        raise InvalidJob(f"{folder} is no folder of a run that can be replayed: {error.filename} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidJob(f"{folder / COMMAND} is not what elche run has written there") from None
    options = replace(
        options,
        replay=recording,
        num_ranks=options.num_ranks or num_ranks,
        slow_factors=options.slow_factors or slow_factors,
        settings={**settings, **options.settings},
        resume=command["resume"],
        name=options.name or command.get("name", ""),
        arguments=options.arguments or tuple(command.get("arguments", ())),
        environment={**command.get("environment", {}), **options.environment},
    )
    path = _source(folder, Path(command["file"]))
    return LocalRun(path=path, options=options, device=device, out=out, as_json=as_json, shows_logs=shows_logs).run()


def list_checkpoints(job: str, address: str, *, as_json: bool) -> int:
    """Prints the checkpoints below a folder, or of a coordinator's job."""
    found = _here(Path(job)) if Path(job).exists() else _of_job(job, address)
    if as_json:
        click.echo(to_json([asdict(one) for one in found]))
        return 0
    console = Console(highlight=False)
    if not console.file.isatty():
        console.width = PIPE_WIDTH
    console.print(checkpoints_table(found) if found else "no checkpoints")
    return 0


def _here(folder: Path) -> list[Checkpoint]:
    manifests = {path: read_manifest(path) for path in checkpoints_in(folder)}
    newest_evaluations = list(manifests.values())[-1]["training"].get("evaluations", {})
    return [_described(path, manifest, newest_evaluations) for path, manifest in manifests.items()]


def _described(path: Path, manifest: dict[str, Any], evaluations: dict[str, Any]) -> Checkpoint:
    """A checkpoint is evaluated after it is written: what that gave stands in later ones."""
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
    with Client(address) as client:
        views = {view.job_id: view for view in client.jobs()}
    if job_id not in views:
        raise InvalidJob(f"there is no folder {job_id}, and no job at {address} has this id")
    return list(views[job_id].checkpoints)

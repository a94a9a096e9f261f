"""Checks a job's file before anything is started, and prints the outcome as one JSON line.

`python -m elche_worker.rank.check FILE`, or a fork of the spawner of `elche run`.
"""

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elche.errors import ElcheError, HelpShown, InvalidJob
from elche.manifest import WEIGHTS, read_manifest
from elche.output import take_any_text
from elche_worker.data.build import build_dataset, build_eval_dataset, build_order
from elche_worker.device.discovery import choose_devices, summary
from elche_worker.device.rng import seed_all
from elche_worker.device.trials import Trials, begin_trials
from elche_worker.model.batch_size import nominal_batch_size, rank_batch_size
from elche_worker.model.checkpoint import load
from elche_worker.process.ending import end
from elche_worker.process.parent import end_with_parent
from elche_worker.user.job import JobDefinition
from elche_worker.user.loading import UserCodeRaised, as_a_script, load_job, with_settings


def check(
    path: Path,
    num_ranks: int,
    device: str,
    *,
    runs_here: bool,
    settings: dict[str, Any],
    resume: str = "",
    is_whole: bool = False,
    trials: Trials | None = None,
) -> dict[str, Any]:
    """Returns the job's settings and the devices on which it would run. Raises `ElcheError` if it cannot run.

    `settings` replace the file's. Only if the job `runs_here`, the devices, for which `trials` have begun, and the
    checkpoint to `resume` are checked as well; of one that `is_whole`, not the files.
    """
    try:
        source = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob(f"{path} cannot be read: {error}") from None
    folder = path.resolve().parent  # before the file is run, which may change the working folder, or delete it
    seed_all(0)  # as every rank does, so that random numbers that the file draws are the same
    job = with_settings(load_job(source, str(path)), settings)
    dataset, dataset_size = build_dataset(job, str(path))
    build_order(job, dataset, dataset_size, str(path))
    build_eval_dataset(job, str(path))
    batch_size = nominal_batch_size(job, dataset_size)
    devices = choose_devices(device, num_ranks, job.group_size, trials=trials)
    other = next((one.device for one in devices if not one.device.startswith("cuda")), None)
    if runs_here and job.backend == "nccl" and other is not None:
        raise InvalidJob(f"backend 'nccl' needs a GPU for every rank, and here is {other}; use 'gloo', or 'auto'")
    if runs_here:
        for one in devices:
            rank_batch_size(job, one, dataset_size)
        if is_whole:
            _check_resumed(resume, read_manifest(Path(resume)), job)
        elif resume:
            loaded = load(resume, new=None)
            _check_resumed(loaded.path, loaded.manifest, job)
    return {
        "ok": True,
        "dataset_size": dataset_size,
        "batch_size": batch_size,
        "epochs": job.epochs,
        "policy": job.policy,
        "devices": [asdict(one) for one in devices],
        "group_size": job.group_size,
        "notes": [
            *([summary(devices)] if runs_here and devices[0].device != "cpu" else []),
            *_notes(dataset_size, batch_size, len(devices) // job.group_size, job.drop_last),
        ],
        "imports_beside": _imports_beside(folder),
    }


def _check_resumed(path: str, manifest: dict[str, Any], job: JobDefinition) -> None:
    """Raises `InvalidJob` for a checkpoint of a training that has completed all of its epochs."""
    trained = manifest["training"].get("ledger", {}).get("epoch", 0)
    if trained >= job.epochs:
        raise InvalidJob(
            f"the checkpoint {path} is of a training that is complete: it has {trained} of {job.epochs} "
            f"epochs; give more with --epochs. Its {WEIGHTS} is the model"
        )


def _imports_beside(folder: Path) -> list[str]:
    """Modules that the file has imported from its own folder, which ranks lack when the file is sent without it."""
    origins = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return sorted(
        {
            name.partition(".")[0]
            for name, origin in origins.items()
            if origin and name != "elche_job" and Path(origin).is_absolute()  # torch has origins that are not files
            if Path(origin).resolve().is_relative_to(folder)
            if "site-packages" not in Path(origin).parts and not name.startswith(("elche", "__"))
        }
    )


def _notes(dataset_size: int, batch_size: int, num_ranks: int, drop_last: bool) -> list[str]:
    """Warnings for the user about the data set's size. Raises `InvalidJob` if nothing would be trained."""
    if drop_last and dataset_size < batch_size:
        raise InvalidJob(
            f"drop_last leaves nothing to train: {dataset_size} samples are fewer than one batch of {batch_size}"
        )
    if dataset_size < batch_size * num_ranks:
        return [
            f"the data set (samples: {dataset_size}) is shorter than one batch of {batch_size} for each of {num_ranks} "
            "ranks: it is trained, but some ranks will have nothing to do"
        ]
    return []


def answer(words: Sequence[str], answers: int) -> int:
    """Writes the JSON line for these arguments to the file descriptor `answers`; returns the exit code, 2 when the job
    cannot run. A fork of the spawner receives its arguments as JSON: `words`, and the job's `environment`, which is set
    before.

    The process must not be used for anything else afterwards, since it has loaded the user's file.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="the job's file; without one, only devices are looked for")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--settings", default="{}", help="replace the file's: a JSON object")
    parser.add_argument("--resume", default="", help="the checkpoint to go on from")
    parser.add_argument("--is-whole", action="store_true", help="the checkpoint's files have been read already")
    parser.add_argument("--arguments", default="[]", help="sys.argv of the file: a JSON list")
    parser.add_argument("--runs-here", action="store_true", help="check the devices of this host, too")
    parser.add_argument("--parent-pid", type=int, default=0, help="end when this process does")
    arguments = parser.parse_args(words)
    if arguments.parent_pid:
        end_with_parent(arguments.parent_pid)
    take_any_text(encoding="utf-8")
    os.dup2(2, 1)  # so that output of the user's file, even at exit, does not mix with the answer
    # before user code, which may use a device or start threads: trials are forks
    trials = begin_trials(arguments.device)
    if arguments.file is not None:
        as_a_script(str(arguments.file), json.loads(arguments.arguments))
    try:
        answer = _answer(arguments, trials)
        # In one line, whatever indentation the file has made json's default.
        line = json.dumps(answer).replace("\n", " ")
        os.write(answers, line.encode() + b"\n")
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        sys.stderr.write(
            f"{arguments.file} has closed file descriptors that others have opened, as os.closerange does\n"
        )
        return 2
    return 0 if answer["ok"] else 2


def _answer(arguments: argparse.Namespace, trials: Trials | None) -> dict[str, Any]:
    try:
        if arguments.file is None:
            devices = choose_devices(arguments.device, arguments.ranks, trials=trials)
            return {"ok": True, "devices": [asdict(one) for one in devices]}
        return check(
            arguments.file,
            arguments.ranks,
            arguments.device,
            runs_here=arguments.runs_here,
            settings=json.loads(arguments.settings),
            resume=arguments.resume,
            is_whole=arguments.is_whole,
            trials=trials,
        )
    except ElcheError as error:
        text = error.traceback if isinstance(error, UserCodeRaised) else ""
        has_answered = isinstance(error, HelpShown)
        return {"ok": False, "error": str(error), "traceback": text, "has_answered": has_answered}


if __name__ == "__main__":
    end(answer(sys.argv[1:], os.dup(1)))  # `elche run` and `elche submit` wait for it

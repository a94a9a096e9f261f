"""`python -m elche_worker.check FILE`: says in one JSON line whether a job can run here, before anything is started."""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elche.errors import ElcheError, InvalidJob
from elche_worker.devices import choose_devices
from elche_worker.loading import UserCodeRaised, build_dataset, load_job, with_overrides
from elche_worker.parent import end_with_parent


def check(path: Path, num_ranks: int, device: str, *, runs_here: bool, backend: str | None) -> dict[str, Any]:
    """What the file says and where it would run. Raises `ElcheError` for what cannot work.

    `backend` replaces the file's; whether its devices are there is judged when the job `runs_here`.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidJob(f"{path} cannot be read: {error}") from None
    job = with_overrides(load_job(source, str(path)), backend=backend)
    _, dataset_size = build_dataset(job, str(path))
    devices = choose_devices(device, num_ranks)
    other = next((one.device for one in devices if not one.device.startswith("cuda")), None)
    if runs_here and job.backend == "nccl" and other is not None:
        raise InvalidJob(f"backend 'nccl' needs a GPU for every rank, and here is {other}; use 'gloo', or 'auto'")
    return {
        "ok": True,
        "dataset_size": dataset_size,
        "batch_size": job.batch_size,
        "epochs": job.epochs,
        "policy": job.policy,
        "devices": [asdict(one) for one in devices],
        "notes": _notes(dataset_size, job.batch_size, len(devices), job.drop_last),
    }


def _notes(dataset_size: int, batch_size: int, num_ranks: int, drop_last: bool) -> list[str]:
    if drop_last and dataset_size < batch_size:
        raise InvalidJob(
            f"drop_last leaves nothing to train: {dataset_size} samples are fewer than one batch of {batch_size}"
        )
    if dataset_size < batch_size * num_ranks:
        return [
            f"the data set of {dataset_size} samples is shorter than one batch of {batch_size} for each of "
            f"{num_ranks} ranks: it is trained all the same, but some ranks will have nothing to do"
        ]
    return []


def main() -> None:
    """Prints the JSON line; exit code 2 when the job cannot run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", help="replaces the file's")
    parser.add_argument("--runs-here", action="store_true", help="judge also what the devices of this host can do")
    parser.add_argument("--parent-pid", type=int, default=0, help="end when this process does")
    arguments = parser.parse_args()
    if arguments.parent_pid:
        end_with_parent(arguments.parent_pid)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _answer(arguments)
    print(json.dumps(answer), flush=True)
    sys.exit(0 if answer["ok"] else 2)


def _answer(arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        here, backend = arguments.runs_here, arguments.backend
        return check(arguments.file, arguments.ranks, arguments.device, runs_here=here, backend=backend)
    except ElcheError as error:
        text = error.traceback if isinstance(error, UserCodeRaised) else ""
        return {"ok": False, "error": str(error), "traceback": text}


if __name__ == "__main__":
    main()

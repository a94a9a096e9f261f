"""Finds checkpoint folders, and reads and writes their manifests, without torch."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from elche.errors import InvalidJob

FORMAT = 2
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
EMA = "ema.safetensors"
"""File of the model with the moving average of its weights, if the job has one; that model was evaluated."""
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
SOURCE = "job.py"
UNFINISHED = "unfinished.json"
"""In a draft that a stopped rank has left: its manifest without the training's state, which the coordinator has."""
FIELDS: dict[str, type | tuple[type, ...]] = {
    "files": dict,
    "training": dict,
    "tensors": list,
    "saved_at": (float, int),
    "settings": dict,
    "num_ranks": int,
    "file_name": str,
    "job": str,
}
"""The fields that each manifest has, with their types."""


class NoCheckpoint(InvalidJob):
    """There is none at the path."""


class DamagedCheckpoint(InvalidJob):
    """What is there is not what was written."""


def newest_whole(
    path: Path,
    on_damaged: Callable[[DamagedCheckpoint], None],
    on_check: Callable[[Path, int], None] = lambda folder, num_bytes: None,
) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at `path`, or the newest one below it whose files are as they were written; and its manifest.
    `on_check` is called before the files of one, so many bytes, are read, which may take minutes, and `on_damaged` for
    each one that is not whole. Raises `NoCheckpoint`, and `DamagedCheckpoint` if there is no whole
    one beside it: that of another job is no replacement.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    found = checkpoints_in(path, damaged.__setitem__)
    manifest: dict[str, Any] = {}
    while found:
        try:
            manifest = read_manifest(found[-1])
            on_check(found[-1], sum(file["bytes"] for file in manifest["files"].values()))
            check_files(found[-1], manifest)
            break
        except DamagedCheckpoint as error:
            damaged[found.pop()] = error
    tell_damaged(damaged, found, on_damaged)
    return found[-1], manifest


def tell_damaged(
    damaged: Mapping[Path, DamagedCheckpoint], whole: Collection[Path], on_damaged: Callable[[DamagedCheckpoint], None]
) -> None:
    """Calls `on_damaged` for each damaged checkpoint, or raises the first that has no whole one beside it: training
    would go on from another job's, or from the start.
    """
    for folder, why in damaged.items():
        if not any(one.parent == folder.parent for one in whole):
            raise why
        on_damaged(why)


def checkpoints_in(path: Path, on_damaged: Callable[[Path, DamagedCheckpoint], None] | None = None) -> list[Path]:
    """All complete checkpoints at or below a folder, oldest first. Raises `NoCheckpoint`, and `InvalidJob` for one that
    cannot be read. With `on_damaged`, it is called for those with damaged manifests, unless all are damaged.
    """
    if not os.path.exists(path):  # False also for a name that none can have
        raise NoCheckpoint(f"there is no checkpoint {path}")
    if os.path.isfile(path / MANIFEST):
        return [path]
    found = [one.parent for depth in ("*", "*/*", "*/*/*") for one in path.glob(f"{depth}/{MANIFEST}")]
    manifests: dict[Path, dict[str, Any]] = {}
    damaged: dict[Path, DamagedCheckpoint] = {}
    for one in found:
        if one.name.startswith("."):
            continue
        try:
            manifests[one] = read_manifest(one)
        except DamagedCheckpoint as error:
            damaged[one] = error
    if damaged and (on_damaged is None or not manifests):
        raise next(iter(damaged.values()))
    if not manifests:
        raise NoCheckpoint(
            f"{path} is not a checkpoint and contains none: no {MANIFEST} is in it. "
            "A job writes one on Ctrl-C, every ten minutes, at its end, and with --checkpoint-every-epochs 1; a "
            "loop of your own on Ctrl-C, by trainer.save(), and with TrainerConfig(checkpoint_every_minutes=...)"
        )
    for one, why in damaged.items():
        assert on_damaged is not None
        on_damaged(one, why)
    furthest_last = sorted(manifests, key=lambda one: (*_progress(manifests[one]), one.name))
    last_at = {manifests[one]["job"]: manifests[one]["saved_at"] for one in furthest_last}
    return sorted(furthest_last, key=lambda one: (last_at[manifests[one]["job"]], manifests[one]["job"]))


def _progress(manifest: Mapping[str, Any]) -> tuple[int, int, float]:
    """How far its job was. The time is not enough, since a host's clock may be set back; a loop has nothing else."""
    attempt, version = (manifest["training"].get(name) for name in ("attempt", "version"))
    has_numbers = type(attempt) is int and type(version) is int
    return (attempt, version, manifest["saved_at"]) if has_numbers else (0, 0, manifest["saved_at"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises `DamagedCheckpoint`, and `InvalidJob` when it cannot be read or is of an
    unknown format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
        missing = [name for name in FIELDS if name not in manifest]
        is_sealed = version != FORMAT or manifest["checksum"] == checksum(manifest)
    except OSError as error:
        raise InvalidJob(f"the checkpoint {folder} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedCheckpoint(
            f"{path} is not a manifest of an elche checkpoint, or is damaged; resume from an older checkpoint"
        ) from None
    if not is_sealed:
        raise DamagedCheckpoint(f"{path} is damaged: its checksum does not match; resume from an older checkpoint")
    if version != FORMAT:
        raise InvalidJob(f"the checkpoint {folder} has format {version}, and this version of elche reads {FORMAT}")
    if missing:
        raise DamagedCheckpoint(f"{path} is not a manifest of an elche checkpoint: {missing[0]} is missing")
    if wrong := [name for name, type_ in FIELDS.items() if not isinstance(manifest[name], type_)]:
        raise DamagedCheckpoint(
            f"{path} is damaged: {wrong[0]} is not what elche writes; resume from an older checkpoint"
        )
    if not all(map(_is_file, manifest["files"].items())):
        raise DamagedCheckpoint(f"{path} is damaged: its list of files is invalid; resume from an older checkpoint")
    return dict(manifest)


def _is_file(one: tuple[str, Any]) -> bool:
    """True for a file's entry: a path within the checkpoint, with the file's size and SHA-256."""
    name, file = one
    is_within = "\0" not in name and not name.startswith("/") and ".." not in name.split("/")
    is_entry = isinstance(file, dict) and type(file.get("bytes")) is int and isinstance(file.get("sha256", ""), str)
    return is_within and is_entry


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises `DamagedCheckpoint` unless all files have the sizes and checksums that the manifest says."""
    for name, file in manifest["files"].items():
        path = folder / name
        if not os.path.isfile(path):  # False also for a name that no file can have
            raise DamagedCheckpoint(f"the checkpoint {folder} is not whole: {name} is missing; use an older one")
        size_bytes = path.stat().st_size
        if size_bytes != file["bytes"]:
            raise DamagedCheckpoint(
                f"the checkpoint {folder} is not whole: {name} has {size_bytes} bytes and had {file['bytes']}; "
                "use an older one"
            )
        if sha256(path) != file.get("sha256"):
            raise DamagedCheckpoint(
                f"the checkpoint {folder} is damaged: {name} is not what was written; use an older one"
            )


def sha256(path: Path) -> str:
    """A file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's values without the checksum, independent of its layout as text."""
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_manifest(draft: Path, unfinished: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a draft, whose other files are durable, a whole checkpoint; returns its manifest. Raises `OSError`."""
    manifest = dict(
        json.loads(json.dumps({**unfinished, "training": training}))
    )  # as it will be read: keys are strings
    manifest["checksum"] = checksum(manifest)
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(draft / MANIFEST)
    sync(draft)
    return manifest


def finish(draft: Path, path: Path, training: Mapping[str, Any]) -> int:
    """Makes a draft that a stopped rank has left a checkpoint at `path`; returns its size in bytes. Never overwrites
    anything. Raises `OSError`, and `ValueError` for a draft that is damaged or not whole.
    """
    try:
        unfinished = json.loads((draft / UNFINISHED).read_text(encoding="utf-8"))
        is_draft = all(map(_is_file, unfinished["files"].items()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_draft = False
    if not is_draft:
        raise ValueError(f"{draft / UNFINISHED} is damaged: the draft of this checkpoint is left as it is")
    for name, file in unfinished["files"].items():
        size_bytes = (draft / name).stat().st_size
        if size_bytes != file["bytes"]:
            raise ValueError(f"{draft / name} has {size_bytes} bytes and had {file['bytes']}")
    write_manifest(draft, unfinished, training)
    draft.rename(path)
    sync(path.parent)
    (path / UNFINISHED).unlink()
    return sum(file["bytes"] for file in unfinished["files"].values())


def sync(path: Path) -> None:
    """Makes a file, or a folder's list of names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

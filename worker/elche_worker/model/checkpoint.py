"""Checkpoints as folders: weights that plain PyTorch reads, what else training needs, and a manifest.

    NAME/model.safetensors   parameters and persistent buffers, by the model's own names
    NAME/ema.safetensors     of a job with `ema`: the same with the moving average of the weights, as rounds keep it
    NAME/state.safetensors   optimizers, outer optimizer, random numbers and other buffers of the rank that wrote it
    NAME/state.json          how these tensors belong together, and what is not a tensor
    NAME/pieces/             of a model that replica groups share: its parameters, and the optimizer's state of them,
                             in parts (`torch.distributed.checkpoint`); model.safetensors has its buffers only
    NAME/job.py              the user's file
    NAME/manifest.json       what it is, every file's size and SHA-256, and the training's books at this version

A folder with a manifest is whole: the manifest is the last thing that appears. To a URL, files are put with fsspec in
the same order. Random numbers and moments are those of one rank, the fastest; on resuming, every rank begins with its
moments.
"""

import json
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import nn

from elche.artifacts import filesystem_of
from elche.errors import InvalidJob
from elche.manifest import (
    EMA,
    FORMAT,
    MANIFEST,
    SOURCE,
    STATE,
    STATE_TENSORS,
    UNFINISHED,
    WEIGHTS,
    DamagedCheckpoint,
    newest_whole,
    read_manifest,
    sha256,
    sync,
    write_manifest,
)
from elche.output import notice
from elche_worker.model.frozen import completed, metadata_of, read_weights
from elche_worker.model.storage import place_of
from elche_worker.model.tensors import (
    Piece,
    can_hold,
    copied,
    flattened,
    is_divided,
    placed,
    unflattened,
    write_tensors,
)

PIECES = "pieces"
"""Folder, in a checkpoint, of the parts of a sharded model."""
MODEL_PIECE = "model "
"""Prefix of the names of parameters among the pieces."""
STOPPED = ".stopped."
"""Prefix of drafts that stopped ranks have left."""
SPARED_S = 60.0
"""Seconds for which such drafts survive new checkpoints, since they may still become checkpoints."""


@dataclass(frozen=True, slots=True)
class CheckpointData:
    """Copies, in the host's memory, of what a checkpoint needs."""

    weights: dict[str, Any]
    """Parameters and persistent buffers: tensors, or pieces of divided ones."""
    state: dict[str, Any]
    """Everything else: plain values, tensors and pieces only."""
    frozen: str = ""
    """Digest of the frozen parameters, if the weights are without them."""
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    """The moving average of the weights, and of buffers that are not among them; empty if the job has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The job's part of the manifest."""

    job: str
    file_name: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    tensors: Sequence[str] = ()
    """Parameters and buffers, "NAME DTYPE SHAPE KIND"."""


NUMBERED = re.compile(r"\.?(?P<at>epoch-\d+-step-\d+)(-attempt-(?P<attempt>\d+))?")
"""The name of a job's checkpoint, or of its draft; `at` grows while training goes on. Attempts after the first are in
it, so that no name comes twice."""


class CheckpointTarget:
    """Where a job's checkpoints are: a folder, or a URL that fsspec knows. Its methods raise `OSError`, and for a URL
    the errors of its fsspec package.
    """

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self._fs: Any = None
        if "://" in place:
            self._fs, self._root = filesystem_of(place)

    def write(
        self,
        name: str,
        kept: CheckpointData,
        about: About,
        training: Mapping[str, Any],
        write_pieces: Callable[[Path, Mapping[str, Piece]], None] | None = None,
    ) -> tuple[str, int]:
        """Writes the checkpoint NAME; returns its path and size in bytes. Never overwrites anything.

        `write_pieces` writes the parts of a sharded model to a folder.
        """
        parent = None if self._fs else Path(self.place)
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
        try:
            manifest = write_manifest(draft, _write_files(draft, kept, about, write_pieces), training)
            size_bytes = sum(file["bytes"] for file in manifest["files"].values())
            if self._fs:
                self._put(draft, name, list(manifest["files"]))
            else:
                assert parent is not None
                draft.chmod(0o700)
                # Atomic, after every file is on disk: whoever finds the folder finds all of it, even after a power cut.
                draft.rename(parent / name)
                sync(parent)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return f"{self.place}/{name}", size_bytes

    @property
    def is_local(self) -> bool:
        """True for a folder, False for a URL."""
        return self._fs is None

    def write_draft(self, kept: CheckpointData, about: About) -> Path:
        """Writes all of a checkpoint but its manifest, for `elche.manifest.finish`, into a new folder, which it
        returns; the place must be local.
        """
        parent = Path(self.place)
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=STOPPED, dir=parent))
        try:
            unfinished = _write_files(draft, kept, about, None)
            (draft / UNFINISHED).write_text(json.dumps(unfinished), encoding="utf-8")
            sync(draft / UNFINISHED)
            sync(draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return draft

    def _put(self, draft: Path, name: str, files: list[str]) -> None:
        """Uploads the manifest last: a folder without one is not a checkpoint."""
        folder = f"{self._root}/{name}"
        if self._fs.exists(folder):
            raise FileExistsError(f"{self.place}/{name} is there already")
        for file in (*files, MANIFEST):
            self._fs.makedirs(f"{folder}/{file}".rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(draft / file), f"{folder}/{file}")

    def remove(self, name: str) -> None:
        """Removes a checkpoint, its manifest first, so that the rest no longer counts as a checkpoint."""
        if self._fs:
            self._fs.rm(f"{self._root}/{name}/{MANIFEST}")
            self._fs.rm(f"{self._root}/{name}", recursive=True)
            return
        (Path(self.place) / name / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(Path(self.place) / name, ignore_errors=True)

    def keep_only(self, names: Sequence[str]) -> None:
        """Removes all other checkpoints, their manifests first, and unfinished drafts. `names` ends with the checkpoint
        that has just become whole.

        Checkpoints that the same attempt has begun since are left alone: another rank may be writing them, or may have
        finished first. So are drafts that ranks have just left as they stopped.
        """
        if self._fs:
            for path in self._fs.ls(self._root, detail=False):
                name = path.rstrip("/").rpartition("/")[2]
                if name not in names and not _is_later(name, names):
                    if self._fs.exists(f"{path}/{MANIFEST}"):
                        self._fs.rm(f"{path}/{MANIFEST}")
                    self._fs.rm(path, recursive=True)
            return
        for path in Path(self.place).iterdir():
            is_draft = any(path.name.startswith(f".{name}.") for name in names)  # which another rank may be writing
            if path.name not in names and not (is_draft or _is_later(path.name, names) or _was_just_left(path)):
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)


def _is_later(name: str, names: Sequence[str]) -> bool:
    """True if, by its name, a checkpoint or its draft was begun after the last of `names`, in the same attempt."""
    this, last = NUMBERED.match(name), NUMBERED.match(names[-1]) if names else None
    return bool(this and last and this["attempt"] == last["attempt"] and this["at"] > last["at"])


def _was_just_left(path: Path) -> bool:
    """True for a draft that a rank has left as it stopped, until nobody has written to it for `SPARED_S`."""
    try:
        return path.name.startswith(STOPPED) and time.time() - path.stat().st_mtime < SPARED_S
    except FileNotFoundError:  # it has become a checkpoint meanwhile, or was removed
        return True


def divided(kept: CheckpointData) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any, dict[str, Piece]]:
    """Splits the data into whole weights, whole tensors of the state, the state's structure, and pieces by name.

    All processes that have a part of a piece use the same name for it.
    """
    tensors: dict[str, torch.Tensor] = {}
    pieces = {f"{MODEL_PIECE}{name}": one for name, one in kept.weights.items() if isinstance(one, Piece)}
    weights = {name: one for name, one in kept.weights.items() if isinstance(one, torch.Tensor)}
    hidden = {name: one for name, one in kept.mean.items() if name not in kept.weights}
    state = {**kept.state, "mean": hidden} if hidden else kept.state
    return weights, tensors, flattened(state, tensors, pieces), pieces


def _write_files(
    draft: Path,
    kept: CheckpointData,
    about: About,
    write_pieces: Callable[[Path, Mapping[str, Piece]], None] | None,
) -> dict[str, Any]:
    """Writes all files but the manifest, which is returned without the training's state."""
    weights, tensors, structure, pieces = divided(kept)
    checksums = {}
    if write_pieces is not None:
        (draft / PIECES).mkdir()
        write_pieces(draft / PIECES, pieces)
        for path in sorted((draft / PIECES).iterdir()):
            sync(path)
            checksums[f"{PIECES}/{path.name}"] = sha256(path)
        sync(draft / PIECES)
    checksums[WEIGHTS] = write_tensors(draft / WEIGHTS, weights, metadata_of(kept.frozen))
    if kept.mean:
        mean = {name: _mean_of(name, one, kept.mean) for name, one in weights.items()}
        checksums[EMA] = write_tensors(draft / EMA, mean, metadata_of(kept.frozen))
    checksums[STATE_TENSORS] = write_tensors(draft / STATE_TENSORS, tensors)
    (draft / SOURCE).write_text(about.source, encoding="utf-8")
    (draft / STATE).write_text(json.dumps(structure), encoding="utf-8")
    checksums |= {name: sha256(draft / name) for name in (SOURCE, STATE)}
    files = {name: {"bytes": (draft / name).stat().st_size, "sha256": checksums[name]} for name in checksums}
    manifest = {
        "format": FORMAT,
        "job": about.job,
        "file_name": about.file_name,
        "settings": dict(about.settings),
        "num_ranks": about.num_ranks,
        "saved_at": time.time(),
        "tensors": list(about.tensors),
        "files": files,
    }
    if pieces:
        dtypes = {name: str(one.local.dtype).removeprefix("torch.") for name, one in pieces.items()}
        manifest["pieces"] = {name: [dtypes[name], list(one.shape)] for name, one in pieces.items()}
    for name in (SOURCE, STATE):
        sync(draft / name)
    return manifest


@dataclass(frozen=True, slots=True)
class Loaded:
    """A complete checkpoint in memory."""

    path: str
    manifest: dict[str, Any]
    weights: dict[str, torch.Tensor]
    state: dict[str, Any]
    frozen: str = ""
    """Digest of the frozen parameters, if the weights are without them."""
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    """The moving average of the weights and of other buffers, in the precision of rounds; empty if there is none."""

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """The weights that were evaluated: their moving average if the job had one (`ema`)."""
        return {name: _mean_of(name, one, self.mean).to(one.dtype) for name, one in self.weights.items()}

    @property
    def training(self) -> str:
        """The training's state, as JSON."""
        return json.dumps(self.manifest["training"])

    def check_model(self, tensors: Sequence[str]) -> None:
        """Raises `InvalidJob`, naming the first parameter or buffer that differs between checkpoint and model. Buffers
        that no `state_dict` has may differ: a cache is made anew.
        """
        compared = (
            [one for one in described if one.partition(" ")[0] not in self.state["buffers"]]
            for described in (self.manifest["tensors"], tensors)
        )
        for then, now in zip_longest(*compared, fillvalue="nothing more"):
            if then != now:
                raise InvalidJob(
                    f"the model has changed since the checkpoint {self.path}: it had {then}, and the job's has {now}"
                )

    def restore_model(self, model: nn.Module) -> None:
        """Copies the weights into the model. Raises `InvalidJob` if it has other frozen parameters than left out."""
        targets = persistent_tensors(model)
        weights = completed(model, self.weights, self.frozen, f"the checkpoint {self.path}")
        placed_there = {name: placed(one, targets.get(name)) for name, one in weights.items()}
        model.load_state_dict(placed_there | self.state.get("extra", {}))
        buffers = dict(model.named_buffers())
        with torch.no_grad():
            for name, value in self.state["buffers"].items():
                if name in buffers and buffers[name].shape == value.shape:
                    buffers[name].copy_(value)


def _mean_of(name: str, weight: torch.Tensor, mean: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The moving average of a weight, or the weight itself. Rounds have the average of complex numbers as pairs."""
    one = mean.get(name, weight)
    return torch.view_as_complex(one) if weight.is_complex() and not one.is_complex() else one


NewTensor = Callable[[torch.Size, torch.dtype], torch.Tensor]
"""Creates the tensor that a divided one is read into: a whole one, or one that is divided again."""


def new_whole(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor."""
    return torch.empty(shape, dtype=dtype)


def new_like(tensor: Any) -> NewTensor:
    """A function that creates tensors divided as this one is."""
    from torch.distributed.tensor import zeros

    mesh, placements = tensor.device_mesh, tensor.placements
    return lambda shape, dtype: zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def load(path: str, new: NewTensor | None = new_whole) -> Loaded:
    """Reads a checkpoint, or the newest whole one in a folder, and says which are damaged. Raises `InvalidJob` for one
    that is incomplete.

    Divided tensors are read into tensors that `new` creates; without `new` they are not read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, manifest = _fetched(path, Path(scratch)) if "://" in path else newest_whole(Path(path), notice)
        try:
            pieces = _read_pieces(folder / PIECES, manifest.get("pieces", {}), new)
            weights, frozen = read_weights(folder / WEIGHTS)
            weights |= {
                name.removeprefix(MODEL_PIECE): one for name, one in pieces.items() if name.startswith(MODEL_PIECE)
            }
            mean = safetensors.torch.load_file(folder / EMA) if EMA in manifest["files"] else {}
            mean = {name: torch.view_as_real(one) if one.is_complex() else one for name, one in mean.items()}
            mapped = safetensors.torch.load_file(folder / STATE_TENSORS)
            # Copied, since an optimizer keeps the tensors that it is given. Those of a mapped file are not aligned,
            # which changes the order and so the result of sums; and if another host replaces the file, SIGBUS ends this
            # process.
            tensors = {name: one.clone() for name, one in mapped.items()}
            state = unflattened(json.loads((folder / STATE).read_text(encoding="utf-8")), {**tensors, **pieces})
            mean |= state.get("mean", {})
        except Exception as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise InvalidJob(f"the checkpoint {path} cannot be read: {why}") from None
    return Loaded(path if "://" in path else str(folder), manifest, weights, state, frozen, mean)


def _read_pieces(folder: Path, described: Mapping[str, Any], new: NewTensor | None) -> dict[str, Any]:
    """Divided tensors by name; each process reads what it needs."""
    if new is None or not described:
        return dict.fromkeys(described)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader  # takes as long as torch itself
    from torch.distributed.checkpoint.state_dict_loader import load as read

    tensors = {name: new(torch.Size(shape), getattr(torch, dtype)) for name, (dtype, shape) in described.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own deprecated functions
        read(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


def _fetched(url: str, scratch: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint at a URL, or the newest whole one in a folder of them, copied here; and its manifest."""
    damaged: DamagedCheckpoint | None = None
    try:
        filesystem, root = filesystem_of(url)
        for name in ("", *sorted((Path(one).name for one in filesystem.ls(root, detail=False)), reverse=True)):
            place = f"{root}/{name}".rstrip("/")
            if not filesystem.exists(f"{place}/{MANIFEST}"):
                continue
            if damaged is not None:
                notice(str(damaged))
            try:
                _copy(filesystem, place, scratch)
                return newest_whole(scratch, lambda error: None)
            except DamagedCheckpoint as error:
                # Named as the user knows it, not as its copy.
                damaged = DamagedCheckpoint(str(error).replace(str(scratch), f"{url}/{name}".rstrip("/")))
            if not name:
                break
            for one in scratch.iterdir():  # so that there is room for the next one
                shutil.rmtree(one) if one.is_dir() else one.unlink()
    except OSError as error:
        raise InvalidJob(f"the checkpoint {url} cannot be read: {error}") from None
    raise damaged or InvalidJob(f"{url} is not a checkpoint and has none: there is no {MANIFEST} in it")


def _copy(filesystem: Any, place: str, here: Path) -> None:
    """Copies a checkpoint from a file system to a folder. Raises `OSError`, and `DamagedCheckpoint`."""
    for name in (MANIFEST, WEIGHTS, STATE_TENSORS, STATE, SOURCE):
        filesystem.get_file(f"{place}/{name}", str(here / name))
    (here / PIECES).mkdir()
    for name in read_manifest(here)["files"]:
        if name == EMA:
            filesystem.get_file(f"{place}/{EMA}", str(here / EMA))
        elif name.startswith(f"{PIECES}/"):
            target = here / PIECES / Path(name).name
            filesystem.get_file(f"{place}/{PIECES}/{target.name}", str(target))


def weights_of(model: nn.Module, *, is_kept: bool = True, without: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Copies of parameters and persistent buffers by name; a tied one appears, whole, under each of its names. Names in
    `without` are left out.

    A sharded model is gathered, tensor by tensor, by all of its processes; a process without `is_kept` gets an empty
    dict.
    """
    weights = {}
    for name, tensor in persistent_tensors(model).items():
        whole = cast(Any, tensor).full_tensor() if is_divided(tensor) else tensor
        if is_kept and name not in without:
            weights[name] = copied(whole)
    return weights


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's own parameters and persistent buffers, under each of their names."""
    return {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def extra_of(model: nn.Module) -> dict[str, Any]:
    """Results of `get_extra_state` of the model's modules, by name, that are no tensors."""
    return {name: one for name, one in model.state_dict().items() if not isinstance(one, torch.Tensor)}


def other_buffers(model: nn.Module, *, is_queued: bool = False) -> dict[str, torch.Tensor]:
    """Copies of the buffers that `state_dict` leaves out, queued or not as by `copied`. Those that no file can hold
    (sparse ones) are left to `model()`.
    """
    persistent = model.state_dict()
    places = {place_of(one) for one in persistent.values() if can_hold(one) and one.numel()}  # under any name
    named = ((name, one) for name, one in model.named_buffers() if name not in persistent and can_hold(one))
    return {name: copied(buffer, is_queued=is_queued) for name, buffer in named if place_of(buffer) not in places}

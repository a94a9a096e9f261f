"""Checkpoints of a sharded model: each process of a replica group writes its part, and reads the parts that it needs.

Written by `torch.distributed.checkpoint`, as safetensors files that name the part of each tensor that they contain.
Parameters are stored by name, an optimizer's moments by the parameter's number, and the outer optimizer's memory tensor
by tensor, so that a group of another size, or one process, can read them. The files contain no pickle. The processes
exchange pickles while they write, over sockets that are bound to loopback.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from elche_worker.collectives.world import World
from elche_worker.model.tensors import Piece


class Pieces:
    """Writes checkpoints of a sharded model, together with the group's other processes, on the thread that calls it.

    `mesh` is a mesh of the group's processes on the CPU, with the shape of the model's mesh.
    """

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
        self._group = group
        self._mesh = mesh
        self._world = World(group, torch.device("cpu"))

    def agree(self, folder: str) -> str:
        """Returns the leader's folder on every process; empty if nothing is written."""
        return self._world.gather_texts(folder)[0]

    def write(self, folder: Path, pieces: Mapping[str, Piece]) -> None:
        """Writes every process's parts. Raises on all processes if one of them fails."""
        tensors = {name: self._whole(piece) for name, piece in pieces.items()}
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own deprecated functions
            save(tensors, storage_writer=writer, process_group=self._group)

    def _whole(self, piece: Piece) -> DTensor:
        return DTensor.from_local(
            piece.local, self._mesh, piece.placements, run_check=False, shape=piece.shape, stride=piece.stride
        )

"""The library versions and the device of a rank, by which the coordinator chooses the backend. `python -m
elche_worker.device.build` prints those of this machine, for `elche doctor`.
"""

import json
from dataclasses import asdict

import torch

from elche.v1 import rank_pb2
from elche_worker.device.discovery import choose_devices
from elche_worker.device.trials import begin_trials


def build_of(device: torch.device, *, needs_encryption: bool, slice_of: str = "") -> rank_pb2.Build:
    """The versions that NCCL needs to be equal, and the GPU's id, unique among all hosts: of a slice (MIG) that of the
    whole, `slice_of`, since NCCL refuses two slices of one GPU.
    """
    version = torch.__version__.partition("+")[0]
    build = rank_pb2.Build(device_type=device.type, torch=version, needs_encryption=needs_encryption)
    if device.type == "cuda":
        build.device_id = slice_of or str(torch.cuda.get_device_properties(device).uuid)
        build.cuda = torch.version.cuda or ""
        build.nccl = _nccl_version() if torch.distributed.is_nccl_available() else ""
    return build


def main() -> None:
    """Prints one line of JSON: this machine's versions, and the backends that its ranks can use."""
    distributed = torch.distributed
    has_nccl = distributed.is_available() and distributed.is_nccl_available()
    build = {
        "cuda": torch.version.cuda or "",
        "nccl": _nccl_version() if has_nccl else "",
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "devices": [asdict(one) for one in choose_devices("auto", 0, trials=begin_trials("auto"))],
    }
    print(json.dumps(build))


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


if __name__ == "__main__":
    main()

"""The versions and the device of a rank, by which the coordinator chooses how ranks average."""

import torch

from elche.v1 import rank_pb2


def build_of(device: torch.device, *, needs_encryption: bool) -> rank_pb2.Build:
    """The versions that NCCL needs to be equal, and the device's id, unique among all hosts."""
    version = torch.__version__.partition("+")[0]
    build = rank_pb2.Build(device_type=device.type, torch=version, needs_encryption=needs_encryption)
    if device.type == "cuda":
        build.device_id = str(torch.cuda.get_device_properties(device).uuid)
        build.cuda = torch.version.cuda or ""
        build.nccl = _nccl_version() if torch.distributed.is_nccl_available() else ""
    return build


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))

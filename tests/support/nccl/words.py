"""What PyTorch and NCCL say when they refuse, word for word."""

NCCL_VERSION = (2, 28, 9)
"""Any would do."""

NOT_ON_DEVICE = "Tensors must be CUDA and dense"
"""`check_gpu_single_tensor`; a ValueError."""
NOT_CONTIGUOUS = "Tensors must be contiguous"
"""`check_gpu_single_tensor`; a ValueError."""
SEVERAL_DEVICES = (
    "Expecting one tensor only but got multiple. You are probably using multiple devices under one thread. The support "
    "for such usage has been deprecated. For details, please refer to "
    "https://pytorch.org/docs/stable/distributed.html#multi-gpu-collective-functions. ProcessGroupNCCL continues "
    "supporting multi-process and multi-thread modes."
)
"""`MULTI_DEVICE_ERROR_MSG`."""
NO_GPUS = "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
"""The constructor; a ValueError."""
OTHER_DEVICE = "Attempt to perform collective on tensor not on device passed to init_process_group"
"""`PG::initNCCLComm`; a DistBackendError."""
BAD_ID = "Invalid size for ncclUniqueId"
"""`PG::broadcastUniqueNCCLID`; a DistBackendError."""
NOT_DIVISIBLE = "Tensor's dim 0 does not divide equally across group size"
"""`checkSplitSizes` of Utils.hpp."""
CORRUPTED = (
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
    "operations might run on corrupted/incomplete data."
)
TORN_DOWN = "To avoid data inconsistency, we are taking the entire process down."
"""Both of `WorkNCCL::handleException`."""


def unsupported_type(dtype: object) -> str:
    """`getNcclDataType`; a TypeError."""
    return f"Input tensor data type is not supported for NCCL process group: {dtype}"


def unsupported_operation(name: str) -> str:
    """`getNcclReduceOp`; a ValueError."""
    return f"Cannot use ReduceOp.{name} with NCCL"


def aborted(rank: int) -> str:
    """`NCCLComm::getNcclComm`, which every collective calls; an abort of the user's has no reason. DistBackendError."""
    return f"NCCL communicator was aborted on rank {rank}. "


def no_id(rank: int, key: str, error: Exception) -> str:
    """`PG::broadcastUniqueNCCLID`; a DistBackendError."""
    return (
        f"[{rank}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
        f"key '{key}', but store->get('{key}') got error: {error}. This may indicate a possible application crash on "
        "rank 0 or a network set up issue."
    )


def nccl_error(kind: str, detail: str, last: str) -> str:
    """`C10D_NCCL_CHECK` with `ncclGetErrorWithVersion` and `getNcclErrorDetailStr`; a DistBackendError."""
    version = ".".join(map(str, NCCL_VERSION))
    return (
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {kind}, NCCL version {version}\n"
        f"{detail}\nLast error:\n{last}"
    )


def duplicate(rank: int, other: int, bus: str) -> str:
    """`initTransportsRank` of NCCL's init.cc answers `ncclInvalidUsage`."""
    return nccl_error(
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {bus}",
    )


def timed_out(work: str, rank: int, elapsed_ms: int) -> str:
    """`WorkNCCL::checkTimeout`; a DistBackendError."""
    return (
        f"[Rank {rank}] Watchdog caught collective operation timeout: {work} ran for {elapsed_ms} milliseconds before "
        "timing out."
    )

"""Whose fault an exception is, by its words: each row of the table, and whole messages as PyTorch prints them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from elche_worker.device.faults import ROWS, RUNTIME, Cause, Known, fault_of, is_device_fault, is_out_of_memory

USER, MEMORY, DEVICE, PEER = Cause.USER, Cause.MEMORY, Cause.DEVICE, Cause.PEER
ADVICE = (
    "\nSearch for `cudaErrorUnknown' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for "
    "more information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
"""What PyTorch adds to an error of the runtime."""
NCCL_VERSION = ", NCCL version 2.28.9\n"
WORKER = "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.words or 'any other'}, by {len(row.said_by)}")
def test_a_row_is_not_hidden_by_one_before_it(row: Known) -> None:
    words = row.words or "words of a later version"
    for said_by in row.said_by or ("",):
        assert fault_of(RuntimeError(f"{WORKER}RuntimeError: {said_by}{words}{ADVICE}")) is row.fault
    assert row.source


def test_no_words_are_listed_twice() -> None:
    assert len({(row.words, row.said_by) for row in ROWS}) == len(ROWS)
    assert all(RUNTIME.values())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        # memory
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.68 GiB", MEMORY),
        ("HIP out of memory. Tried to allocate 76.00 MiB. GPU 1 has a total capacity of 287.98 GiB", MEMORY),
        (f"CUDA error: out of memory{ADVICE}", MEMORY),
        ("HIP error: out of memory", MEMORY),
        ("Triton Error [CUDA]: out of memory", MEMORY),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", MEMORY),
        ("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", MEMORY),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", MEMORY),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", MEMORY),
        ("Unable to find a valid cuDNN algorithm to run convolution", MEMORY),
        ("miopenStatusAllocFailed", MEMORY),
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131, please '
            "report a bug to PyTorch. ",
            MEMORY,
        ),
        ("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried", MEMORY),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
            f"NCCL_DEBUG=INFO for details){NCCL_VERSION}ncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 2 'out of memory'",
            MEMORY,
        ),
        # the program's
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, opa, opb, m, n, k)`", USER),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb)`", USER),
        (
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
            USER,
        ),
        ("cuDNN error: CUDNN_STATUS_BAD_PARAM", USER),
        ("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.", USER),
        (f"CUDA error: device-side assert triggered{ADVICE}", USER),
        ("HIP error: device-side assert triggered", USER),
        (f"CUDA error: invalid argument{ADVICE}", USER),
        ("CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n", USER),
        ("CUDA error: no kernel image is available for execution on the device", USER),
        ("HIP error: invalid device function", USER),
        ("CUDA error: operation not permitted when stream is capturing", USER),
        ("CUDA error: operation failed due to a previous error during capture", USER),
        ("CUDA error: too many resources requested for launch", USER),
        ("miopenStatusBadParm", USER),
        ("cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnSgetrf( handle, m)`", USER),
        ("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use 'spawn'", USER),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", USER),
        ("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!", USER),
        ("", USER),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with "
            f"NCCL_DEBUG=WARN for details){NCCL_VERSION}ncclInvalidUsage: This usually reflects invalid usage of NCCL "
            "library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000",
            USER,
        ),
        # the device's
        (f"CUDA error: an illegal memory access was encountered{ADVICE}", DEVICE),
        ("Triton Error [CUDA]: an illegal memory access was encountered", DEVICE),
        ("Triton Error [HIP]:  Code: 700, Messsage: an illegal memory access was encountered", DEVICE),
        (f"CUDA error: unspecified launch failure{ADVICE}", DEVICE),
        ("CUDA error: uncorrectable ECC error encountered", DEVICE),
        ("HIP error: uncorrectable ECC error encountered", DEVICE),
        ("CUDA error: uncorrectable NVLink error detected during the execution", DEVICE),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", DEVICE),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", DEVICE),
        ("CUDA error: unknown error", DEVICE),
        ("CUDA driver error: unknown error", DEVICE),
        ("CUDA error: misaligned address", DEVICE),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`", DEVICE),
        ("CUDA error: HIPBLAS_STATUS_INTERNAL_ERROR when calling `hipblasSgemm( handle, opa)`", DEVICE),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", DEVICE),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER", DEVICE),
        ("miopenStatusUnknownError", DEVICE),
        ("CUDA error: words that only a later driver has", DEVICE),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1197, unhandled cuda error (run "
            f"with NCCL_DEBUG=INFO for details){NCCL_VERSION}ncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 'an illegal memory access was encountered'",
            DEVICE,
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:121, unhandled system error (run with "
            f"NCCL_DEBUG=INFO for details){NCCL_VERSION}ncclSystemError: System call or external library call failed "
            "or device error.\nLast error:\nCuda failure 'unspecified launch failure'",
            DEVICE,
        ),
        # a peer's
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:121, remote process exited or there was "
            f"a network error{NCCL_VERSION}ncclRemoteError: A call failed possibly due to a network error or a remote "
            "process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer",
            PEER,
        ),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:121, unhandled system error (run with "
            f"NCCL_DEBUG=INFO for details){NCCL_VERSION}ncclSystemError: System call (e.g. socket, malloc) or external "
            "library call failed or device error. ",
            PEER,
        ),
        ("NCCL communicator was aborted on rank 1. ", PEER),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1) ran for 600000 milliseconds", PEER),
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4242", PEER),
    ],
)
def test_what_pytorch_says(text: str, fault: Cause) -> None:
    error = RuntimeError(text)
    assert fault_of(error) is fault
    assert is_device_fault(error) == (fault is DEVICE)
    assert is_out_of_memory(error) == (fault is MEMORY)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (torch.OutOfMemoryError("whatever it says"), MEMORY),
        (MemoryError(), MEMORY),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), DEVICE),
        (dist.DistBackendError("NCCL error in: a.cpp:1, remote process exited or there was a network error"), PEER),
        (ValueError("CUDA error: unspecified launch failure"), USER),
        (KeyboardInterrupt(), USER),
    ],
)
def test_the_type_counts_as_well(error: Any, fault: Cause) -> None:
    """PyTorch raises no other types for faults of devices: a program's own may quote such words."""
    assert fault_of(error) is fault


def test_the_host_says_so_when_it_has_no_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert fault_of(raised.value) is MEMORY

"""Classifies exceptions by the messages of PyTorch and of the vendors' libraries.

Consequences of each fault:

- `USER`: the job fails, with the traceback, and is not restarted: it would fail again on every device.
- `MEMORY`: the allocator's cache is freed, prefetched batches leave the device, and the batch is tried again. With
  `batch_size="auto"` it is then split into twice as many parts, repeatedly. If nothing helps, the job fails as for
  `USER`.
- `DEVICE`: the process ends, and with it the rank; the others train on, and the rank is restarted (protocol P24.3).
- `PEER`: a collective has failed because another rank is lost or cannot be reached. The rank does not fail: it
  abandons its generation (`CollectiveFailed`), and the coordinator decides what follows.

After some errors a process cannot use CUDA any more. An assertion in a kernel is `USER`. An illegal access may be due
to the user's own kernel, a library's, or broken memory, and the message does not tell. It is `DEVICE`: only a new
process can try again, and one broken GPU should not end a job that has trained for days. If the program is at fault,
other ranks die on the same samples, and the job fails for that. A single rank is restarted after up to 30 s. Each has
its traceback in the log.

An error of CUDA or NCCL that is not in the table is `DEVICE` or `PEER`: trying again costs less than giving up. All
other exceptions are `USER`.
"""

from dataclasses import dataclass
from enum import Enum, auto

import torch


class Cause(Enum):
    """The cause of an exception."""

    USER = auto()
    """The program or its setup."""
    MEMORY = auto()
    """Too little memory, on the device or on the host."""
    DEVICE = auto()
    """The device, its driver, or a state in which this process cannot use the device any more."""
    PEER = auto()
    """Another rank, or the network between them."""


@dataclass(frozen=True, slots=True)
class Said:
    """An error whose message has `words`, on one line after one of `said_by` if there are any."""

    fault: Cause
    words: str
    source: str
    """The source file, or constant, of the words."""
    said_by: tuple[str, ...] = ()


RUNTIME = {
    "CUDA error: ": "pytorch c10/cuda/CUDAException.cpp",
    "CUDA driver error: ": "pytorch aten/src/ATen/cuda/Exceptions.h",
    "HIP error: ": "pytorch c10/hip/HIPException.cpp, made of CUDAException.cpp; ATen/miopen/Exceptions.h",
    "Triton Error [CUDA]: ": "triton third_party/nvidia/backend/driver.py, what torch.compile launches kernels with",
    "Triton Error [HIP]: ": "triton third_party/amd/backend/driver.py",
    "Cuda failure ": "nccl src/include/checks.h, after 'Last error:' in torch's message; rccl, the same",
    "HIP failure ": "rccl src/include/checks.h",
}
"""Prefixes of the messages of the CUDA runtime and of HIP, whose words are the same, with the source that writes
each."""
ALL = tuple(RUNTIME)
NCCL = ("NCCL error",)
"""Pytorch torch/csrc/distributed/c10d/NCCLUtils.hpp, of RCCL as well."""

U, M, D, P = Cause.USER, Cause.MEMORY, Cause.DEVICE, Cause.PEER
ROWS = (
    # Memory: the allocators of PyTorch
    Said(M, "out of memory. Tried to allocate", "pytorch c10/cuda/CUDACachingAllocator.cpp"),
    Said(M, "NVML_SUCCESS == r INTERNAL ASSERT FAILED", "the same: it fails while it writes the message above"),
    Said(M, "DefaultCPUAllocator: can't allocate memory", "pytorch c10/core/impl/alloc_cpu.cpp"),
    Said(M, "DefaultCPUAllocator: not enough memory", "pytorch c10/core/impl/alloc_cpu.cpp, on Windows"),
    Said(M, "std::bad_alloc", "C++, as pytorch torch/csrc/Exceptions.h passes it on"),
    # The CUDA runtime's errors by number, in CUDA's driver_types.h; HIP's words in clr hipamd/src/hip_error.cpp
    Said(M, "out of memory", "2 cudaErrorMemoryAllocation, hipErrorOutOfMemory", ALL),
    Said(U, "invalid argument", "1 cudaErrorInvalidValue", ALL),
    Said(U, "initialization error", "3 cudaErrorInitializationError: in a process that was forked", ALL),
    Said(D, "driver shutting down", "4 cudaErrorCudartUnloading", ALL),
    Said(U, "invalid configuration argument", "9 cudaErrorInvalidConfiguration", ALL),
    Said(U, "invalid pitch argument", "12 cudaErrorInvalidPitchValue", ALL),
    Said(U, "invalid device symbol", "13 cudaErrorInvalidSymbol", ALL),
    Said(U, "invalid device pointer", "17 cudaErrorInvalidDevicePointer", ALL),
    Said(U, "invalid copy direction for memcpy", "21 cudaErrorInvalidMemcpyDirection", ALL),
    Said(U, "driver version is insufficient for", "35 cudaErrorInsufficientDriver", ALL),
    Said(D, "device(s) is/are busy or unavailable", "46 cudaErrorDevicesUnavailable", ALL),
    Said(D, "devices are busy or unavailable", "46, before CUDA 12", ALL),
    Said(U, "invalid device function", "98 cudaErrorInvalidDeviceFunction", ALL),
    Said(D, "-capable device is detected", "100 cudaErrorNoDevice, hipErrorNoDevice", ALL),
    Said(U, "invalid device ordinal", "101 cudaErrorInvalidDevice", ALL),
    Said(U, "device kernel image is invalid", "200 cudaErrorInvalidKernelImage", ALL),
    Said(D, "invalid device context", "201 cudaErrorDeviceUninitialized", ALL),
    Said(U, "no kernel image is available for execution on the device", "209 cudaErrorNoKernelImageForDevice", ALL),
    Said(D, "uncorrectable ECC error encountered", "214 cudaErrorECCUncorrectable, hipErrorECCNotCorrectable", ALL),
    Said(U, "limit is not supported on this architecture", "215 cudaErrorUnsupportedLimit", ALL),
    Said(D, "device already in use by a different thread", "216 cudaErrorDeviceAlreadyInUse", ALL),
    Said(U, "peer access is not supported between these two devices", "217 cudaErrorPeerAccessUnsupported", ALL),
    Said(U, "a PTX JIT compilation failed", "218 cudaErrorInvalidPtx", ALL),
    Said(D, "uncorrectable NVLink error", "220 cudaErrorNvlinkUncorrectable", ALL),
    Said(U, "PTX was compiled with an unsupported toolchain", "222 cudaErrorUnsupportedPtxVersion", ALL),
    Said(D, "OS call failed or operation not supported on this OS", "304 cudaErrorOperatingSystem", ALL),
    Said(U, "invalid resource handle", "400 cudaErrorInvalidResourceHandle, hipErrorInvalidHandle", ALL),
    Said(U, "the operation cannot be performed in the present state", "401 cudaErrorIllegalState", ALL),
    Said(U, "named symbol not found", "500 cudaErrorSymbolNotFound", ALL),
    Said(D, "an illegal memory access was encountered", "700 cudaErrorIllegalAddress", ALL),
    Said(U, "too many resources requested for launch", "701 cudaErrorLaunchOutOfResources", ALL),
    Said(D, "the launch timed out and was terminated", "702 cudaErrorLaunchTimeout", ALL),
    Said(D, "context is destroyed", "709 cudaErrorContextIsDestroyed", ALL),
    Said(U, "device-side assert triggered", "710 cudaErrorAssert", ALL),
    Said(D, "hardware stack error", "714 cudaErrorHardwareStackError", ALL),
    Said(D, "an illegal instruction was encountered", "715 cudaErrorIllegalInstruction", ALL),
    Said(D, "misaligned address", "716 cudaErrorMisalignedAddress", ALL),
    Said(D, "operation not supported on global/shared address space", "717 cudaErrorInvalidAddressSpace", ALL),
    Said(D, "invalid program counter", "718 cudaErrorInvalidPc", ALL),
    Said(D, "unspecified launch failure", "719 cudaErrorLaunchFailure", ALL),
    Said(U, "too many blocks in cooperative launch", "720 cudaErrorCooperativeLaunchTooLarge", ALL),
    Said(U, "captur", "900 to 908, cudaErrorStreamCapture...: each has the word capture or capturing", ALL),
    Said(U, "operation not permitted", "800 cudaErrorNotPermitted", ALL),
    Said(U, "operation not supported", "801 cudaErrorNotSupported", ALL),
    Said(D, "system not yet initialized", "802 cudaErrorSystemNotReady", ALL),
    Said(U, "unsupported display driver / cuda driver combination", "803 cudaErrorSystemDriverMismatch", ALL),
    Said(U, "forward compatibility was attempted on non supported HW", "804", ALL),
    Said(U, "due to cluster misconfiguration", "912 cudaErrorInvalidClusterSize", ALL),
    Said(D, "unknown error", "999 cudaErrorUnknown", ALL),
    # cuBLAS, in pytorch aten/src/ATen/cuda/Exceptions.cpp (_cublasGetErrorEnum)
    Said(M, "CUBLAS_STATUS_ALLOC_FAILED", "cublas_api.h: resources could not be allocated"),
    Said(D, "CUBLAS_STATUS_NOT_INITIALIZED", "cublas_api.h: the runtime, or how the hardware is set up, has failed"),
    Said(U, "CUBLAS_STATUS_INVALID_VALUE", "cublas_api.h"),
    Said(U, "CUBLAS_STATUS_ARCH_MISMATCH", "cublas_api.h: the device lacks what the function needs"),
    Said(D, "CUBLAS_STATUS_MAPPING_ERROR", "cublas_api.h: an access to device memory has failed"),
    Said(D, "CUBLAS_STATUS_EXECUTION_FAILED", "cublas_api.h: a kernel could not be launched"),
    Said(D, "CUBLAS_STATUS_INTERNAL_ERROR", "cublas_api.h: a copy on the device has failed"),
    Said(U, "CUBLAS_STATUS_NOT_SUPPORTED", "cublas_api.h"),
    Said(U, "CUBLAS_STATUS_LICENSE_ERROR", "cublas_api.h"),
    # hipBLAS, in the same file (_hipblasGetErrorEnum)
    Said(M, "HIPBLAS_STATUS_ALLOC_FAILED", "hipblas.h"),
    Said(D, "HIPBLAS_STATUS_NOT_INITIALIZED", "hipblas.h"),
    Said(U, "HIPBLAS_STATUS_INVALID_VALUE", "hipblas.h"),
    Said(U, "HIPBLAS_STATUS_INVALID_ENUM", "hipblas.h"),
    Said(U, "HIPBLAS_STATUS_HANDLE_IS_NULLPTR", "hipblas.h"),
    Said(U, "HIPBLAS_STATUS_ARCH_MISMATCH", "hipblas.h"),
    Said(D, "HIPBLAS_STATUS_MAPPING_ERROR", "hipblas.h"),
    Said(D, "HIPBLAS_STATUS_EXECUTION_FAILED", "hipblas.h"),
    Said(D, "HIPBLAS_STATUS_INTERNAL_ERROR", "hipblas.h"),
    Said(U, "HIPBLAS_STATUS_NOT_SUPPORTED", "hipblas.h"),
    Said(D, "HIPBLAS_STATUS_UNKNOWN", "hipblas.h"),
    # cuDNN, after "cuDNN error: " in pytorch aten/src/ATen/cuda/Exceptions.h; longer names begin with shorter ones
    Said(M, "CUDNN_STATUS_ALLOC_FAILED", "cudnn.h, before cuDNN 9"),
    Said(M, "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "cudnn_graph.h"),
    Said(M, "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cudnn_graph.h"),
    Said(M, "valid cuDNN algorithm to run convolution", "pytorch ATen/native/cudnn/Conv_v7.cpp: it tries all that fit"),
    Said(M, "was unable to find an engine to execute", "pytorch ATen/native/cudnn/Conv_v8.cpp: it tries all that fit"),
    Said(U, "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED", "cudnn_graph.h"),
    Said(U, "CUDNN_STATUS_BAD_PARAM", "cudnn_graph.h"),
    Said(U, "CUDNN_STATUS_INVALID_VALUE", "cudnn.h, before cuDNN 9"),
    Said(U, "CUDNN_STATUS_ARCH_MISMATCH", "cudnn.h, before cuDNN 9"),
    Said(U, "CUDNN_STATUS_NOT_SUPPORTED", "cudnn_graph.h, with what was not supported"),
    Said(U, "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "cudnn_graph.h"),
    Said(U, "cuDNN Frontend error: ", "pytorch aten/src/ATen/cuda/Exceptions.h: no plan for these shapes"),
    Said(D, "CUDNN_STATUS_NOT_INITIALIZED", "cudnn_graph.h: no device, or the runtime has failed"),
    Said(D, "CUDNN_STATUS_MAPPING_ERROR", "cudnn.h, before cuDNN 9"),
    Said(D, "CUDNN_STATUS_EXECUTION_FAILED", "cudnn_graph.h, with the library that has failed"),
    Said(D, "CUDNN_STATUS_INTERNAL_ERROR", "cudnn_graph.h"),
    # MIOpen, in miopen.h; pytorch ATen/miopen/Exceptions.h writes the name alone
    Said(M, "miopenStatusAllocFailed", "miopen.h"),
    Said(U, "miopenStatusInvalidValue", "miopen.h"),
    Said(U, "miopenStatusBadParm", "miopen.h"),
    Said(U, "miopenStatusNotImplemented", "miopen.h"),
    Said(U, "miopenStatusUnsupportedOp", "miopen.h"),
    Said(U, "miopenStatusVersionMismatch", "miopen.h"),
    Said(D, "miopenStatusNotInitialized", "miopen.h"),
    Said(D, "miopenStatusInternalError", "miopen.h"),
    Said(D, "miopenStatusUnknownError", "miopen.h"),
    # cuSOLVER and hipSOLVER, in pytorch aten/src/ATen/cuda/Exceptions.h
    Said(M, "SOLVER_STATUS_ALLOC_FAILED", "cusolver_common.h, hipsolver-types.h"),
    Said(D, "SOLVER_STATUS_EXECUTION_FAILED", "cusolver_common.h, hipsolver-types.h"),
    Said(D, "SOLVER_STATUS_INTERNAL_ERROR", "cusolver_common.h, hipsolver-types.h"),
    # cuSPARSE and hipSPARSE have words of their own after "CUDA error: "
    Said(U, "when calling `cusparse", "pytorch aten/src/ATen/cuda/Exceptions.h"),
    Said(U, "when calling `hipsparse", "pytorch aten/src/ATen/cuda/Exceptions.h"),
    # NCCL and RCCL, ncclGetErrorString in src/init.cc; a failure of CUDA within has been told above
    Said(P, "remote process exited or there was a network error", "ncclRemoteError", NCCL),
    Said(P, "unhandled system error", "ncclSystemError: a socket, or a peer that is gone", NCCL),
    Said(D, "unhandled cuda error", "ncclUnhandledCudaError", NCCL),
    Said(U, "invalid usage", "ncclInvalidUsage: such as one device for two ranks", NCCL),
    Said(U, "invalid argument", "ncclInvalidArgument", NCCL),
    Said(P, "internal error", "ncclInternalError", NCCL),
    Said(P, "NCCL communicator was aborted on rank", "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp"),
    Said(P, "Watchdog caught collective operation timeout", "pytorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"),
    Said(P, "NCCL timeout in", "pytorch torch/csrc/distributed/c10d/NCCLUtils.hpp"),
    Said(P, "gloo/transport/", "gloo's files, which it names: gloo/common/logging.h"),
    Said(P, "Application timeout caused pair closure", "gloo gloo/transport/tcp/unbound_buffer.cc"),
    # What none of the rows above has
    Said(P, "", "an error of NCCL that is not listed", NCCL),
    Said(D, "", "an error of the runtime that is not listed", ALL),
)
"""The first match counts."""


def fault_of(error: BaseException) -> Cause:
    """Classifies an exception. PyTorch raises the errors of devices and libraries as `RuntimeError`."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Cause.MEMORY
    if not isinstance(error, RuntimeError):
        return Cause.USER
    lines = str(error).splitlines()
    return next((row.fault for row in ROWS if any(_has(row, line) for line in lines)), Cause.USER)


def _has(row: Said, line: str) -> bool:
    if not row.said_by:
        return row.words in line
    return any(row.words in line.partition(said_by)[2] for said_by in row.said_by if said_by in line)


def is_device_fault(error: BaseException) -> bool:
    """True if the process cannot use its device any more, and the program is not known to be at fault."""
    return fault_of(error) is Cause.DEVICE


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on a device or on the host."""
    return fault_of(error) is Cause.MEMORY

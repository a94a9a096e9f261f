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


class Fault(Enum):
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
class Row:
    """An error whose message has `words`, on one line after one of `said_by` if there are any."""

    fault: Fault
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

U, M, D, P = Fault.USER, Fault.MEMORY, Fault.DEVICE, Fault.PEER
ROWS = (
    # Memory: the allocators of PyTorch
    Row(M, "out of memory. Tried to allocate", "pytorch c10/cuda/CUDACachingAllocator.cpp"),
    Row(M, "NVML_SUCCESS == r INTERNAL ASSERT FAILED", "the same: it fails while it writes the message above"),
    Row(M, "DefaultCPUAllocator: can't allocate memory", "pytorch c10/core/impl/alloc_cpu.cpp"),
    Row(M, "DefaultCPUAllocator: not enough memory", "pytorch c10/core/impl/alloc_cpu.cpp, on Windows"),
    Row(M, "std::bad_alloc", "C++, as pytorch torch/csrc/Exceptions.h passes it on"),
    # The CUDA runtime's errors by number, in CUDA's driver_types.h; HIP's words in clr hipamd/src/hip_error.cpp
    Row(M, "out of memory", "2 cudaErrorMemoryAllocation, hipErrorOutOfMemory", ALL),
    Row(U, "invalid argument", "1 cudaErrorInvalidValue", ALL),
    Row(U, "initialization error", "3 cudaErrorInitializationError: in a process that was forked", ALL),
    Row(D, "driver shutting down", "4 cudaErrorCudartUnloading", ALL),
    Row(U, "invalid configuration argument", "9 cudaErrorInvalidConfiguration", ALL),
    Row(U, "invalid pitch argument", "12 cudaErrorInvalidPitchValue", ALL),
    Row(U, "invalid device symbol", "13 cudaErrorInvalidSymbol", ALL),
    Row(U, "invalid device pointer", "17 cudaErrorInvalidDevicePointer", ALL),
    Row(U, "invalid copy direction for memcpy", "21 cudaErrorInvalidMemcpyDirection", ALL),
    Row(U, "driver version is insufficient for", "35 cudaErrorInsufficientDriver", ALL),
    Row(D, "device(s) is/are busy or unavailable", "46 cudaErrorDevicesUnavailable", ALL),
    Row(D, "devices are busy or unavailable", "46, before CUDA 12", ALL),
    Row(U, "invalid device function", "98 cudaErrorInvalidDeviceFunction", ALL),
    Row(D, "-capable device is detected", "100 cudaErrorNoDevice, hipErrorNoDevice", ALL),
    Row(U, "invalid device ordinal", "101 cudaErrorInvalidDevice", ALL),
    Row(U, "device kernel image is invalid", "200 cudaErrorInvalidKernelImage", ALL),
    Row(D, "invalid device context", "201 cudaErrorDeviceUninitialized", ALL),
    Row(U, "no kernel image is available for execution on the device", "209 cudaErrorNoKernelImageForDevice", ALL),
    Row(D, "uncorrectable ECC error encountered", "214 cudaErrorECCUncorrectable, hipErrorECCNotCorrectable", ALL),
    Row(U, "limit is not supported on this architecture", "215 cudaErrorUnsupportedLimit", ALL),
    Row(D, "device already in use by a different thread", "216 cudaErrorDeviceAlreadyInUse", ALL),
    Row(U, "peer access is not supported between these two devices", "217 cudaErrorPeerAccessUnsupported", ALL),
    Row(U, "a PTX JIT compilation failed", "218 cudaErrorInvalidPtx", ALL),
    Row(D, "uncorrectable NVLink error", "220 cudaErrorNvlinkUncorrectable", ALL),
    Row(U, "PTX was compiled with an unsupported toolchain", "222 cudaErrorUnsupportedPtxVersion", ALL),
    Row(D, "OS call failed or operation not supported on this OS", "304 cudaErrorOperatingSystem", ALL),
    Row(U, "invalid resource handle", "400 cudaErrorInvalidResourceHandle, hipErrorInvalidHandle", ALL),
    Row(U, "the operation cannot be performed in the present state", "401 cudaErrorIllegalState", ALL),
    Row(U, "named symbol not found", "500 cudaErrorSymbolNotFound", ALL),
    Row(D, "an illegal memory access was encountered", "700 cudaErrorIllegalAddress", ALL),
    Row(U, "too many resources requested for launch", "701 cudaErrorLaunchOutOfResources", ALL),
    Row(D, "the launch timed out and was terminated", "702 cudaErrorLaunchTimeout", ALL),
    Row(D, "context is destroyed", "709 cudaErrorContextIsDestroyed", ALL),
    Row(U, "device-side assert triggered", "710 cudaErrorAssert", ALL),
    Row(D, "hardware stack error", "714 cudaErrorHardwareStackError", ALL),
    Row(D, "an illegal instruction was encountered", "715 cudaErrorIllegalInstruction", ALL),
    Row(D, "misaligned address", "716 cudaErrorMisalignedAddress", ALL),
    Row(D, "operation not supported on global/shared address space", "717 cudaErrorInvalidAddressSpace", ALL),
    Row(D, "invalid program counter", "718 cudaErrorInvalidPc", ALL),
    Row(D, "unspecified launch failure", "719 cudaErrorLaunchFailure", ALL),
    Row(U, "too many blocks in cooperative launch", "720 cudaErrorCooperativeLaunchTooLarge", ALL),
    Row(U, "captur", "900 to 908, cudaErrorStreamCapture...: each has the word capture or capturing", ALL),
    Row(U, "operation not permitted", "800 cudaErrorNotPermitted", ALL),
    Row(U, "operation not supported", "801 cudaErrorNotSupported", ALL),
    Row(D, "system not yet initialized", "802 cudaErrorSystemNotReady", ALL),
    Row(U, "unsupported display driver / cuda driver combination", "803 cudaErrorSystemDriverMismatch", ALL),
    Row(U, "forward compatibility was attempted on non supported HW", "804", ALL),
    Row(U, "due to cluster misconfiguration", "912 cudaErrorInvalidClusterSize", ALL),
    Row(D, "unknown error", "999 cudaErrorUnknown", ALL),
    # cuBLAS, in pytorch aten/src/ATen/cuda/Exceptions.cpp (_cublasGetErrorEnum)
    Row(M, "CUBLAS_STATUS_ALLOC_FAILED", "cublas_api.h: resources could not be allocated"),
    Row(D, "CUBLAS_STATUS_NOT_INITIALIZED", "cublas_api.h: the runtime, or how the hardware is set up, has failed"),
    Row(U, "CUBLAS_STATUS_INVALID_VALUE", "cublas_api.h"),
    Row(U, "CUBLAS_STATUS_ARCH_MISMATCH", "cublas_api.h: the device lacks what the function needs"),
    Row(D, "CUBLAS_STATUS_MAPPING_ERROR", "cublas_api.h: an access to device memory has failed"),
    Row(D, "CUBLAS_STATUS_EXECUTION_FAILED", "cublas_api.h: a kernel could not be launched"),
    Row(D, "CUBLAS_STATUS_INTERNAL_ERROR", "cublas_api.h: a copy on the device has failed"),
    Row(U, "CUBLAS_STATUS_NOT_SUPPORTED", "cublas_api.h"),
    Row(U, "CUBLAS_STATUS_LICENSE_ERROR", "cublas_api.h"),
    # hipBLAS, in the same file (_hipblasGetErrorEnum)
    Row(M, "HIPBLAS_STATUS_ALLOC_FAILED", "hipblas.h"),
    Row(D, "HIPBLAS_STATUS_NOT_INITIALIZED", "hipblas.h"),
    Row(U, "HIPBLAS_STATUS_INVALID_VALUE", "hipblas.h"),
    Row(U, "HIPBLAS_STATUS_INVALID_ENUM", "hipblas.h"),
    Row(U, "HIPBLAS_STATUS_HANDLE_IS_NULLPTR", "hipblas.h"),
    Row(U, "HIPBLAS_STATUS_ARCH_MISMATCH", "hipblas.h"),
    Row(D, "HIPBLAS_STATUS_MAPPING_ERROR", "hipblas.h"),
    Row(D, "HIPBLAS_STATUS_EXECUTION_FAILED", "hipblas.h"),
    Row(D, "HIPBLAS_STATUS_INTERNAL_ERROR", "hipblas.h"),
    Row(U, "HIPBLAS_STATUS_NOT_SUPPORTED", "hipblas.h"),
    Row(D, "HIPBLAS_STATUS_UNKNOWN", "hipblas.h"),
    # cuDNN, after "cuDNN error: " in pytorch aten/src/ATen/cuda/Exceptions.h; longer names begin with shorter ones
    Row(M, "CUDNN_STATUS_ALLOC_FAILED", "cudnn.h, before cuDNN 9"),
    Row(M, "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "cudnn_graph.h"),
    Row(M, "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cudnn_graph.h"),
    Row(M, "valid cuDNN algorithm to run convolution", "pytorch ATen/native/cudnn/Conv_v7.cpp: it tries all that fit"),
    Row(M, "was unable to find an engine to execute", "pytorch ATen/native/cudnn/Conv_v8.cpp: it tries all that fit"),
    Row(U, "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED", "cudnn_graph.h"),
    Row(U, "CUDNN_STATUS_BAD_PARAM", "cudnn_graph.h"),
    Row(U, "CUDNN_STATUS_INVALID_VALUE", "cudnn.h, before cuDNN 9"),
    Row(U, "CUDNN_STATUS_ARCH_MISMATCH", "cudnn.h, before cuDNN 9"),
    Row(U, "CUDNN_STATUS_NOT_SUPPORTED", "cudnn_graph.h, with what was not supported"),
    Row(U, "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "cudnn_graph.h"),
    Row(U, "cuDNN Frontend error: ", "pytorch aten/src/ATen/cuda/Exceptions.h: no plan for these shapes"),
    Row(D, "CUDNN_STATUS_NOT_INITIALIZED", "cudnn_graph.h: no device, or the runtime has failed"),
    Row(D, "CUDNN_STATUS_MAPPING_ERROR", "cudnn.h, before cuDNN 9"),
    Row(D, "CUDNN_STATUS_EXECUTION_FAILED", "cudnn_graph.h, with the library that has failed"),
    Row(D, "CUDNN_STATUS_INTERNAL_ERROR", "cudnn_graph.h"),
    # MIOpen, in miopen.h; pytorch ATen/miopen/Exceptions.h writes the name alone
    Row(M, "miopenStatusAllocFailed", "miopen.h"),
    Row(U, "miopenStatusInvalidValue", "miopen.h"),
    Row(U, "miopenStatusBadParm", "miopen.h"),
    Row(U, "miopenStatusNotImplemented", "miopen.h"),
    Row(U, "miopenStatusUnsupportedOp", "miopen.h"),
    Row(U, "miopenStatusVersionMismatch", "miopen.h"),
    Row(D, "miopenStatusNotInitialized", "miopen.h"),
    Row(D, "miopenStatusInternalError", "miopen.h"),
    Row(D, "miopenStatusUnknownError", "miopen.h"),
    # cuSOLVER and hipSOLVER, in pytorch aten/src/ATen/cuda/Exceptions.h
    Row(M, "SOLVER_STATUS_ALLOC_FAILED", "cusolver_common.h, hipsolver-types.h"),
    Row(D, "SOLVER_STATUS_EXECUTION_FAILED", "cusolver_common.h, hipsolver-types.h"),
    Row(D, "SOLVER_STATUS_INTERNAL_ERROR", "cusolver_common.h, hipsolver-types.h"),
    # cuSPARSE and hipSPARSE have words of their own after "CUDA error: "
    Row(U, "when calling `cusparse", "pytorch aten/src/ATen/cuda/Exceptions.h"),
    Row(U, "when calling `hipsparse", "pytorch aten/src/ATen/cuda/Exceptions.h"),
    # NCCL and RCCL, ncclGetErrorString in src/init.cc; a failure of CUDA within has been told above
    Row(P, "remote process exited or there was a network error", "ncclRemoteError", NCCL),
    Row(P, "unhandled system error", "ncclSystemError: a socket, or a peer that is gone", NCCL),
    Row(D, "unhandled cuda error", "ncclUnhandledCudaError", NCCL),
    Row(U, "invalid usage", "ncclInvalidUsage: such as one device for two ranks", NCCL),
    Row(U, "invalid argument", "ncclInvalidArgument", NCCL),
    Row(P, "internal error", "ncclInternalError", NCCL),
    Row(P, "NCCL communicator was aborted on rank", "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp"),
    Row(P, "Watchdog caught collective operation timeout", "pytorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"),
    Row(P, "NCCL timeout in", "pytorch torch/csrc/distributed/c10d/NCCLUtils.hpp"),
    Row(P, "gloo/transport/", "gloo's files, which it names: gloo/common/logging.h"),
    Row(P, "Application timeout caused pair closure", "gloo gloo/transport/tcp/unbound_buffer.cc"),
    # What none of the rows above has
    Row(P, "", "an error of NCCL that is not listed", NCCL),
    Row(D, "", "an error of the runtime that is not listed", ALL),
)
"""The first match counts."""


def fault_of(error: BaseException) -> Fault:
    """Classifies an exception. PyTorch raises the errors of devices and libraries as `RuntimeError`."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Fault.MEMORY
    if not isinstance(error, RuntimeError):
        return Fault.USER
    lines = str(error).splitlines()
    return next((row.fault for row in ROWS if any(_has(row, line) for line in lines)), Fault.USER)


def _has(row: Row, line: str) -> bool:
    if not row.said_by:
        return row.words in line
    return any(row.words in line.partition(said_by)[2] for said_by in row.said_by if said_by in line)


def is_device_fault(error: BaseException) -> bool:
    """True if the process cannot use its device any more, and the program is not known to be at fault."""
    return fault_of(error) is Fault.DEVICE


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on a device or on the host."""
    return fault_of(error) is Fault.MEMORY

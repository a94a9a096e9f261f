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
class Known:
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
"""Prefixes of the messages of CUDA's runtime and of HIP, whose words are the same, with their source."""
ALL = tuple(RUNTIME)
NCCL = ("NCCL error",)
"""Pytorch torch/csrc/distributed/c10d/NCCLUtils.hpp, of RCCL as well."""

U, M, D, P = Cause.USER, Cause.MEMORY, Cause.DEVICE, Cause.PEER
ROWS = (
    # Memory: the allocators of PyTorch
    Known(M, "out of memory. Tried to allocate", "pytorch c10/cuda/CUDACachingAllocator.cpp"),
    Known(M, "NVML_SUCCESS == r INTERNAL ASSERT FAILED", "the same: it fails while it writes the message above"),
    Known(M, "DefaultCPUAllocator: can't allocate memory", "pytorch c10/core/impl/alloc_cpu.cpp"),
    Known(M, "DefaultCPUAllocator: not enough memory", "pytorch c10/core/impl/alloc_cpu.cpp, on Windows"),
    Known(M, "std::bad_alloc", "C++, as pytorch torch/csrc/Exceptions.h passes it on"),
    # The CUDA runtime's errors by number, in CUDA's driver_types.h; HIP's words in clr hipamd/src/hip_error.cpp. Not
    # those that are `DEVICE`, as all that is not listed, unless a row below has words of theirs.
    Known(M, "out of memory", "2 cudaErrorMemoryAllocation, hipErrorOutOfMemory", ALL),
    Known(U, "invalid argument", "1 cudaErrorInvalidValue", ALL),
    Known(U, "initialization error", "3 cudaErrorInitializationError: in a process that was forked", ALL),
    Known(U, "invalid configuration argument", "9 cudaErrorInvalidConfiguration", ALL),
    Known(U, "invalid pitch argument", "12 cudaErrorInvalidPitchValue", ALL),
    Known(U, "invalid device symbol", "13 cudaErrorInvalidSymbol", ALL),
    Known(U, "invalid device pointer", "17 cudaErrorInvalidDevicePointer", ALL),
    Known(U, "invalid copy direction for memcpy", "21 cudaErrorInvalidMemcpyDirection", ALL),
    Known(U, "driver version is insufficient for", "35 cudaErrorInsufficientDriver", ALL),
    Known(U, "invalid device function", "98 cudaErrorInvalidDeviceFunction", ALL),
    Known(U, "invalid device ordinal", "101 cudaErrorInvalidDevice", ALL),
    Known(U, "device kernel image is invalid", "200 cudaErrorInvalidKernelImage", ALL),
    Known(U, "no kernel image is available for execution on the device", "209 cudaErrorNoKernelImageForDevice", ALL),
    Known(U, "limit is not supported on this architecture", "215 cudaErrorUnsupportedLimit", ALL),
    Known(U, "peer access is not supported between these two devices", "217 cudaErrorPeerAccessUnsupported", ALL),
    Known(U, "a PTX JIT compilation failed", "218 cudaErrorInvalidPtx", ALL),
    Known(U, "PTX was compiled with an unsupported toolchain", "222 cudaErrorUnsupportedPtxVersion", ALL),
    Known(D, "OS call failed or operation not supported on this OS", "304 cudaErrorOperatingSystem", ALL),
    Known(U, "invalid resource handle", "400 cudaErrorInvalidResourceHandle, hipErrorInvalidHandle", ALL),
    Known(U, "the operation cannot be performed in the present state", "401 cudaErrorIllegalState", ALL),
    Known(U, "named symbol not found", "500 cudaErrorSymbolNotFound", ALL),
    Known(U, "too many resources requested for launch", "701 cudaErrorLaunchOutOfResources", ALL),
    Known(U, "device-side assert triggered", "710 cudaErrorAssert", ALL),
    Known(D, "operation not supported on global/shared address space", "717 cudaErrorInvalidAddressSpace", ALL),
    Known(U, "too many blocks in cooperative launch", "720 cudaErrorCooperativeLaunchTooLarge", ALL),
    Known(U, "captur", "900 to 908, cudaErrorStreamCapture...: each has the word capture or capturing", ALL),
    Known(U, "operation not permitted", "800 cudaErrorNotPermitted", ALL),
    Known(U, "operation not supported", "801 cudaErrorNotSupported", ALL),
    Known(U, "unsupported display driver / cuda driver combination", "803 cudaErrorSystemDriverMismatch", ALL),
    Known(U, "forward compatibility was attempted on non supported HW", "804", ALL),
    Known(U, "due to cluster misconfiguration", "912 cudaErrorInvalidClusterSize", ALL),
    # cuBLAS, in pytorch aten/src/ATen/cuda/Exceptions.cpp (_cublasGetErrorEnum)
    Known(M, "CUBLAS_STATUS_ALLOC_FAILED", "cublas_api.h: resources could not be allocated"),
    Known(D, "CUBLAS_STATUS_NOT_INITIALIZED", "cublas_api.h: the runtime, or how the hardware is set up, has failed"),
    Known(U, "CUBLAS_STATUS_INVALID_VALUE", "cublas_api.h"),
    Known(U, "CUBLAS_STATUS_ARCH_MISMATCH", "cublas_api.h: the device lacks what the function needs"),
    Known(D, "CUBLAS_STATUS_MAPPING_ERROR", "cublas_api.h: an access to device memory has failed"),
    Known(D, "CUBLAS_STATUS_EXECUTION_FAILED", "cublas_api.h: a kernel could not be launched"),
    Known(D, "CUBLAS_STATUS_INTERNAL_ERROR", "cublas_api.h: a copy on the device has failed"),
    Known(U, "CUBLAS_STATUS_NOT_SUPPORTED", "cublas_api.h"),
    Known(U, "CUBLAS_STATUS_LICENSE_ERROR", "cublas_api.h"),
    # hipBLAS, in the same file (_hipblasGetErrorEnum)
    Known(M, "HIPBLAS_STATUS_ALLOC_FAILED", "hipblas.h"),
    Known(D, "HIPBLAS_STATUS_NOT_INITIALIZED", "hipblas.h"),
    Known(U, "HIPBLAS_STATUS_INVALID_VALUE", "hipblas.h"),
    Known(U, "HIPBLAS_STATUS_INVALID_ENUM", "hipblas.h"),
    Known(U, "HIPBLAS_STATUS_HANDLE_IS_NULLPTR", "hipblas.h"),
    Known(U, "HIPBLAS_STATUS_ARCH_MISMATCH", "hipblas.h"),
    Known(D, "HIPBLAS_STATUS_MAPPING_ERROR", "hipblas.h"),
    Known(D, "HIPBLAS_STATUS_EXECUTION_FAILED", "hipblas.h"),
    Known(D, "HIPBLAS_STATUS_INTERNAL_ERROR", "hipblas.h"),
    Known(U, "HIPBLAS_STATUS_NOT_SUPPORTED", "hipblas.h"),
    Known(D, "HIPBLAS_STATUS_UNKNOWN", "hipblas.h"),
    # cuDNN, after "cuDNN error: " in pytorch aten/src/ATen/cuda/Exceptions.h; longer names begin with shorter ones
    Known(M, "CUDNN_STATUS_ALLOC_FAILED", "cudnn.h, before cuDNN 9"),
    Known(M, "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "cudnn_graph.h"),
    Known(M, "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cudnn_graph.h"),
    Known(M, "valid cuDNN algorithm to run convolution", "pytorch ATen/native/cudnn/Conv_v7.cpp: tries all that fit"),
    Known(M, "was unable to find an engine to execute", "pytorch ATen/native/cudnn/Conv_v8.cpp: tries all that fit"),
    Known(U, "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED", "cudnn_graph.h"),
    Known(U, "CUDNN_STATUS_BAD_PARAM", "cudnn_graph.h"),
    Known(U, "CUDNN_STATUS_INVALID_VALUE", "cudnn.h, before cuDNN 9"),
    Known(U, "CUDNN_STATUS_ARCH_MISMATCH", "cudnn.h, before cuDNN 9"),
    Known(U, "CUDNN_STATUS_NOT_SUPPORTED", "cudnn_graph.h, with what was not supported"),
    Known(U, "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "cudnn_graph.h"),
    Known(U, "cuDNN Frontend error: ", "pytorch aten/src/ATen/cuda/Exceptions.h: no plan for these shapes"),
    Known(D, "CUDNN_STATUS_NOT_INITIALIZED", "cudnn_graph.h: no device, or the runtime has failed"),
    Known(D, "CUDNN_STATUS_MAPPING_ERROR", "cudnn.h, before cuDNN 9"),
    Known(D, "CUDNN_STATUS_EXECUTION_FAILED", "cudnn_graph.h, with the library that has failed"),
    Known(D, "CUDNN_STATUS_INTERNAL_ERROR", "cudnn_graph.h"),
    # MIOpen, in miopen.h; pytorch ATen/miopen/Exceptions.h writes the name alone
    Known(M, "miopenStatusAllocFailed", "miopen.h"),
    Known(U, "miopenStatusInvalidValue", "miopen.h"),
    Known(U, "miopenStatusBadParm", "miopen.h"),
    Known(U, "miopenStatusNotImplemented", "miopen.h"),
    Known(U, "miopenStatusUnsupportedOp", "miopen.h"),
    Known(U, "miopenStatusVersionMismatch", "miopen.h"),
    Known(D, "miopenStatusNotInitialized", "miopen.h"),
    Known(D, "miopenStatusInternalError", "miopen.h"),
    Known(D, "miopenStatusUnknownError", "miopen.h"),
    # cuSOLVER and hipSOLVER, in pytorch aten/src/ATen/cuda/Exceptions.h
    Known(M, "SOLVER_STATUS_ALLOC_FAILED", "cusolver_common.h, hipsolver-types.h"),
    Known(D, "SOLVER_STATUS_EXECUTION_FAILED", "cusolver_common.h, hipsolver-types.h"),
    Known(D, "SOLVER_STATUS_INTERNAL_ERROR", "cusolver_common.h, hipsolver-types.h"),
    # cuSPARSE and hipSPARSE have words of their own after "CUDA error: "
    Known(U, "when calling `cusparse", "pytorch aten/src/ATen/cuda/Exceptions.h"),
    Known(U, "when calling `hipsparse", "pytorch aten/src/ATen/cuda/Exceptions.h"),
    # What none of the rows above has. Before NCCL, whose message has the failure of CUDA behind "Last error:"
    Known(D, "", "an error of the runtime that is not listed", ALL),
    # NCCL and RCCL, ncclGetErrorString in src/init.cc, except for `PEER`
    Known(D, "unhandled cuda error", "ncclUnhandledCudaError", NCCL),
    Known(U, "invalid usage", "ncclInvalidUsage: such as one device for two ranks", NCCL),
    Known(U, "invalid argument", "ncclInvalidArgument", NCCL),
    Known(P, "NCCL communicator was aborted on rank", "pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp"),
    Known(P, "Watchdog caught collective operation timeout", "pytorch csrc/distributed/c10d/ProcessGroupNCCL.cpp"),
    Known(P, "NCCL timeout in", "pytorch torch/csrc/distributed/c10d/NCCLUtils.hpp"),
    Known(P, "gloo/transport/", "gloo's files, which it names: gloo/common/logging.h"),
    Known(P, "Application timeout caused pair closure", "gloo gloo/transport/tcp/unbound_buffer.cc"),
    Known(P, "", "an error of NCCL that is not listed", NCCL),
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


def _has(row: Known, line: str) -> bool:
    if not row.said_by:
        return row.words in line
    return any(row.words in line.partition(said_by)[2] for said_by in row.said_by if said_by in line)


def is_device_fault(error: BaseException) -> bool:
    """True if the process cannot use its device any more, and the program is not known to be at fault."""
    return fault_of(error) is Cause.DEVICE


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on a device or on the host."""
    return fault_of(error) is Cause.MEMORY

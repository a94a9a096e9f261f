"""Errors of a device, as opposed to those of user code: the process is lost with its device, and its job goes on."""

import torch

NAMES = ("CUDA error: ", "CUDA driver error: ", "cuDNN error: ", "CUBLAS_STATUS_", "NCCL error")
"""With what the messages of such errors begin, or what they contain."""
OF_USER_CODE = ("device-side assert", "invalid argument", "invalid configuration", "not supported", "out of memory")
"""What the program has done wrong, or could do with less of: it would fail again elsewhere."""


def is_device_fault(error: BaseException) -> bool:
    """Whether the device, its driver or its connections have failed; a process cannot use the device any more then."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error)
    return any(name in text for name in NAMES) and not any(reason in text for reason in OF_USER_CODE)

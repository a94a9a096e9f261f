"""What a collective returns: `ProcessGroupNCCL::WorkNCCL`."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support.nccl import words
from support.nccl.communicator import Communicator, Kernel
from support.simulated_cuda import device

POLL_S = 0.001
"""`kSynchronizeBusyWaitMillis`."""
NO_TIMEOUT = timedelta(0)
"""`kNoTimeout`."""


class WorkNCCL(dist.Work):
    """One collective, queued or done."""

    def __init__(
        self,
        kind: str,
        *,
        rank: int,
        seq: int,
        communicator: Communicator,
        kernel: Kernel,
        end: Any,
        outputs: list[torch.Tensor],
        num_in: int,
        timeout: timedelta,
        blocks: bool,
    ) -> None:
        super().__init__()
        self._given: dict[str, Any] = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        self.kind = kind
        self.seq = seq
        self.communicator = communicator
        self.kernel = kernel
        self.error: Exception | None = None
        self._rank = rank
        self._end = end
        self._outputs = outputs
        self._num_in = num_in
        self._timeout = timeout
        self._blocks = blocks
        self._started_s = time.monotonic()
        self._device = device()

    def copied(self) -> "WorkNCCL":
        """`WorkNCCL(const WorkNCCL&)`, which the watchdog gets (`PG::workEnqueue`): who has the other does not see the
        error that it finds.
        """
        return WorkNCCL(**self._given)

    def __str__(self) -> str:
        """`operator<<` of `WorkNCCL`."""
        num_out = sum(one.numel() for one in self._outputs)
        timeout_ms = int(self._timeout.total_seconds() * 1000)
        return (
            f"WorkNCCL(SeqNum={self.seq}, OpType={self.kind}, NumelIn={self._num_in}, NumelOut={num_out}, "
            f"Timeout(ms)={timeout_ms})"
        )

    def is_completed(self) -> bool:
        """`WorkNCCL::isCompleted`: an error, or its end event has come. After an abort it has. Asking the event raises
        the error of any kernel of this process (`finishedGPUExecutionInternal`).
        """
        # A watchdog may outlive the test that began it, and with it the device.
        if self.error is None and self._device.is_in_use:
            self._device.check()
        return self.error is not None or self.kernel.ended.is_set()

    def is_success(self) -> bool:
        """`WorkNCCL::isSuccess`."""
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def synchronize(self) -> None:
        """`WorkNCCL::synchronizeStream`: the current stream waits, the host does not."""
        torch.cuda.current_stream().wait_event(self._end)

    block_current_stream = synchronize

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """`WorkNCCL::wait`: as `synchronize`. The host waits only with TORCH_NCCL_BLOCKING_WAIT, when the call gives a
        timeout, or after a barrier. Then, and only then, an error is raised here, and the communicator aborted.
        """
        self.synchronize()
        if self._blocks or timeout != NO_TIMEOUT:
            limit = None if timeout == NO_TIMEOUT else timeout
            while not self.is_completed() and not self.is_overdue(limit):
                time.sleep(POLL_S)
        elif self.kind == "BARRIER" and not self.is_completed():
            torch.cuda.current_stream().synchronize()
        if self.error is not None:
            self.communicator.abort()
            raise self.error
        return True

    def is_overdue(self, timeout: timedelta | None = None) -> bool:
        """`WorkNCCL::checkTimeout`: whether it has run for too long, which is its error from then on."""
        elapsed_s = time.monotonic() - self._started_s
        if elapsed_s < (timeout or self._timeout).total_seconds():
            return False
        self.error = self.error or dist.DistBackendError(words.timed_out(str(self), self._rank, int(elapsed_s * 1000)))
        return True

    def result(self) -> list[torch.Tensor]:
        """`WorkNCCL::result`: the outputs, whether they are there or not."""
        return self._outputs

    def handle(self, *, tears_down: bool, say: Callable[[str], None]) -> None:
        """`WorkNCCL::handleException`."""
        assert self.error is not None
        say(words.CORRUPTED)
        if tears_down:
            say(words.TORN_DOWN)
            raise self.error

"""The environment variables of a process group, read when it is made."""

import os
from dataclasses import dataclass

NO_HANDLING, TEAR_DOWN, CLEAN_UP_ONLY, SKIP_CLEAN_UP = range(4)
"""`ErrorHandlingMode` of ProcessGroupNCCL.hpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """As the constructors of PG, `Watchdog` and `HeartbeatMonitor` read them, with their defaults."""

    blocks_in_wait: bool
    error_handling: int
    monitors: bool
    """Whether the monitor may end the process."""
    dumps: bool
    """Whether the monitor of the process's first group looks for a timeout, here or in the job's store."""
    propagates: bool
    rethrows: bool
    """Whether an error of the device that the watchdog meets ends the process."""
    heartbeat_s: int
    coordination_ms: int
    dump_ms: int
    """How long a dump may take; the watchdog sleeps four times as long before it throws."""
    shares_id: bool
    blocks_in_making: bool
    """Whether a call that makes a communicator waits for the other ranks."""

    @classmethod
    def read(cls) -> "Settings":
        return cls(
            blocks_in_wait=flag("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT", default=False),
            error_handling=number(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", default=SKIP_CLEAN_UP
            ),
            monitors=flag("TORCH_NCCL_ENABLE_MONITORING", default=True),
            dumps=flag("TORCH_NCCL_DUMP_ON_TIMEOUT", default=True),
            propagates=flag("TORCH_NCCL_PROPAGATE_ERROR", default=False),
            rethrows=flag("TORCH_NCCL_RETHROW_CUDA_ERRORS", default=True),
            heartbeat_s=number("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", default=8 * 60),
            coordination_ms=number("TORCH_NCCL_COORD_CHECK_MILSEC", default=1000),
            dump_ms=number("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", default=15 * 1000),
            shares_id=flag("TORCH_NCCL_BCAST_UNIQUEID", default=True),
            blocks_in_making=os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") != "1",
        )

    @property
    def cleans_up(self) -> bool:
        """`SHOULD_CLEAN_UP`."""
        return self.error_handling not in (NO_HANDLING, SKIP_CLEAN_UP)

    @property
    def tears_down(self) -> bool:
        """`SHOULD_TEAR_DOWN`."""
        return self.error_handling not in (NO_HANDLING, CLEAN_UP_ONLY)


def flag(*names: str, default: bool) -> bool:
    """`getCvarBool` of Utils.hpp: the first name counts most; what is neither yes nor no is refused."""
    for name in names:
        text = os.environ.get(name, "").lower()
        if text in ("y", "yes", "1", "t", "true"):
            return True
        if text in ("n", "no", "0", "f", "false"):
            return False
        if name in os.environ:
            raise RuntimeError(f"Invalid value for environment variable: {name}")
    return default


def number(*names: str, default: int) -> int:
    """`getCvarInt` of Utils.hpp."""
    for name in names:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise RuntimeError(f"Invalid value for environment variable: {name}") from None
    return default

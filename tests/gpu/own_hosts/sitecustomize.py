"""Gives each process, for NCCL and for the coordinator, a host and a GPU of its own: NCCL refuses two ranks on one GPU.

With this folder in PYTHONPATH ranks on one GPU average over NCCL through sockets, as hosts without InfiniBand do.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

BUILD = "elche_worker.device.build"


class NamesOwnGpu(importlib.abc.MetaPathFinder):
    """Has the module that says what a rank's device is add the process to the device's id."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != BUILD:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            build_of = module.build_of

            def own_build_of(*given: Any, **more: Any) -> Any:
                build = build_of(*given, **more)
                build.device_id += f" of {os.getpid()}"
                return build

            module.build_of = own_build_of

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def claims_own_host() -> None:
    """Also in a process that is forked."""
    os.environ["NCCL_HOSTID"] = str(os.getpid())


claims_own_host()
os.register_at_fork(after_in_child=claims_own_host)
os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
sys.meta_path.insert(0, NamesOwnGpu())

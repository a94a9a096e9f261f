"""Limits of a job's file, and checks of its arguments, environment variables, module, secrets and project."""

import re
from collections.abc import Mapping, Sequence

from elche.errors import InvalidJob

MAX_SOURCE_BYTES = 1 << 20
"""Largest file of a job."""
MAX_PRIORITY = 1000
"""Highest priority; the lowest is its negative."""
MAX_VARIABLES = 64
MAX_ENVIRONMENT_BYTES = 32 * 1024
MAX_ARGUMENTS_BYTES = 32 * 1024

READ_AT_START = re.compile(
    r"PYTHON\w*|LD_\w+|DYLD_\w+|MALLOC_\w+|GLIBC_\w+|(OMP|MKL|GOMP|KMP|OPENBLAS|NUMEXPR|VECLIB)_\w+|GRPC_\w+"
)
"""Variables that Python, the dynamic loader, OpenMP or gRPC reads at startup. A rank is a fork of a process that has
read them already, so that they would have no effect, or a partial one.
"""
OWN = re.compile(
    r"ELCHE_\w*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|HIP_VISIBLE_DEVICES"
)
"""Variables that elche sets: they tell a process its rank and its device."""


def check_project(name: str) -> str:
    """Returns the name of a project; empty: none. Raises `InvalidJob` for an invalid one."""
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InvalidJob(f"{name[:64]!r} is not a name of a project: use up to 64 letters, digits, '.', '_' and '-'")
    return name


def check_module(name: str) -> tuple[str, str]:
    """Splits PACKAGE.MODULE:NAME into (module, name). Raises `InvalidJob` for another text."""
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", name, re.ASCII):
        raise InvalidJob(f"{name[:64]!r} is not a job of a module: write PACKAGE.MODULE:NAME, such as train.digits:job")
    module, _, attribute = name.partition(":")
    return module, attribute


def check_secrets(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises `InvalidJob` for invalid names of secrets."""
    check_environment(dict.fromkeys(names, ""))
    if both := [name for name in names if name in environment]:
        raise InvalidJob(f"{both[0]} is a secret of the hosts and a variable of the job: give it once")


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises `InvalidJob` for variables that a job may not set. The message has no values, which may be secret."""
    if len(environment) > MAX_VARIABLES:
        raise InvalidJob(f"a job may have {MAX_VARIABLES} variables of its environment, not {len(environment)}")
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidJob(f"{name[:64]!r} is not a name of an environment variable: use letters, digits and _")
        if OWN.fullmatch(name):
            raise InvalidJob(f"{name} cannot be set for a job: elche sets it for each rank")
        if READ_AT_START.fullmatch(name):
            raise InvalidJob(
                f"{name} cannot be set for a job because it is read earlier: set it where elche-worker is started"
            )
        if not isinstance(value, str) or "\0" in value:
            raise InvalidJob(f"the value of {name} must be a string without zero bytes")
    size = sum(len(name.encode()) + len(value.encode("utf-8", "replace")) for name, value in environment.items())
    if size > MAX_ENVIRONMENT_BYTES:
        raise InvalidJob(f"the job's environment has {size} bytes; {MAX_ENVIRONMENT_BYTES} are allowed")


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises `InvalidJob` for arguments that are not strings, or too long."""
    if any(not isinstance(one, str) or "\0" in one for one in arguments):
        raise InvalidJob("arguments of a job's file must be strings without zero bytes")
    size = sum(len(one.encode("utf-8", "replace")) for one in arguments)
    if size > MAX_ARGUMENTS_BYTES:
        raise InvalidJob(f"the arguments of the job's file have {size} bytes; {MAX_ARGUMENTS_BYTES} are allowed")

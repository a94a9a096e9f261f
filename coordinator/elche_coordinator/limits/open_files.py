"""The limit of open files of this process: each connection is one."""

import resource

from elche_coordinator.config import CannotStart

MAX_FILES = 1 << 16
"""Open files that the process asks for."""
MIN_FILES = 128
"""With fewer, a few ranks and their worker could not connect besides what the coordinator itself has open."""
OTHER_FILES = 1000
"""Open files reserved for the page, the database and bundles, or half of all where these are few."""


def raise_limit() -> int:
    """Raises the limit of open files as far as allowed, and returns it. Raises `CannotStart` if it is too low."""
    # The soft limit is often 1024, since `select` knows no more; nothing here uses it.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raise CannotStart(
            f"this process may have only {soft} files open, and each connection is one: raise the limit to {MIN_FILES} "
            "or more (`ulimit -Hn`, or LimitNOFILE= of the service)"
        )
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def max_connections(num_files: int) -> int:
    """The number of files that connections to the gRPC server may take."""
    return num_files - min(OTHER_FILES, num_files // 2)


def max_handshakes(num_files: int) -> int:
    """The number of unfinished TLS handshakes with the page: they take half of the reserved files."""
    return (num_files - max_connections(num_files)) // 2

"""Rules for bundles (packed folders of user code) that clients, the coordinator and ranks share."""

import re

from elche.errors import InvalidJob

MAX_FILES = 20_000
MAX_DEPTH = 100
"""Most folders in the path of a file."""
MAX_ARCHIVE_BYTES = 512 << 20
MAX_UNPACKED_BYTES = 2 << 30
CHUNK_BYTES = 1 << 18
_NAME = re.compile(r"[0-9a-f]{64}")


def check_name(name: str) -> str:
    """Returns a bundle's name, the SHA-256 of its archive in hex. Raises `InvalidJob` for an invalid one."""
    if not _NAME.fullmatch(name):
        raise InvalidJob("a bundle's name is the SHA-256 of its archive, 64 hexadecimal digits")
    return name


def check_path(name: str) -> str:
    """Returns the path of a file in a bundle: relative, with slashes, and within it. Raises `InvalidJob`."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise InvalidJob(f"{name[:200]!a} is not a path within a folder")
    if len(parts) > MAX_DEPTH + 1:
        raise InvalidJob(f"{name[:200]!a}... is in {len(parts) - 1} folders, and {MAX_DEPTH} is the limit")
    return name

"""Modules of the user's own as a rank has kept them in the job's folder: the path and text of each, by name."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ALL = ".modules-*.json"
"""Pattern of the files' names, one of each job."""
EXACT = "latin-1"
"""Encodes the bytes of any file as text, and back."""
Modules = Mapping[str, tuple[str, bytes]]


def path_of(folder: Path, job_id: str) -> Path:
    """The file of a job."""
    return folder / ALL.replace("*", job_id)


def read_modules(path: Path) -> Modules:
    """What a rank has kept; nothing if no rank has, or the file is damaged."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        kept = json.loads(path.read_text(encoding="ascii"))
        return {name: (str(file), text.encode(EXACT)) for name, (file, text) in kept.items()}
    return {}


def edited(modules: Modules) -> str:
    """Names files that are not as they were; "" if there are none."""
    names = sorted(file for file, text in modules.values() if _text_of(file) != text)
    return (names[0] if names else "") + (f" and {len(names) - 1} more" if names[1:] else "")


def _text_of(file: str) -> bytes | None:
    with suppress(OSError, ValueError):
        return Path(file).read_bytes()
    return None

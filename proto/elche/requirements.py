"""The packages that a job's file needs besides the hosts': PEP 508 requirements, one per line."""

import re
import tomllib
from collections.abc import Sequence

from elche.errors import InvalidJob

MAX_REQUIREMENTS = 200
MAX_CHARS = 500
SCRIPT = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""Inline metadata of a script (PEP 723)."""
NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\s*[\[<>=!~;@(].*)?", re.DOTALL)


def check_requirements(lines: Sequence[str]) -> None:
    """Raises `InvalidJob` for lines that are not requirements."""
    if len(lines) > MAX_REQUIREMENTS:
        raise InvalidJob(f"a job may require {MAX_REQUIREMENTS} packages, not {len(lines)}")
    for line in lines:
        if len(line) > MAX_CHARS or not line.isprintable() or not NAMED.fullmatch(line):
            raise InvalidJob(
                f"{line[:80]!r} is not a requirement: write one package per line, such as einops>=0.8; indexes and "
                "options of the installer are set where elche-worker is started"
            )


def parse_requirements(text: str) -> tuple[str, ...]:
    """The requirements of a requirements file. Raises `InvalidJob`."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    found = tuple(line for line in lines if line)
    check_requirements(found)
    return found


def inline_requirements(source: str) -> tuple[str, ...]:
    """The `dependencies` in a script's own metadata (PEP 723); none without. Raises `InvalidJob`."""
    blocks = [found for found in SCRIPT.finditer(source.replace("\r\n", "\n")) if found["type"] == "script"]
    if not blocks:
        return ()
    lines = blocks[0]["content"].splitlines()
    try:
        table = tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))
        dependencies = table.get("dependencies", [])
        if (
            len(blocks) > 1
            or not isinstance(dependencies, list)
            or not all(isinstance(one, str) for one in dependencies)
        ):
            raise ValueError("it must be one block, and its `dependencies` a list of strings")
    except (ValueError, RecursionError) as error:
        raise InvalidJob(f"the file's own metadata (# /// script) cannot be read: {error}") from None
    found = tuple(one.strip() for one in dependencies)
    check_requirements(found)
    return found

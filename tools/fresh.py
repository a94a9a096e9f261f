"""Writes generated files, or checks that they are fresh."""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(target: Path, text: str) -> None:
    """`write_all` for one file."""
    write_all({target: text})


def write_all(wanted: Mapping[Path, str], there: Iterable[Path] = ()) -> None:
    """Writes the texts that files are to have, and removes those of `there` that are not wanted; with --check among the
    program's arguments exits with code 1 instead, if there is anything to write or to remove.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    is_check = parser.parse_args().check
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in there if path not in wanted]
    if stale and is_check:
        sys.exit(f"{stale[0].relative_to(ROOT)} is stale, run `make generated`")
    for path in stale:
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()

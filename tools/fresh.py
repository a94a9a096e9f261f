"""Writes a generated file, or checks that it is fresh."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(target: Path, text: str) -> None:
    """Writes the text; with --check among the arguments exits with code 1 if the file has another."""
    parser = argparse.ArgumentParser(description=f"Writes {target.relative_to(ROOT)}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the file is stale")
    if not parser.parse_args().check:
        target.write_text(text, encoding="utf-8")
    elif not target.exists() or target.read_text(encoding="utf-8") != text:
        sys.exit(f"{target.relative_to(ROOT)} is stale, run `make generated`")

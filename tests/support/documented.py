"""The code blocks of the documentation's pages, and the commands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ("commands.md", "settings.md", "phases.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("elche", "elche-coordinator", "elche-worker")
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"[A-Z_]+=\S+")


def blocks(*kinds: str) -> list[tuple[str, str]]:
    """(page, text) of each code block of these kinds."""
    return [
        (page.relative_to(ROOT).as_posix(), found["text"])
        for page in PAGES
        if page.name not in GENERATED
        for found in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if found["kind"] in kinds
    ]


def named(*names: str) -> list[tuple[str, str]]:
    """The blocks that are whole files: their first line is their name."""
    found = {text: page for page, text in blocks("python") if text.startswith(tuple(f"# {name}\n" for name in names))}
    return [(page, text) for text, page in found.items()]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every call of one of elche's programs in a block of shell."""
    found = []
    for page, text in blocks("sh"):
        without_comments = re.sub(r"(^|\s)#.*", r"\1", text)
        for line in re.split(r"[\n;]|&&", without_comments):
            words = line.partition(" > ")[0].strip()
            while VARIABLE.match(words):
                words = words.partition(" ")[2]
            if words.partition(" ")[0] in PROGRAMS:
                found.append((page, words))
    return list(dict.fromkeys(found))

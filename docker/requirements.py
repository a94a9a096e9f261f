"""Prints a part of requirements.lock, for `pip install --no-deps --require-hashes -r`.

python requirements.py coordinator postgresql         elche with these extras, and all that it needs
python requirements.py --without torch worker         so, but for one package
python requirements.py hatchling                      another package, and all that it needs
python requirements.py --only uv torch                these packages alone
"""

import re
import sys
import tomllib
from collections.abc import Iterable


def name_of(requirement: str) -> str:
    """`Psycopg_c[binary]>=3.2` -> `psycopg-c`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def locked() -> tuple[dict[str, str], dict[str, set[str]]]:
    """By package its lines in the lock, and what it needs."""
    with open("requirements.lock", encoding="utf-8") as file:
        blocks = re.findall(r"^(\S+?)(==.*(?:\n .*)*)", file.read(), re.MULTILINE)
    needs: dict[str, set[str]] = {}
    for name, lines in blocks:
        for parent in re.findall(r"^ +# +(?:via +)?([\w.-]+)", lines, re.MULTILINE):
            needs.setdefault(parent, set()).add(name)
    return {name: name + re.sub(r"\n +#.*", "", lines) for name, lines in blocks}, needs


def closure(names: Iterable[str], needs: dict[str, set[str]]) -> set[str]:
    """The packages, and all that they need."""
    found: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        waiting |= needs.get(name, set()) - found
    return found


def main(arguments: list[str]) -> None:
    lines, needs = locked()
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    option = arguments.pop(0) if arguments[0].startswith("--") else ""
    without = {arguments.pop(0)} if option == "--without" else set()
    extras = project["optional-dependencies"]
    names = {name for name in arguments if name not in extras}
    if len(names) < len(arguments):
        asked = [one for name in arguments for one in extras.get(name, ())]
        names |= {name_of(one) for one in (*project["dependencies"], *asked)}
    wanted = names if option == "--only" else closure(names, needs)
    print(*(lines[name] for name in sorted(wanted - without)), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

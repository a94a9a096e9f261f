"""Places in the source, and tests, that pages name: finds those that are not there, and mends those that have moved.

A place is a dotted name of this project in backticks, such as `elche.cadence.ElChe.anchor`: a module, and perhaps what
is defined in it. Sources are parsed and not imported, so that nothing needs torch. After a move of modules or tests,
`python tools/places.py` rewrites the pages where there is only one new place that it can be, and prints the rest.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = {"elche": "proto", "elche_coordinator": "coordinator", "elche_worker": "worker", "elche_client": "client"}
PLACE = re.compile(r"`((?:elche|elche_coordinator|elche_worker|elche_client)(?:\.\w+)+)`")
TEST = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py(?:::\w+)?)`")


class Missing(Exception):
    """A name stands for nothing in the source; says what is missing, and where it may have gone."""


def names_in(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that statements define."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Assign():
                yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try():
                yield from names_in([*node.body, *node.orelse])


@cache
def module_names(path: Path) -> dict[str, ast.stmt]:
    """The names that a module defines; those that it imports are defined elsewhere."""
    return dict(names_in(ast.parse(path.read_text(encoding="utf-8")).body))


def class_names(node: ast.stmt) -> dict[str, ast.stmt]:
    """The names that a class defines, and that its methods set on `self`; none for what is not a class."""
    if not isinstance(node, ast.ClassDef):
        return {}
    stored = {
        inner.attr: node
        for method in node.body
        for inner in ast.walk(method)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
    }
    return {**stored, **dict(names_in(node.body))}


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name; generated protobuf code by its stub, which has every field."""
    found = {}
    for package, root in SOURCES.items():
        for path in sorted((ROOT / root / package).rglob("*.py")):
            stub = path.with_suffix(".pyi")
            name = ".".join(path.relative_to(ROOT / root).with_suffix("").parts).removesuffix(".__init__")
            found[name] = stub if stub.is_file() else path
    return found


@cache
def homes() -> dict[str, list[str]]:
    """Every name that a module defines, with the modules that do."""
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        for name in module_names(path):
            found.setdefault(name, []).append(module)
    return found


def resolve(place: str) -> None:
    """Raises `Missing` unless the source has a module of that name, or defines it in one."""
    parts = place.split(".")
    length = next(length for length in range(len(parts), 0, -1) if ".".join(parts[:length]) in modules())
    module = ".".join(parts[:length])
    path = modules()[module]
    names, owner = module_names(path), f"module {module} ({path.relative_to(ROOT)})"
    for part in parts[length:]:
        if part not in names:
            known = [home for home in homes().get(part, []) if home != module]
            moved = f"; {part} is in {', '.join(known)}" if known else ""
            raise Missing(f"{owner} defines no {part}{moved}")
        names, owner = class_names(names[part]), f"{part} in {path.relative_to(ROOT)}"


def is_there(place: str) -> bool:
    """True if `resolve` finds it."""
    try:
        resolve(place)
    except Missing:
        return False
    return True


def successors(place: str) -> list[str]:
    """Where a place that is gone may be now: with as much of its path as can be kept, its class at least."""
    package, *parts = place.split(".")
    for index, part in enumerate(parts):
        after = "".join(f".{one}" for one in parts[index + 1 :])
        named = [module for module in modules() if module.rpartition(".")[2] == part]
        options = [f"{home}.{part}{after}" for home in homes().get(part, [])] + [f"{one}{after}" for one in named]
        found = [one for one in dict.fromkeys(options) if one.split(".")[0] == package and is_there(one)]
        if found or part[0].isupper():
            return found
    return []


def test_successors(test: str) -> list[str]:
    """Where a test that is not there may be now: of that name, in the same folder if there is one."""
    old, _, name = test.partition("::")
    files = sorted(path for path in TESTS.rglob("test_*.py") if (name in module_names(path)) or path.name == old)
    if not name:
        files = sorted(TESTS.rglob(Path(old).name))
    beside = [path for path in files if path.parent == (TESTS / old).parent]
    return [f"{path.relative_to(TESTS)}{'::' if name else ''}{name}" for path in beside or files]


def is_test(test: str) -> bool:
    """True if there is such a test, or such a file of tests."""
    path, _, name = test.partition("::")
    return (TESTS / path).is_file() and (not name or name in module_names(TESTS / path))


def problems_of(text: str) -> list[str]:
    """The names on a page that are not there, with reasons."""
    problems = []
    for place in dict.fromkeys(PLACE.findall(text)):
        try:
            resolve(place)
        except Missing as missing:
            problems.append(f"{place}: {missing}")
    for test in dict.fromkeys(TEST.findall(text)):
        if not is_test(test):
            problems.append(f"there is no test {test}; of that name there are {test_successors(test)}")
    return problems


def mended(text: str) -> str:
    """The page with what has moved to one place only."""
    moved = {place: successors(place) for place in PLACE.findall(text) if not is_there(place)}
    moved |= {test: test_successors(test) for test in TEST.findall(text) if not is_test(test)}
    for old, (new, *others) in ((old, found) for old, found in moved.items() if found):
        if not others:
            text = text.replace(f"`{old}`", f"`{new}`").replace(f"`tests/{old}`", f"`tests/{new}`")
    return text


def main() -> None:
    left = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = mended(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
        left += [f"{page.relative_to(ROOT)}: {problem}" for problem in problems_of(new)]
    if left:
        sys.exit("\n".join(left))


if __name__ == "__main__":
    main()

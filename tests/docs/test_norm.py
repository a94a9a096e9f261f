"""What the docs name is there: places in the source, tests, paragraphs of the protocol, and the pages that they link.

A place is a dotted name of this project in backticks, such as `elche.cadence.ElChe.anchor`: a module, and perhaps what
is defined in it. Sources are parsed and not imported, so that nothing needs torch.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SOURCES = {"elche": "proto", "elche_coordinator": "coordinator", "elche_worker": "worker", "elche_client": "client"}
ROWS = [
    f"{letter}{number}"
    for letter, last in [("E", 10), ("C", 14), ("W", 15), ("T", 8), ("G", 11), ("F", 7)]
    for number in range(1, last + 1)
]
PLACE = re.compile(r"`((?:elche|elche_coordinator|elche_worker|elche_client)(?:\.\w+)+)`")
TEST = re.compile(r"`(?:tests/)?((?:\w+/)*test_\w+\.py(?:::\w+)?)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PARAGRAPH = re.compile(r"\bP\d+\.\d+\b")
DEFINED = re.compile(r"^\*\*(P\d+\.\d+)\*\*", re.MULTILINE)


# Places


class Missing(Exception):
    """A name stands for nothing in the source; says what is missing, and where it may have gone."""


def module_file(parts: tuple[str, ...]) -> Path | None:
    """The source of a module or package; of generated protobuf code its stub, which has every field."""
    base = ROOT / SOURCES[parts[0]] / Path(*parts)
    options = (base.with_suffix(".pyi"), base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in options if path.is_file()), None)


def names_in(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """What the statements define."""
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
    return dict(names_in(ast.parse(path.read_text(encoding="utf-8")).body))


def class_names(node: ast.stmt) -> dict[str, ast.stmt]:
    """What a class defines, and what its methods set on `self`; nothing for what is no class."""
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
def homes() -> dict[str, list[str]]:
    """Every name that a module defines, with the modules that do."""
    found: dict[str, list[str]] = {}
    for package, root in SOURCES.items():
        for path in sorted((ROOT / root / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / root).with_suffix("").parts).removesuffix(".__init__")
            for name in module_names(path):
                found.setdefault(name, []).append(module)
    return found


def resolve(place: str) -> None:
    """Raises `Missing` unless the source has a module of that name, or defines it in one."""
    parts = tuple(place.split("."))
    length = next(length for length in range(len(parts), 0, -1) if length == 1 or module_file(parts[:length]))
    path, module = module_file(parts[:length]), ".".join(parts[:length])
    if path is None:
        raise Missing(f"there is no module {module}")
    names, owner = module_names(path), f"module {module} ({path.relative_to(ROOT)})"
    for part in parts[length:]:
        if part not in names:
            known = [home for home in homes().get(part, []) if home != module]
            moved = f"; {part} is in {', '.join(known)}" if known else ""
            raise Missing(f"{owner} defines no {part}{moved}")
        names, owner = class_names(names[part]), f"{part} in {path.relative_to(ROOT)}"


def missing_places(text: str) -> list[str]:
    problems = []
    for place in dict.fromkeys(PLACE.findall(text)):
        try:
            resolve(place)
        except Missing as missing:
            problems.append(f"{place}: {missing}")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_place_that_a_page_names_is_in_the_source(page: Path) -> None:
    assert missing_places(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "place",
    [
        "elche.cadence",
        "elche.cadence.ElChe.report_timing",
        "elche.v1.rank_pb2.SyncNow.after_step",
        "elche_coordinator.core",
    ],
)
def test_a_place_is_a_module_or_what_one_defines(place: str) -> None:
    resolve(place)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("elche.cadences.ElChe", "defines no cadences"),
        ("elche.balance.ElChe", "ElChe is in elche.cadence"),
        ("elche.cadence.ElChe.report", "ElChe in proto/elche/cadence.py defines no report"),
        ("elche.cadence.dataclass", "defines no dataclass"),
    ],
)
def test_a_place_that_has_moved_is_told(place: str, message: str) -> None:
    with pytest.raises(Missing, match=re.escape(message)):
        resolve(place)


# Tests


def missing_tests(text: str) -> list[str]:
    problems = []
    for test in dict.fromkeys(TEST.findall(text)):
        path, _, name = test.partition("::")
        if not (ROOT / "tests" / path).is_file():
            there = [str(one.relative_to(ROOT / "tests")) for one in (ROOT / "tests").rglob(Path(path).name)]
            problems.append(f"there is no tests/{path}; of that name there are {there}")
        elif name and name not in module_names(ROOT / "tests" / path):
            problems.append(f"tests/{path} has no {name}")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    assert missing_tests(page.read_text(encoding="utf-8")) == []


# The reference: a section for each row


@cache
def sections(page: str) -> dict[str, str]:
    """The third-level sections of a page, by the first word of their headings."""
    _, *found = re.split(r"^### ", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {section.split(maxsplit=1)[0]: section.partition("\n## ")[0] for section in found}


def test_the_reference_has_every_row_in_order() -> None:
    assert list(sections("reference.md")) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_where_it_is_made_and_which_tests_show_it(row: str) -> None:
    promise, _, rest = sections("reference.md")[row].partition("\n- Where: ")
    where, _, tests = rest.partition("\n- Tests: ")
    assert len(promise.split()) > 12, "what is promised?"
    assert PLACE.search(where), "where is it made?"
    assert TEST.search(tests), "which tests show it?"


# The glossary: a paragraph for each term


def terms() -> dict[str, str]:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\*\*([^*]+)\*\*(.+?)(?=\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL))


def test_every_term_says_what_it_means_and_where_it_is() -> None:
    for term, meaning in terms().items():
        assert len(meaning.split()) > 8, term
        assert PLACE.search(meaning), f"{term}: where is it in the code?"


def test_terms_are_in_alphabetical_order() -> None:
    assert list(terms()) == sorted(terms(), key=str.lower)


# The protocol: numbered paragraphs


def test_paragraphs_are_numbered_in_order_and_none_twice() -> None:
    found = DEFINED.findall((DOCS / "protocol.md").read_text(encoding="utf-8"))
    numbers = [tuple(map(int, one[1:].split("."))) for one in found]
    assert len(found) > 50
    assert numbers == sorted(set(numbers))


def test_every_paragraph_that_is_cited_exists() -> None:
    known = set(DEFINED.findall((DOCS / "protocol.md").read_text(encoding="utf-8")))
    folders = [ROOT / name for name in (*SOURCES.values(), "tests")]
    cited = [*PAGES, *(path for folder in folders for kind in ("*.py", "*.proto") for path in folder.rglob(kind))]
    for path in cited:
        unknown = set(PARAGRAPH.findall(path.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{path.relative_to(ROOT)} cites {sorted(unknown)}"


# Links between pages


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get where it is shown."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"

"""What the docs name is there: places in the source, tests, paragraphs of the protocol, and the pages they link."""

import importlib.util
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from elche import settings
from elche.policies import POLICIES
from elche_client.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("places_tool", ROOT / "tools" / "places.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
ROWS = [
    f"{letter}{number}"
    for letter, last in [("E", 10), ("C", 14), ("W", 15), ("T", 8), ("G", 11), ("F", 7)]
    for number in range(1, last + 1)
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FILE = re.compile(r"`((?:proto|coordinator|worker|client|tests|tools|docs|examples)/(?:\w+/)*(?!test_)\w+\.\w+)`")
CITED = re.compile(r"\bP\d+\.\d+\b|(?<=protocol )P\d+\b")
DEFINED = re.compile(r"^\*\*(P\d+\.\d+)\*\*", re.MULTILINE)
SECTION = re.compile(r"^## (P\d+) ", re.MULTILINE)

every_page = pytest.mark.parametrize("page", TOOL.PAGES, ids=lambda page: page.name)


# Places and tests


@every_page
def test_every_place_and_test_that_a_page_names_is_there(page: Path) -> None:
    """`python tools/places.py` mends what has moved."""
    assert TOOL.problems_of(page.read_text(encoding="utf-8")) == []


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
    TOOL.resolve(place)


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
    with pytest.raises(TOOL.Missing, match=re.escape(message)):
        TOOL.resolve(place)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("`elche.balance.ElChe.anchor`", "`elche.cadence.ElChe.anchor`"),
        ("`elche.pacing.cadence`", "`elche.cadence`"),
        ("`elche_worker.cadence.ElChe`", "`elche_worker.cadence.ElChe`"),
        ("`elche.partition.Shares.equal_sizes`", "`elche.partition.Shares.equal_sizes`"),
        ("`core/test_cadence.py::test_lists_are_copies`", "`arithmetic/test_cadence.py::test_lists_are_copies`"),
        ("`tests/test_cadence.py`", "`tests/arithmetic/test_cadence.py`"),
    ],
)
def test_a_page_is_mended_where_the_new_place_is_certain(old: str, new: str) -> None:
    assert TOOL.mended(old) == new


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
    promise, _, rest = sections("reference.md")[row].partition("\n- Where:")
    where, _, tests = rest.partition("\n- Tests:")
    assert len(promise.split()) > 12, "what is promised?"
    assert TOOL.PLACE.search(where), "where is it made?"
    assert TOOL.TEST.search(tests), "which tests show it?"


# What users read of


def test_every_policy_is_described_to_users() -> None:
    (row,) = re.findall(r"^\| `policy` \|(.+)$", (DOCS / "manual.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for policy in POLICIES:
        assert f'`"{policy}"`' in row
        assert f"`{policy}`:" in sections("reference.md")["C1"]
        assert f'"{policy}", ' in inspect.getsource(settings), "the setting's docstring says what it does"


@pytest.mark.parametrize("program", ["convergence_report.py", "quality/run.py"])
def test_the_figures_of_trainings_are_those_of_the_kept_runs(program: str) -> None:
    command = [sys.executable, f"benchmarks/{program}", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", cli.commands)
def test_the_manual_has_every_command(command: str) -> None:
    assert re.search(rf"\belche {command}(?![\w-])", (DOCS / "manual.md").read_text(encoding="utf-8"))


# The glossary: an entry for each term


def terms() -> dict[str, str]:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^- \*\*([^*]+)\*\*(.+?)(?=\n-|\Z)", text, flags=re.MULTILINE | re.DOTALL))


def test_every_term_says_what_it_means_and_where_it_is() -> None:
    for term, meaning in terms().items():
        assert len(meaning.split()) > 8, term
        assert TOOL.PLACE.search(meaning), f"{term}: where is it in the code?"


def test_terms_are_in_alphabetical_order() -> None:
    assert list(terms()) == sorted(terms(), key=str.lower)


# The protocol: numbered paragraphs


def test_paragraphs_are_numbered_in_order_and_none_twice() -> None:
    found = DEFINED.findall((DOCS / "protocol.md").read_text(encoding="utf-8"))
    numbers = [tuple(map(int, one[1:].split("."))) for one in found]
    assert len(found) > 50
    assert numbers == sorted(set(numbers))


def test_every_paragraph_that_is_cited_exists() -> None:
    norm = (DOCS / "protocol.md").read_text(encoding="utf-8")
    known = {*DEFINED.findall(norm), *SECTION.findall(norm)}
    folders = [ROOT / name for name in (*TOOL.SOURCES.values(), "tests")]
    cited = [*TOOL.PAGES, *(path for folder in folders for kind in ("*.py", "*.proto") for path in folder.rglob(kind))]
    for path in cited:
        unknown = set(CITED.findall(path.read_text(encoding="utf-8"))) - known
        assert not unknown, f"{path.relative_to(ROOT)} cites {sorted(unknown)}"


# Files and links


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get where it is shown."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@every_page
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for path in FILE.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).is_file(), path

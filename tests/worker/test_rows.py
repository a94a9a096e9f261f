"""Each row of the specification that docs/rows.md lists is covered by tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
ROWS = (
    [f"E{number}" for number in range(1, 11)]
    + [f"C{number}" for number in range(1, 15)]
    + [f"W{number}" for number in range(1, 16)]
    + [f"T{number}" for number in range(1, 9)]
    + [f"G{number}" for number in range(1, 12)]
    + [f"F{number}" for number in range(1, 8)]
)


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_tests_that_exist() -> None:
    named: dict[str, list[str]] = {}
    _, _, tables = (ROOT / "docs" / "rows.md").read_text(encoding="utf-8").partition("## Tests by row")
    for line in tables.splitlines():
        if row := re.match(r"\| ([ECWTGF]\d+) \|", line):
            named[row[1]] = re.findall(r"`([a-z_]+/\w+\.py(?:::\w+)?)`", line)
    assert list(named) == ROWS
    for row, tests in named.items():
        assert tests, row
        for test in tests:
            path, _, name = test.partition("::")
            assert not name or name in functions_of(TESTS / path), f"{row}: {test}"

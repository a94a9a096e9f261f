"""The table of mutants fits the code: each patch still has its place, still compiles, and its tests exist.

Whether the tests notice is found by `make mutants`, which takes minutes.
"""

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_tool", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
MUTANTS = TOOL.load()


@cache
def names_in(path: Path) -> frozenset[str]:
    """Test functions of a file, and classes or assignments, such as those of Hypothesis's state machines."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(names)


@pytest.mark.parametrize("area", sorted({mutant.area for mutant in MUTANTS}))
def test_mutants_have_their_places_in_the_code_and_tests_that_exist(area: str) -> None:
    """All that is wrong is told at once: a move of code may leave many without a place."""
    wrong = {mutant.name: problem for mutant in MUTANTS if mutant.area == area and (problem := problem_of(mutant))}
    assert not wrong


def problem_of(mutant: Any) -> str:
    try:
        compile(mutant.patched(), mutant.file, "exec")
    except (ValueError, SyntaxError) as error:
        return str(error)
    if mutant.before == mutant.after or not mutant.story.endswith(".") or not mutant.tests:
        return "it changes nothing, is not a sentence, or names no tests"
    for test in mutant.tests:
        path, _, name = test.partition("::")
        if not path.startswith("tests/") or not (ROOT / path).exists():
            return f"there is no {path}"
        if name and name.partition("[")[0].partition("::")[0] not in names_in(ROOT / path):
            return f"there is no {test}"
    return ""


def test_there_are_enough_of_them_and_none_twice() -> None:
    assert len(MUTANTS) >= 45
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_patch_without_a_place_is_told(tmp_path: Path) -> None:
    row = {"area": "a", "story": "s.", "file": "Makefile", "after": "", "tests": ()}
    for before in ("there is no such text", "setup"):
        with pytest.raises(ValueError, match="and should have once"):
            TOOL.Mutant(**row, before=before).patched()

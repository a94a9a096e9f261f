"""The names that `elche_worker` offers, and what `help` says of them."""

import inspect
import re
from typing import Any

import pytest

import elche_worker
from elche_worker import outer

ROW = re.compile(r"\b(rows?|SPEC|ref) [A-Z]\d", re.IGNORECASE)


def documented(name: str) -> list[tuple[str, Any]]:
    value = getattr(elche_worker, name)
    members = (
        [(key, one) for key, one in vars(value).items() if not key.startswith("_")] if inspect.isclass(value) else []
    )
    return [(name, value), *((f"{name}.{key}", one) for key, one in members)]


@pytest.mark.parametrize("name", elche_worker.__all__)
def test_help_is_for_users(name: str) -> None:
    assert inspect.getdoc(getattr(elche_worker, name))
    for path, value in documented(name):
        assert not ROW.search(inspect.getdoc(value) or ""), path


def test_optimizers_of_averages_are_not_taken_for_those_of_the_model() -> None:
    assert elche_worker.outer is outer
    assert {"Average", "SGD", "Nesterov", "Adam"} <= set(vars(outer))
    for name in ("Average", "SGD", "Nesterov", "Adam"):
        assert name not in dir(elche_worker)
        assert not hasattr(elche_worker, name)

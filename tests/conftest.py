"""What all tests share: assertions of `support` that say why, slow files first, and a mark for a test's processes."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest

pytest.register_assert_rewrite("support")

from support import fork_server  # noqa: E402 - imported after the line above, which changes how
from support.real_processes import Mark  # noqa: E402

os.environ["ELCHE_FOLDER"] = "none"  # ranks of tests leave notes beside their file
os.environ["ELCHE_CONFIG"] = "/proc/none/elche.toml"  # not that of whoever runs the tests; nobody can write it
os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # else idle threads of torch spin, and take the processors from other tests
fork_server.install()
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected, and none of that is garbage: to look through it takes seconds
    if config.getoption("numprocesses", None):
        fork_server.start()  # for all workers, while they collect


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # nor later: pytest itself collects at the end
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files begin first, so that no worker is left alone with one at the end (`--no-loadscope-reorder`)."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def mark() -> Iterator[Mark]:
    """Marks a test's own processes; none of them may be left at its end."""
    mark = Mark()
    yield mark
    mark.assert_none_left()

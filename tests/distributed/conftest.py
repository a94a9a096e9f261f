"""Real processes with gloo between them, shared by all tests of a session."""

from collections.abc import Iterator

import pytest

from support.worlds import Worlds


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """`worlds.run(size, function, *arguments)` calls a function of the test's module on every rank of a new world."""
    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()

"""Fuzzes one test of tests/fuzz, guided by coverage: `python tools/guided.py TEST FOLDER [OPTIONS OF LIBFUZZER]`.

pytest makes the test's fixtures. Then atheris calls the test with one input after the other, bytes from which
hypothesis draws its examples, and keeps in FOLDER those that reach code that no earlier one has reached. `make fuzz`
runs it.
"""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import atheris
import pytest
from hypothesis import given, settings

PACKAGES = ("elche", "elche_audit", "elche_client", "elche_coordinator", "elche_worker", "tarfile", "tomllib")
"""What is instrumented: ours, and what reads files for us. Not yaml: it becomes too slow for deep lists."""
PYTEST = ("-s", "--timeout=0", *(f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "logging", "xdist")))
"""Signals and memory are libFuzzer's: pytest would keep all that is logged."""


class Guided:
    """Plugin of pytest that hands the test and its fixtures to atheris, which ends the process."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = options

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> None:
        fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        handle = pyfuncitem.obj.hypothesis

        @settings(database=None, deadline=None)
        @given(**handle._given_kwargs)
        def test(**drawn: Any) -> None:
            try:
                handle.inner_test(**fixtures, **drawn)
            except BaseException as error:
                if not type(error).__module__.startswith("hypothesis"):  # those end an example, and are no fault
                    print(f"the input: {drawn!r:.5000}", file=sys.stderr)
                raise

        atheris.Setup([sys.argv[0], *self._options], test.hypothesis.fuzz_one_input)
        atheris.Fuzz()


def run(test: str, options: Sequence[str], packages: Sequence[str] = PACKAGES) -> None:
    """Fuzzes a test, by its id of pytest. `options`: folders, files and options of libFuzzer."""
    os.environ |= {"FUZZ_CHANGES": "12", "FUZZ_PROCESSOR_S": "10"}  # instrumented code is several times as slow
    logging.lastResort = None
    with atheris.instrument_imports(include=list(packages)):
        sys.exit(pytest.main([*PYTEST, test], [Guided(options)]))


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])

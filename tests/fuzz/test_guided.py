"""`make fuzz`: coverage guides it to what chance does not find."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
READER = """
def read(values):
    if values[0] % 16 == 5:
        if values[1] % 16 == 12:
            if values[2] % 16 == 9:
                if values[3] % 16 == 4:
                    if values[4] % 16 == 14:
                        raise ZeroDivisionError("planted")
"""
TEST = """
from hypothesis import given, strategies as st
import planted

@given(values=st.lists(st.integers(0, 255), min_size=5, max_size=5))
def test_reader(values):
    planted.read(values)
"""
RUN = "import guided; guided.run('test_planted.py', ['-runs=20000', '-seed=1', '-max_len=16'], ['planted'])"


def test_a_fault_behind_five_conditions_is_found_by_coverage(tmp_path: Path) -> None:
    """By chance it is found once in a million examples, and here within 20,000."""
    pytest.importorskip("atheris", reason="it exists for Linux on x86-64, and not yet for the newest Python")
    (tmp_path / "planted.py").write_text(READER)
    (tmp_path / "test_planted.py").write_text(TEST)
    command = [sys.executable, "-c", RUN]
    env = {"PYTHONPATH": f"{TOOLS}:{tmp_path}"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    assert "ZeroDivisionError: planted" in said, said
    assert "the input: {'values': [" in said, said

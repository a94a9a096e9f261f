"""A script that is forked of what has torch (`support/fork_server.py`) ends as one that Python has started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOLDS = """
class Held:
    def __del__(self):
        try:
            import torch.nn.functional
        except ImportError:
            pass
        print("destroyed")


held = Held()
"""
AT_EXIT = "import atexit\natexit.register(lambda: print(__import__('json').__name__))"
THREAD = """
import threading


def outlive():
    threading.main_thread().join()
    print("done")


threading.Thread(target=outlive).start()
"""


@pytest.mark.parametrize(
    ("text", "code", "out", "err"),
    [
        ("import torch\nprint(torch.__name__)", 0, "torch\n", ""),
        ("import sys\nsys.exit(3)", 3, "", ""),
        ("import sys\nsys.exit('refused')", 1, "", "refused\n"),
        ("raise ValueError('wrong')", 1, "", "ValueError: wrong\n"),
        ("raise KeyboardInterrupt", -2, "", "KeyboardInterrupt\n"),
        (HOLDS, 0, "destroyed\n", ""),
        (AT_EXIT, 0, "json\n", ""),
        (THREAD, 0, "done\n", ""),
        ("import ctypes\nctypes.CDLL(None).printf(b'of a library')", 0, "of a library", ""),
    ],
)
def test_a_forked_script_ends_as_python_does(tmp_path: Path, text: str, code: int, out: str, err: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, out), ended.stderr
    assert ended.stderr.endswith(err)
    assert err or not ended.stderr


def test_a_forked_script_whose_output_cannot_be_written_ends_with_120(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("print('for nobody')")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, str(path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
            check=False,
        )
    assert ended.returncode == 120
    assert "No space left on device" in ended.stderr


def test_a_forked_script_warns_as_its_command_says(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("open(__file__)")
    words = [sys.executable, "-W", "always::ResourceWarning", str(path)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "ResourceWarning: unclosed file <_io" in ended.stderr
    assert not subprocess.run([words[0], words[-1]], capture_output=True, text=True, check=False).stderr

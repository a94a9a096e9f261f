"""`elche top` shows the jobs and devices of a real coordinator, on a terminal again and again, to a pipe once."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from elche_client import Client
from support.real_processes import Command, Mark, agent, coordinator, eventually

JobFile = Callable[..., Path]


class Terminal:
    """A command on a terminal of its own, and what it shows."""

    def __init__(self, mark: Mark, *arguments: str) -> None:
        self._end, there = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elche_client", *arguments],
            stdin=there,
            stdout=there,
            stderr=there,
            env=mark.environment({"TERM": "xterm", "COLUMNS": "160", "LINES": "50"}),
        )
        os.close(there)
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while part := os.read(self._end, 4096):
                self.text += part.decode("utf-8", "replace")
        except OSError:
            pass  # the command has ended

    def shows(self, text: str) -> None:
        eventually(lambda: text in self.text, f"it shows {text!r}")
        self.text = ""


def test_all_jobs_and_devices_live(
    mark: Mark, tmp_path: Path, job_file: JobFile, elche: Callable[..., Command]
) -> None:
    data = tmp_path / "data"
    with coordinator(mark, tmp_path, data=data) as one, agent(mark, tmp_path, one.address, devices="cpu,cpu"):
        address, path = one.address, job_file("linear.py")
        with Client(one.address, token="") as client:
            runs = client.submit(path, name="runs", num_ranks=2, epochs=500)
            waits = client.submit(path, name="waits", num_ranks=1, epochs=500)
            eventually(lambda: client.jobs()[0].state == "training", "it trains")
            once = elche("top", "--coordinator", one.address)
            assert once.code == 0, once.err
            assert "2 of 2 devices busy   1 jobs run, 1 wait, 0 have ended" in once.out
            assert f"{waits.id}: waits for 1 free slot" in once.out
            terminal = Terminal(mark, "top", "--coordinator", one.address, "--every", "0.2")
            terminal.shows("1 jobs run, 1 wait")
            runs.cancel()
            terminal.shows("1 have ended")
            waits.cancel()
            terminal.shows("0 of 2 devices busy")
    terminal.shows("retrying")
    with coordinator(mark, tmp_path, data=data, listen=address):
        terminal.shows("0 jobs run, 0 wait, 2 have ended")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(400) == 0

"""Stands for the agent: notes how it was started, and does what AGENT says."""

import os
import signal
import sys
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--work-dir") + 1])
(folder / "agent.args").write_text(" ".join(sys.argv[1:]))
if os.environ.get("AGENT") == "dies":
    print("starting", "cuda:7 is not there", sep="\n", file=sys.stderr)
    sys.exit(1)
if os.environ.get("AGENT") == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
if os.environ.get("AGENT") == "prints":
    (folder / "rank-0.log").write_text("hello\nelche: this rank leaves: it is done\n")
(folder / "pid").write_text(str(os.getpid()))
(folder / "pid").rename(folder / "agent.pid")
sys.stdin.read()

"""Stands for `python -m elche_worker.agent.for_run`: reports what CHECK says, and then does what AGENT says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

asked = json.loads(sys.stdin.readline())
words, ranks = asked["words"], asked["num_ranks"] or 1
print("something that prints as Python starts", flush=True)
device = words[words.index("--device") + 1].replace("auto", "cpu")
report = {
    "ok": True,
    "devices": [{"device": device, "model": "a model", "memory_bytes": 0}] * ranks,
    "notes": ["the data set is short"],
}
match os.environ.get("CHECK"):
    case "refuses":
        refusal = {"ok": False, "error": "there is no `job` in it", "traceback": "Traceback ...\nNameError: x"}
        print("checked", 2, json.dumps(refusal), flush=True)
    case "shows help":
        answer = {"ok": False, "error": "ended itself", "has_answered": True}
        print("checked", 2, json.dumps(answer), flush=True)
    case "crashes":
        print("checked", -9, "", flush=True)
    case "hangs":
        print("loading", file=sys.stderr, flush=True)
        sys.stdin.read() or time.sleep(600)
    case "waits for the coordinator":
        begun, deadline_s = Path(os.environ["BEGUN"]), time.monotonic() + 60
        while not begun.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        print("checked", *((0, json.dumps(report)) if begun.exists() else (1, "")), flush=True)
    case _:
        print("checked", 0, json.dumps(report), flush=True)
if not (line := sys.stdin.readline()):
    sys.exit(0)
order = json.loads(line)
folder = Path(order["work_dir"])
log = os.open(order["log"], os.O_WRONLY | os.O_CREAT)
os.dup2(log, 2)
(folder / "agent.args").write_text(line)
match os.environ.get("AGENT"):
    case "dies":
        print("starting", "cuda:7 is not there", sep="\n", file=sys.stderr)
        sys.exit(1)
    case "waits for the coordinator's end":

        def wait(*_: object) -> None:
            number, deadline_s = (folder / "coordinator.pid").read_text(), time.monotonic() + 60
            while Path(f"/proc/{number}/cwd").exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            (folder / "last").touch()
            os._exit(0)

        signal.signal(signal.SIGTERM, wait)
    case "ignores SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: (folder / "asked").touch())
    case "prints":
        (folder / "rank-0.log").write_text("hello\nelche: this rank leaves: it is done\n")
(folder / "pid").write_text(str(os.getpid()))
(folder / "pid").rename(folder / "agent.pid")
sys.stdin.read()

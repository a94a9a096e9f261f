"""Stands for `python -m elche_worker.rank.check`: reports what CHECK says."""

import json
import os
import sys
import time

arguments = sys.argv[1:]
print("the user's own print")
if os.environ.get("CHECK") == "refuses":
    print(json.dumps({"ok": False, "error": "there is no `job` in it", "traceback": "Traceback ...\nNameError: x"}))
    sys.exit(2)
if os.environ.get("CHECK") == "shows help":
    print(json.dumps({"ok": False, "error": "ended itself", "has_answered": True}))
    sys.exit(2)
if os.environ.get("CHECK") == "crashes":
    os.kill(os.getpid(), 9)
if os.environ.get("CHECK") == "hangs":
    sys.stderr.write("loading\n")  # at once: `print` writes the end of the line apart, and a kill may come between
    sys.stdin.read() or time.sleep(600)
ranks = int(arguments[arguments.index("--ranks") + 1]) if "--ranks" in arguments else 1
device = arguments[arguments.index("--device") + 1].replace("auto", "cpu")
devices = [{"device": device, "model": "a model"}] * ranks
report = {"dataset_size": 1000, "batch_size": 10, "epochs": 3, "policy": "cadence", "devices": devices}
print(json.dumps({"ok": True, **report, "notes": ["the data set is short"]}))

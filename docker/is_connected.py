#!/usr/bin/env python3
"""Exits with 0 when the agent on this host has an open connection, which it has with its coordinator only."""

import os
import sys
from contextlib import suppress
from pathlib import Path

ESTABLISHED = "01"  # as the kernel writes the state

sockets = set()
for process in Path("/proc").glob("[0-9]*"):
    with suppress(OSError):  # the process has exited or belongs to another user
        if b"elche-worker" in (process / "cmdline").read_bytes():
            sockets |= {os.readlink(file) for file in (process / "fd").iterdir()}
rows = [row.split() for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()[1:]]
sys.exit(not any(row[3] == ESTABLISHED and f"socket:[{row[9]}]" in sockets for row in rows))

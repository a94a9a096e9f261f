"""The command `elche-worker`."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click

from elche.errors import ElcheError, InvalidJob
from elche.network import split_address
from elche.token import read_token
from elche.v1 import agent_pb2

EXAMPLES = """
\b
Examples:
  elche-worker --coordinator 10.0.0.5:7717
  elche-worker --devices cuda:0,cuda:1
  elche-worker --devices cpu,cpu --work-dir /var/lib/elche
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--coordinator",
    envvar="ELCHE_COORDINATOR",
    default="127.0.0.1:7717",
    show_default=True,
    show_envvar=True,
    help="HOST:PORT of the coordinator.",
)
@click.option("--devices", default="auto", show_default=True, help="One for each rank, such as cuda:0,cuda:1 or cpu.")
@click.option(
    "--work-dir",
    default=Path("runs"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for logs and models of jobs that name none.",
)
@click.option("--exit-with-stdin", is_flag=True, help="End when standard input ends.")
def main(coordinator: str, devices: str, work_dir: Path, exit_with_stdin: bool) -> None:
    """Offers this host's devices to a coordinator and starts ranks on them.

    The coordinator's token, where it has one, is that of ELCHE_TOKEN or of the file that ELCHE_TOKEN_FILE names.
    """
    from elche_worker.agent.agent import Agent

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    try:
        split_address(coordinator)
        agent = Agent(coordinator, _slots(devices), work_dir, token=read_token())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: threading.Thread(target=agent.stop).start())
        if exit_with_stdin:
            threading.Thread(target=_stop_with_stdin, args=(agent.stop,), daemon=True).start()
        agent.run()
    except ElcheError as error:
        print(f"elche-worker: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stderr.flush()
    os._exit(0)


def _stop_with_stdin(stop: Callable[[], None]) -> None:
    sys.stdin.read()
    stop()


def _slots(devices: str) -> list[agent_pb2.Slot]:
    """The slots to offer. torch, which knows the devices, is asked in a process of its own: it would stay in memory."""
    for device in devices.split(","):
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device.strip()):
            raise InvalidJob(
                f"--devices: {device.strip()!r} is no device; use auto, or names such as cpu,cpu or cuda:0"
            )
    if devices != "auto" and "cuda" not in devices:
        return [agent_pb2.Slot(device=device.strip()) for device in devices.split(",")]
    script = (
        "import json; from dataclasses import asdict; from elche_worker.devices import choose_devices; "
        "print(json.dumps([asdict(one) for one in choose_devices('auto', 0)]))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if found.returncode:
        raise InvalidJob(f"torch cannot say which devices there are: {found.stderr.strip().splitlines()[-1:]}")
    known = {one["device"]: one["model"] for one in json.loads(found.stdout.splitlines()[-1])}
    wanted = list(known) if devices == "auto" else [device.strip() for device in devices.split(",")]
    return [agent_pb2.Slot(device=device, model=known.get(device, "")) for device in wanted]

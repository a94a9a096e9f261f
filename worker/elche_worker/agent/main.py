"""The command `elche-worker`."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from elche.errors import ElcheError, InvalidJob
from elche.logs import FORMATS, print_reason, set_up
from elche.logs import VARIABLE as LOG_VARIABLE
from elche.network import DEFAULT_ADDRESS, split_addresses
from elche.output import use_utf8
from elche.selector import check_label
from elche.stopping import StopSignals
from elche.tls import VARIABLE
from elche.token import FILE_VARIABLE, read_token
from elche.v1 import agent_pb2
from elche_worker.agent.confinement import Confinement
from elche_worker.agent.identity import FOLDER as AGENTS
from elche_worker.device.share import SHARE_VARIABLE
from elche_worker.process.interfaces import interface_address

if TYPE_CHECKING:
    from elche_worker.agent.agent import Agent

FIND_LIMIT_S = 150.0
"""Limit in seconds for the trials of all devices together; each trial has its own limit."""

log = logging.getLogger(__name__)

EXAMPLES = """
\b
Examples:
  elche-worker --coordinator 10.0.0.5:7717
  elche-worker --devices cuda:0,cuda:1
  elche-worker --devices cpu,cpu --work-dir /var/lib/elche
  elche-worker --devices cuda:0 --share 2 --label zone=eu
  elche-worker --coordinator gpu1.lab:7717 --tls certs/pool --interface wg0
  elche-worker --coordinator 10.0.0.5:7717 --notices aws --grace 100
"""


class _Program(click.Command):
    """Tells a wrong usage in one line, as `elche` does, and not with the usage."""

    def main(self, *given: Any, **options: Any) -> Any:
        try:
            return super().main(*given, **options | {"standalone_mode": False})
        except click.ClickException as error:
            words = error.format_message().rstrip(".")
            print(f"elche-worker: {words}; see `elche-worker --help`", file=sys.stderr)
            sys.exit(2)
        except click.Abort:  # Ctrl-C
            sys.exit(130)


@click.command(cls=_Program, epilog=EXAMPLES)
@click.option(
    "--coordinator",
    envvar="ELCHE_COORDINATOR",
    default=DEFAULT_ADDRESS,
    show_default=True,
    show_envvar=True,
    help="HOST:PORT of the coordinator; several that share a database are separated by commas.",
)
@click.option(
    "--tls",
    envvar=VARIABLE,
    default="",
    show_envvar=True,
    metavar="DIR",
    help="Folder with the ca.crt of the coordinator's authority, and a tls.crt and tls.key if it asks for them.",
)
@click.option(
    "--interface",
    envvar="ELCHE_INTERFACE",
    default="",
    show_envvar=True,
    metavar="NAME",
    help="Network interface on which ranks connect to each other, unencrypted; default: the way to the coordinator.",
)
@click.option(
    "--devices", default="auto", show_default=True, help="One for each rank, such as cuda:0,cuda:1 or cpu,cpu."
)
@click.option(
    "--share",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Offer each device this many times, to run small jobs at the same time; each may use that part of its memory.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="A label of this host that jobs may require (elche submit --on zone=eu). Repeatable.",
)
@click.option(
    "--secrets",
    envvar="ELCHE_SECRETS",
    show_envvar=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder with one file per secret that jobs may request by name (elche submit --secret NAME).",
)
@click.option(
    "--work-dir",
    default=Path("runs"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for logs and models of jobs that name none.",
)
@click.option(
    "--grace",
    default=25.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds that ranks may take to commit their work on SIGTERM.",
)
@click.option(
    "--notices",
    type=click.Choice(["aws", "gcp", "azure"]),
    help="Watch this cloud's metadata service for an interruption of the machine, and then leave as on SIGTERM.",
)
@click.option(
    "--confine",
    is_flag=True,
    help="Run each rank in a rootless container (bubblewrap), which sees no home, secret or process of this host.",
)
@click.option(
    "--writable",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="With --confine: a folder that ranks may write to, such as that of checkpoints. Repeatable.",
)
@click.option(
    "--log-format",
    envvar=LOG_VARIABLE,
    default="text",
    show_default=True,
    show_envvar=True,
    type=click.Choice(FORMATS),
    help="Lines of the log on standard error: text, or JSON objects with level, UTC time, job and rank as fields.",
)
@click.option("--exit-with-stdin", is_flag=True, help="Exit when standard input closes.")
def main(
    coordinator: str,
    tls: str,
    interface: str,
    devices: str,
    share: int,
    labels: tuple[str, ...],
    secrets: Path | None,
    work_dir: Path,
    grace: float,
    notices: str | None,
    confine: bool,
    writable: tuple[Path, ...],
    log_format: str,
    exit_with_stdin: bool,
) -> None:
    """Offer this host's devices to a coordinator, and start ranks on them when it has jobs.

    On SIGTERM or Ctrl-C, or when its terminal is closed, its ranks leave their jobs, once their work is committed; a
    second SIGTERM or Ctrl-C ends them at once. If no coordinator answers, the next worker with this work folder hands
    in what they leave.

    If the coordinator needs a token, set ELCHE_TOKEN, or ELCHE_TOKEN_FILE to a file that contains it.
    """
    use_utf8()
    # Before gRPC is imported: of a coordinator that cannot be reached, this program says once a minute why.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from elche_worker.agent.agent import Agent
    from elche_worker.agent.job_folders import check_writable
    from elche_worker.agent.notices import watch

    set_up(log_format)
    try:
        split_addresses(coordinator)
        check_writable(work_dir)
        if interface:
            interface_address(interface)
            # `=`: NCCL would otherwise take each interface whose name begins with this one.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        agent = Agent(
            coordinator,
            _shared(_slots(devices), share),
            work_dir,
            token=read_token,
            tls=tls,
            interface=interface,
            grace_s=grace,
            labels=_labels(labels),
            secrets_dir=secrets,
            confinement=_confinement(work_dir, writable, secrets, tls) if confine else None,
        )
        if notices is not None:
            watch(notices, agent.leave, address=os.environ.get("ELCHE_METADATA", ""))
        serve(agent, exit_with_stdin=exit_with_stdin)
    except ElcheError as error:
        print_reason("elche-worker", str(error), log_format)
        sys.exit(2)
    except KeyboardInterrupt:  # before it takes signals itself
        sys.exit(130)


def serve(agent: "Agent", *, exit_with_stdin: bool) -> NoReturn:
    """Runs the agent until a signal or the end of standard input. Raises `ElcheError` when it is refused."""
    leave_on_signals(agent.leave)
    if exit_with_stdin:
        threading.Thread(target=_stop_with_stdin, args=(agent.stop,), daemon=True).start()
    agent.run()
    sys.stderr.flush()
    # An ordinary exit would abort the process while a thread waits for standard input.
    os._exit(0)


def leave_on_signals(leave: Callable[[], None]) -> None:
    """Calls `leave` on a thread at the first signal, and at each that hurries. Under nohup SIGHUP does nothing."""
    is_leaving, stop_signals = False, StopSignals()

    def on_signal(number: int, _: object) -> None:
        nonlocal is_leaving
        # On a thread: the handler interrupts this one at any line, also where it has locks that leaving needs.
        if stop_signals.hurries(number) or not is_leaving:
            threading.Thread(target=leave).start()
        is_leaving = True

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, on_signal)


def _confinement(work_dir: Path, writable: Sequence[Path], secrets: Path | None, tls: str) -> Confinement:
    """The confinement of ranks by these options. Raises `CannotConfine`."""
    agents = work_dir / AGENTS
    agents.mkdir(parents=True, exist_ok=True)
    token = os.environ.get(FILE_VARIABLE, "")
    confinement = Confinement(
        writable=[one.resolve() for one in (work_dir, *writable)],
        readable=[Path(tls).resolve()] if tls else [],
        secrets=[one.resolve() for one in (agents, secrets, Path(token) if token else None) if one is not None],
    )
    confinement.check()
    return confinement


def _stop_with_stdin(stop: Callable[[], None]) -> None:
    sys.stdin.read()
    stop()


def _slots(devices: str) -> list[agent_pb2.Slot]:
    """The slots to offer. A subprocess lists the devices with torch, so that the agent itself need not import it."""
    for device in devices.split(","):
        if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", device.strip()):
            raise InvalidJob(
                f"--devices: {device.strip()!r} is not a device; use auto, or names such as cpu,cpu or cuda:0"
            )
    wanted = [device.strip() for device in devices.split(",")]
    if set(wanted) == {"cpu"}:
        return [agent_pb2.Slot(device=device) for device in wanted]
    found = _find(wanted)
    log.info("offers %s", ", ".join(f"{one['device']} {one['model']}".strip() for one in found))
    return slots_of(found)


def slots_of(devices: Sequence[Mapping[str, Any]]) -> list[agent_pb2.Slot]:
    """The slots of devices that `device.discovery` has found; a device named several times gets several ranks."""
    times = Counter(one["device"] for one in devices)
    return [agent_pb2.Slot(**one, repeats=times[one["device"]] > 1) for one in devices]


def _shared(slots: list[agent_pb2.Slot], share: int) -> list[agent_pb2.Slot]:
    """Repeats each slot `share` times, with that part of the memory; ranks read the share from the environment."""
    if share > 1:
        os.environ[SHARE_VARIABLE] = str(share)
    return [
        agent_pb2.Slot(
            device=slot.device, model=slot.model, memory_bytes=slot.memory_bytes // share, repeats=slot.repeats
        )
        for _ in range(share)
        for slot in slots
    ]


def _labels(texts: Sequence[str]) -> dict[str, str]:
    labels = dict(text.partition("=")[::2] for text in texts)
    for name, value in labels.items():
        check_label(name, value)
    return labels


def _find(wanted: list[str]) -> list[dict[str, Any]]:
    """The usable ones of these devices, found by a process of its own, since the agent does not import torch. It names
    unusable ones on standard error. Raises `InvalidJob`.
    """
    command = [sys.executable, "-P", "-m", "elche_worker.device.discovery", ",".join(wanted)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process inherits this: this one kills it
    try:
        listing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with listing:
        try:
            output, _ = listing.communicate(timeout=FIND_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise InvalidJob(f"torch did not list the devices within {FIND_LIMIT_S:.0f} s") from None
        finally:
            listing.kill()
    if listing.returncode:
        raise InvalidJob("torch cannot list the devices; see the lines above")
    devices: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    if not devices:
        raise InvalidJob(f"--devices {','.join(wanted)}: none of them can be used; use auto, or cpu")
    return devices

"""`elche doctor`: checks of this machine and of the connection to the coordinator."""

import json
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from elche.errors import ElcheError, Forbidden, Unreachable
from elche.network import BadAddress, join_address, split_address, split_addresses
from elche.status import calling
from elche.tls import AUTHORITY, CERTIFICATE, KEY, Folder, client_context
from elche.v1 import job_pb2 as pb
from elche.v1.job_pb2_grpc import JobServiceStub
from elche_client.client import Client
from elche_client.display.formatting import printable
from elche_client.events import LinkView
from elche_client.local.check import NEEDED_BY_WORKER
from elche_client.transport import contexts
from elche_client.transport.connection import connect

DEVICES_LIMIT_S = 120.0
"""Limit in seconds of the trial of this machine's devices, torch's import included."""
CONNECT_LIMIT_S = 3.0
"""Limit in seconds of a TCP connection."""
TLS_LIMIT_S = 15.0
"""Limit in seconds of a TLS handshake; a busy coordinator may take long."""
NUM_CALLS = 5
"""Calls that are timed; the first one also opens the connection."""
LARGE = ("elche-padding", "0123456789abcdef" * 150)
"""Metadata that does not fit into one packet, and into the 4 KiB of them that the coordinator takes."""
CALL_LIMIT_S = 10.0
"""Limit in seconds of a call."""
MAX_SKEW_S = 5.0
"""Difference of clocks in seconds above which times in logs, tokens and certificates mislead."""
MIN_DISK_BYTES = 2 << 30
"""Free bytes of the disk below which a warning is given."""
MIN_SHARED_BYTES = 512 << 20
"""Least shared memory in bytes. With the 64 MiB of containers, a loader with worker processes dies of a bus error."""
MIN_FILES = 1024
"""Open files of a process below which a warning is given."""
SLOW_TIMES = 4.0
"""A link is slow if its bandwidth is lower than the median by this factor."""
ROUND_BYTES = 400e6
"""Bytes of a model of 100 million parameters in fp32, for the estimate of a round's time."""
CANNOT_CONNECT = "cannot connect to"
SHARED = Path("/dev/shm")
NOBODY_LISTENS = "nothing listens at"
DRIVER = Path("/proc/driver/nvidia/version")


class State(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    name: str
    state: State
    text: str
    advice: str = ""
    """Remedy; empty if there is no fault."""


def of_this_machine(work_dir: Path) -> Iterator[Finding]:
    """Checks this machine as ranks would use it; `work_dir` is their output folder."""
    yield Finding("Python", State.OK, f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}")
    yield from _packages()
    yield from _devices()
    yield from _shared_memory()
    yield _disk(work_dir)
    yield _open_files()


def _packages() -> Iterator[Finding]:
    missing = [name for name in NEEDED_BY_WORKER if find_spec(name) is None]
    if missing:
        text = f"elche {version('elche')}, which can submit, but not train here: {', '.join(missing)} is missing"
        yield Finding("packages", State.WARNING, text, "where ranks are to run: pip install 'elche[worker]'")
        return
    yield Finding("packages", State.OK, f"elche {version('elche')}, torch {_torch()}")


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "without a version"


def _devices() -> Iterator[Finding]:
    """Tries the devices in another process, which a broken driver may crash or hang."""
    if find_spec("torch") is None or find_spec("elche_worker") is None:
        return
    # Without -P, `-m` would import from the working directory first, such as a user's own queue.py or types.py.
    command = [sys.executable, "-P", "-m", "elche_worker.device.build"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEVICES_LIMIT_S)
    except subprocess.TimeoutExpired:
        text = f"torch does not say within {DEVICES_LIMIT_S:.0f} s which devices there are"
        yield Finding("devices", State.FAULT, text, "see whether `nvidia-smi` answers; else restart the machine")
        return
    lines = [line.removeprefix("elche: ") for line in done.stderr.splitlines() if line.startswith("elche: ")]
    for line in lines:
        yield Finding("devices", State.WARNING, line, "see what `nvidia-smi` says of it")
    try:
        build = json.loads(done.stdout.splitlines()[-1])
        found = build["devices"]
    except (IndexError, ValueError, KeyError, TypeError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        yield Finding("devices", State.FAULT, f"torch cannot be loaded: {last[0]}", "install torch again")
        return
    names = ", ".join(f"{one['device']} {one['model']}".strip() for one in found)
    if DRIVER.exists() and all(one["device"] == "cpu" for one in found):
        built = f"torch {_torch()}"
        why = f"{built} is built without CUDA" if "+cpu" in built else f"{built} may need a newer driver"
        text = f"there is an NVIDIA driver, but torch finds no GPU: {why}"
        yield Finding("devices", State.FAULT, text, "install the torch that fits the driver (`nvidia-smi` names both)")
        return
    yield Finding("devices", State.OK, names)
    yield _averaging(build)


def _averaging(build: Mapping[str, Any]) -> Finding:
    """The backends with which ranks here can average among themselves."""
    num_gpus = sum(one["device"].startswith("cuda") for one in build["devices"])
    driver = DRIVER.read_text(encoding="utf-8").splitlines()[0].strip() if DRIVER.exists() else ""
    means = [f"NCCL {build['nccl']}"] if build["nccl"] else []
    means += ["gloo"] if build["gloo"] else []
    cuda = f"CUDA {build['cuda']}; " if build["cuda"] else ""
    text = f"{cuda}{' and '.join(means) or 'through the coordinator alone'}{f'; {driver}' if driver else ''}"
    advice = "install PyTorch's own build, which has both NCCL and gloo"
    if not means:
        return Finding("averaging", State.WARNING, text, advice)
    if num_gpus > 1 and not build["nccl"]:
        return Finding("averaging", State.WARNING, f"{text}: {num_gpus} GPUs average slowly without NCCL", advice)
    return Finding("averaging", State.OK, text)


def _shared_memory() -> Iterator[Finding]:
    if not SHARED.is_dir():
        return
    size = shutil.disk_usage(SHARED).total
    if size < MIN_SHARED_BYTES:
        text = f"{SHARED} has {size >> 20} MiB: data loaders with worker processes may end with a bus error"
        yield Finding("shared memory", State.WARNING, text, "docker run --shm-size=2g, or shm_size: 2g in compose.yaml")
        return
    yield Finding("shared memory", State.OK, f"{size >> 20} MiB")


def _disk(work_dir: Path) -> Finding:
    place = work_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"elche")
        free = shutil.disk_usage(place).free
    except OSError as error:
        text = f"nothing can be written to {work_dir}: {error.strerror}"
        return Finding("disk", State.FAULT, text, "name another folder with --work-dir, or make this one writable")
    if free < MIN_DISK_BYTES:
        text = f"{free >> 20} MiB are free in {work_dir}, for logs, models and checkpoints"
        return Finding("disk", State.WARNING, text, "remove old runs, or name another folder with --work-dir")
    return Finding("disk", State.OK, f"{free >> 30} GiB are free in {work_dir}")


def _open_files() -> Finding:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < MIN_FILES:
        text = f"a process may open {limit} files, which many ranks or loaders exceed"
        return Finding("open files", State.WARNING, text, "ulimit -n 4096, or LimitNOFILE= of the service")
    return Finding("open files", State.OK, "no limit" if limit < 0 else f"up to {limit}")


def of_coordinator(address: str, *, is_named: bool = True) -> Iterator[Finding]:
    """Checks the coordinator at HOST:PORT, or several, up to the first fault that prevents further checks. That nothing
    listens there is no fault if nobody has named the address (`is_named` False): `elche run` needs no coordinator.
    """
    try:
        tls = contexts.tls_of(address)
        places = [split_address(one) for one in split_addresses(address)]
    except BadAddress as error:
        yield Finding("address", State.FAULT, str(error), "give it with --coordinator, or in ELCHE_COORDINATOR")
        return
    except ElcheError as error:
        yield Finding("address", State.FAULT, str(error), "see `elche context list`")
        return
    findings = [(place, list(_way(*place))) for place in places]
    serving = [place for place, found in findings if found[-1].state is State.OK]
    for _, found in findings:
        yield from (_of_several(one) if serving else one if is_named else _of_unnamed(one) for one in found)
    for host, port in serving if tls else ():
        yield from _certificates(host, port, tls)
    if serving:
        yield from _calls(address)


def _way(host: str, port: int) -> Iterator[Finding]:
    """Checks that the name resolves, and then that the port answers. The last finding decides if checks go on."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        text = f"the name {host} is not known here: {error.strerror}"
        yield Finding("address", State.FAULT, text, "check its spelling, DNS and /etc/hosts, or give an address")
        return
    yield Finding("address", State.OK, f"{host} is {', '.join(dict.fromkeys(str(one[4][0]) for one in found))}")
    yield _port(host, port)


def _of_several(finding: Finding) -> Finding:
    """A finding on further addresses if one answers: a standby does not listen."""
    if finding.state is not State.FAULT:
        return finding
    if finding.text.startswith(NOBODY_LISTENS):
        return Finding(finding.name, State.OK, f"{finding.text}: it is a standby, or is not running")
    return replace(finding, state=State.WARNING)


def _of_unnamed(finding: Finding) -> Finding:
    return replace(finding, state=State.WARNING) if finding.text.startswith(NOBODY_LISTENS) else finding


def _port(host: str, port: int) -> Finding:
    address = join_address(host, port)
    began_s = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=CONNECT_LIMIT_S).close()
    except TimeoutError:
        text = f"{address} does not answer within {CONNECT_LIMIT_S:.0f} s"
        return Finding("port", State.FAULT, text, f"let TCP port {port} through the firewalls between here and there")
    except ConnectionRefusedError:
        advice = (
            "`elche run` needs none; else start elche-coordinator there, for other machines with --listen 0.0.0.0:PORT"
        )
        return Finding("port", State.FAULT, f"{NOBODY_LISTENS} {address}", advice)
    except OSError as error:
        return Finding("port", State.FAULT, f"{address} cannot be reached: {error.strerror}", "check the network")
    return Finding("port", State.OK, f"{address} answers in {(time.monotonic() - began_s) * 1e3:.1f} ms")


def _certificates(host: str, port: int, folder: str) -> Iterator[Finding]:
    """Checks the coordinator's certificate, and the own one if there is one."""
    try:
        held = Folder(folder, needs=(AUTHORITY,))
    except ElcheError as error:
        yield Finding("certificates", State.FAULT, str(error), "name the right folder by ELCHE_TLS")
        return
    if held.held.certificate:
        from elche_client.commands.certificates import read_certificate

        own = read_certificate(held.path / CERTIFICATE)
        yield _validity("own certificate", own.not_valid_before_utc, own.not_valid_after_utc)
    context = client_context(held.path / AUTHORITY)
    context.set_alpn_protocols(["h2"])
    if held.held.certificate:
        context.load_cert_chain(held.path / CERTIFICATE, held.path / KEY)
    try:
        with (
            socket.create_connection((host, port), timeout=TLS_LIMIT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            presented = wrapped.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        advice = f"make it one for the name {host} with `elche certs server`, or put its authority into {folder}"
        yield Finding("TLS", State.FAULT, f"its certificate is refused: {error.verify_message}", advice)
        return
    except (OSError, ssl.SSLError) as error:
        text = f"what listens at {host}:{port} does not speak TLS ({error})"
        yield Finding("TLS", State.FAULT, text, "unset ELCHE_TLS, or start elche-coordinator with --tls")
        return
    since, until = (
        datetime.fromtimestamp(ssl.cert_time_to_seconds(str(presented[name])), UTC)
        for name in ("notBefore", "notAfter")
    )
    yield _validity("TLS", since, until)


def _validity(name: str, since: datetime, until: datetime) -> Finding:
    now = datetime.now(UTC)
    text = f"valid until {until:%Y-%m-%d %H:%M} UTC"
    if now >= until:
        return Finding(name, State.FAULT, f"it expired at {until:%Y-%m-%d %H:%M} UTC", "make a new one: `elche certs`")
    if until - now < (until - since) / 10:
        return Finding(name, State.WARNING, text, "make a new one soon: `elche certs`; no restart is needed")
    return Finding(name, State.OK, text)


def _calls(address: str) -> Iterator[Finding]:
    """Checks credentials, the time of a call, large packets, the difference of clocks, and the connected hosts."""
    took_s = list[float]()
    try:
        connection = connect(address, None, None)
        stub = JobServiceStub(connection.channel)
        skews_s = []
        with connection.channel, calling(address):
            for _ in range(NUM_CALLS):
                began_s, wall_s = time.monotonic(), time.time()
                answer = stub.ListHosts(pb.ListHostsRequest(), timeout=CALL_LIMIT_S, metadata=connection.metadata)
                took_s.append(time.monotonic() - began_s)
                skews_s.append(answer.now - wall_s - took_s[-1] / 2)
            stub.ListHosts(pb.ListHostsRequest(), timeout=CALL_LIMIT_S, metadata=(*connection.metadata, LARGE))
            hosts, page = list(answer.hosts), answer
            while page.next_page_token:
                more = pb.ListHostsRequest(page_token=page.next_page_token)
                page = stub.ListHosts(more, timeout=CALL_LIMIT_S, metadata=connection.metadata)
                hosts += page.hosts
    except Forbidden as error:
        yield Finding("access", State.OK, f"it knows this token or certificate, whose role allows less: {error}")
        return
    except ElcheError as error:
        if isinstance(error, Unreachable) and len(took_s) == NUM_CALLS:
            text = "short calls are answered, but not a long one: large packets to the coordinator are lost"
            yield Finding("network", State.FAULT, text, "give all network interfaces on the way the same MTU")
            return
        yield Finding("access", State.FAULT, str(error), "docs/security.md says who may call it, with what")
        return
    yield Finding("access", State.OK, f"a call takes {median(took_s) * 1e3:.1f} ms")
    # A call that is not as slow one way as the other, like the first, which connects, adds half of the difference.
    skew_s = min(skews_s, key=abs)
    if answer.now and abs(skew_s) > MAX_SKEW_S:
        text = f"the coordinator's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
        yield Finding("clock", State.FAULT, text, "let NTP set both: times, tokens and certificates go by them")
    elif answer.now:
        yield Finding("clock", State.OK, f"within {max(0.01, abs(skew_s)):.2f} s of the coordinator's")
    slots = sum(len(host.slots) for host in hosts)
    if not slots:
        yield Finding("hosts", State.WARNING, "none connected: jobs wait", f"elche-worker --coordinator {address}")
        return
    names = printable(", ".join(dict.fromkeys(host.host for host in hosts)))
    yield Finding("hosts", State.OK, f"{len(hosts)} with {slots} slots: {names[:200]}")


def of_links(address: str) -> Iterator[Finding]:
    """Findings on the links between the connected hosts, as each is measured, and on slow ones."""
    measured: list[LinkView] = []
    try:
        with Client(address) as client:
            for link in client.measure_links():
                if link.error:
                    is_closed = CANNOT_CONNECT in link.error
                    advice = "jobs on both average through the coordinator, unless TCP ports are opened both ways"
                    yield Finding("link", State.WARNING, printable(link.error), advice if is_closed else "")
                    continue
                measured.append(link)
                rates = " and back ".join(_mbit(rate) for rate in (link.to_bytes_per_s, link.from_bytes_per_s))
                yield Finding("link", State.OK, f"{_ends(link)}: {link.round_trip_s * 1e3:.2f} ms, {rates}")
    except ElcheError as error:
        yield Finding("links", State.WARNING, str(error), "docs/operating.md says what it needs")
    if measured:
        yield _slowest(measured)


def _slowest(measured: list[LinkView]) -> Finding:
    """The finding on the slowest link, which limits the speed of a ring all-reduce."""
    rates = [min(link.to_bytes_per_s, link.from_bytes_per_s) for link in measured]
    slowest = min(rates)
    link = measured[rates.index(slowest)]
    took_s = 2 * ROUND_BYTES / slowest
    text = f"over {_ends(link)}, the slowest, 100 million parameters average in some {took_s:.1f} s"
    if slowest * SLOW_TIMES < median(rates):
        advice = f"the median is {_mbit(median(rates))}: see what is wrong there, or submit with --compress int8"
        return Finding("links", State.WARNING, text, advice)
    return Finding("links", State.OK, text)


def _ends(link: LinkView) -> str:
    return printable(f"{link.host} and {link.other}")


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e6:,.0f} Mbit/s"

"""Two network namespaces joined by a slow link in user space: delay, rate, a bounded queue, loss (Linux, root).

A process of its own holds two TUN devices, one in each namespace, and passes packets between them. The namespaces have
no names: they are gone when the last process in them is, so that nothing is left behind, however it ends.

    with WanLink(delay_ms=20, rate_mbit=50) as link:
        subprocess.run(link.command(1, ["ping", "-c", "3", link.addresses[0]]))
"""

import argparse
import ctypes
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Self

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "wan0"
MTU = 1500
QUEUE_S = 0.1
"""What would wait longer than this to be sent is dropped."""
BURST = 64
"""Packets that are read from one side before the other gets its turn."""

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000


class WanLink:
    """The link and its two namespaces, numbered 0 and 1, for the length of a `with`.

    delay_ms: one way. rate_mbit: each way, in Mbit/s. loss: how likely a packet is lost on the way, at random.
    """

    def __init__(self, *, delay_ms: float, rate_mbit: float, loss: float = 0.0) -> None:
        values = {"--delay-ms": delay_ms, "--rate-mbit": rate_mbit, "--loss": loss}
        self._arguments = [f"{name}={value}" for name, value in values.items()]
        self._process: subprocess.Popen[str] | None = None
        self._namespaces: list[str] = []
        self.addresses = ADDRESSES

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self._arguments],
            stdin=subprocess.PIPE,  # its end tells the link that we are gone
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must not take the link away before its users are stopped
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the link did not start: it needs root, Linux, /dev/net/tun and the command ip")
        self._namespaces = json.loads(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def command(self, side: int, arguments: Sequence[str | os.PathLike[str]]) -> list[str | os.PathLike[str]]:
        """The command line that runs these arguments in one of the namespaces."""
        return ["nsenter", f"--net={self._namespaces[side]}", *arguments]

    def enter(self, side: int) -> None:
        """Moves the calling thread, and what it starts from now on, into one of the namespaces."""
        with open(self._namespaces[side]) as namespace:
            _call_libc("setns", namespace.fileno(), CLONE_NEWNET)


@dataclass(slots=True, kw_only=True)
class Direction:
    """One way through the link: a queue in front of a line that sends at its rate, then the line's delay."""

    source: int
    sink: int
    delay_s: float
    bytes_per_s: float
    loss: float
    draws: Random
    line_free_s: float = 0.0
    """When the line will have sent what it has accepted."""
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    """Packets in order, and when each arrives."""

    def accept(self, now_s: float) -> None:
        """Takes in what has come; drops what the queue has no room for."""
        for _ in range(BURST):
            try:
                packet = os.read(self.source, MTU)
            except BlockingIOError:
                return
            begins_s = max(now_s, self.line_free_s)
            if begins_s - now_s > QUEUE_S:
                continue
            self.line_free_s = begins_s + len(packet) / self.bytes_per_s
            if self.draws.random() >= self.loss:
                self.under_way.append((self.line_free_s + self.delay_s, packet))

    def deliver(self, now_s: float) -> None:
        """Hands over what has arrived."""
        while self.under_way and self.under_way[0][0] <= now_s:
            _, packet = self.under_way.popleft()
            with suppress(OSError):  # a device that takes nothing loses it, as a network would
                os.write(self.sink, packet)

    @property
    def next_arrival_s(self) -> float | None:
        return self.under_way[0][0] if self.under_way else None


def pass_packets(directions: Sequence[Direction]) -> None:
    """Carries packets until standard input ends."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    for direction in directions:
        poll.register(direction.source, select.POLLIN)
    while True:
        arrivals_s = [direction.next_arrival_s for direction in directions if direction.next_arrival_s is not None]
        timeout_ms = max(0.0, min(arrivals_s) - time.monotonic()) * 1000 if arrivals_s else None
        ready = {descriptor for descriptor, _ in poll.poll(timeout_ms)}
        if sys.stdin.fileno() in ready:
            return
        now_s = time.monotonic()
        for direction in directions:
            if direction.source in ready:
                direction.accept(now_s)
            direction.deliver(now_s)


def new_namespace() -> int:
    """Moves this process into a new network namespace; returns a descriptor that keeps it alive."""
    _call_libc("unshare", CLONE_NEWNET)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def open_device(address: str) -> int:
    """A TUN device with an address, up, in this process's namespace; its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        "ip link set lo up",
        f"ip address add {address}/24 dev {DEVICE}",
        f"ip link set {DEVICE} mtu {MTU} up",
    ):
        subprocess.run(command.split(), check=True)
    return device


def _call_libc(name: str, *arguments: int) -> None:
    # `os.setns` and `os.unshare` came with Python 3.12.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The process of a WanLink; lasts as long as its standard input.")
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--rate-mbit", type=float, required=True)
    parser.add_argument("--loss", type=float, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    namespaces, devices = [], []
    for address in ADDRESSES:
        namespaces.append(new_namespace())
        devices.append(open_device(address))
    directions = [
        Direction(
            source=source,
            sink=sink,
            delay_s=arguments.delay_ms / 1000,
            bytes_per_s=arguments.rate_mbit * 1e6 / 8,
            loss=arguments.loss,
            draws=Random(source),
        )
        for source, sink in (devices, reversed(devices))
    ]
    print(json.dumps([f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces]), flush=True)
    pass_packets(directions)


if __name__ == "__main__":
    main()

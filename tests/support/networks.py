"""Network namespaces, which are hosts as far as the network is concerned."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path("/tmp/elche-tests-lan.lock")


def ip(*arguments: str, is_needed: bool = True) -> None:
    """Raises `CalledProcessError` when a change that is needed cannot be made."""
    subprocess.run(["ip", *arguments], check=is_needed, capture_output=not is_needed)


@contextmanager
def network(number: int) -> Iterator[tuple[str, str]]:
    """A namespace that is joined to this host and to nothing else; its name, and this host's address there."""
    name, here, there = f"elche-{number}", f"elche{number}", f"eth{number}"
    ip("netns", "delete", name, is_needed=False)
    ip("netns", "add", name)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("address", "add", f"10.77.{number}.1/24", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", f"10.77.{number}.2/24", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, f"10.77.{number}.1"
    finally:
        ip("netns", "delete", name, is_needed=False)
        ip("link", "delete", here, is_needed=False)


def _plug_in(port: int, place: str, name: str) -> None:
    """A cable from the switch to a namespace, or to that of a process; `name` is the interface there."""
    ip("-n", "elche-switch", "link", "add", f"port{port}", "type", "veth", "peer", "name", name, "netns", place)
    ip("-n", "elche-switch", "link", "set", f"port{port}", "master", "br0", "up")


def may_make_networks() -> bool:
    """Whether this user, in this container, may."""
    name = f"elche-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    ip("netns", "delete", name, is_needed=False)
    return made


@contextmanager
def lan(num_hosts: int) -> Iterator[list[str]]:
    """Namespaces that reach each other and this host (10.77.9.254) through a switch, which is one, too; their names.
    Host i, from 1, has the address 10.77.9.i and the interface eth0. There is one such network at a time: tests beside
    this one wait.
    """
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _lan(num_hosts)


def _lan(num_hosts: int) -> Iterator[list[str]]:
    names = [f"elche-lan-{number}" for number in range(1, num_hosts + 1)]
    every = ["elche-switch", *names]
    for name in every:
        ip("netns", "delete", name, is_needed=False)
    try:
        for name in every:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", "elche-switch", "link", "add", "br0", "type", "bridge")
        ip("-n", "elche-switch", "link", "set", "br0", "up")
        _plug_in(0, str(os.getpid()), "elche-lan")
        ip("address", "add", "10.77.9.254/24", "dev", "elche-lan")
        ip("link", "set", "elche-lan", "up")
        for number, name in enumerate(names, start=1):
            _plug_in(number, name, "eth0")
            ip("-n", name, "address", "add", f"10.77.9.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in every:
            ip("netns", "delete", name, is_needed=False)
        ip("link", "delete", "elche-lan", is_needed=False)

"""A link between two hosts is measured by who has the secret, and by nobody else."""

import errno
import socket
import time

import pytest

from elche.network import split_address
from elche_worker.agent import link_speed
from elche_worker.agent.link_speed import LinkFault, listen, measure
from support.real_processes import eventually

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "STEPS_S", (0.01, 0.05))


def test_a_link_is_measured_both_ways() -> None:
    address, began_s = listen("127.0.0.1", SECRET), time.monotonic()
    found = measure(address, SECRET)
    assert 0 < found.round_trip_s < time.monotonic() - began_s
    assert min(found.to_bytes_per_s, found.from_bytes_per_s) > 1e6


def test_who_has_another_secret_is_turned_away_and_the_next_one_is_not() -> None:
    address = listen("127.0.0.1", SECRET)
    with pytest.raises(LinkFault, match=r"closed|reset"):
        measure(address, bytes(32))
    assert measure(address, SECRET).round_trip_s > 0


def test_who_goes_in_the_middle_of_a_secret_is_forgotten() -> None:
    """A port scanner, say. The thread that has read a part once waited for the rest forever, at full speed."""
    address = listen("127.0.0.1", SECRET)
    with socket.create_connection(split_address(address), 5) as one:
        one.sendall(b"GET / HTTP")
    assert measure(address, SECRET, only_connects=True).to_bytes_per_s == 0


def test_it_listens_for_one_only() -> None:
    address = listen("127.0.0.1", SECRET)
    measure(address, SECRET)
    with pytest.raises(LinkFault):
        measure(address, SECRET)


def test_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "WAIT_S", 0.05)
    address = listen("127.0.0.1", SECRET)

    def is_gone() -> bool:
        with socket.socket() as one:
            return one.connect_ex(split_address(address)) == errno.ECONNREFUSED

    eventually(is_gone, "it listens no more")


def test_what_it_does_not_know_ends_it() -> None:
    host, port = split_address(listen("127.0.0.1", SECRET))
    with socket.create_connection((host, port), 5) as one:
        one.sendall(SECRET + b"?")
        assert one.recv(1) == b""


def test_over_ipv6_and_where_nothing_listens() -> None:
    assert measure(listen("::1", SECRET), SECRET).round_trip_s > 0
    with socket.create_server(("127.0.0.1", 0)) as one:
        nobody = f"127.0.0.1:{one.getsockname()[1]}"
    with pytest.raises(LinkFault, match="refused"):
        measure(nobody, SECRET)

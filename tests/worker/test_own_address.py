"""The address of this host that ranks tell each other."""

import socket

import pytest
import torch
import torch.distributed as dist

from elche.network import own_address
from elche_worker.collectives.operations import CollectiveFailed
from elche_worker.collectives.process_group import ProcessGroupCollectives


class Names:
    """Stands in for the names that this host can look up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: dict[str, list[str]] = {}
        self._look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, port: int, *more: int, **kinds: int) -> list[tuple[object, ...]]:
        if host not in self.known:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [found for one in self.known[host] for found in self._look_up(one, port, *more, **kinds)]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def test_a_name_with_ipv6_addresses_only_has_a_route(names: Names) -> None:
    names.known = {"six": ["::1"], "both": ["::1", "127.0.0.1"]}
    assert own_address("six:1") == "::1"
    assert own_address("both:1") == "127.0.0.1"


def test_a_name_that_cannot_be_looked_up_for_a_moment_has_its_last_route(names: Names) -> None:
    with pytest.raises(socket.gaierror):
        own_address("moment:1")
    names.known = {"moment": ["127.0.0.1"]}
    assert own_address("moment:1") == "127.0.0.1"
    names.known = {}
    assert own_address("moment:1") == "127.0.0.1"


def test_the_second_coordinator_is_looked_up_if_the_first_has_no_address(names: Names) -> None:
    names.known = {"second": ["127.0.0.1"]}
    assert own_address("first:1,second:1") == "127.0.0.1"


def test_a_name_that_cannot_be_looked_up_keeps_ranks_from_meeting_and_does_not_fail_the_job(names: Names) -> None:
    assert names.known == {}
    with pytest.raises(CollectiveFailed, match="Temporary failure in name resolution"):
        ProcessGroupCollectives(
            dist.HashStore(),
            backend="gloo",
            attempt=1,
            generation=1,
            position=0,
            size=2,
            peer="nowhere:1",
            device=torch.device("cpu"),
        )

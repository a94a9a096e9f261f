"""Who a certificate says that its holder is, and which configurations are safe enough to start with."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from elche.errors import NotAllowed
from elche.token import Role
from elche_client.commands.certificates import Authority
from elche_coordinator.access.credentials import Credentials
from elche_coordinator.access.encryption import Encryption, caller_of
from elche_coordinator.access.tokens import IssuedTokens
from elche_coordinator.config import CannotStart, Config
from elche_coordinator.roles import Caller
from elche_coordinator.storage.sql.store import SqlStore

ANNA = b"elche://user/anna"


@pytest.mark.parametrize(
    ("uris", "found"),
    [
        ([ANNA], Caller("anna", Role.USER)),
        ([b"https://lab/x", b"elche://agent/pool"], Caller("pool", Role.AGENT)),
        ([b"elche://king/anna"], None),
        ([b"\xff"], None),
        ([], None),
    ],
)
def test_a_certificate_names_its_holder(uris: list[bytes], found: Caller | None) -> None:
    assert caller_of(uris) == found


def test_a_token_counts_more_than_a_certificate_and_one_of_both_is_needed(tmp_path: Path) -> None:
    tokens = IssuedTokens(SqlStore.in_file(tmp_path / "db.sqlite"))
    _, text = tokens.make("ops", Role.OPERATOR, expires_s=0.0, made_by="")
    asking = Credentials("", tokens, asks_certificates=True)
    assert asking.find("", [ANNA])[0] == Caller("anna", Role.USER)
    assert asking.find(f"Bearer {text}", [ANNA])[0].role is Role.OPERATOR
    for header, uris in (("", []), ("Bearer ", []), ("Bearer ", [ANNA]), ("Bearer wrong", [ANNA]), ("", [b"x://y/z"])):
        with pytest.raises(NotAllowed):
            asking.find(header, uris)
    assert Credentials("", tokens).find("")[0].role is None, "on loopback alone"


def test_beyond_loopback_it_needs_a_token_or_certificates(tmp_path: Path) -> None:
    common = {"listen": "0.0.0.0:0", "http": None, "data": tmp_path, "keep_jobs": 1}
    with pytest.raises(CannotStart, match=r"listening on 0\.0\.0\.0 needs a token"):
        Config(**common, tls=tmp_path)
    with pytest.raises(CannotStart, match="--client-certificates needs --tls"):
        Config(**common, asks_certificates=True)
    Config(**common, tls=tmp_path, asks_certificates=True)


def test_grpc_is_given_a_certificate_only_when_it_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one at each connection, gRPC crashed when two began at once: a port scan ended the coordinator."""
    fetchers: list[Callable[[], Any]] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda given, fetch, **_: fetchers.append(fetch))
    authority = Authority(tmp_path)
    holder = authority.server(["gpu1.lab"], expires=timedelta(days=1))
    Encryption(holder.folder, asks_clients=False).server_credentials()
    (renewed,) = fetchers
    assert renewed() is None
    authority.server(["gpu1.lab"], expires=timedelta(days=2))
    assert renewed() is not None
    assert renewed() is None

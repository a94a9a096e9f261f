"""What is exported of certificates and tokens that end, and of the disk."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from elche.token import Role
from elche_client.commands.certificates import Authority
from elche_coordinator.access import credentials
from elche_coordinator.access.encryption import Encryption
from elche_coordinator.access.tokens import IssuedTokens
from elche_coordinator.access.upkeep import FORGOTTEN_S, Upkeep
from elche_coordinator.storage.sql.store import SqlStore

DAY_S = 24 * 3600.0


class Clock:
    now_s = 1000.0
    num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s


def test_of_a_holder_s_tokens_the_last_to_end_counts(tmp_path: Path) -> None:
    clock = Clock()
    tokens = IssuedTokens(SqlStore.in_file(tmp_path / "db.sqlite"), now=clock)
    tokens.make("anna", Role.USER, expires_s=90 * DAY_S, made_by="")
    old, _ = tokens.make("pool", Role.AGENT, expires_s=10 * DAY_S, made_by="")
    tokens.make("ops", Role.OPERATOR, expires_s=DAY_S, made_by="")
    tokens.make("ops", Role.OPERATOR, expires_s=0, made_by="")  # which does not end
    upkeep = Upkeep(tmp_path, tokens)

    def ends() -> dict[str, float]:
        return {one.name: one.ends_at for one in upkeep.terms(clock.now_s)}

    assert ends() == {"anna": 1000 + 90 * DAY_S, "pool": old.expires_at}
    clock.now_s += 9 * DAY_S
    tokens.make("pool", Role.AGENT, expires_s=10 * DAY_S, made_by="")
    (made_at,) = [one.made_at for one in upkeep.terms(clock.now_s) if one.name == "pool"]
    assert (made_at, ends()["pool"]) == (clock.now_s, clock.now_s + 10 * DAY_S)
    tokens.revoke(old.id)
    clock.now_s += 10 * DAY_S + FORGOTTEN_S - 1
    assert "pool" in ends()
    clock.now_s += 2
    assert ends() == {"anna": 1000 + 90 * DAY_S}


def test_a_certificate_that_is_replaced_is_told_of_with_its_new_end(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    holder = authority.server(["gpu1.lab"], expires=timedelta(days=1))
    encryption = Encryption(holder.folder, asks_clients=False)
    upkeep = Upkeep(tmp_path, IssuedTokens(SqlStore.in_file(tmp_path / "db.sqlite")), encryption)

    def lasts_days() -> dict[str, float]:
        terms = upkeep.terms(0.0)
        assert {one.kind for one in terms} == {"certificate"}
        return {one.name: round((one.ends_at - one.made_at) / DAY_S) for one in terms}

    assert lasts_days()["tls.crt"] == 1
    assert lasts_days()["ca.crt"] > 300
    authority.server(["gpu1.lab"], expires=timedelta(days=5))
    assert encryption._of_page.renew()
    assert lasts_days()["tls.crt"] == 5


def test_a_disk_that_cannot_be_asked_has_no_series(tmp_path: Path) -> None:
    tokens = IssuedTokens(SqlStore.in_file(tmp_path / "db.sqlite"))
    found = Upkeep(tmp_path, tokens).disk()
    assert found is not None
    assert 0 < found[0] <= found[1]
    assert Upkeep(tmp_path / "gone", tokens).disk() is None


def test_a_token_of_an_open_call_ends_by_the_clock_as_it_is_set_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was wrong ended a worker, with its ranks, or kept it for hours after its token had expired."""
    monkeypatch.setattr(credentials, "LOOK_EVERY_S", 0.001)
    clock = Clock()
    tokens = IssuedTokens(SqlStore.in_file(tmp_path / "db.sqlite"), now=clock)
    _, text = tokens.make("pool", Role.AGENT, expires_s=DAY_S, made_by="")
    grant = tokens.find(text)
    assert grant is not None

    async def story() -> None:
        clock.now_s += DAY_S - 0.001
        ended = asyncio.create_task(credentials.Credentials("own", tokens).ended(grant))
        await asyncio.sleep(0)
        clock.now_s -= DAY_S / 2  # it was too far ahead
        before = clock.num_reads
        while clock.num_reads < before + 5:
            assert not ended.done()
            await asyncio.sleep(0.001)
        clock.now_s += DAY_S
        await asyncio.wait_for(ended, 100)

    asyncio.run(story())

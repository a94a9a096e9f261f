"""Calls that wait for keys: whom a key wakes, how much work that is, and how many there may be."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from elche.errors import TooMuch
from elche_coordinator.collectives import rendezvous as module
from elche_coordinator.collectives.rendezvous import NotInTime, Rendezvous
from elche_coordinator.limits.budgets import Held
from elche_coordinator.services import store_service
from elche_coordinator.services.store_service import StoreServicer


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


async def begun(*calls: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


class Counting(dict[str, bytes]):
    """Counts how often a key is looked for."""

    num_looks = 0

    def __contains__(self, key: object) -> bool:
        self.num_looks += 1
        return super().__contains__(key)


def test_a_call_waits_until_each_of_its_keys_has_been_set() -> None:
    async def story() -> None:
        table = Rendezvous()
        table.set("a", b"1")
        (both, one) = await begun(table.wait(["a", "b", "c"], 50), table.get("c", 50))
        table.set("b", b"2")
        await asyncio.sleep(0)
        assert not both.done()
        table.delete("b")
        table.set("c", b"3")
        await both
        assert await one == b"3"

    run(story)


def test_a_key_costs_nothing_for_those_that_wait_for_others() -> None:
    """With 300 that waited for 10,000 keys each, every `Set` took 0.3 s."""

    async def story() -> None:
        table = Rendezvous()
        keys = [str(number) for number in range(500)]
        waiting = await begun(*(table.wait(keys, 50) for _ in range(50)))
        table._values = counting = Counting(table._values)
        table.set("another", b"")
        for _ in range(3):
            await asyncio.sleep(0)
        assert counting.num_looks == 0
        for key in keys:
            table.set(key, b"")
        await asyncio.gather(*waiting)

    run(story)


def test_what_is_waited_for_is_bounded_and_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_AWAITED", 5)

    async def story() -> None:
        table = Rendezvous()
        (first,) = await begun(table.wait(["a", "b", "c"], 50))
        with pytest.raises(TooMuch, match="they lack 3, and 5 is the limit"):
            await table.wait(["a", "b", "c"], 50)
        table.set("a", b"")
        with pytest.raises(NotInTime, match=r"timeout after 0 s: nobody has set b, c, d"):
            await table.wait(["a", "b", "c", "d"], 0)
        first.cancel()
        await asyncio.wait([first])
        (more,) = await begun(table.wait(list("bcdef"), 50))
        table.close()
        with pytest.raises(NotInTime, match="the job has ended"):
            await more
        with pytest.raises(NotInTime, match="the job has ended"):
            await table.get("a", 50)

    run(story)


def test_the_stores_of_a_users_jobs_and_of_all_hold_so_much_together() -> None:
    """64 MiB for each job, and a user may have thousands: the stores of 12 loops held 840 MB."""

    async def story() -> None:
        held = Held("keys and values", 1000, 1500)
        first, second, third = (Rendezvous(partial(held.change, user)) for user in ("eve", "eve", "bob"))
        first.set("a", bytes(599))
        with pytest.raises(TooMuch, match=r"your jobs have 0 MiB of keys and values, and 0 MiB is the limit"):
            second.set("b", bytes(400))
        assert (second.has("b"), len(second)) == (False, 0)
        third.set("c", bytes(799))
        with pytest.raises(TooMuch, match="all jobs have"):
            second.set("b", bytes(100))
        first.append("a", bytes(100))
        first.set("a", bytes(99))
        assert held._held == {"eve": 100, "bob": 800}
        assert third.delete("c")
        assert not third.delete("c")
        second.set("b", bytes(899))
        second.close()
        second.close()
        assert held._held == {"eve": 100}
        first.close()
        assert not held._held

    run(story)


def test_a_jobs_store_is_of_who_has_submitted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_service, "authenticated", lambda driver, context: {"job_id": context})
    ended: list[Callable[[Any], None]] = []
    driver: Any = SimpleNamespace(
        watchers=SimpleNamespace(on_ended=ended.append),
        core=SimpleNamespace(spec=lambda job_id: SimpleNamespace(submitted_by=job_id.partition("-")[0])),
    )
    servicer = StoreServicer(driver)
    servicer._held = Held("keys and values", 100, 1000)
    table_of: Any = servicer._table
    assert table_of("eve-1") is table_of("eve-1")
    table_of("eve-1").set("a", bytes(79))
    with pytest.raises(TooMuch, match="your jobs have"):
        table_of("eve-2").set("a", bytes(79))
    table_of("bob-1").set("a", bytes(79))
    ended[0]("eve-1")
    table_of("eve-2").set("a", bytes(79))

"""The relay as ranks call it: a round that one of them has lost is over for all."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from elche.v1 import averaging_pb2 as pb
from elche_coordinator.collectives.averaging import RelayAborted
from elche_coordinator.core.messages.events import AgreedSettings, RoundFailed
from elche_coordinator.core.records.round import Round
from elche_coordinator.driver import Driver
from elche_coordinator.services.averaging_service import AveragingServicer
from elche_coordinator.services.interceptor import SECRET
from elche_coordinator.simulator.simulation import Simulation
from elche_coordinator.storage.sql.store import SqlStore
from support.watched import ranks


class Caller:
    """What the service asks of gRPC's context."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SECRET, self._secret),)


def in_a_round() -> tuple[Simulation, Round]:
    """A training of two ranks that average through the coordinator, with an open round."""
    settings = AgreedSettings(dataset_size=4000, batch_size=10, epochs=1, policy="cadence", backend="cpu")
    simulation = Simulation(settings=settings, ranks=ranks(5, 11.5))
    simulation.run_until(lambda: len(simulation.rounds) > 2 and bool(simulation.generation.rounds))
    return simulation, simulation.generation.rounds[0]


async def heard(servicer: AveragingServicer, secret: str, opened: Round) -> list[bytes] | str:
    """The answers to a rank that joins the round and ends it, or why it was aborted."""

    async def spoken() -> AsyncIterator[pb.AverageRequest]:
        yield pb.AverageRequest(join=pb.JoinRound(generation=opened.generation, round=opened.id))
        yield pb.AverageRequest(part=pb.Part(operation=pb.OPERATION_FINISH))
        await asyncio.Event().wait()

    caller: Any = Caller(secret)
    try:
        return [answer.data async for answer in servicer.Average(spoken(), caller)]
    except RelayAborted as error:
        return str(error)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_does_not_wait_for_one_that_lost_the_round_before_it_had_joined(is_first: bool, tmp_path: Path) -> None:
    """A connection broke while rank 1 joined: rank 0, on a new one, waited for it in a round that nobody could end."""
    simulation, opened = in_a_round()
    addresses = [simulation.training.ranks[rank].address for rank in (0, 1)]
    failed = RoundFailed(**addresses[1], generation=opened.generation, round=opened.id, reason="its connection broke")

    async def story() -> None:
        driver = Driver(simulation.core, SqlStore.in_file(tmp_path / "elche.sqlite"))
        try:
            servicer, secret = AveragingServicer(driver), driver.secrets.new(addresses[0])
            waiting = asyncio.ensure_future(heard(servicer, secret, opened))
            if is_first:
                await asyncio.sleep(0)
                driver.handle(failed)
                assert await waiting == "rank 1 has lost it: its connection broke"
            else:
                driver.handle(failed)
                assert await waiting == f"round {opened.id} is not open"
            both = [heard(servicer, driver.secrets.new(one), opened) for one in addresses]
            assert await asyncio.gather(*both) == [f"round {opened.id} is not open"] * 2
        finally:
            driver.stop()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_ranks_that_have_lost_nothing_meet(tmp_path: Path) -> None:
    simulation, opened = in_a_round()
    addresses = [simulation.training.ranks[rank].address for rank in (0, 1)]

    async def story() -> list[Any]:
        driver = Driver(simulation.core, SqlStore.in_file(tmp_path / "elche.sqlite"))
        try:
            servicer = AveragingServicer(driver)
            return await asyncio.gather(*(heard(servicer, driver.secrets.new(one), opened) for one in addresses))
        finally:
            driver.stop()

    assert asyncio.run(asyncio.wait_for(story(), 20)) == [[b""], [b""]]

"""Has hosts measure the links between them, for who looks for a slow or a closed one (`elche doctor --links`)."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import combinations

from elche.errors import ElcheError, InvalidJob, TooMuch
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.driver import Driver
from elche_coordinator.transfers import Transfers

SECRET_BYTES = 32


class LinkTrials:
    """Measures one link after the other: two at a time would disturb each other."""

    def __init__(self, driver: Driver, transfers: Transfers) -> None:
        self._driver = driver
        self._transfers = transfers
        self._is_busy = False

    async def measure(self, names: Sequence[str]) -> AsyncGenerator[job_pb2.MeasureLinksResponse]:
        """What each two of these hosts find, or of all that are connected; of hosts with one name, the first. Raises
        `InvalidJob` where there are no two, and `TooMuch` while others measure.
        """
        hosts = {host.host: host.agent_id for host in reversed(self._driver.hosts())}
        if unknown := [name for name in names if name not in hosts]:
            raise InvalidJob(f"no host named {unknown[0]!r} is connected; `elche hosts` lists them")
        pairs = list(combinations(sorted(names or hosts), 2))
        if not pairs:
            raise InvalidJob(f"a link is between two hosts, and {len(names or hosts)} is connected")
        if self._is_busy:
            raise TooMuch("links are being measured for somebody else: try again when that is done")
        self._is_busy = True
        try:
            for host, other in pairs:
                answer = job_pb2.MeasureLinksResponse(host=host, other=other, num_links=len(pairs))
                try:
                    answer.measured.ParseFromString(await self._measure(hosts[host], hosts[other]))
                except ElcheError as error:
                    answer.error = str(error)
                yield answer
        finally:
            self._is_busy = False

    async def _measure(self, agent_id: AgentId, other: AgentId) -> bytes:
        secret = secrets.token_bytes(SECRET_BYTES)
        transfer = self._transfers.begin()
        opened = agent_pb2.OpenLink(transfer=transfer, secret=secret)
        address = await self._answer(other, agent_pb2.AttendResponse(open_link=opened), transfer)
        transfer = self._transfers.begin()
        tried = agent_pb2.TryLink(transfer=transfer, address=address.decode(), secret=secret)
        return await self._answer(agent_id, agent_pb2.AttendResponse(try_link=tried), transfer)

    async def _answer(self, agent_id: AgentId, order: agent_pb2.AttendResponse, transfer: str) -> bytes:
        async with aclosing(self._transfers.chunks(transfer)) as chunks:
            if not self._driver.ask_agent(agent_id, order):
                raise InvalidJob("its host has disconnected")
            return b"".join([chunk async for chunk in chunks])

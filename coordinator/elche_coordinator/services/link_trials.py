"""Measures the links between hosts, to find slow or blocked ones (`elche doctor --links`)."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from itertools import combinations
from math import comb

from google.protobuf.message import DecodeError

from elche.errors import ElcheError, InvalidJob, TooMuch
from elche.v1 import agent_pb2, job_pb2
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.streams.agents import Agents
from elche_coordinator.streams.transfers import TooLong, Transfers

SECRET_BYTES = 32
"""Length of the random secret by which a host recognizes the other one."""
MAX_HOSTS = 64
"""Most hosts of one measurement: these have 2016 links, which take more than an hour."""
MAX_ANSWER_BYTES = 4096
"""Largest answer of a host: an address, or a `LinkMeasured`."""


class Unmeasured(ElcheError):
    """A host could not be asked, or has sent an invalid answer, so that the link is unknown."""


class LinkTrials:
    """Measures links one at a time, since two would disturb each other."""

    def __init__(self, agents: Agents, transfers: Transfers) -> None:
        self._agents = agents
        self._transfers = transfers
        self._is_busy = False

    async def measure(self, names: Sequence[str]) -> AsyncGenerator[job_pb2.MeasureLinksResponse]:
        """Yields the measurement of each pair of these hosts, or of all connected ones; of hosts with equal names, the
        first. Raises `InvalidJob` for fewer than two, and `TooMuch` for too many, or while another measurement runs.
        """
        hosts = {host.host: host.agent_id for host in reversed(self._agents.hosts())}
        wanted = sorted(set(names or hosts))
        if unknown := [name for name in wanted if name not in hosts]:
            raise InvalidJob(f"no host named {unknown[0]!r} is connected; `elche hosts` lists them")
        if len(wanted) < 2:
            raise InvalidJob(f"a link is between two hosts; hosts {'named' if names else 'connected'}: {len(wanted)}")
        if len(wanted) > MAX_HOSTS:
            raise TooMuch(f"{len(wanted)} hosts have {comb(len(wanted), 2)} links: name {MAX_HOSTS} of them at most")
        if self._is_busy:
            raise TooMuch("links are being measured for somebody else: try again when that is done")
        self._is_busy = True
        try:
            for host, other in combinations(wanted, 2):
                answer = job_pb2.MeasureLinksResponse(host=host, other=other, num_links=comb(len(wanted), 2))
                try:
                    answer.measured.MergeFrom(await self._try(host, hosts[host], other, hosts[other]))
                    await self._try(other, hosts[other], host, hosts[host], only_connects=True)
                except ElcheError as error:
                    answer.error = str(error)
                yield answer
        finally:
            self._is_busy = False

    async def _try(
        self, host: str, agent_id: AgentId, other: str, peer: AgentId, *, only_connects: bool = False
    ) -> job_pb2.LinkMeasured:
        """Has one host measure the link to another. Raises `ElcheError`."""
        secret = secrets.token_bytes(SECRET_BYTES)
        opened = agent_pb2.OpenLink(transfer=self._transfers.begin(), secret=secret)
        address = await self._answer(other, peer, agent_pb2.AttendResponse(open_link=opened), opened.transfer)
        tried = agent_pb2.TryLink(transfer=self._transfers.begin(), secret=secret, only_connects=only_connects)
        try:
            tried.address = address.decode()
            found = await self._answer(host, agent_id, agent_pb2.AttendResponse(try_link=tried), tried.transfer)
            return job_pb2.LinkMeasured.FromString(found)
        except (UnicodeDecodeError, DecodeError, TooLong):
            raise Unmeasured(f"{host} or {other} has sent something other than a measurement") from None
        except InvalidJob as error:  # the host's error
            raise Unmeasured(f"{host} cannot connect to {other}: {error}") from None

    async def _answer(self, host: str, agent_id: AgentId, order: agent_pb2.AttendResponse, transfer: str) -> bytes:
        """Sends an order and returns the agent's delivery. Raises `ElcheError`."""
        if not self._agents.ask(agent_id, order):
            self._transfers.drop(transfer)
            raise Unmeasured(f"{host} has disconnected")
        return await self._transfers.whole(transfer, MAX_ANSWER_BYTES)

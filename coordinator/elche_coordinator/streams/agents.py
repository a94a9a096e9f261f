"""Orders to agents besides the core's commands: delivery of files, and measurements of links."""

from elche.v1 import agent_pb2
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.describe import JobView, RankView
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.core.messages.reports import JobResult
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.limits.budgets import MAX_HOSTS_BYTES, MAX_HOSTS_BYTES_OF_CALLER, Held
from elche_coordinator.streams.streams import Streams
from elche_coordinator.streams.transfers import Rest

SLOT_BYTES = 128
"""Bytes that are counted for each slot besides its description: each submission looks at all slots, 0.8 us each."""


class Agents:
    """The agents that are connected, and orders to them."""

    def __init__(self, core: Coordinator, streams: Streams) -> None:
        self._core = core
        self._streams = streams
        what = "descriptions of hosts"
        self._held = Held(what, MAX_HOSTS_BYTES_OF_CALLER, MAX_HOSTS_BYTES, "workers")
        self._sizes: dict[AgentId, tuple[str, int]] = {}
        """Caller and bytes of each agent's hello."""

    def hold(self, agent_id: AgentId, caller: str, hello: agent_pb2.AgentHello) -> None:
        """Counts what an agent says of its host until it is lost. Raises `TooMuch`."""
        if agent_id not in self._sizes:
            num_bytes = hello.ByteSize() + SLOT_BYTES * len(hello.slots)
            self._held.change(caller, num_bytes)
            self._sizes[agent_id] = caller, num_bytes

    def forget(self, agent_id: AgentId) -> None:
        """Forgets an agent that is lost, and stops counting it."""
        caller, num_bytes = self._sizes.pop(agent_id, ("", 0))
        self._held.change(caller, -num_bytes)

    def hosts(self) -> list[HostView]:
        """All hosts, in the order in which they joined."""
        return self._core.fleet.hosts()

    def hosts_of(self, view: JobView) -> list[AgentId]:
        """The connected hosts that may have the output of the job's ranks."""
        places = dict.fromkeys((AgentId(rank.agent_id), rank.folder) for rank in view.ranks)
        return list(dict.fromkeys(one for place in places for one in self.holders(view.job_id, *place)))

    def ask(self, agent_id: AgentId, order: agent_pb2.AttendResponse) -> bool:
        """Sends an agent an order. Returns False if it is not connected."""
        if not self._is_connected(agent_id):
            return False
        self._streams.agents[agent_id].pass_on(order)
        return True

    def ask_for_model(self, job_id: str, result: JobResult, rest: Rest, transfer: str, *, best: bool = False) -> bool:
        """Asks a host with the final, or best, model of an ended job to deliver it, or the rest of it. Returns False if
        none is connected.
        """
        holders = self.holders(job_id, AgentId(result.model_agent_id), result.model_folder)
        send = agent_pb2.SendModel(
            job_id=job_id, transfer=transfer, best=best, offset=rest.has_bytes, sha256=rest.of_sha256
        )
        return bool(holders) and self.ask(holders[0], agent_pb2.AttendResponse(send_model=send))

    def ask_for_checkpoint(self, job_id: str, agent_id: AgentId, path: str, rest: Rest, transfer: str) -> bool:
        """Asks a host to deliver the weights of the checkpoint at `path`. Returns False if it is not connected."""
        send = agent_pb2.SendModel(
            job_id=job_id, transfer=transfer, checkpoint=path, offset=rest.has_bytes, sha256=rest.of_sha256
        )
        return self.ask(agent_id, agent_pb2.AttendResponse(send_model=send))

    def ask_for_log(self, job_id: str, rank: RankView, how: agent_pb2.SendLog, transfer: str) -> bool:
        """Asks a host that has a rank's log to deliver it as `how` says. False when none is connected."""
        holders = self.holders_of_log(job_id, rank)
        send = agent_pb2.SendLog(job_id=job_id, rank=rank.rank, transfer=transfer)
        send.MergeFrom(how)
        return bool(holders) and self.ask(holders[0], agent_pb2.AttendResponse(send_log=send))

    def holders_of_log(self, job_id: str, rank: RankView) -> list[AgentId]:
        """The connected hosts that may have a rank's log."""
        return self.holders(job_id, AgentId(rank.agent_id), rank.folder)

    def holders(self, job_id: str, agent_id: AgentId, folder: str) -> list[AgentId]:
        """The connected hosts that may have what the job left with an agent that had this work folder."""
        return list(filter(self._is_connected, self._core.fleet.holders(JobId(job_id), agent_id, folder)))

    def _is_connected(self, agent_id: AgentId) -> bool:
        stream = self._streams.agents.get(agent_id)
        return stream is not None and stream.is_connected

"""What agents are asked for beside the core's commands: files of their hosts, and measurements of links."""

from elche.v1 import agent_pb2
from elche_coordinator.core.coordinator import Coordinator
from elche_coordinator.core.messages.ids import AgentId, JobId, Rank
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.streams import Streams


class Agents:
    """The agents that are connected, and orders to them."""

    def __init__(self, core: Coordinator, streams: Streams) -> None:
        self._core = core
        self._streams = streams
        self.measuring: set[AgentId] = set()
        """Agents that can measure links: older ones cannot."""

    def hosts(self) -> list[HostView]:
        """All hosts, in the order in which they joined."""
        return self._core.hosts()

    def hosts_of(self, job_id: str) -> list[AgentId]:
        """The connected hosts of the job's ranks."""
        return list(filter(self._is_connected, self._core.hosts_of(JobId(job_id))))

    def ask(self, agent_id: AgentId, order: agent_pb2.AttendResponse) -> bool:
        """Sends an agent an order. False when it is not connected."""
        if not self._is_connected(agent_id):
            return False
        self._streams.agents[agent_id].pass_on(order)
        return True

    def ask_for_model(self, job_id: str, transfer: str, *, best: bool = False) -> bool:
        """Asks the host with the job's final, or best, model to deliver it. False when that host is not connected."""
        agent_id = self._core.host_of_model(JobId(job_id))
        send = agent_pb2.SendModel(job_id=job_id, transfer=transfer, best=best)
        return agent_id is not None and self.ask(agent_id, agent_pb2.AttendResponse(send_model=send))

    def ask_for_checkpoint(self, job_id: str, agent_id: AgentId, path: str, transfer: str) -> None:
        """Asks a host to deliver the weights of the checkpoint at `path`."""
        send = agent_pb2.SendModel(job_id=job_id, transfer=transfer, checkpoint=path)
        self.ask(agent_id, agent_pb2.AttendResponse(send_model=send))

    def ask_for_log(self, job_id: str, rank: Rank, transfer: str, max_bytes: int, **how: bool) -> bool:
        """Asks a rank's host to deliver the end of its log and, with `follow=True`, what is appended; with
        `with_times=True` with the time of each line. False when the host is not connected.
        """
        agent_id = self._core.host_of_rank(JobId(job_id), rank)
        send = agent_pb2.SendLog(job_id=job_id, rank=rank, transfer=transfer, max_bytes=max_bytes, **how)
        return agent_id is not None and self.ask(agent_id, agent_pb2.AttendResponse(send_log=send))

    def _is_connected(self, agent_id: AgentId) -> bool:
        stream = self._streams.agents.get(agent_id)
        return stream is not None and stream.is_connected

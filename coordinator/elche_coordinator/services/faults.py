"""Injects faults, for `elche chaos`. The core gets no event of them: it only sees their effects, as with real ones."""

import asyncio
import logging
import os
import signal
import socket

from elche.errors import Forbidden, InvalidJob
from elche.v1 import agent_pb2, job_pb2
from elche.v1.job_pb2 import Fault
from elche_coordinator.core.describe import JobView
from elche_coordinator.core.messages.ids import AgentId, JobId
from elche_coordinator.driver import Driver
from elche_coordinator.job_states import DECIDED

log = logging.getLogger(__name__)

MAX_STOP_S = 600.0
"""Longest time in seconds for which a rank is stopped."""
ANSWER_S = 0.2
"""Seconds in which the answer to a request to kill the coordinator is sent."""


class Faults:
    """Breaks ranks, agents, connections and this process where that is allowed."""

    def __init__(self, driver: Driver, *, are_allowed: bool) -> None:
        self._driver = driver
        self._are_allowed = are_allowed

    def inject(self, view: JobView, request: job_pb2.InjectFaultRequest) -> str:
        """Breaks what is asked for; returns the name of the host on which that is.

        Raises `Forbidden` where faults are not allowed, and `InvalidJob` for a job that has ended, or a rank that is
        not there.
        """
        if not self._are_allowed:
            raise Forbidden("faults are not allowed here: start the coordinator with --allow-chaos")
        if view.state in DECIDED:
            raise InvalidJob(f"job {view.job_id} is {view.state}: there is nothing to break")
        if not 0 <= request.seconds <= MAX_STOP_S:
            raise InvalidJob(f"a fault lasts from 0 to {MAX_STOP_S:g} s, not {request.seconds:g}")
        if request.fault == Fault.FAULT_UNSPECIFIED:
            return ""
        if request.fault not in Fault.values():
            raise InvalidJob(f"this coordinator does not know fault {request.fault}: it is of an older version")
        host = self._break(view, request)
        log.warning("job=%s rank=%d a fault on purpose: %s", view.job_id, request.rank, Fault.Name(request.fault))
        return host

    def _break(self, view: JobView, request: job_pb2.InjectFaultRequest) -> str:
        if request.fault == Fault.FAULT_KILL_COORDINATOR:
            asyncio.get_running_loop().call_later(ANSWER_S, os.kill, os.getpid(), signal.SIGKILL)
            return socket.gethostname()
        if request.fault == Fault.FAULT_FILL_DISK:
            self._driver.writer.fill_disk(request.seconds)
            return socket.gethostname()
        rank = next((one for one in view.ranks if one.rank == request.rank), None)
        if rank is None:
            raise InvalidJob(f"job {view.job_id} has no rank {request.rank}")
        if request.fault == Fault.FAULT_CUT_CONNECTIONS:
            self._cut(JobId(view.job_id), rank.rank, AgentId(rank.agent_id))
        else:
            self._order(AgentId(rank.agent_id), request)
        return rank.host

    def _cut(self, job_id: JobId, rank: int, agent_id: AgentId) -> None:
        streams = self._driver.streams
        for (number, _), stream in streams.ranks.get(job_id, {}).items():
            if number == rank:
                stream.close()
        if agent_id in streams.agents:
            streams.agents[agent_id].close()

    def _order(self, agent_id: AgentId, request: job_pb2.InjectFaultRequest) -> None:
        order = agent_pb2.InjectFault(
            fault=request.fault, job_id=request.job_id, rank=request.rank, seconds=request.seconds
        )
        agents = self._driver.agents
        if not agent_id:
            why = "no worker has started it"
        elif not agents.ask(agent_id, agent_pb2.AttendResponse(inject_fault=order)):
            why = "its worker is not connected"
        else:
            return
        raise InvalidJob(f"rank {request.rank} of job {request.job_id} cannot be reached: {why}")

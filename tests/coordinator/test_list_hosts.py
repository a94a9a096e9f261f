"""Hosts are listed page by page: many large ones are more than a message holds."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from elche.v1 import job_pb2, job_pb2_grpc
from elche_client import Client
from elche_coordinator.core.messages.ids import AgentId
from elche_coordinator.core.messages.spec import Slot
from elche_coordinator.core.records.fleet import HostView
from elche_coordinator.services.job_service import PAGE_BYTES, JobServicer
from elche_coordinator.services.validation import ValidationInterceptor

FAT = Slot(device="d" * 255, model="m" * 255)
NAMES = [f"host-{number}" for number in range(7)]


async def listed() -> list[str]:
    """The names that a client finds, of hosts whose slots take two pages and more."""
    views = [HostView(agent_id=AgentId(name), host=name, slots=(FAT,) * 1024, ranks={}) for name in NAMES]
    driver: Any = SimpleNamespace(agents=SimpleNamespace(hosts=lambda: views), last_change=lambda job_id: 0)
    nothing: Any = None
    catalogue: Any = SimpleNamespace(known_view=nothing)
    server = grpc.aio.server(interceptors=[ValidationInterceptor()])
    servicer = JobServicer(driver, catalogue, nothing, nothing, nothing, nothing, nothing, nothing)
    job_pb2_grpc.add_JobServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = job_pb2_grpc.JobServiceStub(channel)
        page = await stub.ListHosts(job_pb2.ListHostsRequest())
        assert 0 < page.ByteSize() <= PAGE_BYTES + 1000
        assert page.next_page_token
        few = await stub.ListHosts(job_pb2.ListHostsRequest(page_token="4", page_size=2))
        assert ([one.host for one in few.hosts], few.next_page_token) == (NAMES[4:6], "6")
        last = await stub.ListHosts(job_pb2.ListHostsRequest(page_token="6"))
        assert ([one.host for one in last.hosts], last.next_page_token) == (NAMES[6:], "")
        with pytest.raises(grpc.aio.AioRpcError, match="the page token was not returned by an earlier page"):
            await stub.ListHosts(job_pb2.ListHostsRequest(page_token="-1"))
    found = await asyncio.to_thread(names_of, f"127.0.0.1:{port}")
    await server.stop(None)
    return found


def names_of(address: str) -> list[str]:
    with Client(address, token="") as client:
        return [host.host for host in client.hosts()]


def test_hosts_beyond_one_message_come_page_by_page() -> None:
    """Four agents with 1,024 slots were more than 4 MiB, and nobody could list any host."""
    assert asyncio.run(listed()) == NAMES

"""The gRPC service of the rendezvous store, by which ranks form their process groups."""

import secrets
from functools import partial
from typing import Any

from elche.errors import Unreachable
from elche.protocol import TABLE
from elche.v1 import store_pb2, store_pb2_grpc
from elche_coordinator.collectives.rendezvous import Rendezvous
from elche_coordinator.core.messages.ids import JobId
from elche_coordinator.driver import Driver
from elche_coordinator.limits.budgets import MAX_STORES_BYTES, MAX_STORES_BYTES_OF_USER, Held
from elche_coordinator.limits.releasing import Context
from elche_coordinator.services.interceptor import authenticated


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    """The rendezvous store. A rank sees the table of its own job only. Tables are lost when this process ends. So each
    answer has the process's name in its metadata, and a call that names another process is refused: the keys that its
    caller has set are missing here.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._name = secrets.token_hex(8)
        """Name of this process."""
        self._tables: dict[str, Rendezvous] = {}
        self._held = Held("keys and values in rendezvous stores", MAX_STORES_BYTES_OF_USER, MAX_STORES_BYTES)
        driver.watchers.on_ended(self._drop)

    async def Set(self, request: store_pb2.SetRequest, context: Context) -> store_pb2.SetResponse:
        self._asked(context).set(request.key, request.value)
        return store_pb2.SetResponse()

    async def Get(self, request: store_pb2.GetRequest, context: Context) -> store_pb2.GetResponse:
        value = await self._asked(context).get(request.key, _seconds(request.timeout))
        return store_pb2.GetResponse(value=value)

    async def Add(self, request: store_pb2.AddRequest, context: Context) -> store_pb2.AddResponse:
        value = self._asked(context).add(request.key, request.amount)
        return store_pb2.AddResponse(value=value)

    async def Wait(self, request: store_pb2.WaitRequest, context: Context) -> store_pb2.WaitResponse:
        await self._asked(context).wait(request.keys, _seconds(request.timeout))
        return store_pb2.WaitResponse()

    async def Check(self, request: store_pb2.CheckRequest, context: Context) -> store_pb2.CheckResponse:
        exist = self._asked(context).has(request.keys)
        return store_pb2.CheckResponse(exist=exist)

    async def CompareSet(self, request: store_pb2.CompareSetRequest, context: Context) -> store_pb2.CompareSetResponse:
        value = self._asked(context).compare_set(request.key, request.expected, request.desired)
        return store_pb2.CompareSetResponse(value=value)

    async def DeleteKey(self, request: store_pb2.DeleteKeyRequest, context: Context) -> store_pb2.DeleteKeyResponse:
        deleted = self._asked(context).delete(request.key)
        return store_pb2.DeleteKeyResponse(deleted=deleted)

    async def Append(self, request: store_pb2.AppendRequest, context: Context) -> store_pb2.AppendResponse:
        self._asked(context).append(request.key, request.value)
        return store_pb2.AppendResponse()

    async def NumKeys(self, request: store_pb2.NumKeysRequest, context: Context) -> store_pb2.NumKeysResponse:
        count = len(self._asked(context))
        return store_pb2.NumKeysResponse(count=count)

    def _drop(self, job_id: JobId) -> None:
        table = self._tables.pop(job_id, None)
        if table is not None:
            table.close()

    def _asked(self, context: Context) -> Rendezvous:
        """The table of a call. Raises `Unreachable` if the caller has used that of an earlier process."""
        table, metadata = self._table(context), dict(context.invocation_metadata() or ())
        context.set_trailing_metadata(((TABLE, self._name),))
        if metadata.get(TABLE, self._name) != self._name:
            raise Unreachable("the coordinator was started again, without the keys by which ranks were meeting")
        return table

    def _table(self, context: Context) -> Rendezvous:
        job_id = authenticated(self._driver, context)["job_id"]
        if (table := self._tables.get(job_id)) is None:
            spec = self._driver.core.spec(job_id)
            table = self._tables[job_id] = Rendezvous(partial(self._held.change, spec.submitted_by if spec else ""))
        return table


def _seconds(duration: Any) -> float:
    return min(max(0.0, float(duration.seconds) + float(duration.nanos) / 1e9), 3600.0)

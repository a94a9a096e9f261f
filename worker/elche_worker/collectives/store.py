"""A `torch.distributed.Store` on the coordinator's store service: one address and one credential find all peers."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import grpc
import torch.distributed as dist
from google.protobuf.duration_pb2 import Duration
from torch.distributed.distributed_c10d import Store

from elche.channel import NOBODY
from elche.protocol import TABLE
from elche.status import was_never_sent
from elche.v1 import store_pb2, store_pb2_grpc

CALL_MARGIN_S = 10.0
"""Seconds that a call may take beyond the wait that it asks for: the service's own answer is better than gRPC's."""
AWAY_S = 20.0
"""Seconds for which a call is repeated that has had no answer, since its connection broke."""
RETRY_S = 0.2
"""Seconds between two such attempts."""
NOT_IN_TIME = grpc.StatusCode.FAILED_PRECONDITION
"""Status code of the service for a key that is not set within the timeout."""


class CoordinatorStore(Store):
    """Keys and values of one job. Raises `DistStoreError` when a key does not come in time or a value is not a counter,
    and `DistNetworkError` when the coordinator cannot be asked, or was restarted and has lost the keys; both are
    `RuntimeError`. Calls whose connection breaks are repeated for `AWAY_S`, except those that would count twice.

    torch calls its methods from C++, mostly through a `PrefixStore`, by the names that its trampoline looks for
    (`PythonStore` in torch/csrc/distributed/c10d/init.cpp, torch 2.13): of two methods these are not the names that
    Python's callers use. The trampoline knows no queues and no `list_keys`; they raise torch's `NotImplementedError`.
    """

    _alive: ClassVar[list["CoordinatorStore"]] = []
    """All stores of the process. C++ holds no reference to the Python object, which it calls as late as NCCL's first
    collective: without this one it would be freed before.
    """

    def __init__(self, channel: grpc.Channel, secret: str) -> None:
        super().__init__()
        self._stub = store_pb2_grpc.StoreServiceStub(channel)
        self._secret = ("elche-secret", secret)
        self._table = ""
        """Name of the coordinator's tables, of its last answer; empty before the first."""
        self._alive.append(self)

    @property
    def _limit(self) -> timedelta:
        """The timeout of `set_timeout`, which C++ keeps and a `PrefixStore` sets as well."""
        return self.timeout  # type: ignore[attr-defined, no-any-return]

    def clone(self) -> "CoordinatorStore":
        """Returns this store, which has no connection that two users could disturb."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        self._call(self._stub.Set, store_pb2.SetRequest(key=key, value=_bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        request = store_pb2.GetRequest(key=key, timeout=_duration(self._limit))
        return bytes(self._call(self._stub.Get, request, self._limit).value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns it."""
        request = store_pb2.AddRequest(key=key, amount=amount)
        return int(self._call(self._stub.Add, request, may_repeat=False).value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        limit = timeout or self._limit
        self._call(self._stub.Wait, store_pb2.WaitRequest(keys=keys, timeout=_duration(limit)), limit)

    def check(self, keys: list[str]) -> bool:
        """True if all keys exist."""
        return bool(self._call(self._stub.Check, store_pb2.CheckRequest(keys=keys)).exist)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets the key if it has the expected value, or is missing and none is expected."""
        request = store_pb2.CompareSetRequest(key=key, expected=_bytes(expected), desired=_bytes(desired))
        # May be repeated: if the first attempt had set it, the second returns the desired value too.
        return bytes(self._call(self._stub.CompareSet, request).value)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns True if it existed."""
        return bool(self._call(self._stub.DeleteKey, store_pb2.DeleteKeyRequest(key=key)).deleted)

    def num_keys(self) -> int:
        """Number of the job's keys, of all prefixes."""
        return int(self._call(self._stub.NumKeys, store_pb2.NumKeysRequest()).count)

    deleteKey = delete_key  # noqa: N815 torch's trampoline looks for these names
    getNumKeys = num_keys  # noqa: N815

    def append(self, key: str, value: str | bytes) -> None:
        """Adds to the end of a key's value."""
        request = store_pb2.AppendRequest(key=key, value=_bytes(value))
        self._call(self._stub.Append, request, may_repeat=False)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for keys and returns their values, in order."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Sets keys, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """True: there are `append`, `multi_get` and `multi_set`."""
        return True

    def _call(self, method: Any, request: Any, limit: timedelta = timedelta(), *, may_repeat: bool = True) -> Any:
        timeout_s, until_s = limit.total_seconds() + CALL_MARGIN_S, 0.0
        while True:
            began_s = time.monotonic()
            metadata = (self._secret, (TABLE, self._table)) if self._table else (self._secret,)
            try:
                answer, call = method.with_call(request, metadata=metadata, timeout=timeout_s)
                self._note_table(call)
                return answer
            except grpc.RpcError as error:
                failed_s = time.monotonic()
                if not until_s or failed_s - began_s > AWAY_S:  # the connection was there until now
                    until_s = failed_s + AWAY_S
                is_refused = self._note_table(error) or error.code() not in NOBODY
                if is_refused or not (may_repeat or was_never_sent(error)) or failed_s >= until_s:
                    words = f"rendezvous through the coordinator failed: {error.details()}"
                    kind = dist.DistStoreError if error.code() is NOT_IN_TIME else dist.DistNetworkError
                    raise kind(words) from error
            time.sleep(RETRY_S)

    def _note_table(self, call: Any) -> bool:
        """Notes the name of the coordinator's tables, if this is an answer of the store and no broken connection."""
        name = dict(call.trailing_metadata() or ()).get(TABLE, "")
        self._table = name or self._table
        return bool(name)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _duration(limit: timedelta) -> Duration:
    duration = Duration()
    duration.FromTimedelta(limit)
    return duration

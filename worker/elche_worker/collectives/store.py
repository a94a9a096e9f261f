"""A `torch.distributed.Store` on the coordinator's store service: one address and one credential find all peers."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import grpc
import torch.distributed as dist
from google.protobuf.duration_pb2 import Duration
from torch.distributed.distributed_c10d import Store

from elche.v1 import store_pb2, store_pb2_grpc

CALL_MARGIN_S = 10.0
"""Seconds that a call may take beyond the wait that it asks for: the service's own answer is better than gRPC's."""
NOT_IN_TIME = grpc.StatusCode.FAILED_PRECONDITION
"""Status code of the service for a key that is not set within the timeout."""


class CoordinatorStore(Store):
    """Keys and values of one job. Raises `DistStoreError` when a key does not come in time or a value is no counter,
    and `DistNetworkError` when the coordinator cannot be asked; both are `RuntimeError`.

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
        self._metadata = (("elche-secret", secret),)
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
        return int(self._call(self._stub.Add, store_pb2.AddRequest(key=key, amount=amount)).value)

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
        self._call(self._stub.Append, store_pb2.AppendRequest(key=key, value=_bytes(value)))

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

    def _call(self, method: Any, request: Any, limit: timedelta = timedelta()) -> Any:
        try:
            return method(request, metadata=self._metadata, timeout=limit.total_seconds() + CALL_MARGIN_S)
        except grpc.RpcError as error:
            words = f"rendezvous through the coordinator failed: {error.details()}"
            if error.code() is NOT_IN_TIME:
                raise dist.DistStoreError(words) from error
            raise dist.DistNetworkError(words) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _duration(limit: timedelta) -> Duration:
    duration = Duration()
    duration.FromTimedelta(limit)
    return duration

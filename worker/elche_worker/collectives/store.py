"""A `torch.distributed.Store` on the coordinator's store service: one address and one credential find all peers."""

from datetime import timedelta
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from torch.distributed.distributed_c10d import Store

from elche.v1 import store_pb2, store_pb2_grpc

DEFAULT_TIMEOUT = timedelta(minutes=5)
CALL_MARGIN_S = 10.0


class CoordinatorStore(Store):
    """Keys and values of one job. Raises `RuntimeError`, as torch's stores do, when a key does not come in time."""

    def __init__(self, channel: grpc.Channel, secret: str) -> None:
        super().__init__()
        self._stub = store_pb2_grpc.StoreServiceStub(channel)
        self._metadata = (("elche-secret", secret),)
        self._timeout = DEFAULT_TIMEOUT

    def clone(self) -> "CoordinatorStore":
        """Returns this store, which has no connection that two users could disturb. The caller must keep it alive."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of `get` and `wait`."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a key."""
        self._call(self._stub.Set, store_pb2.SetRequest(key=key, value=_bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for a key and returns its value."""
        request = store_pb2.GetRequest(key=key, timeout=_duration(self._timeout))
        return bytes(self._call(self._stub.Get, request, self._timeout).value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns it."""
        return int(self._call(self._stub.Add, store_pb2.AddRequest(key=key, amount=amount)).value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        limit = timeout or self._timeout
        self._call(self._stub.Wait, store_pb2.WaitRequest(keys=keys, timeout=_duration(limit)), limit)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._call(self._stub.Check, store_pb2.CheckRequest(keys=keys)).exist)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets the key if it has the expected value, or is missing and none is expected."""
        request = store_pb2.CompareSetRequest(key=key, expected=_bytes(expected), desired=_bytes(desired))
        return bytes(self._call(self._stub.CompareSet, request).value)

    def delete_key(self, key: str) -> bool:
        """Deletes a key; whether it existed."""
        return bool(self._call(self._stub.DeleteKey, store_pb2.DeleteKeyRequest(key=key)).deleted)

    def _call(self, method: Any, request: Any, limit: timedelta = timedelta()) -> Any:
        try:
            return method(request, metadata=self._metadata, timeout=limit.total_seconds() + CALL_MARGIN_S)
        except grpc.RpcError as error:
            raise RuntimeError(f"rendezvous through the coordinator failed: {error.details()}") from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _duration(limit: timedelta) -> Duration:
    duration = Duration()
    duration.FromTimedelta(limit)
    return duration

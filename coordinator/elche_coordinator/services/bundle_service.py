"""The gRPC service of bundles: clients upload them, ranks fetch that of their job."""

from collections.abc import AsyncIterator

from elche.errors import InvalidJob
from elche.v1 import bundle_pb2, bundle_pb2_grpc
from elche_coordinator.driver import Driver
from elche_coordinator.limits.budgets import MAX_ANNOUNCED_BYTES_OF_CALLER, Budget
from elche_coordinator.limits.releasing import Context
from elche_coordinator.roles import CALLER
from elche_coordinator.services.interceptor import authenticated
from elche_coordinator.storage.bundles import MAX_TOTAL_BYTES, Bundles


class BundleServicer(bundle_pb2_grpc.BundleServiceServicer):
    """Takes bundles and gives them out."""

    def __init__(self, driver: Driver, bundles: Bundles) -> None:
        self._driver = driver
        self._bundles = bundles
        self._announced = Budget("bytes of folders announced", MAX_ANNOUNCED_BYTES_OF_CALLER, MAX_TOTAL_BYTES)

    async def FindBundle(
        self, request: bundle_pb2.FindBundleRequest, context: Context
    ) -> bundle_pb2.FindBundleResponse:
        size_bytes, is_complete = self._bundles.find(request.bundle)
        return bundle_pb2.FindBundleResponse(size_bytes=size_bytes, is_complete=is_complete)

    async def UploadBundle(
        self, request_iterator: AsyncIterator[bundle_pb2.UploadBundleRequest], context: Context
    ) -> bundle_pb2.UploadBundleResponse:
        first = await anext(aiter(request_iterator), None)
        if first is None:
            raise InvalidJob("an upload begins with the bundle's name")
        chunks = (request.data async for request in request_iterator)
        # `write` refuses a negative size, but only after it would have enlarged the budget.
        with self._announced.taking(CALLER.get().name, max(0, first.size_bytes)):
            await self._bundles.write(first.bundle, first.offset, first.size_bytes, chunks)
        return bundle_pb2.UploadBundleResponse()

    async def FetchBundle(
        self, request: bundle_pb2.FetchBundleRequest, context: Context
    ) -> AsyncIterator[bundle_pb2.FetchBundleResponse]:
        spec = self._driver.core.spec(authenticated(self._driver, context)["job_id"])
        if spec is None or not spec.bundle:
            raise InvalidJob("this job has no folder")
        async for data in self._bundles.chunks(spec.bundle, request.offset):
            yield bundle_pb2.FetchBundleResponse(data=data)

"""The gRPC service that averages for ranks which cannot reach each other."""

from collections.abc import AsyncIterator

from elche.v1 import averaging_pb2, averaging_pb2_grpc
from elche_coordinator.collectives.averaging import Averager, RelayAborted, take_part
from elche_coordinator.core.messages.commands import SendAbandon, SendFormGroup, SessionCommand
from elche_coordinator.core.messages.events import RoundFailed
from elche_coordinator.core.messages.ids import GenerationId, RoundId
from elche_coordinator.driver import Driver
from elche_coordinator.limits.releasing import Context
from elche_coordinator.services.interceptor import authenticated


class AveragingServicer(averaging_pb2_grpc.AveragingServiceServicer):
    """Averaging for ranks that cannot reach each other. A rank may join the open rounds of its own job only."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._averager = Averager()
        driver.watchers.on_ended(self._averager.drop)
        driver.on_performed(self._follow)
        driver.on_round_failed(self._lose)

    def _follow(self, command: SessionCommand, _: str) -> None:
        """Aborts rounds whose generation is abandoned, and rounds of earlier attempts."""
        match command:
            case SendAbandon():
                self._averager.give_up(command.job_id)
            case SendFormGroup():
                self._averager.begin(command.job_id, command.attempt)

    def _lose(self, event: RoundFailed) -> None:
        """Aborts a round that a member has lost, perhaps before it has joined: the others would wait for it."""
        if self._driver.core.has_lost_round(event.job_id, event.generation, event.round):
            self._averager.abort(event.job_id, event.round, f"rank {event.rank} has lost it: {event.reason}")

    async def Average(
        self, request_iterator: AsyncIterator[averaging_pb2.AverageRequest], context: Context
    ) -> AsyncIterator[averaging_pb2.AverageResponse]:
        address = authenticated(self._driver, context)
        first = await anext(request_iterator, None)
        join = first.join if first is not None else averaging_pb2.JoinRound()
        generation, round_id = GenerationId(join.generation), RoundId(join.round)
        seat = self._driver.core.position_in_round(address, generation, round_id)
        # Also if another member has lost the round before: who joined it would wait for nothing.
        if seat is None:
            raise RelayAborted(f"round {round_id} is not open")
        position, size = seat
        relay = self._averager.relay(address["job_id"], round_id, size)
        async for data in take_part(relay, position, request_iterator):
            yield averaging_pb2.AverageResponse(data=data)

    async def GetVerdict(
        self, request: averaging_pb2.GetVerdictRequest, context: Context
    ) -> averaging_pb2.GetVerdictResponse:
        job_id = authenticated(self._driver, context)["job_id"]
        is_complete = await self._averager.is_complete(job_id, RoundId(request.round))
        return averaging_pb2.GetVerdictResponse(is_complete=is_complete)

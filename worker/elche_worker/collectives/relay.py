"""Collectives through the coordinator, chunk by chunk, for ranks that cannot reach each other (backend "cpu").

The coordinator adds chunks in the order of the ranks, so that sums are equal on all ranks and reproducible. A round
that breaks before every rank has its whole result is abandoned on all of them, and its work goes into the next one.
"""

import queue
import time
from collections.abc import Callable
from typing import Any

import grpc
import torch

from elche.v1 import averaging_pb2, averaging_pb2_grpc
from elche_worker.collectives.operations import Collectives, RoundAborted

CHUNK_BYTES = 1 << 18
"""Most bytes of one message; with `AHEAD` it bounds what the coordinator holds for each rank, here 4 MiB."""
AHEAD = 16
"""Chunks in flight. Of a stream 512 KiB may be on its way: 8 Mbit/s at a round trip of 500 ms, 80 at 50 ms."""
VERDICT_S = 20.0
"""Seconds for which a rank whose stream broke asks for the round's outcome."""
SUMS = {torch.float32: averaging_pb2.OPERATION_SUM_FLOAT32, torch.float64: averaging_pb2.OPERATION_SUM_FLOAT64}


class Relay(Collectives):
    """The ranks of one generation, connected through the coordinator."""

    def __init__(
        self, channel: grpc.Channel, secret: str, *, attempt: int, generation: int, position: int, size: int
    ) -> None:
        self.position = position
        self.size = size
        self.attempt = attempt
        self.generation = generation
        self.device = torch.device("cpu")
        self._stub = averaging_pb2_grpc.AveragingServiceStub(channel)
        self._metadata = (("elche-secret", secret),)
        self._round = 0
        self._outgoing: queue.SimpleQueue[averaging_pb2.AverageRequest | None] = queue.SimpleQueue()
        self._answers: Any = None
        """The stream of the present round; None before the first."""
        self._is_aborted = False

    def begin(self, round_id: int) -> None:
        self._round = round_id
        # A new queue for each round: when a stream has broken, gRPC's thread may still take a request from its queue.
        outgoing: queue.SimpleQueue[averaging_pb2.AverageRequest | None] = queue.SimpleQueue()
        outgoing.put(
            averaging_pb2.AverageRequest(join=averaging_pb2.JoinRound(generation=self.generation, round=round_id))
        )
        self._outgoing = outgoing
        self._answers = self._stub.Average(iter(outgoing.get, None), metadata=self._metadata)
        if self._is_aborted:  # `abort` came before there was a stream that it could cancel
            self._answers.cancel()

    def all_gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        rows = torch.empty(self.size, row.nbytes, dtype=torch.uint8)
        raw = _bytes_of(row)
        length = max(1, CHUNK_BYTES // self.size)

        def place(start: int, data: torch.Tensor) -> None:
            rows[:, start : start + length] = data.view(self.size, -1)

        self._run(averaging_pb2.OPERATION_GATHER, raw.numel(), length, lambda part: raw[part], place)
        return [one.view(row.dtype).view(row.shape) for one in rows]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        raw = _bytes_of(tensor)

        def place(start: int, data: torch.Tensor) -> None:
            raw[start : start + data.numel()] = data

        self._run(SUMS[tensor.dtype], raw.numel(), CHUNK_BYTES, lambda part: raw[part], place)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        raw = rows.contiguous().view(torch.uint8).view(self.size, -1)
        received = torch.empty_like(raw)
        length = max(1, CHUNK_BYTES // self.size)

        def place(start: int, data: torch.Tensor) -> None:
            received[:, start : start + length] = data.view(self.size, -1)

        self._run(averaging_pb2.OPERATION_SCATTER, raw.shape[1], length, lambda part: raw[:, part], place)
        return received.view(rows.dtype).view(rows.shape)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        raw = _bytes_of(tensor)
        is_source = source == self.position

        def place(start: int, data: torch.Tensor) -> None:
            if not is_source:
                raw[start : start + data.numel()] = data

        def take(part: slice) -> torch.Tensor:
            return raw[part] if is_source else raw[:0]

        self._run(averaging_pb2.OPERATION_BROADCAST, raw.numel(), CHUNK_BYTES, take, place, source=source)

    def finish(self) -> None:
        try:
            self._send(averaging_pb2.Part(operation=averaging_pb2.OPERATION_FINISH))
            self._receive()
        except RoundAborted as broken:
            self._ask_verdict(broken)
        finally:
            # Ends gRPC's thread, which would otherwise wait for further requests of this round forever.
            self._outgoing.put(None)

    def abort(self) -> None:
        """Ends the stream of the round. If this rank has already said that it has everything, the round may be complete
        all the same: the coordinator is asked, as for any stream that breaks.
        """
        self._is_aborted = True
        if self._answers is not None:
            self._answers.cancel()

    def _run(
        self,
        operation: averaging_pb2.Operation.ValueType,
        num_bytes: int,
        length: int,
        take: Callable[[slice], torch.Tensor],
        place: Callable[[int, torch.Tensor], None],
        *,
        source: int = 0,
    ) -> None:
        """Runs one operation in chunks of `length` bytes of each row. `take` gives a chunk to send, `place` stores an
        answer. Chunk i is sent before the answer to chunk i - `AHEAD` is read, so that as many are in flight.
        """
        num_chunks = -(-num_bytes // length)
        is_of_rows = operation in (averaging_pb2.OPERATION_GATHER, averaging_pb2.OPERATION_SCATTER)
        may_be_empty = operation == averaging_pb2.OPERATION_BROADCAST and source == self.position
        for index in range(num_chunks + AHEAD):
            if index < num_chunks:
                data = take(slice(index * length, (index + 1) * length)).contiguous().numpy().tobytes()
                self.sent_bytes += len(data)
                self._send(averaging_pb2.Part(operation=operation, source=source, data=data))
            if 0 <= index - AHEAD < num_chunks:
                data = self._receive()
                start = (index - AHEAD) * length
                expected = min(length, num_bytes - start) * (self.size if is_of_rows else 1)
                # The source of a broadcast is answered with nothing, since it has the values.
                if data or not may_be_empty:
                    if len(data) != expected:
                        raise RoundAborted(f"the coordinator has sent {len(data)} bytes of {expected}")
                    place(start, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _send(self, part: averaging_pb2.Part) -> None:
        self._outgoing.put(averaging_pb2.AverageRequest(part=part))

    def _receive(self) -> bytes:
        try:
            return bytes(next(self._answers).data)
        except StopIteration:
            raise RoundAborted("the coordinator ended the averaging") from None
        except grpc.RpcError as error:
            self._outgoing.put(None)
            raise RoundAborted(error.details() or error.code().name) from None

    def _ask_verdict(self, broken: RoundAborted) -> None:
        """Returns if the round is complete although its last answer was lost; else raises `broken`. Without it a rank
        would take a round for lost that the others have: their models would differ.
        """
        request = averaging_pb2.GetVerdictRequest(round=self._round)
        until_s = time.monotonic() + VERDICT_S
        while True:
            try:
                answer = self._stub.GetVerdict(request, metadata=self._metadata, timeout=VERDICT_S)
            except grpc.RpcError as error:
                is_over = error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                if is_over or time.monotonic() > until_s:
                    raise broken from None
                time.sleep(0.2)
                continue
            if not answer.is_complete:
                raise broken
            return


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own bytes, flat."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)

"""A rank's reports of rounds' headers: the rows, or only their digest if another member sends the rows."""

from collections.abc import Sequence

from elche.header import header_digest
from elche.v1 import rank_pb2
from elche_worker.collectives.header import Row


class Headers:
    """Keeps rows whose digest alone was sent, until their round is committed (protocol P5.5)."""

    def __init__(self) -> None:
        self._send_digests: set[int] = set()
        """Generations in which this rank sends digests."""
        self._unreported: dict[int, tuple[int, Sequence[Row]]] = {}
        """Generation and rows by round."""

    def learn(self, command: rank_pb2.FormGroup) -> None:
        """Notes from the command that forms a generation if digests are sent in it."""
        if command.sends_digest:
            self._send_digests.add(command.generation)

    def put(self, ack: rank_pb2.SyncAck, rows: Sequence[Row]) -> None:
        """Puts the round's header, or its digest, into the message."""
        if ack.generation in self._send_digests:
            ack.header_digest = header_digest(rows)
            self._unreported[ack.round] = (ack.generation, rows)
        else:
            ack.header.extend(map(_message, rows))

    def forget(self, round_id: int) -> None:
        """Drops the rows of rounds up to this one, which are committed."""
        self._unreported = {one: kept for one, kept in self._unreported.items() if one > round_id}

    def take_unreported(self, generation: int) -> list[rank_pb2.HeaderReported]:
        """Removes and returns the unsent rows of the generation's uncommitted rounds. The coordinator asks for them if
        it needs them to commit, and the member that sends rows is lost.
        """
        reported = [
            rank_pb2.HeaderReported(round=round_id, generation=of, header=map(_message, rows))
            for round_id, (of, rows) in self._unreported.items()
            if of == generation
        ]
        self._unreported = {one: kept for one, kept in self._unreported.items() if kept[0] != generation}
        return reported


def _message(row: Row) -> rank_pb2.HeaderRow:
    return rank_pb2.HeaderRow(
        weight=row.weight,
        cut=row.cut,
        local_step=row.local_step,
        compute_us=row.compute_us,
        finite=bool(row.finite),
        version=row.version,
        unusual=bool(row.unusual),
    )

"""The digest of a round's header, which most ranks send instead of its rows."""

from collections.abc import Iterable
from hashlib import blake2b
from struct import pack
from typing import Protocol

from elche.contributions import Contribution


class DigestedRow(Contribution, Protocol):
    """The fields of a row in the digest: those that a rank sends to the coordinator."""

    @property
    def cut(self) -> int:
        """Samples that its values contain, in the order of its leases."""
        ...

    @property
    def local_step(self) -> int:
        """Batches that its values contain."""
        ...

    @property
    def compute_us(self) -> int:
        """Compute time since the last round in microseconds."""
        ...

    @property
    def version(self) -> int:
        """Version of its model before the round."""
        ...


def header_digest(rows: Iterable[DigestedRow]) -> int:
    """64 bits of BLAKE2b over the rows, each packed as little-endian numbers of 64 bits, and flags of a byte."""
    digest = blake2b(digest_size=8)
    for row in rows:
        flags = bool(row.finite), bool(row.unusual)
        digest.update(pack("<QQQQQ??", row.weight, row.cut, row.local_step, row.compute_us, row.version, *flags))
    return int.from_bytes(digest.digest(), "little")

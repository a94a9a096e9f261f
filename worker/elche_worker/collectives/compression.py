"""Compression of rounds' payload, to 16 bits per value down to less than one, with error feedback.

Each rank sends the change since the last result, in parts, to the ranks that own them; an owner adds up its part and
sends the compressed sum to all. Every rank decodes the same bytes, so the results are equal bit for bit. The encoding
error is kept and added to the next change (Karimireddy et al., arXiv 1901.09847).
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from elche_worker.collectives.operations import ValueCollectives
from elche_worker.device import chunks

BLOCK = 256
"""Values that share one scale, or are chosen from together; rows are multiples of it long."""
FINE_BLOCK = 64
"""Values that share one scale in 4-bit form."""
NUM_TOP = BLOCK // 32
"""Values of a block that `TopK` sends."""
LARGE = 1.2
"""A magnitude counts as large above this many times the mean of its block: near the best for normal values."""


class Codec(Protocol):
    """Turns rows of float32 (multiples of `BLOCK` long) into rows of bytes, and back."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Float32 (rows, length) to uint8 (rows, bytes)."""
        ...

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        """Decodes to float32 (rows, length)."""
        ...


class Float32:
    """The values as they are."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.contiguous().view(torch.uint8)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.contiguous().view(torch.float32)


class Bf16:
    """Two bytes per value: sign, exponent and 7 bits of mantissa."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.view(torch.bfloat16).float()


class Int8:
    """One byte per value, and one scale per block."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        blocks = values.view(values.shape[0], -1, BLOCK)
        scales = blocks.abs().amax(dim=2, keepdim=True).div_(127)
        steps = blocks.div(scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        parts = [steps.reshape(values.shape[0], -1).view(torch.uint8), scales.squeeze(2).contiguous().view(torch.uint8)]
        return torch.cat(parts, dim=1)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        length = raw.shape[1] * BLOCK // (BLOCK + 4)
        steps = raw[:, :length].contiguous().view(torch.int8).view(raw.shape[0], -1, BLOCK)
        scales = raw[:, length:].contiguous().view(torch.float32).unsqueeze(2)
        return steps.float().mul_(scales).view(raw.shape[0], -1)


class Int4:
    """Half a byte per value, and one scale of two bytes per fine block."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        blocks = values.view(values.shape[0], -1, FINE_BLOCK)
        scales = blocks.abs().amax(dim=2).div_(7).to(torch.bfloat16)
        steps = blocks.div(scales.float().clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).round_().add_(8)
        return _joined(_packed(steps.to(torch.uint8), 4), scales.view(torch.uint8))

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        packed, scales = _split(raw, FINE_BLOCK // 2, 2)
        steps = _unpacked(packed, 4).float().sub_(8)
        return steps.mul_(scales.view(torch.bfloat16).float()).view(raw.shape[0], -1)


class Int2:
    """Two bits per value, and two magnitudes per block: the mean of its large values, and that of the others."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        codes, magnitudes = _two_bits(values.view(values.shape[0], -1, BLOCK))
        return _joined(_packed(codes, 2), magnitudes)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        packed, magnitudes = _split(raw, BLOCK // 4, 4)
        return _of_two_bits(_unpacked(packed, 2), magnitudes).view(raw.shape[0], -1)


class TopK:
    """The largest 1/32 of each block, with two bits per value, and their positions; nothing of the others."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        blocks = values.view(values.shape[0], -1, BLOCK)
        positions = blocks.abs().topk(NUM_TOP, dim=2, sorted=False).indices
        codes, magnitudes = _two_bits(blocks.gather(2, positions))
        return _joined(positions.to(torch.uint8), _packed(codes, 2), magnitudes)

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        positions, packed, magnitudes = _split(raw, NUM_TOP, NUM_TOP // 4, 4)
        values = torch.zeros(*positions.shape[:2], BLOCK, device=raw.device)
        values.scatter_(2, positions.long(), _of_two_bits(_unpacked(packed, 2), magnitudes))
        return values.view(raw.shape[0], -1)


def _two_bits(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each value's sign (1) and whether it is large (2), and per block, as bytes, the mean of its small magnitudes and
    by how much that of its large ones is larger.
    """
    length = blocks.shape[2]
    magnitudes = blocks.abs().div_(length)  # else their sum may overflow
    total = magnitudes.sum(dim=2, keepdim=True)
    are_large = magnitudes > total * (LARGE / length)
    of_large = are_large.float()
    num_large = of_large.sum(dim=2)
    large = torch.linalg.vecdot(magnitudes, of_large)
    small = (total.squeeze(2) - large).clamp_(min=0).mul_(length / (length - num_large).clamp_(min=1))
    large.mul_(length / num_large.clamp(min=1))
    codes = are_large.view(torch.uint8) << 1
    codes += torch.signbit(blocks)
    return codes, torch.stack([small, large.sub_(small).clamp_(min=0)], dim=2).to(torch.bfloat16).view(torch.uint8)


def _of_two_bits(codes: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    decoded = magnitudes.view(torch.bfloat16).float()
    small, more = decoded[:, :, :1], decoded[:, :, 1:]
    values = (codes >> 1).float().mul_(more).add_(small)
    return values.mul_((codes & 1).float().mul_(-2).add_(1))


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes of `bits` bits (uint8, in the last dimension) into full bytes; those of its first part get the lowest
    bits.
    """
    first, *others = codes.chunk(8 // bits, dim=-1)
    packed = first.clone()
    for at, part in enumerate(others, start=1):
        packed |= part << (bits * at)
    return packed


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_packed`."""
    mask = (1 << bits) - 1
    return torch.cat([packed >> (bits * at) & mask for at in range(8 // bits)], dim=-1)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    """Rows of bytes from parts of (rows, blocks, bytes of a block), all blocks of one part after the other."""
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _split(raw: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """The inverse of `_joined`; `sizes`: bytes per block of each part."""
    num_blocks = raw.shape[1] // sum(sizes)
    parts = torch.split(raw, [num_blocks * size for size in sizes], dim=1)
    return [part.reshape(raw.shape[0], num_blocks, size) for part, size in zip(parts, sizes, strict=True)]


CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8, "int4": Int4, "int2": Int2, "topk": TopK}
"""In order of bytes, the most first."""


class Compression:
    """Averages compressed changes, some blocks at a time. Its errors are of one rank and generation, and change in
    `commit` only.
    """

    def __init__(self, length: int, group: ValueCollectives) -> None:
        self.generation = group.generation
        self._position = group.position
        self._size = group.size
        self._length = length
        part = -(-length // group.size)
        self._part = -(-part // BLOCK) * BLOCK
        self._step = max(1, chunks.CHUNK_BYTES // (4 * BLOCK * group.size)) * BLOCK
        """Values of each part that are sent together."""
        self._error = torch.zeros(group.size, self._part, device=group.device)
        """Accumulated encoding error of this rank's change."""
        self._sum_error = torch.zeros(1, self._part, device=group.device)
        """Accumulated encoding error of the sum of this rank's part."""
        self._next = self._error, self._sum_error
        """Both errors after the last average, until `commit`: a round that fails must leave them as they were."""

    def average(self, change: torch.Tensor, fractions: list[float], group: ValueCollectives, *, codec: Codec) -> None:
        """Makes `change` (float32, flat) the sum over ranks of fraction times change, in place. All ranks must have the
        same codec; it may be another in each round.
        """
        self._error, self._sum_error = self._error.to(change.device), self._sum_error.to(change.device)
        self._next = self._error, self._sum_error
        error, sum_error = torch.empty_like(self._error), torch.empty_like(self._sum_error)
        keeps = fractions[group.position] > 0
        for start in range(0, self._part, self._step):
            at = slice(start, min(start + self._step, self._part))
            values = torch.zeros_like(self._error[:, at])
            for row, own in zip(values, self._rows(change, at), strict=True):
                row[: len(own)] = own
            raw, error[:, at] = _encoded(codec, values, self._error[:, at], keeps=keeps)
            total = torch.zeros_like(values[:1])
            for fraction, received in zip(fractions, codec.decode(group.all_to_all(raw)), strict=True):
                if fraction > 0:  # what a rank without weight has sent may be anything
                    total += received * fraction
            raw, sum_error[:, at] = _encoded(codec, total, self._sum_error[:, at], keeps=True)
            # The owner decodes its own bytes too, in place of the exact sum that it has: results must be equal.
            sums = codec.decode(torch.cat(group.all_gather(raw)))
            for own, row in zip(self._rows(change, at), sums, strict=True):
                own.copy_(row[: len(own)])
        self._next = error, sum_error

    def _rows(self, change: torch.Tensor, at: slice) -> Iterator[torch.Tensor]:
        """The same slice of each part of the change; the last parts may have less of it, or nothing."""
        for start in range(0, self._size * self._part, self._part):
            yield change[start + at.start : start + at.stop]

    def add_unsent(self, change: torch.Tensor, fraction: float) -> None:
        """Adds this rank's errors to its change: that of its own change, and that of the sum of its part, divided by
        `fraction`, since the change is multiplied by `fraction` in the sum.
        """
        change += self._error.view(-1)[: self._length].to(change.device)
        own = change[self._position * self._part : (self._position + 1) * self._part]
        own += self._sum_error[0, : len(own)].to(change.device) / fraction

    def commit(self) -> None:
        """Keeps the encoding errors of the last average, which is committed, to be sent with the next."""
        self._error, self._sum_error = self._next


def _encoded(
    codec: Codec, values: torch.Tensor, error: torch.Tensor, *, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the encoded values and the encoding error. Without `keeps`, as for a rank whose values have no weight,
    the error of earlier rounds is neither sent nor changed.
    """
    if not keeps:
        return codec.encode(values), error
    values = values + error
    raw = codec.encode(values)
    return raw, values - codec.decode(raw)

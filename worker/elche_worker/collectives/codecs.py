"""Codecs of compressed rounds: blocks of float32 values as few bytes, and back."""

from typing import Protocol, Self

import torch

BLOCK = 256
"""Values that share one scale, or are chosen from together; rows are multiples of it long."""
FINE_BLOCK = 64
"""Values that share one scale in 4-bit form."""
NUM_TOP = BLOCK // 32
"""Values of a block that `TopK` sends."""
LARGE = 1.2
"""A magnitude counts as large above this many times the mean of its block: near the best for normal values."""


class Codec(Protocol):
    """Turns blocks of float32 values into some parts, each of the same bytes per block, and back."""

    sizes: tuple[int, ...]
    """Bytes per block of each part."""

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Float32 (rows, blocks, `BLOCK`) to uint8 (rows, blocks, bytes), one for each part."""

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        """Decodes contiguous parts to float32 (rows, blocks, `BLOCK`)."""


class Float32:
    """The values as they are."""

    sizes: tuple[int, ...] = (4 * BLOCK,)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (blocks.contiguous().view(torch.uint8),)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        return parts[0].view(torch.float32)


class Bf16:
    """Two bytes per value: sign, exponent and 7 bits of mantissa."""

    sizes: tuple[int, ...] = (2 * BLOCK,)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (blocks.to(torch.bfloat16).view(torch.uint8),)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        return parts[0].view(torch.bfloat16).float()


class Int8:
    """One byte per value, and one scale per block."""

    sizes: tuple[int, ...] = (BLOCK, 4)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = blocks.abs().amax(dim=2, keepdim=True).div_(127)
        # Not below `tiny`: a block of zeros has scale 0, and what int8 becomes of 0 / 0 differs between processors.
        steps = blocks.div(scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return steps.view(torch.uint8), scales.view(torch.uint8)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        steps, scales = parts
        return steps.view(torch.int8).float().mul_(scales.view(torch.float32))


class Int4:
    """Half a byte per value, and one scale of two bytes per fine block."""

    sizes: tuple[int, ...] = (BLOCK // 2, 2 * BLOCK // FINE_BLOCK)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fine = blocks.view(*blocks.shape[:2], -1, FINE_BLOCK)
        # Rounded to what is sent before it divides: the decoder multiplies by that, and not by the exact scale.
        scales = fine.abs().amax(dim=3).div_(7).to(torch.bfloat16)
        steps = fine.div(scales.float().clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(3)).round_().add_(8)
        return _packed(steps.to(torch.uint8), 4).flatten(2), scales.view(torch.uint8)

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        packed, scales = parts
        steps = _unpacked(packed.view(*packed.shape[:2], -1, FINE_BLOCK // 2), 4).float().sub_(8)
        return steps.mul_(scales.view(torch.bfloat16).float().unsqueeze(3)).flatten(2)


class Int2:
    """Two bits per value, and two magnitudes per block: the mean of its large values, and that of the others."""

    sizes: tuple[int, ...] = (BLOCK // 4, 4)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes, magnitudes = _two_bits(blocks)
        return _packed(codes, 2), magnitudes

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        packed, magnitudes = parts
        return _of_two_bits(_unpacked(packed, 2), magnitudes)


class TopK:
    """The largest 1/32 of each block, with two bits per value, and their positions; nothing of the others."""

    sizes: tuple[int, ...] = (NUM_TOP, NUM_TOP // 4, 4)

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = blocks.abs().topk(NUM_TOP, dim=2, sorted=False).indices
        codes, magnitudes = _two_bits(blocks.gather(2, positions))
        return positions.to(torch.uint8), _packed(codes, 2), magnitudes

    def decode(self, *parts: torch.Tensor) -> torch.Tensor:
        positions, packed, magnitudes = parts
        values = torch.zeros(*positions.shape[:2], BLOCK, device=positions.device)
        return values.scatter_(2, positions.long(), _of_two_bits(_unpacked(packed, 2), magnitudes))


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
    # Clamped: rounding may make the difference of two sums negative, and if all values are large, none is small.
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
    """Packs codes of `bits` bits (uint8, in the last dimension) into bytes, the first part in the lowest bits."""
    first, *others = codes.chunk(8 // bits, dim=-1)
    packed = first.clone()
    for at, part in enumerate(others, start=1):
        packed |= part << (bits * at)
    return packed


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_packed`."""
    mask = (1 << bits) - 1
    return torch.cat([packed >> (bits * at) & mask for at in range(8 // bits)], dim=-1)


class Encoded:
    """Rows of encoded blocks, as bytes to send and as parts: in a row one part of all blocks, then the next."""

    def __init__(self, codec: Codec, raw: torch.Tensor) -> None:
        self.raw = raw
        self._codec = codec
        num_blocks = raw.shape[1] // sum(codec.sizes)
        parts = torch.split(raw, [num_blocks * size for size in codec.sizes], dim=1)
        self._parts = [part.view(len(raw), num_blocks, size) for part, size in zip(parts, codec.sizes, strict=True)]

    @classmethod
    def empty(cls, codec: Codec, num_rows: int, length: int, device: torch.device) -> Self:
        """Room for rows of `length` values, a multiple of `BLOCK`."""
        num_bytes = length // BLOCK * sum(codec.sizes)
        return cls(codec, torch.empty(num_rows, num_bytes, dtype=torch.uint8, device=device))

    def write(self, at: slice, values: torch.Tensor) -> None:
        """Encodes float32 (rows, length of the slice)."""
        for part, made in zip(self._parts, self._codec.encode(values.view(len(values), -1, BLOCK)), strict=True):
            part[:, at.start // BLOCK : at.stop // BLOCK] = made

    def read(self, at: slice) -> torch.Tensor:
        """Decodes to float32 (rows, length of the slice)."""
        parts = [part[:, at.start // BLOCK : at.stop // BLOCK] for part in self._parts]
        # Cloned: a view of other bytes would not be aligned.
        return self._codec.decode(*(part.clone(memory_format=torch.contiguous_format) for part in parts)).flatten(1)


CODECS: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8, "int4": Int4, "int2": Int2, "topk": TopK}
"""In order of bytes, the most first."""

"""Strategies of sharding a model over ranks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from elche.errors import Misuse


@dataclass(frozen=True, slots=True, repr=False)
class Strategy:
    """One of `Strategy.FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD` and `HYBRID_SHARD(intra_node_size=n)`.

    They differ in the number of ranks over which a parameter is sharded, and in whether gathered parameters are freed
    between forward and backward.
    """

    name: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
    intra_node_size: int | None = None

    FULL_SHARD: ClassVar["Strategy"]
    """Parameters, gradients and optimizer state sharded over all ranks; parameters gathered while used (ZeRO-3)."""
    SHARD_GRAD_OP: ClassVar["Strategy"]
    """As FULL_SHARD, but a gathered parameter is kept from forward to the end of backward (ZeRO-2)."""
    NO_SHARD: ClassVar["Strategy"]
    """Everything whole on every rank; gradients averaged (DDP)."""

    @classmethod
    def HYBRID_SHARD(cls, intra_node_size: int) -> "Strategy":  # noqa: N802
        """FULL_SHARD among each `intra_node_size` consecutive ranks, which are replicas of each other."""
        return cls("HYBRID_SHARD", intra_node_size)

    def __repr__(self) -> str:
        size = "" if self.intra_node_size is None else f"(intra_node_size={self.intra_node_size})"
        return f"Strategy.{self.name}{size}"

    @property
    def reshards_after_forward(self) -> bool:
        """True if gathered parameters are freed after forward, and gathered again for backward."""
        return self.name != "SHARD_GRAD_OP"

    def num_shards(self, world_size: int) -> int:
        """Number of ranks over which a parameter is sharded. Raises `Misuse` if the world size does not fit."""
        if self.name == "NO_SHARD":
            return 1
        if self.name != "HYBRID_SHARD":
            return world_size
        size = self.intra_node_size
        if not isinstance(size, int) or size < 1 or world_size % size:
            raise Misuse(f"{self} needs a world that is a positive multiple of {size}; this one is {world_size}")
        return size


Strategy.FULL_SHARD = Strategy("FULL_SHARD")
Strategy.SHARD_GRAD_OP = Strategy("SHARD_GRAD_OP")
Strategy.NO_SHARD = Strategy("NO_SHARD")

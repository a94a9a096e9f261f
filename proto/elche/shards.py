"""In which order an epoch begins the shards of a data set; coordinator and ranks compute it alike."""

from collections.abc import Sequence
from hashlib import blake2b


def shuffled_shards(sizes: Sequence[int], *, seed: int, epoch: int) -> list[int]:
    """Indices of the shards that have samples, in an order that the seed and the epoch choose."""

    def key(shard: int) -> bytes:
        return blake2b(f"{seed} {epoch} {shard}".encode(), digest_size=8).digest()

    return sorted((shard for shard, size in enumerate(sizes) if size), key=key)

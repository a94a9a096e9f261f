"""The order of a data set's shards in an epoch, computed equally by the coordinator and the ranks."""

from collections.abc import Sequence
from hashlib import blake2b


def shuffled_shards(sizes: Sequence[int], *, seed: int, epoch: int) -> list[int]:
    """Indices of the shards that are not empty, in a pseudo-random order that depends on seed and epoch."""

    def key(shard: int) -> bytes:
        return blake2b(f"{seed} {epoch} {shard}".encode(), digest_size=8).digest()

    return sorted((shard for shard, size in enumerate(sizes) if size), key=key)

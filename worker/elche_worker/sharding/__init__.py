"""A model whose parameters, gradients and optimizer state are divided among ranks."""

from elche_worker.sharding.sharded import Sharded, shard
from elche_worker.sharding.strategy import Strategy

__all__ = ["Sharded", "Strategy", "shard"]

"""Sharding of models that are too large for one device over the ranks of a group."""

from typing import TYPE_CHECKING, Any

from elche_worker.user.strategy import Strategy

if TYPE_CHECKING:
    from elche_worker.sharding.sharded import Sharded, shard

__all__ = ["Sharded", "Strategy", "shard"]


def __getattr__(name: str) -> Any:
    """Imports the implementation on first use: PyTorch's sharding takes a second to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elche_worker.sharding import sharded

    return getattr(sharded, name)

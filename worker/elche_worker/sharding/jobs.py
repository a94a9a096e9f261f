"""Shards a job's model among the processes of a replica group."""

from collections.abc import Callable
from typing import cast

from torch import nn

from elche.errors import InvalidJob, Misuse
from elche_worker.model.step import ShardedModel
from elche_worker.user.job import JobDefinition
from elche_worker.user.strategy import Strategy


def sharding_of(job: JobDefinition, file_name: str) -> Callable[[nn.Module], ShardedModel] | None:
    """Returns a function that shards the job's model in place; None if each rank holds the whole model.

    The function needs a torch default process group of the processes that share the model. It raises `InvalidJob`.
    """
    if job.shard is None:
        return None

    def divide(model: nn.Module) -> ShardedModel:
        from elche_worker.sharding.sharded import shard  # importing it takes a second, and only groups need it

        scalar = next((name for name, parameter in model.named_parameters() if not parameter.dim()), None)
        try:
            if scalar is not None:  # rounds and checkpoints of groups support only sharded parameters
                raise Misuse(
                    f"parameter {scalar!r} is a scalar, which replica groups do not support; give it the shape (1,)"
                )
            return shard(model, cast(Strategy, job.shard))
        except Misuse as error:
            raise InvalidJob(f"{file_name}: the model cannot be sharded: {error}") from None

    return divide

"""The device mesh of a sharded model."""

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def build_mesh(group: dist.ProcessGroup, num_shards: int, device_type: str) -> DeviceMesh:
    """The group's ranks in rows of `num_shards` consecutive ranks; each row holds one copy of the model.

    All strategies are meshes, so that gradients, clipping and states have one code path: NO_SHARD is (world, 1),
    HYBRID_SHARD (world / n, n), and the others are one row.

    Collective among the group's ranks; ranks outside of it need not take part.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(group))
    if num_shards == len(ranks):
        return DeviceMesh.from_group(group, device_type)
    grid = ranks.view(-1, num_shards)
    row, column = divmod(dist.get_rank(group), num_shards)
    shards, replicas = (_subgroup(group, members.tolist()) for members in (grid[row], grid[:, column]))
    return DeviceMesh.from_group([replicas, shards], device_type, mesh=grid, mesh_dim_names=("replicas", "shards"))


def _subgroup(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    if len(ranks) == group.size():
        return group
    made = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    return cast(dist.ProcessGroup, made)

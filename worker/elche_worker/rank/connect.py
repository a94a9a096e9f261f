"""Connects a rank to the other ranks of its generation."""

import grpc
import torch

from elche_worker.collectives.operations import Collectives, SoloCollectives
from elche_worker.collectives.process_group import ProcessGroupCollectives
from elche_worker.collectives.relay import Relay
from elche_worker.collectives.store import CoordinatorStore
from elche_worker.model.layout import CPU
from elche_worker.rank.acts import JoinGeneration
from elche_worker.session.launch import Launch
from elche_worker.user.job import JobDefinition


def connect(
    act: JoinGeneration, launch: Launch, job: JobDefinition, channel: grpc.Channel, device: torch.device
) -> Collectives:
    """Returns the collectives of a generation: gloo or NCCL among the ranks, or the coordinator's relay (backend
    "cpu"). Waits for the other ranks. Of replica groups it connects the processes of equal position. Raises
    `CollectiveFailed`.
    """
    attempt, generation = act.attempt, act.generation
    # With `backend="nccl"` even a single rank gets a communicator, so that a host without a working NCCL is noticed at
    # once.
    if act.world_size == 1 and job.backend != "nccl":
        home = device if device.type == "cuda" else CPU
        return SoloCollectives(attempt=attempt, generation=generation, device=home)
    position, size = act.position, act.world_size
    if act.backend == "cpu":
        return Relay(channel, launch.secret, attempt=attempt, generation=generation, position=position, size=size)
    return ProcessGroupCollectives(
        CoordinatorStore(channel, launch.secret),
        backend=act.backend,
        attempt=attempt,
        generation=generation,
        position=position,
        size=size,
        peer=launch.coordinator,
        interface=launch.interface,
        device=device,
        member=launch.member,
    )

"""Gathers outputs, targets, tags and traces of one step from all ranks."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elche.errors import Misuse
from elche.sums import added
from elche_worker.collectives.world import World
from elche_worker.trainer.capture import Capture, Caught


@dataclass(frozen=True, slots=True)
class Gathered:
    """One step's batches of all ranks, concatenated (dimension 0): batch 0 of each rank, then batch 1."""

    output: torch.Tensor
    batch: dict[str, torch.Tensor]
    """The fields that do not go into the model: the targets, in the order of the outputs."""
    tags: dict[str, torch.Tensor]
    traces: dict[str, list[torch.Tensor]]
    """By module, one entry per call."""


def gather(world: World, caught: Caught, capture: Capture, targets: tuple[str, ...]) -> Gathered:
    """Gathers the captured values of all ranks. Raises `Misuse` on every rank for values that are not tensors, except
    for targets, which are left out.
    """
    fields = {name: [part[name] for part in caught.targets] for name in targets}
    are_tensors = [float(all(isinstance(one, torch.Tensor) for one in parts)) for parts in fields.values()]
    wanted = [all(column) for column in zip(*world.gather_numbers(are_tensors), strict=True)]
    own_calls = [caught.num_calls(name) for name in capture.trace_names]
    num_calls = [int(max(column)) for column in zip(*world.gather_numbers(own_calls), strict=True)]
    return Gathered(
        output=_join(world, "the output", caught.outputs),
        batch={
            name: _join(world, f"field {name!r}", parts)
            for (name, parts), is_wanted in zip(fields.items(), wanted, strict=True)
            if is_wanted
        },
        tags={name: _join(world, f"tag {name!r}", caught.tags.get(name, [])) for name in capture.tag_names},
        traces={
            name: [_join(world, f"trace {name!r}", caught.traces.get((name, call), [])) for call in range(count)]
            for name, count in zip(capture.trace_names, num_calls, strict=True)
        },
    )


def _join(world: World, name: str, parts: list[Any]) -> torch.Tensor:
    wrong = next((type(part).__name__ for part in parts if not isinstance(part, torch.Tensor)), "")
    world.agree(f"{name} cannot be gathered: it is of type {wrong}" if wrong else "")
    by_rank = world.gather_tensors(name, [part if part.dim() else part.reshape(1) for part in parts])
    most = max(map(len, by_rank))
    ordered = [batches[index] for index in range(most) for batches in by_rank if index < len(batches)]
    return torch.cat(ordered) if ordered else torch.empty(0, device=world.device)


def weighted_mean(world: World, numbers: Mapping[str, float], weight: float) -> dict[str, float]:
    """The mean over ranks of numbers that each has, by name. Raises `Misuse` when all weights are 0, and when ranks
    that count have other names.
    """
    gathered = [json.loads(one) for one in world.gather_texts(json.dumps([float(weight), dict(numbers)]))]
    counted = [(rank, one) for rank, one in enumerate(gathered) if one[0]]
    if not counted:
        raise Misuse("mean() needs a weight above 0 on at least one rank")
    first, (_, names) = counted[0]
    for rank, (_, others) in counted:
        if set(others) != set(names):
            raise Misuse(f"mean(): rank {first} gives {_listed(names)}, and rank {rank} {_listed(others)}")
    total = added([one for _, (one, _) in counted])
    return {name: added([one * values[name] for _, (one, values) in counted]) / total for name in names}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"

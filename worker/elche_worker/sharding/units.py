"""Units of sharding: submodules that are gathered one at a time, so that a rank never holds the whole model."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elche.errors import Misuse
from elche_worker.collectives.world import World

UNIT_BYTES = 1 << 20
"""Least size in bytes of a unit: gathering a smaller one is mostly latency, and saves no memory."""

LISTS = (nn.ModuleList, nn.ModuleDict)
"""Containers without a forward."""


def choose_units(module: nn.Module) -> dict[str, nn.Module]:
    """The entries of the outermost `nn.ModuleList`s and `nn.Sequential`s that hold at least `UNIT_BYTES`, by name.

    Models repeat their blocks in these. Lists within an entry (experts, branches) and entries of an `nn.ModuleDict` are
    no units, since they may run on some ranks only. Neither is an entry that shares a parameter with the rest:
    parameters that are gathered separately are no longer tied.
    """
    units: dict[str, nn.Module] = {}

    def search(parent: nn.Module, prefix: str) -> None:
        for key, child in parent.named_children():
            name = f"{prefix}{key}"
            if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or isinstance(child, LISTS):
                search(child, f"{name}.")
            elif sum(one.nbytes for one in child.parameters()) >= UNIT_BYTES and not _shared(module, name, child):
                units[name] = child

    search(module, "")
    return units


def check_units(module: nn.Module, chosen: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The user's units by name, inner ones first. Raises `Misuse` for one that cannot be a unit."""
    chosen = list(chosen)
    names = {child: name for name, child in module.named_modules() if name}
    for unit in chosen:
        if unit not in names or isinstance(unit, LISTS):
            kind = type(unit).__name__
            raise Misuse(f"units must be submodules of the module that have a forward, and this {kind} is not")
        if shared := _shared(module, names[unit], unit):
            raise Misuse(f"unit {names[unit]!r} shares parameter {shared!r} with the rest; gather them together")
    return {name: child for child, name in reversed(names.items()) if child in chosen}


def check_parameters(module: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raises `Misuse`, naming it, for a parameter that `fully_shard` cannot shard, or would refuse too late."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        # In older versions parameters that only some ranks use broke the reduction, and over gloo one version summed
        # gradients where means were requested (pytorch#162338).
        raise Misuse(f"sharding needs PyTorch 2.13 or newer, and this is {torch.__version__}")
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise Misuse("the module is sharded already")
    if isinstance(module, LISTS):
        raise Misuse(f"a {type(module).__name__} has no forward; shard the module that calls its entries")
    named = dict(module.named_parameters())
    if not named:
        raise Misuse("the module has no parameters to shard")
    if not any(parameter.dim() for parameter in named.values()):
        raise Misuse(f"the module has no parameters that can be divided: {next(iter(named))!r} needs the shape (1,)")
    for name, parameter in named.items():
        if parameter.is_meta:
            raise Misuse(f"parameter {name!r} is on the meta device; give it values before shard()")
    seen: set[nn.Parameter] = set()
    for name, part in (*units.items(), ("the rest", module)):
        own = set(part.parameters()) - seen
        seen |= own
        if (
            len(dtypes := {str(parameter.dtype) for parameter in own if parameter.requires_grad and parameter.dim()})
            > 1
        ):
            raise Misuse(f"parameters of one unit must be trained in one dtype; {name} has {sorted(dtypes)}")


def compare_first_forward(module: nn.Module, units: Mapping[str, nn.Module], world: World) -> None:
    """Has ranks compare the units that they enter in the first forward pass. Raises `Misuse` on every rank if they
    differ: they would gather one unit's shards into another's parameters. Differences in a later forward are not
    noticed: such models need `units=()`.
    """

    def tell(place: str) -> None:
        places = world.gather_texts(place)
        for rank, other in enumerate(places):
            if other != places[0]:
                raise Misuse(
                    f"rank {rank} runs {other} where rank 0 runs {places[0]}: submodules that are gathered on their "
                    "own must run on every rank, in the same order; shard(..., units=()) gathers all at once"
                )

    def ended(*_: Any) -> None:
        tell("the end of forward")
        for hook in hooks:
            hook.remove()

    hooks = [
        unit.register_forward_pre_hook(lambda *_, name=name: tell(f"{name!r}"), prepend=True)
        for name, unit in units.items()
    ]
    hooks.append(module.register_forward_hook(ended))


def _shared(module: nn.Module, name: str, unit: nn.Module) -> str | None:
    """A name outside of the unit of one of its parameters; None if it shares none."""
    inside = set(unit.parameters())
    for other, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in inside and not other.startswith(f"{name}."):
            return other
    return None

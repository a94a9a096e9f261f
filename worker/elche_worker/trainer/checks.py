"""Checks a loop's model, optimizers, config and loader on every rank before training begins."""

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import current_process, parent_process
from typing import Any

from torch import nn

from elche.errors import Misuse
from elche_worker.collectives.world import World
from elche_worker.model.savable import problem_of_model
from elche_worker.model.tensors import described, is_plain
from elche_worker.session.script import SPAWNS, changed_place, has_several_ranks
from elche_worker.trainer.config import TrainerConfig
from elche_worker.trainer.optimizers import problem_of_optimizers


def check_is_main() -> None:
    """Raises `Misuse` in a process that imports the script because the script has started it by spawn or forkserver:
    each would train on its own, or wait for the other ranks. Likewise if the script has changed RANK or WORLD_SIZE.
    """
    if getattr(current_process(), "_inheriting", False):  # what multiprocessing itself looks at before it starts one
        raise Misuse(
            "Trainer.setup() is called again in a process that the script has started by spawn or forkserver, since "
            "such a process imports the script: put what trains under `if __name__ == '__main__':`"
        )
    if parent_process() is not None and has_several_ranks():
        raise Misuse(SPAWNS)
    if changed := changed_place():
        raise Misuse(changed)


def problem_of(model: Any, optimizers: Any) -> str:
    """Returns why this model and optimizer cannot be trained; "" when they can."""
    if not isinstance(model, nn.Module):
        return f"Trainer.setup needs a torch.nn.Module, not {type(model).__name__}"
    if problem := problem_of_model(model):
        return problem
    lazy = next((name for name, one in model.named_parameters() if isinstance(one, nn.UninitializedParameter)), "")
    if lazy:
        return f"parameter {lazy!r} has no shape yet: let one batch go through the model first"
    for name, one in model.named_buffers():
        if not is_plain(one):
            return (
                f"buffer {name!r} is {described(one)}, which ranks cannot send each other: keep it as a plain attribute"
            )
    if problem := problem_of_optimizers(optimizers, model):
        return problem
    if not any(one.requires_grad for one in model.parameters()):
        return "the model has no parameter to train: all are frozen, or it has none"
    return ""


def problem_of_synced(model: nn.Module, device: str, *, has_el_che: bool) -> str:
    """Returns why a SyncBatchNorm of the model cannot be trained on several ranks, of which this one has a device of
    this type; "" if there is none, or it can.
    """
    name = next((name for name, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm)), None)
    if name is None:
        return ""
    which = f"{name or 'the model'} is a SyncBatchNorm"
    if device == "cpu":
        return (
            f"{which}, which PyTorch has for GPUs alone: leave nn.SyncBatchNorm.convert_sync_batchnorm() out on CPUs, "
            "where each rank then normalises by its own part of a batch"
        )
    if has_el_che:
        return (
            f"{which}, in which ranks wait for each other in every forward pass, and under El Che they make unequal "
            "numbers of them: share each batch, by TrainerConfig(max_anchor=0), or leave convert_sync_batchnorm() out"
        )
    return ""


def check_same_config(config: TrainerConfig, world: World) -> None:
    """Raises `Misuse` on every rank when configs differ."""
    texts = world.gather_texts(repr(replace(config, device="auto")))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise Misuse(f"ranks have different configs: rank 0 {texts[0]}, rank {rank} {text}")


def check_shares(batch_size: Any, num_steps: int | None, least: int, world: World) -> None:
    """Raises `Misuse` on every rank unless all ask for the same shares, with at least `least` samples for each rank."""
    needed = least * world.size if world.size > 1 else 1
    is_number = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    problem = ""
    if not is_number or batch_size < needed:
        each = f" ({least} for each of {world.size} ranks)" if world.size > 1 else ""
        problem = f"shares: batch_size must be a whole number of at least {needed}{each}, not {batch_size!r}"
    world.agree(problem)
    for rank, other in enumerate(world.gather_texts(f"batch_size={batch_size}, num_steps={num_steps}")):
        if other != f"batch_size={batch_size}, num_steps={num_steps}":
            raise Misuse(
                f"shares: rank {rank} has {other}, and this one batch_size={batch_size}, num_steps={num_steps}"
            )


def module_of(head: Any, name: str) -> nn.Module:
    """The module in the attribute `name`, or the only module that an object holds. Raises `Misuse`."""
    if name:
        found = getattr(head, name, None)
        if not isinstance(found, nn.Module):
            raise Misuse(f"{type(head).__name__}.{name} is not a torch.nn.Module but {type(found).__name__}")
        return found
    if isinstance(head, nn.Module):
        return head
    held = {name: one for name, one in vars(head).items() if isinstance(one, nn.Module)}
    if len(held) != 1:
        what = f"holds {len(held)} modules ({', '.join(held)})" if held else "holds no module"
        raise Misuse(f"{type(head).__name__} {what}: say which, as in setup_head(head, optimizer, module='model')")
    return next(iter(held.values()))


def check_same_loader(facts: Sequence[float], world: World) -> None:
    """`facts`: samples, batch_size, num_workers, prefetch_factor. Raises `Misuse` on every rank where they differ."""
    gathered = world.gather_numbers(facts)
    for rank, other in enumerate(gathered):
        if other != gathered[0]:
            raise Misuse(
                "ranks have different loaders (samples, batch_size, num_workers, prefetch_factor): rank 0 "
                f"{_whole(gathered[0])}, rank {rank} {_whole(other)}; give the same whole loader on every rank"
            )


def _whole(numbers: Sequence[float]) -> str:
    return f"({', '.join(str(int(number)) for number in numbers)})"

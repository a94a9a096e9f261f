"""Checks, before the first batch, that a model and its optimizers can be trained and saved."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elche.errors import InvalidJob
from elche_worker.model.storage import storage_of
from elche_worker.model.tensors import can_hold, described, flattened, is_plain, unflattened
from elche_worker.model.wrapped import on_trial, tell_left_out
from elche_worker.user.loading import check_json

CLOSURE = (
    "needs a closure at every step: use manual_optimization=True, with which train_step(model, batch, optimizers) "
    "calls optimizers.step(closure) itself"
)
"""What an optimizer needs, and what helps."""


@torch.no_grad()
def take_form(model: nn.Module) -> None:
    """Copies tensors of the model that cannot be written to: expanded ones, whose values share memory, and buffers that
    were made in inference mode.

    Raises `InvalidJob` for lazy modules, whose parameters have no shape before the first forward pass.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = next((name for name, one in named if is_lazy(one)), "")
    if lazy:
        raise InvalidJob(
            f"the model's {lazy} has no shape yet (a lazy module): run the model on one sample in model(), "
            "as in net(torch.zeros(1, 3, 32, 32)), before it is returned"
        )
    for _, tensor in named:
        if is_plain(tensor) and any(
            stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            tensor.data = tensor.data.contiguous()
    copies: dict[torch.Tensor, torch.Tensor] = {}  # a buffer that several modules share stays one
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_inference():
                module._buffers[name] = copies.setdefault(buffer, buffer.clone())


def problem_of_model(model: nn.Module) -> str:
    """Returns why a model is not trained that has tensors without values, or parameters that were made in inference
    mode, or is, or holds, DataParallel or DistributedDataParallel; "" for others.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            return (
                f"the model's {name} has no values, since it was made on the device 'meta': give the model memory, and "
                "its values, first, as by model.to_empty(device='cpu') and its own initialisation or load_state_dict()"
            )
    for name, one in model.named_parameters():
        if not is_lazy(one) and one.is_inference():
            return (
                f"the model's {name} was made in torch.inference_mode(), where no parameter can be trained or written "
                "to: make the model outside of it, or within torch.no_grad()"
            )
    kinds = nn.parallel.DistributedDataParallel, nn.DataParallel
    for name, one in model.named_modules():
        if isinstance(one, kinds):
            what, uses = f"model.{name}" if name else "the model", "averages gradients itself"
            if isinstance(one, nn.DataParallel):
                uses = "would take other ranks' GPUs, too"
            return f"{what} is in {type(one).__name__}, which {uses}: give the module that it holds (its .module)"
    return ""


def needs_closure(optimizer: Optimizer) -> bool:
    """True for an optimizer that evaluates the loss itself in a step, such as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_steps(optimizers: Iterable[Optimizer]) -> None:
    """Raises `InvalidJob` for an optimizer whose `step` needs a closure."""
    for one in optimizers:
        if needs_closure(one):
            raise InvalidJob(f"{type(one).__name__} {CLOSURE}")


@contextmanager
def without_closure(optimizer: Optimizer, file_name: str) -> Iterator[None]:
    """Around a step without a closure. Raises `InvalidJob` if the optimizer wants one after all, as those of SAM, whose
    `step` has None as its default and then refuses it.
    """
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        if "closure" in words or "'NoneType' object is not callable" in words:
            raise InvalidJob(f"{file_name}: {type(optimizer).__name__} {CLOSURE} ({words})") from error
        raise


def check_savable(model: nn.Module, optimizers: Iterable[Optimizer] = (), without: Iterable[str] = ()) -> None:
    """Raises `InvalidJob`, naming it, for a value that files cannot hold, a parameter of the optimizers that the model
    leaves out of its state, or a state that the model cannot load. Names in `without` are left out of files.
    """
    left_out = set(without)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = model.state_dict()
    for name, value in state.items():
        if name in left_out or can_hold(value):
            continue
        if not isinstance(value, torch.Tensor):
            way = "let get_extra_state() return a tensor"
        elif name not in parameters:
            way = "register_buffer(..., persistent=False) keeps it out of files, and model() makes it on each rank"
        elif value.is_complex():
            way = "use complex64, or a parameter of real numbers and torch.view_as_complex() in forward()"
        else:
            way = "use a type that it has"
        raise InvalidJob(f"the model's {name} is {described(value)}, which a safetensors file cannot hold: {way}")
    if any(hasattr(one, "device_mesh") for one in state.values()):
        return
    _check_has_trained(parameters, state, optimizers)
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise InvalidJob(
            "the model cannot load its own state_dict(), so that no checkpoint of it could be resumed: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None


def _check_has_trained(
    parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any], optimizers: Iterable[Optimizer]
) -> None:
    """Raises `InvalidJob` for a parameter of the optimizers that is not in the state, under any name."""
    stepped = {one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    saved = {storage_of(one) for one in state.values() if can_hold(one)}
    for name, one in parameters.items():
        if one in stepped and one.requires_grad and name not in state and storage_of(one) not in saved:
            raise InvalidJob(
                f"the model's {name} is trained, and its state_dict() leaves it out, so that no checkpoint and no "
                "model file has it: let state_dict() return all that the optimizer has, or give the optimizer only "
                "what is in it"
            )


def check_state(optimizers: Sequence[Optimizer]) -> None:
    """Raises `InvalidJob` for an optimizer without a `state_dict`, with a value that no checkpoint can hold, or that
    cannot load its own state.
    """
    check_json()  # as model() may have replaced it
    tensors: dict[str, torch.Tensor] = {}
    state: list[Any] = []
    for one in optimizers:
        try:
            state.append(one.state_dict())
            tell_left_out(one, state[-1])
        except Exception as error:
            kind = type(one).__name__
            raise InvalidJob(
                f"{kind}.state_dict() raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from None
    try:
        text = json.dumps(flattened(state, tensors, {}, where="optimizers"))
        read = unflattened(json.loads(text), tensors)
    except ValueError as error:
        raise InvalidJob(
            f"{error}: keep only numbers, strings and tensors in an optimizer's groups and state"
        ) from None
    for one, own in zip(optimizers, read, strict=True):
        _check_loads(one, own)


def _check_loads(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raises `InvalidJob` for an optimizer that cannot load its own state, as read from a checkpoint. It stays as it
    is, and its tensors are not copied.
    """
    try:
        with on_trial(optimizer):
            optimizer.load_state_dict(state)
    except Exception as error:
        raise InvalidJob(
            f"{type(optimizer).__name__} cannot load its own state_dict(), so that no checkpoint could be resumed: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None

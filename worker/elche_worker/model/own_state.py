"""The user's own state besides the model: the objects that a job's `state(model)` returns."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from torch import nn

from elche.errors import InvalidJob
from elche_worker.model.tensors import copied, flattened, unflattened
from elche_worker.user.job import JobDefinition
from elche_worker.user.loading import refused

LENGTH_BYTES = 8
"""Size in bytes of the text's length, little-endian, with which `packed` begins."""


class OwnState:
    """Objects by name, stored in checkpoints and handed to ranks that join: those with `state_dict` and
    `load_state_dict`, and dicts, which are cleared and filled.
    """

    def __init__(self, objects: Mapping[str, Any] | None = None, file_name: str = "the job") -> None:
        self.objects: Mapping[str, Any] = MappingProxyType(dict(objects or {}))
        self._file_name = file_name

    def state(self) -> dict[str, Any]:
        """The objects' state by name: their own tensors, not copies. Raises `InvalidJob` or `UserCodeRaised`."""
        try:
            return {name: one.state_dict() if _has_state(one) else dict(one) for name, one in self.objects.items()}
        except BaseException as error:
            raise refused(error, self._file_name) from None

    def storable(self) -> dict[str, Any]:
        """The state as read from a checkpoint. Raises `InvalidJob`, naming the object that cannot be stored."""
        return {name: self._storable(name, one) for name, one in self.state().items()}

    def _storable(self, name: str, state: Any) -> Any:
        """The state as it comes back from a checkpoint: flattened to JSON and tensors, and built again."""
        tensors: dict[str, torch.Tensor] = {}
        try:
            text = json.dumps(flattened(copied(state), tensors, where=name))
        except ValueError as error:
            raise InvalidJob(
                f"{self._file_name}: state() gives {name!r}: {error}: keep numbers, strings and tensors in it"
            ) from None
        return unflattened(json.loads(text), tensors)

    def restore(self, states: Mapping[str, Any], source: str) -> list[str]:
        """Loads the objects' state of a checkpoint or another rank, described by `source`; returns the names of objects
        without a state there. Raises `InvalidJob` for a state without an object, or one that does not fit.
        """
        for name in states:
            if name not in self.objects:
                raise InvalidJob(
                    f"{source} has the state of {name!r}, and state() in {self._file_name} gives nothing of that name: "
                    f"return it there, or an empty dict, {name!r}: {{}}, if it is not used any more"
                )
        for name, state in states.items():
            try:
                _load(self.objects[name], state)
            except Exception as error:
                words = " ".join(str(error).split())[:300]
                raise InvalidJob(
                    f"{self._file_name}: {name!r} of state() does not take the state that {source} has of it: "
                    f"{type(error).__name__}: {words}"
                ) from None
        return [name for name in self.objects if name not in states]

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Context after which the objects' state is as before. Raises `InvalidJob` if the state cannot be stored, or an
        object cannot load its own.
        """
        before = self.storable()
        self.restore(before, "a checkpoint")
        yield
        self.restore(before, "a checkpoint")


def build_own_state(job: JobDefinition, model: nn.Module, file_name: str) -> OwnState:
    """The objects that the job's `state` returns for this model. Raises `InvalidJob` or `UserCodeRaised`."""
    if job.state is None:
        return OwnState()
    try:
        objects = job.state(model)
    except BaseException as error:
        raise refused(error, file_name) from None
    if not isinstance(objects, Mapping):
        raise InvalidJob(f"{file_name}: state() must return a dict of objects by name, not {type(objects).__name__}")
    for name, one in objects.items():
        if not isinstance(name, str):
            raise InvalidJob(f"{file_name}: state() must give names that are strings, not {name!r}")
        if not (isinstance(one, dict) or _has_state(one)):
            raise InvalidJob(
                f"{file_name}: state() gives {name!r}, a {type(one).__name__} without state_dict() and "
                "load_state_dict(): give it these methods, or keep it in a dict"
            )
    return OwnState(objects, file_name)


def packed(value: Any) -> bytes:
    """Nested values and tensors as bytes, for another process. Raises `ValueError` for other types."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(flattened(copied(value), tensors)).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + (safetensors.torch.save(tensors) if tensors else b"")


def unpacked(raw: bytes) -> Any:
    """The inverse of `packed`."""
    end = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
    tensors = safetensors.torch.load(raw[end:]) if len(raw) > end else {}
    return unflattened(json.loads(raw[LENGTH_BYTES:end]), tensors)


def _has_state(one: Any) -> bool:
    return all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict"))


def _load(one: Any, state: Any) -> None:
    if _has_state(one):
        one.load_state_dict(state)
        return
    filled = {key: _on_device_of(one.get(key), value) for key, value in copied(state).items()}
    one.clear()
    one.update(filled)


def _on_device_of(old: Any, value: Any) -> Any:
    """The value; a tensor on the device of the tensor `old` that it replaces."""
    are_tensors = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
    return value.to(old.device) if are_tensors else value

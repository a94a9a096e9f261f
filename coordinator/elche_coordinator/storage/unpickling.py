"""Restricted unpickling of a coordinator's own classes, so that write access to its database does not allow running
code in it. A checksum detects damage.
"""

import io
import pickle
import zlib
from collections import Counter, deque
from enum import EnumMeta
from functools import partial
from typing import Any

OWN = (
    "elche.cadence",
    "elche.extent",
    "elche.settings",
    "elche.v1.",
    "elche_coordinator.core.",
    "elche_coordinator.streams.streams",
    "elche_coordinator.storage.tape",
)
"""Modules whose classes are allowed: they hold data, and decide without I/O."""
CHECKSUM_BYTES = 4


def sealed(content: bytes) -> bytes:
    """Prepends a checksum to a pickle."""
    return zlib.crc32(content).to_bytes(CHECKSUM_BYTES) + content


def unsealed(content: bytes) -> bytes:
    """The inverse of `sealed`. Raises `pickle.UnpicklingError` if the content was changed."""
    pickled = content[CHECKSUM_BYTES:]
    if content != sealed(pickled):
        raise pickle.UnpicklingError("its checksum does not match: it was damaged")
    return pickled


def loads(content: bytes) -> Any:
    """Unpickles an object. Raises `pickle.UnpicklingError` for other classes."""
    return _Unpickler(io.BytesIO(content)).load()


def _attribute(owner: object, name: str) -> Any:
    """Stands for `getattr` in a pickle, as bound methods have it, and in Python 3.11.0 to 3.11.3 members of
    enumerations. Allows only methods of elche's objects, and members of its enumerations.
    """
    if isinstance(owner, EnumMeta) and owner.__module__.startswith(OWN) and name in owner.__members__:
        return owner[name]
    if not type(owner).__module__.startswith(OWN) or name.startswith("__"):
        raise pickle.UnpicklingError(f"{name} is not a method of an object of elche")
    return getattr(owner, name)


OTHERS = {
    ("builtins", "getattr"): _attribute,
    ("collections", "Counter"): Counter,
    ("collections", "deque"): deque,
    ("functools", "partial"): partial,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (other := OTHERS.get((module, name))) is not None:
            return other
        found = super().find_class(module, name) if module.startswith(OWN) else None
        if isinstance(found, type) and found.__module__.startswith(OWN):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a class of elche's state")

"""Named coordinators: a file with their addresses and tokens.

The file is ~/.config/elche/config.toml, or the one that ELCHE_CONFIG names. ELCHE_CONTEXT overrides its current
context.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elche.errors import ElcheError
from elche.folders import without_waiting
from elche.network import DEFAULT_ADDRESS
from elche.tls import named_folder
from elche.token import FILE_VARIABLE, read_token

# Environment variables: the file of contexts, the name of the current one, and an address that replaces it.
CONFIG = "ELCHE_CONFIG"
CHOICE = "ELCHE_CONTEXT"
ADDRESS = "ELCHE_COORDINATOR"
MAX_CHARACTERS = 1 << 20
"""A file of contexts with as many is refused: it may have no end, as /dev/zero."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class InvalidContext(ElcheError):
    """The file of contexts cannot be read or written, or has no such context."""


@dataclass(frozen=True, slots=True)
class Context:
    """One coordinator."""

    coordinator: str
    """HOST:PORT, or several, separated by commas."""
    token_file: str = ""
    """File that holds its token; empty: that of the environment, or none."""
    tls: str = ""
    """Folder with its authority's certificate; empty: that of the environment, or no TLS."""


@dataclass(slots=True)
class Contexts:
    """The named coordinators."""

    current: str = ""
    """Name of the current one; empty: none."""
    known: dict[str, Context] = field(default_factory=dict)

    def chosen(self, environment: Mapping[str, str] = os.environ) -> Context | None:
        """The current context; None if none is chosen. Raises `InvalidContext` for an unknown name."""
        name = environment.get(CHOICE) or self.current
        return self.of(name) if name else None

    def of(self, name: str) -> Context:
        """The context of a name. Raises `InvalidContext`."""
        if name not in self.known:
            there = ", ".join(self.known) or "none: `elche context add NAME --coordinator HOST:PORT` adds one"
            raise InvalidContext(f"there is no context {name[:100]!r}; known are {there}")
        return self.known[name]


def config_path() -> Path:
    """Path of the file."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path(os.path.expanduser("~")) / ".config"
    return Path(os.environ.get(CONFIG) or Path(home) / "elche" / "config.toml")


def load() -> Contexts:
    """Reads the contexts; none if there is no file. Raises `InvalidContext`, which names the fault and its place."""
    path = config_path()
    try:
        with open(path, encoding="utf-8", opener=without_waiting) as file:
            text = file.read(MAX_CHARACTERS)
        if len(text) == MAX_CHARACTERS:
            raise ValueError(f"it has {MAX_CHARACTERS} characters or more")
        content = tomllib.loads(text)
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidContext(f"{path} cannot be read: {error}; correct it, or remove it") from error
    found = Contexts(current=_text(path, content, "current"))
    listed = content.get("contexts", {})
    if not isinstance(listed, dict):
        raise InvalidContext(f"{path}: contexts must be tables, such as [contexts.lab]")
    for name, one in listed.items():
        if not isinstance(one, dict) or not _text(path, one, "coordinator"):
            raise InvalidContext(f'{path}: [contexts.{name}] needs coordinator = "HOST:PORT"')
        found.known[name] = Context(*(_text(path, one, key) for key in ("coordinator", "token_file", "tls")))
    return found


def save(contexts: Contexts) -> None:
    """Writes the file atomically. Raises `InvalidContext`."""
    lines = [f"current = {json.dumps(contexts.current)}"]
    for name, one in contexts.known.items():
        lines += ["", f"[contexts.{name}]", f"coordinator = {json.dumps(one.coordinator)}"]
        lines += [f"token_file = {json.dumps(one.token_file)}"] if one.token_file else []
        lines += [f"tls = {json.dumps(one.tls)}"] if one.tls else []
    path = config_path()
    if path.parts[0] == "~":
        raise InvalidContext(f"this user has no home directory to keep contexts in: set HOME, or {CONFIG} to a file")
    # Another file, with the process's id: two commands at a time would write into one another's draft.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text("\n".join([*lines, ""]), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise InvalidContext(f"{path} cannot be written: {error.strerror}") from error


def check_name(name: str) -> str:
    """Returns the name of a context. Raises `InvalidContext` for an invalid one."""
    if not _NAME.fullmatch(name):
        raise InvalidContext(f"a context's name has letters, digits, - and _, at most 100, not {name[:100]!r}")
    return name


def address() -> str:
    """The coordinator's address: that of the environment, of the context, or on this machine."""
    if given := os.environ.get(ADDRESS):
        return given
    chosen = load().chosen()
    return chosen.coordinator if chosen else DEFAULT_ADDRESS


def is_named() -> bool:
    """True if the environment or a context names a coordinator."""
    return bool(os.environ.get(ADDRESS)) or load().chosen() is not None


def token_of(coordinator: str) -> str:
    """The token for a coordinator: that of the environment, else that of the context if it is this coordinator's."""
    if token := read_token():
        return token
    chosen = load().chosen()
    # Otherwise --coordinator with a wrong address would send this coordinator's token to whoever listens there.
    if chosen is None or chosen.coordinator != coordinator or not chosen.token_file:
        return ""
    return read_token({FILE_VARIABLE: os.path.expanduser(chosen.token_file)})


def tls_of(coordinator: str) -> str:
    """The folder of certificates for a coordinator, found as its token is; empty: no TLS."""
    if folder := named_folder():
        return folder
    chosen = load().chosen()
    return chosen.tls if chosen is not None and chosen.coordinator == coordinator else ""


def _text(path: Path, table: Mapping[str, object], name: str) -> str:
    value = table.get(name, "")
    if not isinstance(value, str):
        raise InvalidContext(f"{path}: {name} must be a string, not {value!r}")
    return value

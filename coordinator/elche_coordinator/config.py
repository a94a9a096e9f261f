"""The configuration with which a coordinator starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elche.errors import ElcheError
from elche.network import is_loopback, split_address
from elche.token import HOW, MIN_CHARACTERS


class CannotStart(ElcheError):
    """The daemon cannot start with this configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Configuration of the daemon. Raises `CannotStart` for an insecure one."""

    listen: str
    """HOST:PORT of the gRPC server; port 0: any free one."""
    http: str | None
    """HOST:PORT of the page and /metrics; None: neither is served."""
    data: Path
    """Folder of the database."""
    store: str = ""
    """URL of a PostgreSQL database that several coordinators share; empty: a file in `data`."""
    keep_jobs: int
    """Number of ended jobs that are kept."""
    artifacts: str = ""
    """Folder, or URL that fsspec knows, in which what jobs leave outlives their hosts; empty: it stays there."""
    token: str = ""
    """The coordinator's own token, whose bearer may do everything; empty: no token is required."""
    tls: Path | None = None
    """Folder with a certificate and its key; None: no TLS."""
    asks_certificates: bool = False
    """True if clients and agents must present certificates of the authority in that folder."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Most slots per project; "*": of each project that is not named."""
    allows_chaos: bool = False
    """True if operators may break ranks, agents and this process on purpose."""
    grace_s: float = 0.0
    """Seconds for which jobs may write checkpoints before the coordinator stops."""
    exit_with_stdin: bool = False
    """Exit when standard input closes, that is when the parent process is gone."""

    def __post_init__(self) -> None:
        if self.token and len(self.token) < MIN_CHARACTERS:
            raise CannotStart(
                f"a token of {len(self.token)} characters can be guessed: it must have at least {MIN_CHARACTERS}, "
                "such as the output of `openssl rand -hex 32`"
            )
        if self.asks_certificates and self.tls is None:
            raise CannotStart("--client-certificates needs --tls: a folder with the authority that has signed them")
        for address in filter(None, (self.listen, self.http)):
            host, _ = split_address(address)
            if not is_loopback(host) and not self.token and not self.asks_certificates:
                raise CannotStart(
                    f"listening on {host} needs a token: {HOW}, a secret that clients and workers share, "
                    "or listen on 127.0.0.1"
                )

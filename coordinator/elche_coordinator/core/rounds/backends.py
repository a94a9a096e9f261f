"""Choice of the backend for a job's averaging: the job's setting, or one that all ranks support."""

from dataclasses import dataclass

from elche_coordinator.core.messages.ids import Rank
from elche_coordinator.core.messages.spec import Build

BACKENDS = ("auto", "nccl", "gloo", "cpu")
"""Values of the setting `backend`; "cpu" averages through the coordinator."""
UNENCRYPTED = "hosts would average unencrypted: elche-worker --interface names a network where they may"
"""The reason of the choice "cpu" between hosts that are joined by TLS: NCCL and gloo do not encrypt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A backend with the reason of its choice."""

    backend: str
    """"nccl", "gloo" or "cpu"; never "auto"."""
    reason: str
    """Why, for people."""

    @property
    def is_relayed(self) -> bool:
        """True if ranks average through the coordinator, and so cannot while it is away."""
        return self.backend == "cpu"

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def choose_backend(asked: str, builds: dict[Rank, Build], num_hosts: int) -> Choice:
    """Returns the backend for these ranks on `num_hosts` hosts. Raises `ValueError` if the one in `asked` is unknown or
    cannot be used.
    """
    if asked not in BACKENDS:
        raise ValueError(f"unknown backend {asked!r}; known are {', '.join(BACKENDS[:-1])} and {BACKENDS[-1]}")
    obstacle = nccl_obstacle(builds)
    if asked == "nccl" and obstacle is not None:
        raise ValueError(f"backend 'nccl' cannot work here: {obstacle}; use 'gloo', or 'auto'")
    if asked != "auto":
        return Choice(backend=asked, reason="as the job says")
    if num_hosts > 1 and any(build.needs_encryption for build in builds.values()):
        return Choice(backend="cpu", reason=UNENCRYPTED)
    if obstacle is not None:
        return Choice(backend="gloo", reason=obstacle)
    return Choice(backend="nccl", reason="every rank has a GPU of its own and the same builds")


def nccl_obstacle(builds: dict[Rank, Build]) -> str | None:
    """Returns the reason for which the ranks cannot average over NCCL; None if they can."""
    first_rank, first = next(iter(builds.items()))
    owners: dict[str, Rank] = {}
    for rank, build in builds.items():
        if build.device_type != "cuda":
            return f"rank {rank} is on {build.device_type}"
        if not build.nccl:
            return f"the PyTorch of rank {rank} has no NCCL"
        for name in ("torch", "cuda", "nccl"):
            mine, theirs = getattr(first, name), getattr(build, name)
            if mine != theirs:
                return f"ranks {first_rank} and {rank} have {NAMES[name]} {mine} and {theirs}"
        if build.device_id in owners:
            return f"ranks {owners[build.device_id]} and {rank} share one GPU"
        if build.device_id:  # empty: the device has no id, so that sharing cannot be found out
            owners[build.device_id] = rank
    return None


NAMES = {"torch": "PyTorch", "cuda": "CUDA", "nccl": "NCCL"}
"""Names for people of the versions in a `Build`."""

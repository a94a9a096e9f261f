"""A planned job and what is expected of it: what `elche plan` asks the coordinator's simulator for, and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTIMIZERS = ("adam", "momentum", "sgd")
"""With two copies of the parameters in their state, one, or none."""
MAX_DEVICES = 32
"""The most devices of a plan: simulating more takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A job that is planned: its devices, the link between them and what it trains."""

    batch_ms: tuple[float, ...]
    """Milliseconds per batch, of each device; batches of all are equally large."""
    model_bytes: int
    """Size of the trained parameters in float32."""
    link_bytes_per_s: float
    """Bytes per second that each device can send and, at the same time, receive."""
    round_trip_s: float
    """Seconds to another device, or to the coordinator, and back."""
    mtbf_s: float | None = None
    """Mean seconds between failures of one device; None: none fails."""
    restart_s: float = 30.0
    """Seconds from a device's failure until its rank can join again."""
    epoch_batches: int | None = None
    """Batches of an epoch; None: of an epoch that does not end while the plan is simulated."""
    policy: str = "cadence"
    averaging: str = "auto"
    compress: str | None = None
    optimizer: str = "adam"

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "PlanRequest":
        """The request of which `document` is what `dataclasses.asdict` has made."""
        return cls(**{**document, "batch_ms": tuple(document["batch_ms"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """One device of a plan. Its four fractions of time add up to 1."""

    batch_ms: float
    batches_per_s: float
    training: float
    waiting: float
    """For other ranks, or for what the coordinator says."""
    averaging: float
    """While it does not train; 0 when averagings overlap."""
    lost: float
    """To failures of this device and of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that each device needs, without activations and what the libraries take."""

    parameters: int
    gradients: int
    optimizer: int
    rounds: int
    """Held for averaging, from one round to the next."""
    while_averaging: int
    """Held in addition to `rounds` while an averaging runs."""

    @property
    def total(self) -> int:
        """The most at one time."""
        return self.parameters + self.gradients + self.optimizer + self.rounds + self.while_averaging


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The figures to be expected of a planned job once it has run for a while."""

    batches_per_s: float
    bound_batches_per_s: float
    """The sum of what the devices would make alone."""
    rounds_per_minute: float
    averaging_s: float
    """Duration of an averaging."""
    sent_bytes_per_round: float
    """By all devices together."""
    loss_per_failure_s: float | None
    """Mean time that the failure of one device costs the job; None: no failures are planned."""
    devices: tuple[DevicePlan, ...]
    memory: MemoryPlan
    simulated_s: float
    """Virtual time that was simulated."""
    epoch_s: float | None = None
    """Duration of an epoch; None: its batches are not given."""

    @property
    def bound_fraction(self) -> float:
        """Throughput as a fraction of the bound."""
        return self.batches_per_s / self.bound_batches_per_s

    @property
    def sent_bytes_per_hour(self) -> float:
        """By all devices together."""
        return self.sent_bytes_per_round * self.rounds_per_minute * 60

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Plan":
        """The plan of which `document` is what `dataclasses.asdict` has made."""
        devices = tuple(DevicePlan(**one) for one in document["devices"])
        return cls(**{**document, "devices": devices, "memory": MemoryPlan(**document["memory"])})

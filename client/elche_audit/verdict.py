"""The outcome of an audit."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Thrown:
    """Samples that one rank process has trained and that are not in the final parameters."""

    rank: int
    incarnation: int
    samples: int
    batches: int
    reason: str


@dataclass(slots=True)
class Verdict:
    """What was found. It is refuted by any violation, and undecided by anything missing."""

    job: str = ""
    violations: list[str] = field(default_factory=list)
    """What is wrong and where, a line each."""
    missing: list[str] = field(default_factory=list)
    """Files that are missing or damaged, a line each."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and is not wrong, a line each."""
    thrown: list[Thrown] = field(default_factory=list)
    epoch_samples: list[int] = field(default_factory=list)
    """By epoch: samples in the final parameters."""
    epoch_sizes: list[int] = field(default_factory=list)
    """By epoch: samples to be trained."""
    left_out: int = 0
    """Samples of committed rounds whose rank was left out of the average."""
    skipped_samples: int = 0
    skipped_batches: int = 0
    """Batches of these rounds for which the job's data gave None, and their samples."""
    version: int = 0
    """The last committed version."""
    num_rounds: int = 0
    """Committed rounds that are part of it, in this folder."""
    num_checkpoints: int = 0
    num_files: int = 0
    num_batches: int = 0
    """Batches in all files."""
    is_complete: bool = False
    """True if the job was to train all epochs to their end, and has."""
    state: str = ""
    """The job's state by its record; empty without one."""

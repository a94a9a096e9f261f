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
    """The result of an audit: refuted if there is any violation, undecided if anything is missing, else confirmed."""

    job: str = ""
    violations: list[str] = field(default_factory=list)
    """Faults with their places, a line each."""
    missing: list[str] = field(default_factory=list)
    """Files that are missing or damaged, a line each."""
    notes: list[str] = field(default_factory=list)
    """Remarks on things that are unusual and no faults, a line each."""
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
    """Rounds recorded in this folder that are part of that version."""
    num_checkpoints: int = 0
    num_files: int = 0
    num_batches: int = 0
    """Batches in all files."""
    is_complete: bool = False
    """True if the job was to train all epochs to their end, and has."""
    model_is: str = ""
    """The model that the job has written, by its record, such as "best of epoch 3"."""
    state: str = ""
    """The job's state by its record, or by what its ranks were told; empty without either."""

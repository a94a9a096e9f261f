"""Jobs whose ranks write down what they were given and what they held: jobs/noting.py, varied by a test."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elche_client.events import Event, JobResult, JobState
from support.real_processes import Cluster

if TYPE_CHECKING:
    from elche_worker import TrainingJob

NUM_SAMPLES, BATCH_SIZE, EPOCHS, LR = 200, 16, 4, 0.1  # of jobs/noting.py
EVERY_SAMPLE_ONCE_PER_EPOCH = dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
BASE = (Path(__file__).parents[1] / "processes" / "jobs" / "noting.py").read_text(encoding="utf-8")
REPLACE = "job = dataclasses.replace(job, {})"


@dataclass(frozen=True, slots=True)
class Trained:
    """A job that has ended, and what its ranks have noted."""

    path: Path
    events: list[Event]

    @property
    def result(self) -> JobResult:
        last = self.events[-1]
        assert isinstance(last, JobResult)
        return last

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def notes(self, rank: int) -> list[Any]:
        """[kind, values...] in order."""
        path = self.path.with_suffix(f".rank-{rank}")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def noted(self, kind: str, rank: int) -> list[Any]:
        """The values of one kind."""
        return [values for one, *values in self.notes(rank) if one == kind]

    def batches(self, *ranks: int) -> list[list[int]]:
        """The samples of each batch of these ranks."""
        return [indices for rank in ranks for indices, _ in self.noted("batch", rank)]

    def samples(self, *ranks: int) -> Counter[int]:
        return Counter(index for indices in self.batches(*ranks) for index in indices)


def trained(cluster: Cluster, path: Path, *, fails: bool = False, **options: Any) -> Trained:
    options = {"num_ranks": 2, "verify_rounds": True, **options}
    done = Trained(path, list(cluster.client.submit(path, **options).watch()))
    assert fails or done.result.state is JobState.SUCCEEDED, done.result
    return done


def log_of(cluster: Cluster, rank: int) -> str:
    """That of a rank of the newest job."""
    return Path(cluster.client.jobs()[-1].ranks[rank].log_path).read_text()


def here(path: Path) -> "TrainingJob":
    """The job of a file, to be run in this process."""
    from elche_worker.user.loading import load_job  # starts PyTorch, which most tests of processes do without

    return load_job(path.read_text(encoding="utf-8"), str(path))

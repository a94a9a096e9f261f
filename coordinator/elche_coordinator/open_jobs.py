"""How many jobs have not ended, and how much was sent with them: both are bounded, of each user and in all."""

import pickle
from collections import Counter

from elche.errors import TooMuch
from elche_coordinator.core.messages.spec import JobSpec

MAX_JOBS = 20_000
MAX_JOBS_OF_USER = 2_000
MAX_BYTES = 1 << 30
"""Of what was sent with all jobs that have not ended, their files and settings."""
MAX_BYTES_OF_USER = 128 << 20


class OpenJobs:
    """Counts the jobs that have not ended, by who submitted them."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[str, int]] = {}
        """By job, whose it is and its bytes."""
        self._num: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def require_room(self, user: str) -> None:
        """Raises `TooMuch` when there is no room for one more job. `user` is whom a token names; empty: nobody, and
        only what all have together is bounded.
        """
        if user:
            self._require("your", self._num[user], MAX_JOBS_OF_USER, self._bytes[user], MAX_BYTES_OF_USER)
        self._require("all users'", len(self._jobs), MAX_JOBS, self._bytes.total(), MAX_BYTES)

    def _require(self, whose: str, num: int, max_num: int, num_bytes: int, max_bytes: int) -> None:
        what = ""
        if num >= max_num:
            what = f"{num} of {whose} jobs have not ended, and {max_num} is the limit"
        elif num_bytes >= max_bytes:
            sent, limit = f"{num_bytes >> 20} MiB", f"{max_bytes >> 20} MiB"
            what = f"{sent} were sent with {whose} {num} jobs that have not ended, and {limit} is the limit"
        if what:
            raise TooMuch(
                f"{what}: cancel some that wait (`elche jobs`, `elche cancel`), or submit when some have ended"
            )

    def add(self, job_id: str, spec: JobSpec, file_bytes: int) -> None:
        """A job that has not ended, with the size of its file."""
        self.remove(job_id)
        num_bytes = len(pickle.dumps(spec)) + file_bytes
        user = str(spec.submitted_by)
        self._jobs[job_id] = user, num_bytes
        self._num[user] += 1
        self._bytes[user] += num_bytes

    def remove(self, job_id: str) -> None:
        """It has ended."""
        if (found := self._jobs.pop(job_id, None)) is None:
            return
        user, num_bytes = found
        self._num[user] -= 1
        self._bytes[user] -= num_bytes
        if not self._num[user]:
            del self._num[user], self._bytes[user]

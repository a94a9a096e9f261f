"""Bounds on the number of open jobs and the bytes submitted with them, per user and in total."""

import pickle
from collections import Counter

from elche.errors import TooMuch
from elche_coordinator.core.jobs.lines import Kind, kind_of
from elche_coordinator.core.messages.spec import JobSpec

MAX_JOBS = 20_000
"""Most open jobs of all users."""
MAX_JOBS_OF_USER = 2_000
"""Most open jobs of the user that a token names."""
MAX_BYTES = 1 << 30
"""Most bytes of files, settings and ranks of all open jobs."""
MAX_BYTES_OF_USER = 128 << 20
"""Most bytes of files, settings and ranks of one user's open jobs."""
MAX_KINDS = 2_000
"""Most kinds of open jobs (`Kind`) of all users: an event that changes slots or the queue looks at one job of each."""
MAX_KINDS_OF_USER = 200
"""Most kinds of one user's open jobs."""
RANK_BYTES = 2048
"""Bytes that are counted for each rank of a loop, which exists from the beginning, not only while it has slots."""


class OpenJobs:
    """Counts open jobs by submitter."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[str, int, Kind | None]] = {}
        """(user, bytes, kind) of each job; kind None: an attached loop, which never waits for slots."""
        self._num: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._kinds: dict[str, Counter[Kind]] = {}
        """Number of jobs of each kind, by user."""

    def require_room(self, user: str, spec: JobSpec | None = None) -> None:
        """Raises `TooMuch` if there is no room for one more job. `user` is the token's name; empty: only the total is
        bounded. `spec` is None for an attached loop, which needs no slots.
        """
        if user:
            self._require("your", self._num[user], MAX_JOBS_OF_USER, self._bytes[user], MAX_BYTES_OF_USER)
        self._require("all users'", len(self._jobs), MAX_JOBS, self._bytes.total(), MAX_BYTES)
        if spec is not None:
            self.require_kind(user, spec)

    def require_kind(self, user: str, spec: JobSpec) -> None:
        """Raises `TooMuch` if the user's jobs, or all, are of too many kinds for one more of this kind."""
        kinds = self._kinds.get(user, Counter())
        if kind_of(spec) in kinds:
            return
        num_all = sum(map(len, self._kinds.values()))
        for whose, num, most in (("your", len(kinds) if user else 0, MAX_KINDS_OF_USER), ("all", num_all, MAX_KINDS)):
            if num >= most:
                raise TooMuch(
                    f"{whose} jobs that have not ended are of {num} kinds (project, conditions, least number of ranks, "
                    f"group size), and {most} is the limit: submit jobs that are alike, or when some have ended"
                )

    def _require(self, whose: str, num: int, max_num: int, num_bytes: int, max_bytes: int) -> None:
        what = ""
        if num >= max_num:
            what = f"{num} of {whose} jobs have not ended, and {max_num} is the limit"
        elif num_bytes >= max_bytes:
            sent, limit = f"{num_bytes >> 20} MiB", f"{max_bytes >> 20} MiB"
            what = f"{whose} {num} jobs that have not ended take {sent}, and {limit} is the limit"
        if what:
            raise TooMuch(
                f"{what}: cancel some that wait (`elche jobs`, `elche cancel`), or submit when some have ended"
            )

    def add(self, job_id: str, spec: JobSpec, file_bytes: int) -> None:
        """Counts a job, with the size of its file."""
        self.remove(job_id)
        num_bytes = len(pickle.dumps(spec)) + file_bytes + (spec.num_ranks * RANK_BYTES if spec.is_loop else 0)
        user = str(spec.submitted_by)
        kind = None if spec.is_attached else kind_of(spec)
        self._jobs[job_id] = user, num_bytes, kind
        if kind is not None:
            self._kinds.setdefault(user, Counter())[kind] += 1
        self._num[user] += 1
        self._bytes[user] += num_bytes

    def remove(self, job_id: str) -> None:
        """Stops counting a job, which has ended."""
        if (found := self._jobs.pop(job_id, None)) is None:
            return
        user, num_bytes, kind = found
        if kind is not None:
            self._kinds[user][kind] -= 1
            self._kinds[user] += Counter()  # drops what is 0
            if not self._kinds[user]:
                del self._kinds[user]
        self._num[user] -= 1
        self._bytes[user] -= num_bytes
        if not self._num[user]:
            del self._num[user], self._bytes[user]

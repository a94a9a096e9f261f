"""Bounds on the number of open jobs and the bytes submitted with them, per user and in total."""

import pickle
from collections import Counter
from collections.abc import Mapping

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
MAX_STATE_BYTES = 64 << 20
"""Largest saved state of one open job: what its ranks have reported, and messages to them; some 1 KiB for a rank."""
MAX_STATE_BYTES_OF_USER = 256 << 20
"""The same of one user's open jobs together."""
MAX_STATE_BYTES_IN_ALL = 1 << 30
"""The same of all users' open jobs."""


class OpenJobs:
    """Counts open jobs by submitter."""

    def __init__(self) -> None:
        self._jobs: dict[str, tuple[str, int, Kind | None]] = {}
        """(user, bytes, kind) of each job; kind None: an attached loop, which never waits for slots."""
        self._num: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._kinds: dict[str, Counter[Kind]] = {}
        """Number of jobs of each kind, by user."""
        self._states: dict[str, int] = {}
        """Bytes of each job's saved state."""
        self._state_bytes: Counter[str] = Counter()
        """The same of each user's jobs together."""

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

    def note_states(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """Notes the sizes in bytes of open jobs' saved states. Returns jobs that must end because there is too much,
        each the largest of those that have it, with the reason.
        """
        users: set[str] = set()
        for job_id, num_bytes in sizes.items():
            if (found := self._jobs.get(job_id)) is not None:
                users.add(found[0])
                self._state_bytes[found[0]] += num_bytes - self._states.get(job_id, 0)
                self._states[job_id] = num_bytes
        large = [one for one in sizes if self._states.get(one, 0) > MAX_STATE_BYTES]
        too_much = {one: _why("its", self._states[one], MAX_STATE_BYTES) for one in large}
        for user in sorted(users - {""}):
            if (num_bytes := self._state_bytes[user]) > MAX_STATE_BYTES_OF_USER:
                largest = max((one for one in self._states if self._jobs[one][0] == user), key=self._states.__getitem__)
                too_much[largest] = _why("your jobs'", num_bytes, MAX_STATE_BYTES_OF_USER)
        if (num_bytes := self._state_bytes.total()) > MAX_STATE_BYTES_IN_ALL:
            too_much[max(self._states, key=self._states.__getitem__)] = _why(
                "all jobs'", num_bytes, MAX_STATE_BYTES_IN_ALL
            )
        return too_much

    def remove(self, job_id: str) -> None:
        """Stops counting a job, which has ended."""
        if (found := self._jobs.pop(job_id, None)) is None:
            return
        user, num_bytes, kind = found
        self._state_bytes[user] -= self._states.pop(job_id, 0)
        self._state_bytes += Counter()  # drops what is 0
        if kind is not None:
            self._kinds[user][kind] -= 1
            self._kinds[user] += Counter()  # drops what is 0
            if not self._kinds[user]:
                del self._kinds[user]
        self._num[user] -= 1
        self._bytes[user] -= num_bytes
        if not self._num[user]:
            del self._num[user], self._bytes[user]


def _why(whose: str, num_bytes: int, most: int) -> str:
    return (
        f"{whose} state in the coordinator, of metrics and of messages that ranks have not read, takes "
        f"{num_bytes >> 20} MiB, and {most >> 20} MiB is the limit: has the job thousands of metrics?"
    )

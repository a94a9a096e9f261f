"""What can go wrong, in words for users; `status` maps each kind to its gRPC status and back."""


class ElcheError(Exception):
    """Something that a user can understand and mend. The message says what, where and what to do."""


class InvalidJob(ElcheError):
    """The job file, or what was asked of it, is not valid. Nothing was started."""


class Misuse(ElcheError):
    """A trainer, or what belongs to it, was asked for something that it cannot do. Nothing was changed."""


class PeerLost(ElcheError):
    """Another rank has ended, or cannot be reached."""


class UnknownJob(ElcheError):
    """No job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job has the id {job_id!r}; `elche jobs` lists them")
        self.job_id = job_id


class NotAllowed(ElcheError):
    """The credential is missing or wrong."""


class UnknownMessage(ElcheError):
    """A message is of a kind that this version does not know, or that has no place where it came."""

    def __init__(self, kind: str, name: str | None = None) -> None:
        what = f"has no place for {name!r}" if name else "knows no such message"
        super().__init__(f"a {kind} came, and this program {what}: are all programs of one version of elche?")


class TooMuch(ElcheError):
    """A message, queue or table is full."""


class Unreachable(ElcheError):
    """The coordinator does not answer."""


class JobFailed(ElcheError):
    """The job ended without a model. `traceback` is the user's own when user code raised, else empty."""

    def __init__(self, message: str, *, traceback: str = "", invalid: bool = False) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.invalid = invalid

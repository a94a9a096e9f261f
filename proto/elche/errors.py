"""The errors that users see; `status` maps each class to its gRPC status code and back."""

from collections.abc import Sequence


class ElcheError(Exception):
    """An error that a user can understand and fix. The message says what happened, where, and what to do."""


class InvalidJob(ElcheError):
    """A job file, option or request is not valid. Nothing was started or changed."""


class HelpShown(InvalidJob):
    """A job file was asked for its help, which it has printed, and has ended. There is nothing more to say."""


class HostAway(InvalidJob):
    """The host that has a file is not connected, or has gone while it sent the file. It may come back."""


class Misuse(ElcheError):
    """A call of the user's loop that the trainer cannot carry out. Nothing was changed."""


MISSING = "missing"
"""In `Ready.resumed`, in place of a training's state: why a rank has not found the checkpoint of its job."""
LEFT_ALONE = 75
"""Exit code of a rank's process that cannot go on without others that have ended, and is not at fault itself."""


class PeerLost(ElcheError):
    """Another rank has exited or cannot be reached."""


class UnknownJob(ElcheError):
    """No job has this id."""

    def __init__(self, job_id: str, similar: Sequence[str] = ()) -> None:
        """`similar`: ids or names that may be meant."""
        hint = f"did you mean {' or '.join(similar)}?" if similar else "`elche jobs` lists them"
        super().__init__(f"no job has the id {job_id!r}; {hint}")
        self.job_id = job_id


class NotAllowed(ElcheError):
    """The credential is missing or wrong."""


class Forbidden(ElcheError):
    """The credential is valid, but its role does not allow this, or the job is another user's."""


class UnknownMessage(ElcheError):
    """A message of a kind that this version does not know, or that was not expected on its stream."""

    def __init__(self, kind: str, name: str | None = None) -> None:
        what = f"has no place for {name!r}" if name else "knows no such message"
        super().__init__(f"a {kind} came, and this program {what}: are all programs of one version of elche?")


class WrongVersion(ElcheError):
    """The programs are of incompatible versions of elche."""


class TooMuch(ElcheError):
    """A limit is exceeded: of a message, a queue, a table or the disk."""


class Unreachable(ElcheError):
    """The coordinator does not answer."""


class JobFailed(ElcheError):
    """The job ended without a model. `traceback` is the user's own when user code raised, else empty."""

    def __init__(self, message: str, *, traceback: str = "", invalid: bool = False) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.invalid = invalid

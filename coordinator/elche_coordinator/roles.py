"""Callers, their roles, and what each role may do. Tokens, which have roles, are in `access.tokens`."""

from contextvars import ContextVar
from dataclasses import dataclass

from elche.errors import Forbidden
from elche.token import Role

IMPLIED = {
    Role.VIEWER: {Role.VIEWER},
    Role.USER: {Role.VIEWER, Role.USER},
    Role.OPERATOR: {Role.VIEWER, Role.USER, Role.OPERATOR},
    Role.AGENT: {Role.AGENT},
}
"""The roles that each role includes."""

_VIEWED = ("ListJobs", "WatchJob", "ListHosts", "FetchTimeline", "StreamLogs")
_OF_JOBS = (
    "SubmitJob",
    "CancelJob",
    "ResumeJob",
    "CheckpointJob",
    "PauseJob",
    "ScaleJob",
    "FetchModel",
    "FetchJournal",
)
NEEDED = {
    **{f"/elche.v1.JobService/{name}": Role.VIEWER for name in _VIEWED},
    **{f"/elche.v1.JobService/{name}": Role.USER for name in _OF_JOBS},
    "/elche.v1.JobService/DrainHost": Role.OPERATOR,
    "/elche.v1.JobService/MeasureLinks": Role.OPERATOR,
    "/elche.v1.JobService/InjectFault": Role.OPERATOR,
    "/elche.v1.BundleService/FindBundle": Role.USER,
    "/elche.v1.BundleService/UploadBundle": Role.USER,
    "/elche.v1.RankService/Attach": Role.USER,
    "/elche.v1.AccessService/MakeToken": Role.OPERATOR,
    "/elche.v1.AccessService/ListTokens": Role.OPERATOR,
    "/elche.v1.AccessService/RevokeToken": Role.OPERATOR,
    "/elche.v1.AgentService/Attend": Role.AGENT,
    "/elche.v1.AgentService/Deliver": Role.AGENT,
}
"""The role that each call of clients and agents needs. Other calls are those of ranks, which have secrets."""
CHANGES = frozenset(
    {
        *("SubmitJob", "CancelJob", "ResumeJob", "CheckpointJob", "PauseJob", "ScaleJob", "DrainHost", "Attach"),
        *("MakeToken", "RevokeToken", "MeasureLinks", "InjectFault", "UploadBundle"),
    }
)
"""Calls that the audit log shows."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request."""

    name: str = ""
    """The token's name; empty for the coordinator's own token, and where none is required."""
    role: Role | None = None
    """The token's role; None: may do everything."""
    token: str = ""
    """The token's id."""

    def require(self, needed: Role, what: str) -> None:
        """Raises `Forbidden` without the role."""
        if self.role is not None and needed not in IMPLIED[self.role]:
            raise Forbidden(f"{what} needs the role {needed}; {self.name} has the role {self.role}")

    def require_own(self, submitted_by: str, job_id: str) -> None:
        """Raises `Forbidden` for another user's job, unless the caller is an operator."""
        if self.role is not None and Role.OPERATOR not in IMPLIED[self.role] and submitted_by != self.name:
            whose = submitted_by or "somebody who gave no name"
            raise Forbidden(f"job {job_id} is of {whose}: {self.name} needs the role operator to change it")

    def submitter(self, claimed: str) -> str:
        """The owner of a job that the caller submits: the token's name, else the one in the request."""
        return self.name or claimed

    def own_key(self, key: str) -> str:
        """The key of a submission, made unique per user."""
        return f"{self.name}\n{key}" if self.name and key else key

    def __str__(self) -> str:
        return f"{self.name} ({self.role})" if self.role else "the coordinator's own token"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A token that has not been revoked."""

    id: str
    hash: str
    """SHA-256 of its text, in hex. The text is random: a slow hash would not make it harder to guess."""
    name: str
    role: Role
    made_at: float
    """Seconds since 1970."""
    expires_at: float
    """Seconds since 1970; 0: it does not expire."""
    made_by: str

    @property
    def caller(self) -> Caller:
        """The caller that presents this token."""
        return Caller(self.name, self.role, self.id)


ANYBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""The caller of the present call."""
HAS_CHANGED: ContextVar[bool] = ContextVar("has_changed", default=True)
"""False once the present call has found that all is as it asks."""

"""Types of ids, which are never reused and never addresses."""

from collections.abc import Iterable
from typing import NewType, TypeVar

Value = TypeVar("Value")

JobId = NewType("JobId", str)
AgentId = NewType("AgentId", str)
Rank = NewType("Rank", int)
"""Position in a job, from 0."""
Incarnation = NewType("Incarnation", int)
"""One process of a rank; a new process is a new incarnation."""
Attempt = NewType("Attempt", int)
"""Raised whenever a job goes back to a checkpoint."""
GenerationId = NewType("GenerationId", int)
"""A fixed membership with one process group."""
RoundId = NewType("RoundId", int)
"""Number of a round in its job, from 1. Rounds that were given up count too, so that no number comes twice."""
Version = NewType("Version", int)
"""A committed round's result; 0 is a model that no round has reached."""
LeaseId = NewType("LeaseId", int)
"""Number of a lease, which rises from lease to lease of a rank."""
Epoch = NewType("Epoch", int)
"""Counted from 0."""


def by_rank(ranks: Iterable[Rank], values: Iterable[Value]) -> dict[Rank, Value]:
    """Returns a dict from rank to value, for values in the order of `ranks`, such as the rows of a round's header.
    Positions are used nowhere else.

    Raises `ValueError` when the two differ in length.
    """
    return dict(zip(ranks, values, strict=True))

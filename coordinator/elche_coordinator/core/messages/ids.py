"""The names of things. Ids are never reused and never addresses."""

from typing import NewType

JobId = NewType("JobId", str)
AgentId = NewType("AgentId", str)
Rank = NewType("Rank", int)
"""Position in a job, from 0."""
Incarnation = NewType("Incarnation", int)
"""One process of a rank; a new process is a new incarnation."""
Attempt = NewType("Attempt", int)
"""Raised whenever a job goes back to a checkpoint."""
Generation = NewType("Generation", int)
"""Fixed membership with one process group."""
RoundId = NewType("RoundId", int)
"""One attempt at averaging."""
Version = NewType("Version", int)
"""A committed round's result; 0 is a model that no round has reached."""
LeaseId = NewType("LeaseId", int)
Epoch = NewType("Epoch", int)

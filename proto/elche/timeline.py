"""The kinds of spans in a timeline, by their numbers on the wire."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of span."""

    name: str
    lane: str
    """Spans of one lane do not overlap; those of different lanes may."""
    detail: str
    """The meaning of a span's number; empty: none."""


LOOP, BESIDE, DATA, DISK, GROUPS = "loop", "averaging", "data", "checkpoints", "groups"
KINDS = (
    Kind("batch", LOOP, "epoch"),
    Kind("wait for data", LOOP, ""),
    Kind("wait for a round", LOOP, "round"),
    Kind("wait at the limit", LOOP, "batches allowed"),
    Kind("idle", LOOP, ""),
    Kind("apply a result", LOOP, "round"),
    Kind("evaluate", LOOP, "epoch"),
    Kind("callback", LOOP, ""),
    Kind("average", BESIDE, "round"),
    Kind("fetch", DATA, "samples"),
    Kind("copy to the device", DATA, "bytes"),
    Kind("write a checkpoint", DISK, "version"),
    Kind("form a group", GROUPS, "generation"),
    Kind("epoch begins", LOOP, "epoch"),
)
BATCH, WAIT_DATA, WAIT_ROUND, WAIT_LIMIT, IDLE, APPLY, EVALUATE = range(7)
CALLBACK, AVERAGE, FETCH, COPY, CHECKPOINT, GROUP, EPOCH = range(7, len(KINDS))

"""What a timeline is made of: the kinds of spans that ranks record, by their numbers on the wire."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of span."""

    name: str
    lane: str
    """Spans of one lane follow each other; those of different lanes may overlap."""
    detail: str
    """What its number means; empty: nothing."""


LOOP, BESIDE, DATA, DISK = "loop", "averaging", "data", "checkpoints"
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
    Kind("form a group", LOOP, "generation"),
    Kind("epoch begins", LOOP, "epoch"),
)
BATCH, WAIT_DATA, WAIT_ROUND, WAIT_LIMIT, IDLE, APPLY, EVALUATE = range(7)
CALLBACK, AVERAGE, FETCH, COPY, CHECKPOINT, GROUP, EPOCH = range(7, len(KINDS))

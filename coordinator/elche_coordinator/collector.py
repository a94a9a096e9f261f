"""Python's garbage collector, set for a program that holds much and makes few cycles."""

import gc

YOUNG, MIDDLE, OLD = 10_000, 10, 50
"""New objects after which the newest are looked at, and how many looks each later one of the other two waits for. With
Python's own numbers (700, 10, 10) a sixth of the coordinator's time went into looking at what a thousand ranks' journal
and records keep, 0.1 s of it at a stretch."""


def settle() -> None:
    """Has the collector look less often, and never at what is imported. Called once, before there are jobs."""
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)

"""Devices that an agent offers several times (`elche-worker --share`): each rank gets an equal part of the memory."""

import os

SHARE_VARIABLE = "ELCHE_DEVICE_SHARE"
"""Environment variable with the number of times that the rank's device is offered; set by the agent."""


def memory_fraction() -> float:
    """The part of the device's memory that a rank may use, from 0 to 1."""
    text = os.environ.get(SHARE_VARIABLE, "1")
    return 1 / max(1, int(text)) if text.isdecimal() else 1.0

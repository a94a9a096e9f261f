"""A device that an agent offers several times (`elche-worker --share`): each rank gets its part of the memory."""

import os

SHARE_VARIABLE = "ELCHE_DEVICE_SHARE"
"""How many times the rank's device is offered; set by the agent."""


def memory_fraction() -> float:
    """The part of the device's memory that a rank may use, from 0 to 1."""
    text = os.environ.get(SHARE_VARIABLE, "1")
    return 1 / max(1, int(text)) if text.isdecimal() else 1.0

"""The launch of this process's script, if an agent has started it: its first trainer reports as a rank of the job."""

from elche_worker.session.launch import Launch

_launches: list[Launch] = []
_is_taken = False


def begin(launch: Launch) -> None:
    """Says that this process runs a submitted script."""
    _launches.append(launch)


def is_submitted() -> bool:
    """True in the process of a submitted script."""
    return bool(_launches)


def take_launch() -> Launch | None:
    """The launch, for the first trainer of the script; None afterwards."""
    global _is_taken
    if _is_taken or not _launches:
        return None
    _is_taken = True
    return _launches[0]

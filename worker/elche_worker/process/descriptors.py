"""Notices that a process's file descriptors were closed by code that has not opened them, as os.closerange does."""

import os

CLOSED = "the job's code has closed file descriptors that others have opened, as os.closerange does"
"""Why a process can never connect again."""


class OpenDescriptor:
    """A file descriptor that stays open as long as this is used, unless somebody closes all."""

    def __init__(self) -> None:
        self._number, other = os.pipe()
        os.close(other)
        self._inode = os.fstat(self._number).st_ino

    @property
    def was_closed(self) -> bool:
        """True if it was closed, also if another file has its number since then."""
        try:
            return os.fstat(self._number).st_ino != self._inode
        except OSError:
            return True

    def __del__(self) -> None:
        if not self.was_closed:  # else its number may be another's
            os.close(self._number)

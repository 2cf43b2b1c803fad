"""Ties a process to the one that started it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however it ends; now, if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

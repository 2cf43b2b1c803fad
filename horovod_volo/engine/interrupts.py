"""The "stop, please" of a scheduler: remembered here, acted on at the next log point.

A handler only sets a flag; ranks agree on it where they exchange their sums anyway. A second
SIGTERM ends the process at once. A second SIGUSR1 does not: schedulers and launchers pass it on
each in its own way, so that one request may arrive twice.
"""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process has been asked to save and stop."""

    def __init__(self) -> None:
        self.received = False

    @classmethod
    def listening(cls) -> StopRequest:
        """Return one that hears of signals from now on."""
        request = cls()
        for number in _SIGNALS:
            signal.signal(number, request._remember)
        # Whoever starts ranks may have them begin with these blocked, so that no early request is lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return request

    @staticmethod
    def ignore_from_now_on() -> None:
        """Let SIGUSR1 change nothing any more: Python's own end would make it deadly again."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _remember(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = True
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

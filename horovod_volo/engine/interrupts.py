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
        return request

    def _remember(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = True
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

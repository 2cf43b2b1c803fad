"""Stop requests of a scheduler: SIGTERM and SIGUSR1.

The handler only sets a flag. Ranks agree on it at the next log point, where they exchange sums in any case.
A second SIGTERM ends the process at once. A second SIGUSR1 does not: schedulers and launchers forward signals
in different ways, and the same request may arrive twice.
"""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """The request to save a checkpoint and stop: `received` is true after SIGTERM or SIGUSR1."""

    def __init__(self) -> None:
        self.received = False

    @classmethod
    def listening(cls) -> StopRequest:
        """Install the signal handlers and return the request that they set."""
        request = cls()
        for number in _SIGNALS:
            signal.signal(number, request._receive)
        # Launchers may start ranks with these signals blocked, so that no early request is lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return request

    @staticmethod
    def ignore_from_now_on() -> None:
        """Ignore SIGUSR1: at shutdown Python restores its default handler, which would kill the process."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = True
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

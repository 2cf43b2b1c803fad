"""Requests to save a checkpoint and stop: SIGTERM, Ctrl-C (SIGINT), SIGHUP and SIGUSR1.

The handler prints that the request was received, and sets a flag. Ranks agree on it at the end of the step
(`cluster/step_statistics.py`). A second SIGTERM or Ctrl-C ends the process at once. A second SIGUSR1 or
SIGHUP does not: schedulers and launchers forward signals in different ways, and the same request may arrive
twice.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from horovod_volo.cluster.launch_env import OWN, read_launch_env
from horovod_volo.cluster.stop_signals import STOP_SIGNALS

_REPEATABLE = (signal.SIGHUP, signal.SIGUSR1)


class StopRequest:
    """The request to save a checkpoint and stop: `received` is true after one of the signals."""

    def __init__(self) -> None:
        self.received = False
        self.effect = "the run saves a checkpoint after this step and stops"
        self._next: dict[int, Any] = {}  # handlers of a second request; without one, the system's default

    @classmethod
    @contextmanager
    def while_training(cls) -> Iterator["StopRequest"]:
        """Install the signal handlers, and restore those of before at the end. A second request goes to them.

        Only the main thread can; in another one, signals do what they did.
        """
        request = cls()
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
            # A handler of None was not installed by Python, which could not restore it.
            request._next = {number: each for number, each in handlers.items() if each is not None}
        try:
            request._install(request._next)
            yield request
        finally:
            for number, handler in request._next.items():
                signal.signal(number, handler)

    @classmethod
    def listening(cls) -> "StopRequest":
        """Install the signal handlers and return the request that they set."""
        request = cls()
        request._install(STOP_SIGNALS)
        # Launchers may start ranks with these signals blocked, so that no early request is lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return request

    @staticmethod
    def ignore_from_now_on() -> None:
        """Ignore repeated requests: at shutdown Python restores default handlers, which kill the process."""
        for number in _REPEATABLE:
            signal.signal(number, signal.SIG_IGN)

    def _install(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            # nohup ignores SIGHUP, and a shell ignores SIGINT for a command in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        launch = read_launch_env()  # now, because the rank may change
        first, self.received = not self.received, True
        if first and launch.local_rank == 0:
            name = signal.Signals(number).name
            text = f"{name} on rank {launch.rank}: {self.effect}"
            if launch.launcher in ("horovodrun", "mpirun") and number != signal.SIGUSR1:
                waits = f"jobs/{launch.launcher}.sh waits for the checkpoint"
                text += f" ({launch.launcher} may end it sooner: {waits})"
            # print() must not be called in a handler that may have interrupted it.
            with suppress(OSError):  # whoever read it may have ended by the same signal
                os.write(2, f"{text}\n".encode())  # standard error
        # The launcher of --ranks counts requests, and passes one on that the rank may have received already.
        if number not in _REPEATABLE and launch.launcher != OWN:
            signal.signal(number, self._next.get(number, signal.SIG_DFL))

"""Ends a command on Ctrl-C (SIGINT) and on SIGTERM, with one line on stderr and exit status 130 or 143.

The main thread is interrupted, so that temporary files are removed as after any error. It may be waiting
inside Horovod, where Python runs no handler. So a thread prints the line, ends the worker processes and, if
the main thread does not end in time, the process. Training has its own handler, `engine/interrupts.py`.
"""

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import active_children
from types import FrameType
from typing import NoReturn

from horovod_volo.cluster.launch_env import read_launch_env

ENDING = (signal.SIGINT, signal.SIGTERM)
STOP_SIGNALS = (*ENDING, signal.SIGHUP, signal.SIGUSR1)  # of training, which saves first
_RETRIES, _RETRY_SECONDS = 4, 1.0
_STDERR = 2
_STATUS = 128


class StopSignal(BaseException):
    """Interrupts the main thread. After a KeyboardInterrupt, Python may end itself with SIGINT."""


def run_until_signal(main: Callable[[list[str]], int], outcome: str) -> NoReturn:
    """Run `main`; exit with its status, or a signal's: `outcome` says what this stopped, what is left."""
    ending = _EndOnSignal(outcome)
    try:
        status = main(sys.argv[1:])
    finally:  # code of others may catch the exception, or raise another one instead
        if ending.number:
            ending.exit()
    for number in ENDING:
        if signal.getsignal(number) == ending.interrupt:
            signal.signal(number, signal.SIG_DFL)
    exit_at_once(status)


def exit_at_once(status: int) -> NoReturn:
    """Exit as `sys.exit` does, but let the kernel free the memory: for Python it is 1.2 s of work."""
    if not {"LD_PRELOAD", "CUDA_INJECTION64_PATH"} & os.environ.keys():  # profilers, which write at the end
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):  # then Python says so
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        if status:  # Python would replace it
            os._exit(status)
    sys.exit(status)


class _EndOnSignal:
    """The handler of both signals, and the thread that ends the process."""

    def __init__(self, outcome: str) -> None:
        self._outcome = outcome
        self.number = 0  # of the signal that was received
        self._interrupted = False
        self._printed, self._lost = threading.Event(), threading.Event()
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        for number in ENDING:
            # A shell ignores SIGINT for a command in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.interrupt)
        # Ranks of --ranks start with these blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Thread(target=self._end, args=(receiver,), daemon=True).start()

    def interrupt(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Interrupt the main thread, once."""
        if not self._interrupted:
            self.number, self._interrupted = number, True
            sys.unraisablehook = lambda _: None  # print nothing where Python cannot raise an exception
            raise self._new_exception()

    def _new_exception(self) -> StopSignal:
        """Return an exception that is noticed if it is dropped: code of others may catch it and go on."""
        exception = StopSignal()
        weakref.finalize(exception, self._lost.set)
        return exception

    def exit(self) -> NoReturn:
        """Exit once the line is printed, without the end of Python: Horovod's waits for the other ranks."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        gc.collect()  # multiprocessing reports semaphores that nobody has collected
        self._printed.wait(_RETRY_SECONDS)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(_STATUS + self.number)

    def _end(self, receiver: int) -> None:
        number = os.read(receiver, 1)[0]
        while not self.number and signal.getsignal(number) != self.interrupt:
            number = os.read(receiver, 1)[0]  # the doctor handled the first one
        for process in active_children():
            process.kill()
        launch = read_launch_env()
        if launch.local_rank == 0:
            rank = f" on rank {launch.rank}" if launch.size > 1 else ""
            # A progress line that is rewritten in place is not ended yet.
            start = "\n" if os.isatty(_STDERR) else ""
            with contextlib.suppress(OSError):
                os.write(_STDERR, f"{start}{signal.Signals(number).name}{rank}: {self._outcome}\n".encode())
        self._printed.set()
        for _ in range(_RETRIES):
            if self._lost.wait(_RETRY_SECONDS) or not self._interrupted:  # else it is cleaning up
                self._lost.clear()
                self._interrupted = False
                signal.pthread_kill(threading.main_thread().ident or 0, number)
        os._exit(_STATUS + number)

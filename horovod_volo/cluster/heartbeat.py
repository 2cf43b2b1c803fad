"""The heartbeat of a rank: memory in which it notes its progress, and which its watchdog reads.

Imports the standard library alone, as the watchdog does.
"""

import mmap
import signal
import struct
from typing import Any, NamedTuple

DUMP = signal.SIGUSR2  # makes the rank write its stacks
CONNECTING = "connecting to other ranks"  # the first stage
_FORMAT = struct.Struct("qqd?80s")


class Progress(NamedTuple):
    """What a rank has last noted."""

    beats: int = 0  # how often it has noted progress
    step: int = 0
    limit: float = 0.0  # seconds without a beat after which the rank hangs; 0: not watched
    waits: bool = False  # whether it waits for other ranks in a collective
    stage: bytes = CONNECTING.encode()  # of the set-up; empty: steps

    @property
    def doing(self) -> str:
        """Return where in the run the rank is."""
        stage = self.stage.rstrip(b"\0").decode()
        return f"while {stage}" if stage else f"after step {self.step}"


class Heartbeat:
    """The progress of a rank, which notes it, and whose watchdog reads it."""

    def __init__(self, descriptor: int = -1) -> None:
        """Share the memory behind a file descriptor; without one, nobody watches."""
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
        self._progress, self._limit = Progress(), 0.0

    def watch(self, limit: float) -> None:
        """Let the rank count as hanging after `limit` seconds without a beat; 0: never."""
        self._limit = limit
        self._write(limit=limit)

    def begin(self, stage: str, at_least: float = 0.0) -> None:
        """Note that a stage begins, such as "listing the data"; `at_least` raises a lower limit for it."""
        self._write(stage=stage.encode(), limit=max(self._limit, at_least))

    def beat(self, step: int | None = None) -> None:
        """Note that a step, or a batch of the evaluation after it, has ended; None: a part of a stage."""
        self._write(**({} if step is None else {"step": step, "stage": b"", "limit": self._limit}))

    def waits(self, waits: bool) -> None:
        """Note whether this rank waits for others in a collective."""
        self._write(waits=waits, beats=self._progress.beats)

    def read(self) -> Progress:
        """Return what was noted last."""
        return Progress(*_FORMAT.unpack_from(self._memory))

    def _write(self, **changes: Any) -> None:
        self._progress = self._progress._replace(**{"beats": self._progress.beats + 1, **changes})
        _FORMAT.pack_into(self._memory, 0, *self._progress)

"""One line on the error stream for work that takes long: how much is done, how fast, how long yet."""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_MOVES = 0.2


class ThroughputLine:
    """Tells the pace of one piece of work: over and over in one line of a terminal, else line by line."""

    def __init__(self, what: str, *, shown: bool = True) -> None:
        self._what = what
        self._shown = shown
        self._live = sys.stderr.isatty()
        self._first: tuple[float, int] | None = None  # when the first word came, and what was done then
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Tell that `done` of `total` are done."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        pause = SECONDS_BETWEEN_MOVES if self._live else SECONDS_BETWEEN_LINES
        if not self._shown or (done < total and now - self._last < pause):
            return
        self._last = now
        line = f"{done:,}/{total:,} {self._what}{self._speed(now, done, total)}"
        if self._live:
            print(f"\r{line:<78}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _speed(self, now: float, done: int, total: int) -> str:
        began, before = self._first or (now, done)
        if done == before or now == began:
            return ""
        rate = (done - before) / (now - began)
        minutes, seconds = divmod(round((total - done) / rate), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {rate:,.0f} a second, {hours}:{minutes:02}:{seconds:02} left"

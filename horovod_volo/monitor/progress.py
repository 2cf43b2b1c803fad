"""Progress lines: rewritten in place on a terminal, printed as separate lines anywhere else.

tqdm and rich are not used: in log files and under launchers tqdm still rewrites its line with carriage
returns, and rich prints nothing before the end.
"""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_REWRITES = 0.2
_BAR_WIDTH = 20

Values = dict[str, float | int]


class ThroughputLine:
    """Progress of one long operation on stderr: items done, items per second and time left."""

    def __init__(self, unit: str, *, shown: bool = True) -> None:
        self._unit = unit
        self._shown = shown
        self._live = sys.stderr.isatty()
        self._start: tuple[float, int] | None = None  # time and `done` of the first call
        self._last_shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` items are done; printed at most once per interval, and at the end."""
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)
        interval = SECONDS_BETWEEN_REWRITES if self._live else SECONDS_BETWEEN_LINES
        if not self._shown or (done < total and now - self._last_shown < interval):
            return
        self._last_shown = now
        line = f"{done:,}/{total:,} {self._unit}"
        seconds, items = now - self._start[0], done - self._start[1]
        if seconds and items:
            rate = items / seconds
            line += f", {rate:,.0f} per second, {duration((total - done) / rate)} left"
        if self._live and total:
            line = f"{bar(done / total)} {line}"
        if self._live:
            print(f"\r{line:<78}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def bar(fraction: float) -> str:
    """Draw how much is done."""
    filled = round(_BAR_WIDTH * fraction)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"


def duration(seconds: float) -> str:
    """Return h:mm:ss, or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

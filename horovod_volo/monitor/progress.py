"""Progress lines: rewritten in place on a terminal, printed as separate lines anywhere else.

tqdm and rich are not used: in log files and under launchers tqdm still rewrites its line with carriage
returns, and rich prints nothing before the end.
"""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_REWRITES = 0.2

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
        line = f"{done:,}/{total:,} {self._unit}{self._throughput(self._start, now, done, total)}"
        if self._live:
            print(f"\r{line:<78}", end="\n" if done >= total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _throughput(self, start: tuple[float, int], now: float, done: int, total: int) -> str:
        seconds, items = now - start[0], done - start[1]
        if not (seconds and items):
            return ""
        rate = items / seconds
        return f", {rate:,.0f} per second, {_duration((total - done) / rate)} left"


class TrainingProgress:
    """The progress line of training on stdout; rewritten in place if `live` and stdout is a terminal."""

    def __init__(self, *, first_step: int, total_steps: int, live: bool = True) -> None:
        self._first_step, self._total_steps = first_step, total_steps
        self._start_time = time.monotonic()
        self._live = live and sys.stdout.isatty()
        self._width = 0  # characters of the line that is being rewritten

    def format(self, step: int, values: Values) -> str:
        """Format a log point."""
        step_seconds = (time.monotonic() - self._start_time) / max(1, step - self._first_step)
        left = _duration(step_seconds * (self._total_steps - step))
        return (
            f"step {step}/{self._total_steps} {100 * step / self._total_steps:3.0f} %  "
            f"epoch {values['epoch']}  loss {values['loss']:.3f}  lr {values['lr']:.2e}  "
            f"{values['images_per_second']:.0f} images/s  "
            f"data wait {100 * values['data_wait']:.0f} %  {left} left"
        )

    def show(self, line: str) -> None:
        """Print the line, over the previous one where it is rewritten in place."""
        if self._live:
            print("\r" + line.ljust(self._width), end="", flush=True)
            self._width = len(line)
        else:
            print(line, flush=True)

    def end_line(self) -> None:
        """End a line that is rewritten in place, so that other text starts on a new line."""
        if self._width:
            print(flush=True)
            self._width = 0


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

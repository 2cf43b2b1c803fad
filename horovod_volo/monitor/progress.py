"""The progress line: where the run is, how fast, and how long it will take."""

from __future__ import annotations

import sys
import time

Values = dict[str, float | int]


class Progress:
    """One line, rewritten in place on a terminal and printed line by line elsewhere."""

    def __init__(self, *, first_step: int, total_steps: int, live: bool = True) -> None:
        self._first_step, self._total_steps = first_step, total_steps
        self._began = time.monotonic()
        self._live = live and sys.stdout.isatty()
        self._shown = 0

    def line(self, step: int, values: Values) -> str:
        """Word a log point."""
        pace = (time.monotonic() - self._began) / max(1, step - self._first_step)
        left = _duration(pace * (self._total_steps - step))
        return (
            f"step {step}/{self._total_steps} {100 * step / self._total_steps:3.0f} %  "
            f"epoch {values['epoch']}  loss {values['loss']:.3f}  lr {values['lr']:.2e}  "
            f"{values['images_per_second']:.0f} images/s  "
            f"data wait {100 * values['data_wait']:.0f} %  {left} left"
        )

    def show(self, line: str) -> None:
        """Put the line on the terminal."""
        if self._live:
            print("\r" + line.ljust(self._shown), end="", flush=True)
            self._shown = len(line)
        else:
            print(line, flush=True)

    def clear(self) -> None:
        """End a line that is being rewritten, so that other text begins on its own."""
        if self._shown:
            print(flush=True)
            self._shown = 0


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

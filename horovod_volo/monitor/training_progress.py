"""The progress of a run on stdout: log points, and between them how far it is and what time is left.

On a terminal one line is rewritten in place every second. Elsewhere each line is written on its own and in
one piece, because launchers pass on what ranks write as it comes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from horovod_volo.monitor.progress import SECONDS_BETWEEN_LINES, Values, bar, duration

_STEPS_TO_MEASURE = 3  # after the first one
_SECONDS_BETWEEN_REWRITES = 1.0


@dataclass(frozen=True)
class RunLength:
    """The steps of a run, and how often it is evaluated."""

    first_step: int
    total_steps: int
    steps_per_epoch: int
    eval_every: int  # epochs

    def epoch_of(self, step: int) -> str:
        """Describe how many epochs are done after a step."""
        return f"epoch {step / self.steps_per_epoch:.4g} of {self._epochs}"

    def evaluations_after(self, step: int) -> int:
        """Return how many evaluations follow a step; that of an epoch that ends with it does not."""
        done = step // self.steps_per_epoch
        regular = self._epochs // self.eval_every - done // self.eval_every
        return regular + (self._epochs % self.eval_every > 0 and done < self._epochs)

    @property
    def _epochs(self) -> int:
        return self.total_steps // self.steps_per_epoch


class TrainingProgress:
    """The progress line of training; rewritten in place if `live` and stdout is a terminal."""

    def __init__(self, length: RunLength, *, live: bool = True) -> None:
        self._length = length
        self._live = live and sys.stdout.isatty()
        self._width = 0  # characters of the line that is being rewritten
        self._start = self._last_shown = self._mark = time.monotonic()
        self._since_evaluation: float | None = None  # when the evaluation under way began
        self._steps, self._step_seconds = 0, 0.0  # without the first step, and without evaluations
        self._evaluations, self._evaluation_seconds = 0, 0.0
        self._last_values = ""

    def step_done(self, step: int) -> str | None:
        """Count a step, and show the progress if it is time; return a line to log about the first steps."""
        now = time.monotonic()
        if step == self._length.first_step + 1:
            self._mark = now
            took = _seconds(now - self._start)
            return f"first step done after {took}, with reading ahead and what is compiled"
        self._steps += 1
        self._step_seconds += now - self._mark
        self._mark = now
        if self._is_time(now):
            self.show(self._format(step, self._last_values))
        if self._steps == _STEPS_TO_MEASURE and self._evaluation_seconds == 0:
            cost = self._step_seconds / self._steps
            more = "; evaluations come on top" if self._length.evaluations_after(step) else ""
            return f"one step takes {_seconds(cost)}: {duration(self._seconds_left(step))} left{more}"
        return None

    def evaluating(self, done: int, total: int) -> None:
        """Show how much of an evaluation is done, if it is time; `done` is 0 when it begins."""
        now = time.monotonic()
        if self._since_evaluation is None:
            self._since_evaluation = self._last_shown = now
        if done >= total:
            self._evaluations += 1
            self._evaluation_seconds += now - self._since_evaluation
            self._since_evaluation, self._mark = None, now
            if not self._steps:  # a resumed run evaluates what it finds before its first step
                self._start = now
        elif self._is_time(now):
            left = (now - self._since_evaluation) / max(done, 1) * (total - done)
            self.show(f"evaluating {bar(done / total)} {done:,}/{total:,} images, {duration(left)} left")

    def format(self, step: int, values: Values) -> str:
        """Format a log point."""
        self._last_values = (
            f"loss {values['loss']:.3f}  lr {values['lr']:.2e}  {values['images_per_second']:.0f} images/s  "
            f"data wait {100 * values['data_wait']:.0f} %"
        )
        return self._format(step, self._last_values)

    def _format(self, step: int, values: str) -> str:
        total = self._length.total_steps
        parts = (
            f"step {step}/{total} {100 * step / total:3.0f} %",
            self._length.epoch_of(step),
            values,
            f"{duration(self._seconds_left(step))} left",
        )
        return "  ".join(filter(None, parts))

    def _seconds_left(self, step: int) -> float:
        """Estimate the time to the end, with the evaluations as soon as one has been made."""
        per_step = self._step_seconds / self._steps if self._steps else time.monotonic() - self._start
        per_evaluation = self._evaluation_seconds / max(self._evaluations, 1)
        evaluations = self._length.evaluations_after(step)
        return per_step * (self._length.total_steps - step) + per_evaluation * evaluations

    def _is_time(self, now: float) -> bool:
        return now - self._last_shown > (_SECONDS_BETWEEN_REWRITES if self._live else SECONDS_BETWEEN_LINES)

    def show(self, line: str) -> None:
        """Print the line, over the previous one where it is rewritten in place."""
        self._last_shown = time.monotonic()
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


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)

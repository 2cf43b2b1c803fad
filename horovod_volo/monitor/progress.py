"""Progress lines: rewritten in place on a terminal, printed as separate lines anywhere else.

Elsewhere each line is written in one piece, because launchers pass on what ranks write as it comes. tqdm and
rich are not used: in log files and under launchers tqdm still rewrites its line with carriage returns, and
rich prints nothing before the end.
"""

import sys
import time
from dataclasses import dataclass

from horovod_volo.core.errors import show
from horovod_volo.monitor.logger import Values

_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_REWRITES = 0.2  # of one operation; a run's line:
_SECONDS_BETWEEN_STEPS = 1.0
_STEPS_TO_MEASURE = 3  # after the first one


class ThroughputLine:
    """Progress of one long operation on stderr: items done, items per second and time left."""

    def __init__(self, unit: str, *, shown: bool = True) -> None:
        self._unit, self._shown, self._live = unit, shown, sys.stderr.isatty()
        self._start: tuple[float, int] | None = None  # time and `done` of the first call
        self._last_shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` items are done; printed at most once per interval, and at the end."""
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)
        interval = _SECONDS_BETWEEN_REWRITES if self._live else _SECONDS_BETWEEN_LINES
        if not self._shown or (done < total and now - self._last_shown < interval):
            return
        self._last_shown = now
        line = f"{done:,}/{total:,} {self._unit}"
        seconds, items = now - self._start[0], done - self._start[1]
        if seconds and items:
            rate = items / seconds
            line += f", {rate:,.0f} per second, {_duration((total - done) / rate)} left"
        text, end = (f"\r{line:<78}", "\n" * (done >= total)) if self._live else (line, "\n")
        show(text, end=end, file=sys.stderr)


@dataclass(frozen=True)
class RunLength:
    """The steps of a run, and how often it is evaluated."""

    first_step: int
    total_steps: int
    steps_per_epoch: int
    eval_every: int  # epochs

    @property
    def epochs(self) -> int:
        return self.total_steps // self.steps_per_epoch

    def evaluations_after(self, step: int) -> int:
        """Return how many evaluations follow a step; that of an epoch that ends with it does not."""
        done = step // self.steps_per_epoch
        regular = self.epochs // self.eval_every - done // self.eval_every
        return regular + (self.epochs % self.eval_every > 0 and done < self.epochs)


class TrainingProgress:
    """The progress of a run on stdout: log points, and between them how far it is and what time is left.

    The line is rewritten in place if `live` and stdout is a terminal.
    """

    def __init__(self, length: RunLength, *, live: bool = True) -> None:
        self._length, self._live = length, live and sys.stdout.isatty()
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
            self.show(self._format(step))
        if self._steps == _STEPS_TO_MEASURE and self._evaluation_seconds == 0:
            cost = self._step_seconds / self._steps
            more = "; evaluations come on top" if self._length.evaluations_after(step) else ""
            return f"one step takes {_seconds(cost)}: {self._time_left(step)} left{more}"
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
            left = _duration((now - self._since_evaluation) / max(done, 1) * (total - done))
            self.show(f"evaluating {done:,}/{total:,} images, {left} left")

    def format(self, step: int, values: Values) -> str:
        """Format a log point."""
        self._last_values = (
            f"loss {values['loss']:.3f}  lr {values['lr']:.2e}  {values['images_per_second']:.0f} images/s  "
            f"data wait {100 * values['data_wait']:.0f} %  "
        )
        return self._format(step)

    def _format(self, step: int) -> str:
        total, epoch = self._length.total_steps, step / self._length.steps_per_epoch
        place = f"step {step}/{total} {100 * step / total:3.0f} %  epoch {epoch:.4g} of {self._length.epochs}"
        return f"{place}  {self._last_values}{self._time_left(step)} left"

    def _time_left(self, step: int) -> str:
        """Estimate the time to the end, with the evaluations as soon as one has been made."""
        per_step = self._step_seconds / self._steps if self._steps else time.monotonic() - self._start
        per_evaluation = self._evaluation_seconds / max(self._evaluations, 1)
        evaluations = self._length.evaluations_after(step)
        return _duration(per_step * (self._length.total_steps - step) + per_evaluation * evaluations)

    def _is_time(self, now: float) -> bool:
        return now - self._last_shown > (_SECONDS_BETWEEN_STEPS if self._live else _SECONDS_BETWEEN_LINES)

    def show(self, line: str) -> None:
        """Print the line, over the previous one where it is rewritten in place."""
        self._last_shown = time.monotonic()
        if self._live:
            show("\r" + line.ljust(self._width), end="")
            self._width = len(line)
        else:
            show(line)

    def end_line(self) -> None:
        """End a line that is rewritten in place, so that other text starts on a new line."""
        if self._width:
            show("")
            self._width = 0


def _duration(seconds: float) -> str:
    """Return h:mm:ss, or m:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else _duration(seconds)

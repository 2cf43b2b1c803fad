"""A loss far above those of the earlier log points is logged."""

from __future__ import annotations

from contextlib import closing

from horovod_volo.bench.synthetic import SyntheticRun, bench_config
from horovod_volo.engine.divergence import note_value
from horovod_volo.monitor.logger import Logger


class LinesLogger(Logger):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, *lines: str) -> None:
        self.lines += lines


def test_a_spike_is_logged_and_a_slow_rise_is_not() -> None:
    with closing(SyntheticRun(bench_config(model="volo_demo", img_size=32, batch_size=2))) as run:
        run.context.logger = logger = LinesLogger()
        for loss in (9.0, 2.0, 2.1, 2.2, 2.3, 3.2, 3.3, 3.4, 3.5, 3.6):
            note_value(run.context, "loss", loss)
        assert logger.lines == []
        note_value(run.context, "loss", 5.2)
        (line,) = logger.lines
        assert "the loss is 5.200, 1.5 times" in line

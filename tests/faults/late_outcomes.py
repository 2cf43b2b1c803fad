"""Lets the host learn one step late what ranks agreed on, as on several GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from horovod_volo.cluster.step_statistics import StepStatistics


def skip_on_device(statistics: StepStatistics) -> None:
    """Take the place of the method, which does so on GPUs alone."""
    statistics.found_inf = statistics._averaged.new_zeros(())


StepStatistics.skip_on_device = skip_on_device  # type: ignore[method-assign]
torch.cuda.Event = lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None)

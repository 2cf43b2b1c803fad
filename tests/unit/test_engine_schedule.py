"""A run's learning rate starts, peaks and ends at the values for its global batch."""

from __future__ import annotations

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive
from horovod_volo.engine.context import build_schedule


@pytest.mark.parametrize(
    ("argv", "scale"),
    [
        ([], 1.0),
        (["-b", "16"], 0.25),
        (["-b", "16", "--lr", "8e-6"], 1.0),  # --lr: nothing is scaled
        (["-b", "128", "--warmup-prefix"], 2.0),
    ],
)
def test_start_peak_and_end_are_scaled_with_the_global_batch(argv: list[str], scale: float) -> None:
    config = parse(["--recipe", "volo_d1_384", *argv]).config
    derived = derive(config, ranks=8, images=10_240)
    lr = build_schedule(config, derived)
    rates = [lr(step) for step in range(derived.total_steps)]
    assert rates[0] == pytest.approx(1e-6 * scale, rel=1e-12)
    assert rates[-1] == pytest.approx(4e-6 * scale, rel=1e-12)
    peak = 8e-6 * scale
    # A warm-up inside --epochs joins the cosine after 5 of 30 epochs, a prefix at its peak.
    assert peak * 0.9 < max(rates) <= peak * (1 + 1e-12)
    assert min(rates[derived.warmup_steps :]) == pytest.approx(4e-6 * scale, rel=1e-12)

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
        (["-b", "16", "--lr", "8e-6"], 1.0),  # with --lr no learning rate is scaled
        (["-b", "128", "--warmup-prefix"], 2.0),
    ],
)
def test_start_peak_and_end_are_scaled_with_the_global_batch(argv: list[str], scale: float) -> None:
    config = parse(["--recipe", "volo_d1_384", *argv]).config
    derived = derive(config, ranks=8, images=10_240)
    lr = build_schedule(config, derived)
    learning_rates = [lr(step) for step in range(derived.total_steps)]
    assert learning_rates[0] == pytest.approx(1e-6 * scale, rel=1e-12)
    assert learning_rates[-1] == pytest.approx(4e-6 * scale, rel=1e-12)
    peak = 8e-6 * scale
    # A warm-up inside --epochs joins the cosine after 5 of 30 epochs, a prefix at its peak.
    assert peak * 0.9 < max(learning_rates) <= peak * (1 + 1e-12)
    assert min(learning_rates[derived.warmup_steps :]) == pytest.approx(4e-6 * scale, rel=1e-12)


def test_the_decay_is_the_one_that_sched_names() -> None:
    config = parse(["--recipe", "volo_d1_384", "--sched", "constant"]).config
    derived = derive(config, ranks=8, images=10_240)
    lr = build_schedule(config, derived)
    last = derived.prefix_steps + derived.decay_steps - 1
    assert [lr(derived.warmup_steps), lr(last)] == [derived.peak_lr] * 2
    assert lr(last + 1) == derived.min_lr

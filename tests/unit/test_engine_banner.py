"""The learning rates that follow from the global batch, and what the start of a run warns of."""

from __future__ import annotations

import re

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, resolve
from horovod_volo.engine.banner import batch_warnings
from horovod_volo.engine.context import build_schedule

IMAGENET = 1_281_167


def warnings_of(ranks: int, *argv: str, images: int = IMAGENET) -> list[str]:
    config = resolve(parse(list(argv)).config, ranks)
    return batch_warnings(config, derive(config, ranks=ranks, images=images), images)


@pytest.mark.parametrize(
    ("ranks", "argv", "batches", "peaks", "steps", "nearest"),
    [
        (40, "--recipe volo_d1", "5,120 1,024", "0.008 0.0016", "250 1,251", "1000 or 1040"),
        (40, "--recipe volo_d1 --global-batch 1040", "1,040 1,024", "0.00163 0.0016", "1,231 1,251", ""),
        # With more ranks than images in a published step, only a larger batch is possible.
        (256, "--recipe volo_d3_448 -b 2", "512 240", "1.71e-05 8e-06", "2,502 5,338", "256"),
        (16, "--recipe volo_d1 --lr 2e-3", "2,048 1,024", "", "625 1,251", "1024"),
        # Without a recipe the published code scales no learning rate.
        (8, "--model lvvit_s -b 64", "512 1,024", "0.0008 0.0016", "2,502 1,251", "1024"),
    ],
)
def test_another_global_batch_is_a_warning_with_its_effects(
    ranks: int, argv: str, batches: str, peaks: str, steps: str, nearest: str
) -> None:
    (warning,) = warnings_of(ranks, *argv.split())
    found = re.match(r"(\S+) images per step, .*?([\d,]+): ", warning)
    assert found is not None
    assert f"{found[1]} {found[2]}" == batches
    peak = re.search(r"peak learning rate (\S+) instead of ([\d.e-]+\d)", warning)
    assert (f"{peak[1]} {peak[2]}" if peak else "") == peaks
    assert ("--lr 0.0016: not scaled" in warning) == ("--model" in argv)
    compared = re.search(r"(\S+) steps per epoch instead of ([\d,]*\d)", warning)
    assert compared is not None
    assert f"{compared[1]} {compared[2]}" == steps
    assert warning.partition("--global-batch ")[2] == nearest


@pytest.mark.parametrize(
    ("ranks", "argv"),
    [
        (16, ["--recipe", "volo_d1", "--global-batch", "1024"]),
        (2, ["--recipe", "demo"]),
        (8, ["--model", "volo_d5", "-b", "44", "--lr", "1e-4"]),  # a published command line with --lr
    ],
)
def test_the_published_batch_and_a_given_learning_rate_give_no_warnings(ranks: int, argv: list[str]) -> None:
    assert warnings_of(ranks, *argv) == []


def test_steps_are_not_compared_where_the_published_batch_exceeds_the_images() -> None:
    assert "steps" not in warnings_of(2, "--recipe", "volo_d1", "-b", "4", images=40)[0]


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

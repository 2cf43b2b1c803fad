"""The learning rates that follow from the global batch, and what the start of a run warns of."""

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
def test_another_global_batch_is_a_warning_with_its_effects(ranks, argv, batches, peaks, steps, nearest):
    (warning,) = warnings_of(ranks, *argv.split())
    found = re.match(r"(\S+) images per step, .*?([\d,]+): ", warning)
    assert f"{found[1]} {found[2]}" == batches
    peak = re.search(r"peak learning rate (\S+) instead of ([\d.e-]+\d)", warning)
    assert (f"{peak[1]} {peak[2]}" if peak else "") == peaks
    assert ("--lr 0.0016: not scaled" in warning) == ("--model" in argv)
    compared = re.search(r"(\S+) steps per epoch instead of ([\d,]*\d)", warning)
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


def test_a_run_has_the_schedule_of_its_settings() -> None:
    """tests/unit/test_optim_update.py has the schedules, and tests/unit/test_config_derived.py the rates."""
    for flags, rates in (
        ("-b 128 --warmup-prefix", (2e-6, 16e-6, 16e-6, 8e-6)),  # for twice the published batch
        ("--sched constant", (1e-6, 8e-6, 8e-6, 4e-6)),
    ):
        config = parse(["--recipe", "volo_d1_384", *flags.split()]).config
        derived = derive(config, ranks=8, images=10_240)
        lr = build_schedule(config, derived)
        steps = (0, derived.warmup_steps, derived.warmup_steps + 1, derived.total_steps - 1)
        found = [lr(step) for step in steps]
        assert found == pytest.approx(rates, rel=1e-3)
        assert max(map(lr, range(derived.total_steps))) == found[1]

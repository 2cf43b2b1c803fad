"""The banner explains the peak learning rate and warns of a global batch other than the published one."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.values import assemble
from horovod_volo.engine.banner import batch_warnings, lr_line
from horovod_volo.engine.classification_data import labels_line

IMAGENET = 1_281_167


def peak_line(**chosen: Any) -> str:
    config = assemble(chosen, fallback_name="")
    return lr_line(config, derive(config, ranks=8, images=10_000))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"lr": 1e-4}, "peak 0.0001, as given by --lr"),
        ({"lr_base": 2e-3}, "peak 0.002 = 0.002 x 1024 / 1024"),
        (
            {"lr_base": 2e-3, "batch_size": 64},
            "peak 0.001 = 0.002 x 512 / 1024; warm-up from 5e-07, decay to 5e-06, scaled likewise",
        ),
        (
            {"lr_base": 5e-6, "lr_base_size": 512, "batch_size": 40, "min_lr": 4e-6},
            "peak 3.13e-06 = 5e-06 x 320 / 512; warm-up from 6.25e-07, decay to 2.5e-06, scaled likewise",
        ),
        (  # without a warm-up
            {"lr_base": 2e-3, "batch_size": 64, "sched": "one-cycle"},
            "peak 0.001 = 0.002 x 512 / 1024; decay to 5e-06, scaled likewise",
        ),
        # --lr-base-size 0 scales the peak alone.
        ({"lr_base": 2e-3, "lr_base_size": 0, "batch_size": 64}, "peak 0.001 = 0.002 x 512 / 1024"),
    ],
)
def test_the_peak_is_shown_with_its_formula(chosen: dict[str, Any], expected: str) -> None:
    assert peak_line(**chosen) == expected


def warnings_of(ranks: int, *argv: str, images: int = IMAGENET) -> list[str]:
    config = resolve(parse(list(argv)).config, ranks)
    return batch_warnings(config, derive(config, ranks=ranks, images=images), images)


@pytest.mark.parametrize(
    ("ranks", "argv", "expected"),
    [
        (
            40,
            ["--recipe", "volo_d1"],
            "5,120 images per step, published with 1,024: peak learning rate 0.008 instead of 0.0016, "
            "250 steps per epoch instead of 1,251; nearest on 40 ranks: --global-batch 1000 or 1040",
        ),
        (
            40,
            ["--recipe", "volo_d1", "--global-batch", "1040"],
            "1,040 images per step, published with 1,024: peak learning rate 0.00163 instead of 0.0016, "
            "1,231 steps per epoch instead of 1,251",
        ),
        (
            8,
            ["--recipe", "volo_d5_448"],
            "64 images per step, published with 512: peak learning rate 6.25e-07 instead of 5e-06, "
            "20,018 steps per epoch instead of 2,502; nearest on 8 ranks: --global-batch 512",
        ),
        # With more ranks than images in a published step, only a larger batch is possible.
        (
            256,
            ["--recipe", "volo_d3_448", "-b", "2"],
            "512 images per step, published with 240: peak learning rate 1.71e-05 instead of 8e-06, "
            "2,502 steps per epoch instead of 5,338; nearest on 256 ranks: --global-batch 256",
        ),
        (
            16,
            ["--recipe", "volo_d1", "--lr", "2e-3"],
            "2,048 images per step, published with 1,024: 625 steps per epoch instead of 1,251; nearest on "
            "16 ranks: --global-batch 1024",
        ),
        # Without a recipe the published code scales no learning rate.
        (
            8,
            ["--model", "lvvit_s", "-b", "64"],
            "512 images per step, learning rates are stated for 1,024: peak learning rate 0.0008 instead of "
            "0.0016 (--lr 0.0016: not scaled), 2,502 steps per epoch instead of 1,251; nearest on 8 ranks: "
            "--global-batch 1024",
        ),
    ],
)
def test_another_global_batch_is_a_warning_with_its_effects(
    ranks: int, argv: list[str], expected: str
) -> None:
    assert warnings_of(ranks, *argv) == [expected]


@pytest.mark.parametrize(
    ("ranks", "argv"),
    [
        (8, ["--recipe", "volo_d1"]),
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
    ("chosen", "expected"),
    [
        ({}, "class labels, mixed in pairs of images by MixToken (--no-mix-token disables it)"),
        ({"mix_token": False}, "class labels"),
        ({"token_label": True, "img_size": 64}, "4 x 4 token labels, the image's class on every token"),
    ],
)
def test_the_label_line_names_mixing(chosen: dict[str, Any], expected: str) -> None:
    assert labels_line(assemble(chosen, fallback_name=""), None) == expected

"""What a run says of its learning rates, and of another global batch than they are stated for."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.values import assemble
from horovod_volo.engine.banner import batch_notes, labels_line, rate_line, token_size_warnings

IMAGENET = 1_281_167


def line(**chosen: Any) -> str:
    config = assemble(chosen, fallback_name="")
    return rate_line(config, derive(config, ranks=8, images=10_000))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"lr": 1e-4}, "peak 0.0001, as given by --lr"),
        ({"lr_base": 2e-3}, "peak 0.002 = 0.002 x 1024 / 1024"),
        (
            {"lr_base": 2e-3, "batch_size": 64},
            "peak 0.001 = 0.002 x 512 / 1024; from 5e-07 and down to 5e-06, scaled alike",
        ),
        (
            {"lr_base": 5e-6, "lr_base_size": 512, "batch_size": 40, "min_lr": 4e-6},
            "peak 3.13e-06 = 5e-06 x 320 / 512; from 6.25e-07 and down to 2.5e-06, scaled alike",
        ),
        # Ends that are not scaled are as they were typed.
        ({"lr_base": 2e-3, "lr_base_size": 0, "batch_size": 64}, "peak 0.001 = 0.002 x 512 / 1024"),
    ],
)
def test_the_peak_tells_where_it_comes_from(chosen: dict[str, Any], said: str) -> None:
    assert line(**chosen) == said


def noted(ranks: int, *argv: str, images: int = IMAGENET) -> list[str]:
    config = resolve(parse(list(argv)).config, ranks)
    return batch_notes(config, derive(config, ranks=ranks, images=images), images)


@pytest.mark.parametrize(
    ("ranks", "argv", "said"),
    [
        (
            40,
            ["--recipe", "volo_d1"],
            "5,120 images a step, published with 1,024: peak learning rate 0.008 for 0.0016, 250 steps an "
            "epoch for 1,251; nearest on 40 ranks: --global-batch 1000 or 1040",
        ),
        (
            40,
            ["--recipe", "volo_d1", "--global-batch", "1040"],
            "1,040 images a step, published with 1,024: peak learning rate 0.00163 for 0.0016, 1,231 steps "
            "an epoch for 1,251",
        ),
        (
            8,
            ["--recipe", "volo_d5_448"],
            "64 images a step, published with 512: peak learning rate 6.25e-07 for 5e-06, 20,018 steps an "
            "epoch for 2,502; nearest on 8 ranks: --global-batch 512",
        ),
        # More ranks than images in the published step: there is nothing below.
        (
            256,
            ["--recipe", "volo_d3_448", "-b", "2"],
            "512 images a step, published with 240: peak learning rate 1.71e-05 for 8e-06, 2,502 steps an "
            "epoch for 5,338; nearest on 256 ranks: --global-batch 256",
        ),
        (
            16,
            ["--recipe", "volo_d1", "--lr", "2e-3"],
            "2,048 images a step, published with 1,024: 625 steps an epoch for 1,251; nearest on 16 ranks: "
            "--global-batch 1024",
        ),
        # The published code, without a recipe, scales nothing.
        (
            8,
            ["--model", "lvvit_s", "-b", "64"],
            "512 images a step, learning rates are stated for 1,024: peak learning rate 0.0008 for 0.0016 "
            "(--lr 0.0016: not scaled), 2,502 steps an epoch for 1,251; nearest on 8 ranks: "
            "--global-batch 1024",
        ),
    ],
)
def test_another_batch_is_noted_with_what_it_changes(ranks: int, argv: list[str], said: str) -> None:
    assert noted(ranks, *argv) == [said]


@pytest.mark.parametrize(
    ("ranks", "argv"),
    [
        (8, ["--recipe", "volo_d1"]),
        (16, ["--recipe", "volo_d1", "--global-batch", "1024"]),
        (2, ["--recipe", "demo"]),
        (8, ["--model", "volo_d5", "-b", "44", "--lr", "1e-4"]),  # a published line with a rate of its own
    ],
)
def test_what_is_as_stated_is_not_noted(ranks: int, argv: list[str]) -> None:
    assert noted(ranks, *argv) == []


def test_few_images_have_no_steps_to_compare() -> None:
    assert "steps" not in noted(2, "--recipe", "volo_d1", "-b", "4", images=40)[0]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({}, "class labels, of pairs of images by MixToken (not with --no-mix-token)"),
        ({"mix_token": False}, "class labels"),
        ({"token_label": True, "img_size": 64}, "4 x 4 token labels, the image's class on every token"),
    ],
)
def test_the_labels_tell_whether_images_are_mixed(chosen: dict[str, Any], said: str) -> None:
    assert labels_line(assemble(chosen, fallback_name=""), None) == said


@pytest.mark.parametrize(("asked", "said"), [([], ""), (["14"], ""), (["1"], "so 14 is used")])
def test_a_token_label_size_that_does_not_fit_is_noted(asked: list[str], said: str) -> None:
    given = [
        "--img-size",
        "224",
        "--token-label",
        *(word for size in asked for word in ("--token-label-size", size)),
    ]
    warned = token_size_warnings(parse(given).config)
    assert len(warned) == bool(said)
    assert said in "".join(warned)

"""What a run says of its rate, which may end above its peak, and of its labels, which may be mixed."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_volo.config.derived import derive
from horovod_volo.config.values import assemble
from horovod_volo.engine.banner import labels_line, rate_line


def line(**chosen: Any) -> str:
    config = assemble(chosen, fallback_name="")
    return rate_line(config, derive(config, ranks=8, images=10_000))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"lr": 1e-4}, "peak 0.0001, as given by --lr"),
        ({"lr_base": 2e-3, "batch_size": 64}, "peak 0.001 = 0.002 x 512 / 1024"),
        (
            {"lr_base": 1e-5, "batch_size": 40, "min_lr": 4e-6},
            "peak 3.13e-06 = 1e-05 x 320 / 1024; below --min-lr 4e-06, to which it rises: lower that",
        ),
    ],
)
def test_the_peak_tells_where_it_comes_from(chosen: dict[str, Any], said: str) -> None:
    assert line(**chosen) == said


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({}, "class labels, of pairs of images by MixToken (not with --no-mix-token)"),
        ({"mix_token": False}, "class labels"),
        (
            {"token_label": True, "img_size": 64},
            "4 x 4 token labels from the image's class on every token (corrected geometry)",
        ),
    ],
)
def test_the_labels_tell_whether_images_are_mixed(chosen: dict[str, Any], said: str) -> None:
    assert labels_line(assemble(chosen, fallback_name="")) == said

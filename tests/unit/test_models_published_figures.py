"""The networks still give the published code's recorded logits for fixed weights and images.

`tests/published/test_networks.py` compares the figures with the published code.
"""

from __future__ import annotations

import pytest
import torch
from formula_weights import fill, images
from torch import Tensor

from horovod_volo.models.build import build_model
from horovod_volo.objective.mixing import Box

BOX = Box(top=3, left=5, height=7, width=4, grid=14)


def numbers(text: str) -> list[float]:
    return list(map(float, text.split()))


# For each output some logits of both images, then the mean absolute value of all.
FIGURES: dict[str, dict[str, list[float]]] = {
    "volo_d1": {
        "evaluation": [1.513007, 1.544366, 0.312751, 1.586277, 1.593254, 0.342979, 0.909936],
        "class": [1.552728, 1.401238, 1.114753, 1.250318, 1.446887, 0.797916, 0.772072],
        "tokens": numbers(
            """
            0.981993 1.20749 1.140328 1.616802 1.45921 0.499408 0.910022 1.509883 0.911896
            1.132302 1.192883 1.14738 0.521341 1.701772 1.09178 1.973689 1.736819 0.933194
            1.933002 1.324915 1.087563 0.551257 1.957171 0.25993 0.825407
            """
        ),
    },
    "lvvit_s": {
        "evaluation": [0.995634, 1.691613, 1.201898, 0.985259, 1.813776, 0.841231, 0.940779],
        "class": [0.256159, 0.973583, -0.555618, 0.353506, 1.035201, -0.902325, 0.803332],
        "tokens": numbers(
            """
            1.820907 1.829083 -0.289777 1.171537 2.624203 0.023386 1.755491 1.722695 -0.218047
            1.694484 1.594165 -1.002091 2.178025 1.783513 0.110486 1.593691 1.759206 0.062641
            1.473816 2.182661 1.064764 1.920454 1.431874 -0.387535 0.854255
            """
        ),
    },
}


def summary(logits: Tensor) -> list[float]:
    """Return some logits (batch, classes) or (batch, tokens, classes), and the mean absolute value of all."""
    # Tokens in a corner, inside the box of MixToken, in another row of it, and elsewhere.
    tokens = logits[:, [0, 48, 119, 195]] if logits.ndim == 3 else logits[:, None]
    some = tokens[..., [1, 530, 999]].flatten().tolist()
    return [round(value, 6) for value in [*some, logits.abs().mean().item()]]


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_s"])
@torch.inference_mode()
def test_logits_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):  # the weights are overwritten, so none are drawn
        model = build_model(name, img_size=224, num_classes=1000, drop_path=0.0)
    fill(model.to_empty(device="cpu"))
    pictures, expected = images(2, 224), FIGURES[name]
    # Evaluation first: training changes the running averages of batch norm.
    assert summary(model.eval()(pictures)) == pytest.approx(expected["evaluation"], rel=0, abs=1e-4)
    class_logits, token_logits = model.train().training_logits(pictures, BOX.swap_tokens)
    assert summary(class_logits) == pytest.approx(expected["class"], rel=0, abs=1e-4)
    assert summary(token_logits) == pytest.approx(expected["tokens"], rel=0, abs=1e-4)
    # The figures of the two images must differ.
    assert abs(expected["class"][0] - expected["class"][3]) > 0.01

"""The networks still give the published code's recorded logits for fixed weights and images.

Each weight is computed by integer arithmetic from its position and its tensor's name, so it is the same on
every machine and with every release of numpy or torch. tests/published/test_networks.py compares the figures
with the published code.
"""

import zlib
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from horovod_volo.models.build import build_model
from horovod_volo.objective.mixing import Box


def fill(model: nn.Module) -> None:
    """Overwrite all weights and statistics of a network, independently of the order of its parameters."""
    state: Mapping[str, Tensor] = model.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            counts = not tensor.is_floating_point()  # the number of batches of batch norm
            tensor.copy_(torch.zeros(()) if counts else _weights(name, tuple(tensor.shape)))


def images(batch: int, side: int) -> Tensor:
    """Return images (batch, 3, side, side) between -2 and 2: smooth waves with noise by the formula."""
    rows, columns = np.mgrid[0:side, 0:side] / side
    waves = [
        np.sin(7.0 * rows * (image + 1) + 3.0 * channel) * np.cos(5.0 * columns + image - channel)
        for image in range(batch)
        for channel in range(3)
    ]
    smooth = torch.tensor(np.array(waves), dtype=torch.float32).reshape(batch, 3, side, side)
    return 1.5 * smooth + 0.5 * spread("images", (batch, 3, side, side))


def spread(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return numbers with a uniform distribution between -1 and 1 that look random."""
    with np.errstate(over="ignore"):
        word = np.arange(int(np.prod(shape)), dtype=np.uint32) + np.uint32(zlib.crc32(name.encode()))
        # MurmurHash's finalizer: every bit of the position changes every bit of the result.
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            word = (word ^ (word >> np.uint32(shift))) * np.uint32(factor)
        word ^= word >> np.uint32(16)
    values = (word >> np.uint32(8)).astype(np.float32) / np.float32(2**23) - np.float32(1)  # exact in fp32
    return torch.from_numpy(values).reshape(shape)


def _weights(name: str, shape: tuple[int, ...]) -> Tensor:
    values = spread(name, shape)
    if name.endswith("running_var"):
        return 1.0 + 0.5 * values
    if len(shape) > 1 and name.endswith("weight"):  # layers whose outputs are about as large as their inputs
        return values * (3.0 / np.prod(shape[1:])) ** 0.5
    if name.endswith("weight"):  # norms
        return 1.0 + 0.2 * values
    return 0.1 * values


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

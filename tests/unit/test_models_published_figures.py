"""The networks still give the published code's recorded logits for fixed weights and images.

Each weight is computed by integer arithmetic from its position and its tensor's name, so it is the same on
every machine and with every release of numpy or torch. tests/published/test_networks.py compares the figures
with the published code.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

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


# For each output some logits of both images, then the mean absolute value of all.
RECORDED = Path(__file__).parent / "published_figures.json"
FIGURES: dict[str, dict[str, list[float]]] = json.loads(RECORDED.read_text(encoding="utf-8"))


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

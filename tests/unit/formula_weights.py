"""Weights and images by a fixed formula, the same on every machine and with every release of numpy or torch.

Each number is computed by integer arithmetic from its position and its tensor's name, so that recorded
outputs of a network stay comparable. No number is 0 or 1, and no two tensors are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn


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

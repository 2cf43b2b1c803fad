"""Position embeddings of weights, fitted to the model's grid of tokens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models.registry import State


def fit_position_embedding(model: nn.Module, state: State) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights with `pos_embed` reshaped or resized to the model's if possible, and messages."""
    given = dict(state)
    old, new = given.get("pos_embed"), model.state_dict()["pos_embed"]
    if old is None or old.shape == new.shape or old.shape[:1] != (1,) or not old.numel():
        return given, []
    reshaped: list[str] = []
    if old.ndim == 3 and new.ndim == 4:
        old, reshaped = _as_grid(old)
        given["pos_embed"] = old
    if old.shape == new.shape:
        return given, reshaped
    if old.ndim != new.ndim or old.shape[-1] != new.shape[-1]:
        return given, []
    old_grid, grid = _grid(old), _grid(new)
    if not (old_grid and grid):
        return given, []
    given["pos_embed"] = resize_position_embedding(old, old_grid, grid)
    sizes = (f"{rows} x {columns}" for rows, columns in (old_grid, grid))
    return given, [*reshaped, f"position embedding resized from {' to '.join(sizes)}"]


def _as_grid(embedding: Tensor) -> tuple[Tensor, list[str]]:
    """Reshape (1, tokens, channels), without a class token, to a square grid, as in published weights."""
    side = math.isqrt(embedding.shape[1])
    if side * side != embedding.shape[1]:
        return embedding, []
    return embedding.reshape(1, side, side, -1), [f"position embedding laid out as {side} x {side} tokens"]


def _grid(embedding: Tensor) -> tuple[int, int] | None:
    """Return the rows and columns of a position embedding; None where it has no grid."""
    if embedding.ndim == 4:
        return embedding.shape[1], embedding.shape[2]
    side = math.isqrt(embedding.shape[1] - 1)  # the first one is the class token's
    return (side, side) if side * side == embedding.shape[1] - 1 else None


def resize_position_embedding(embedding: Tensor, old: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Resize the grid of an embedding bicubically, as the published fine-tuning does.

    It is (1, rows, columns, channels), or (1, 1 + rows * columns, channels), whose first token stays.
    """
    channels = embedding.shape[-1]
    prefix = embedding[:, :0] if embedding.ndim == 4 else embedding[:, :1]
    tokens = embedding if embedding.ndim == 4 else embedding[:, 1:]
    channels_first = tokens.reshape(1, *old, channels).permute(0, 3, 1, 2).float()
    resized = F.interpolate(channels_first, size=grid, mode="bicubic", align_corners=False)
    tokens = resized.permute(0, 2, 3, 1).to(embedding.dtype)  # (1, rows, columns, channels)
    return tokens if embedding.ndim == 4 else torch.cat([prefix, tokens.flatten(1, 2)], dim=1)

"""MixToken: swap a box of tokens between each image and its partner in the reversed batch.

A micro-batch has one box: its tokens are swapped after the stem and swapped back before the token logits,
and its area is the weight of the partner in the class target.

Invariant: a box is a pure function of (seed, step, rank, micro-batch). It is drawn in units of output
tokens, so that it covers entire tokens on both grids.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from horovod_volo.core.rng import Purpose, uniforms
from horovod_volo.objective.image_mix import ImageMix


@dataclass(frozen=True)
class Box:
    """A box on a coarse grid of `grid` x `grid` cells; empty when height or width is 0."""

    top: int
    left: int
    height: int
    width: int
    grid: int

    @property
    def lam(self) -> float:
        """Return the fraction of the grid outside the box, the weight of the image's own class."""
        return 1.0 - self.height * self.width / self.grid**2

    def images(self, images: Tensor) -> Tensor:
        """Return images unchanged: their tokens are mixed."""
        return images

    def swap_tokens(self, tokens: Tensor) -> Tensor:
        """Replace the box by that of the reversed batch in (batch, rows, columns, channels) tokens.

        Its own inverse. The middle image of an odd batch is its own partner.
        """
        rows_per_cell, rows_over = divmod(tokens.shape[1], self.grid)
        columns_per_cell, columns_over = divmod(tokens.shape[2], self.grid)
        if rows_over or columns_over:
            raise ValueError(
                f"{tokens.shape[1]} x {tokens.shape[2]} tokens are no multiple of the box's "
                f"{self.grid} x {self.grid} grid. Draw the box with as many cells as output tokens per side."
            )
        if self.height * self.width == 0:
            return tokens
        rows = slice(self.top * rows_per_cell, (self.top + self.height) * rows_per_cell)
        columns = slice(self.left * columns_per_cell, (self.left + self.width) * columns_per_cell)
        mixed = tokens.clone()
        mixed[:, rows, columns] = tokens[:, rows, columns].flip(0)
        return mixed


Mix = Box | ImageMix
NO_BOX = Box(top=0, left=0, height=0, width=0, grid=1)


def draw_box(seed: int, step: int, rank: int, pass_index: int, grid: int) -> Box:
    """Draw the box of a micro-batch: its area before clipping ~ Beta(1, 1), its centre uniform."""
    area, down, across = uniforms(3, Purpose.MIXTOKEN_BOX, seed, step, rank, pass_index)
    # Beta(1, 1) is uniform, for the fraction inside the box as for the one outside.
    half = int(grid * sqrt(area)) // 2
    row, column = int(grid * down), int(grid * across)
    top, bottom = max(row - half, 0), min(row + half, grid)
    left, right = max(column - half, 0), min(column + half, grid)
    return Box(top=top, left=left, height=bottom - top, width=right - left, grid=grid)

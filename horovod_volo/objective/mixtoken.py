"""MixToken: exchange a box of tokens between each image and its partner in the reversed batch.

One box serves a whole pass: it mixes the stem's tokens, un-mixes the token logits, and its area
weighs the class target.

Invariant: a box is a pure function of (seed, step, rank, pass); nothing is carried from one draw to
the next. It is drawn in units of output tokens, so that it covers whole tokens on both grids.
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
        """The share of the grid that stays with its own image."""
        return 1.0 - self.height * self.width / self.grid**2

    def images(self, images: Tensor) -> Tensor:
        """Leave images as they are: their tokens are mixed."""
        return images

    def swap_tokens(self, tokens: Tensor) -> Tensor:
        """Replace the box by that of the reversed batch in (batch, rows, columns, channels) tokens.

        Doing it twice restores the tokens. The middle image of an odd batch is its own partner.
        """
        rows_per_cell, rows_over = divmod(tokens.shape[1], self.grid)
        columns_per_cell, columns_over = divmod(tokens.shape[2], self.grid)
        if rows_over or columns_over:
            raise ValueError(
                f"{tokens.shape[1]} x {tokens.shape[2]} tokens are no whole multiple of the box's "
                f"{self.grid} x {self.grid} grid; draw the box with as many cells as output tokens per side."
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
    """Draw the box of one pass: exchanged share before clipping ~ Beta(1, 1), centre uniform."""
    area, down, across = uniforms(3, Purpose.MIXTOKEN_BOX, seed, step, rank, pass_index)
    # Beta(1, 1) is the uniform distribution, of the exchanged share as well as of the kept one.
    half = int(grid * sqrt(area)) // 2
    row, column = int(grid * down), int(grid * across)
    top, bottom = max(row - half, 0), min(row + half, grid)
    left, right = max(column - half, 0), min(column + half, grid)
    return Box(top=top, left=left, height=bottom - top, width=right - left, grid=grid)

"""MixToken, mixup and CutMix: each image is mixed with its partner in the reversed batch.

Mixup and CutMix mix the images. MixToken swaps a box of tokens after the stem and swaps it back before the
token head; the box's fraction of the grid is the partner's weight in the class target. At most one of them is
applied to a batch. Mixup and CutMix are refused with token labels, because they would not mix these.

Invariant: a mix is a pure function of (seed, step, rank, micro-batch). MixToken's box is drawn in units of
output tokens, so that it covers entire tokens on both grids.
"""

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.rng import Purpose, generator, random_bits, uniforms


@dataclass(frozen=True)
class ImageMix:
    """The mix of one micro-batch: CutMix if it has a box, else Mixup."""

    lam: float  # weight of the image's own class
    box: tuple[int, int, int, int] | None = None  # top, left, height, width in pixels

    def images(self, images: Tensor) -> Tensor:
        """Return mixed images (batch, 3, side, side); the middle image of an odd batch is its own partner."""
        if self.lam == 1.0:
            return images
        if self.box is None:
            return images.lerp(images.flip(0), 1.0 - self.lam)
        top, left, height, width = self.box
        place = (..., slice(top, top + height), slice(left, left + width))
        mixed = images.clone()
        mixed[place] = images[place].flip(0)
        return mixed

    def swap_tokens(self, tokens: Tensor) -> Tensor:
        """Return tokens unchanged: the images are mixed."""
        return tokens


def draw_image_mix(
    settings: Objective, seed: int, step: int, rank: int, micro_batch: int, side: int
) -> ImageMix:
    """Draw the mix of a micro-batch; `side` is that of its images, in pixels."""
    random = generator(random_bits(Purpose.IMAGE_MIX, seed, step, rank, micro_batch))
    mixed, switch, row, column = random.random(4)
    if mixed >= settings.mixup_prob:
        return ImageMix(lam=1.0)
    pasted = settings.cutmix > 0 and (settings.mixup == 0 or switch < settings.mixup_switch_prob)
    strength = settings.cutmix if pasted else settings.mixup
    lam = float(random.beta(strength, strength))
    if not pasted:
        return ImageMix(lam=lam)
    half = int(side * sqrt(1.0 - lam)) // 2
    top, left = max(int(row * side) - half, 0), max(int(column * side) - half, 0)
    bottom, right = min(int(row * side) + half, side), min(int(column * side) + half, side)
    height, width = bottom - top, right - left
    # The box may be clipped at the edge of the image: the weight follows from its actual area.
    return ImageMix(lam=1.0 - height * width / side**2, box=(top, left, height, width))


@dataclass(frozen=True)
class Box:
    """MixToken's box on a coarse grid of `grid` x `grid` cells; empty if its height or width is 0."""

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
        """Return tokens (batch, rows, columns, channels) in which each image has its partner's box.

        This is its own inverse. The middle image of an odd batch is its own partner.
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


def draw_box(seed: int, step: int, rank: int, micro_batch: int, grid: int) -> Box:
    """Draw the box of a micro-batch: its area before clipping is from Beta(1, 1), its centre uniform."""
    area, down, across = uniforms(3, Purpose.MIXTOKEN_BOX, seed, step, rank, micro_batch)
    # Beta(1, 1) is the uniform distribution, of the fraction inside the box as of the one outside.
    half = int(grid * sqrt(area)) // 2
    row, column = int(grid * down), int(grid * across)
    top, bottom = max(row - half, 0), min(row + half, grid)
    left, right = max(column - half, 0), min(column + half, grid)
    return Box(top=top, left=left, height=bottom - top, width=right - left, grid=grid)

"""Pictures of a run of classification for TensorBoard.

Of a training batch, each image is shown as augmented, then with the class of each token label in colour, then
as mixed with its partner.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from horovod_volo.config.schema import Config
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.image_decoder import Normalization
from horovod_volo.engine.classification import PICTURES
from horovod_volo.models.weights_header import statistics_of_run
from horovod_volo.monitor import pictures
from horovod_volo.monitor.logger import Picture
from horovod_volo.objective.label_map import most_probable
from horovod_volo.objective.loss import Loss, SoftTargetLoss
from horovod_volo.objective.mixing import Box, ImageMix, Mix

_MOST = 6  # images of a batch
_COLUMNS = 4  # of panels
_SIDE = 128  # of a panel, pixels: TensorBoard shows pictures some 300 pixels wide
_GAP, _LINE, _FONT = 8, 24, 16
_TINT = 0.55  # opacity of a token's colour

Pixels = NDArray[np.uint8]


@torch.no_grad()
def draw_batch(
    batch: TrainBatch, mix: Mix, loss: Loss, classes: Sequence[str], config: Config
) -> dict[str, Picture]:
    """Return pictures of the first images of a micro-batch, as they are mixed, with their labels."""
    normalization = Normalization(*statistics_of_run(config.data, config.model.model))
    images = _pixels(batch.images[:_MOST], normalization)
    partners = _pixels(batch.images.flip(0)[:_MOST], normalization)
    tokens = _token_classes(batch, loss)
    colors = pictures.palette_colors(tokens) if tokens is not None else {}
    cells = []
    for number, (pixels, partner) in enumerate(zip(images, partners, strict=True)):
        panels = [_shown(pixels)]
        if tokens is not None:
            tint = np.array([[colors[int(kind)] for kind in row] for row in tokens[number]], dtype=np.uint8)
            panels.append(_tinted(pixels, tint))
        if mix.lam != 1.0:
            panels.append(_mixed(pixels, partner, mix))
        cells.append(_captioned(panels, _caption(batch, number, mix, classes)))
    legend = [(colors[kind], classes[kind]) for kind in colors if colors[kind] != pictures.GREY]
    return {"batch": _sheet(cells, legend)}


def _token_classes(batch: TrainBatch, loss: Loss) -> NDArray[np.int64] | None:
    """Return the most probable class of each token (images, rows, columns), where tokens have labels."""
    targets = loss.targets(batch.labels).tokens if isinstance(loss, SoftTargetLoss) else None
    if targets is None:
        return None
    classes = most_probable(targets).view(len(batch.images), -1)
    side = round(classes.shape[1] ** 0.5)
    found: NDArray[np.int64] = classes[:_MOST].view(-1, side, side).cpu().numpy()
    return found


def _caption(batch: TrainBatch, number: int, mix: Mix, classes: Sequence[str]) -> str:
    own = classes[int(batch.labels.classes[number])]
    if mix.lam == 1.0:
        return own
    partner = classes[int(batch.labels.classes[len(batch.images) - 1 - number])]
    return f"{own} {100 * mix.lam:.0f} %, {partner} {100 - 100 * mix.lam:.0f} %"


def _pixels(images: Tensor, normalization: Normalization) -> list[Pixels]:
    """Return normalised images as pixels (height, width, 3)."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in normalization)
    levels = ((images.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return list(levels.permute(0, 2, 3, 1).cpu().numpy())


def _shown(pixels: Pixels) -> Image.Image:
    return Image.fromarray(pixels).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)


def _tinted(pixels: Pixels, colors: Pixels) -> Image.Image:
    """Return an image under a grid of colours (rows, columns, 3)."""
    grid = Image.fromarray(colors).resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
    return Image.blend(_shown(pixels).convert("L").convert("RGB"), grid, _TINT)


def _mixed(pixels: Pixels, partner: Pixels, mix: Mix) -> Image.Image:
    """Return an image mixed with its partner, and the box drawn."""
    if isinstance(mix, ImageMix) and mix.box is None:
        return Image.blend(_shown(partner), _shown(pixels), mix.lam)
    edges = mix if isinstance(mix, Box) else Box(*(mix.box or (0, 0, 0, 0)), grid=len(pixels))
    sides = edges.left, edges.top, edges.left + edges.width, edges.top + edges.height
    left, top, right, bottom = (round(side * _SIDE / edges.grid) for side in sides)
    image = _shown(pixels)
    image.paste(_shown(partner).crop((left, top, right, bottom)), (left, top))
    draw = ImageDraw.Draw(image)
    draw.rectangle((left, top, right - 1, bottom - 1), outline="black", width=4)
    draw.rectangle((left + 1, top + 1, right - 2, bottom - 2), outline="white", width=2)
    return image


def _captioned(panels: Sequence[Image.Image], caption: str) -> Image.Image:
    """Return images side by side, and a line of text under them."""
    cell = Image.new("RGB", (_SIDE * len(panels), _SIDE + _LINE), pictures.BACKGROUND)
    for number, panel in enumerate(panels):
        cell.paste(panel, (number * _SIDE, 0))
    ImageDraw.Draw(cell).text((2, _SIDE + 3), caption, pictures.TEXT, pictures.load_font(_FONT))
    return cell


def _sheet(cells: Sequence[Image.Image], legend: Sequence[tuple[pictures.Color, str]] = ()) -> Picture:
    """Return cells of equal size as a sheet, with a legend of colours in two columns under it."""
    columns = max(1, _COLUMNS * _SIDE // cells[0].width)
    rows = -(-len(cells) // columns)
    width, height = cells[0].width + _GAP, cells[0].height + _GAP
    lines = -(-len(legend) // 2)
    size = (columns * width + _GAP, rows * height + _GAP + lines * _LINE)
    sheet = Image.new("RGB", size, pictures.BACKGROUND)
    for number, cell in enumerate(cells):
        sheet.paste(cell, (_GAP + number % columns * width, _GAP + number // columns * height))
    draw = ImageDraw.Draw(sheet)
    for number, (color, name) in enumerate(legend):
        left, top = _GAP + number % 2 * (size[0] // 2), rows * height + _GAP + number // 2 * _LINE
        draw.rectangle((left, top, left + _FONT, top + _FONT), fill=color)
        draw.text((left + _FONT + 5, top - 2), name, pictures.SECONDARY_TEXT, pictures.load_font(_FONT))
    return pictures.encoded_with_palette(sheet)


PICTURES.register("classification", draw_batch)

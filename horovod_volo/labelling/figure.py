"""Draw a training image under the grid of its label map: each cell with its most probable class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.reading import decode_rgb
from horovod_volo.monitor.pictures import BACKGROUND, TEXT, Color, load_font, palette_colors
from horovod_volo.token_labels.geometry import MapGeometry, describe_coverage
from horovod_volo.token_labels.keys import label_key, names_of
from horovod_volo.token_labels.probability import probabilities
from horovod_volo.token_labels.source import open_labels
from horovod_volo.token_labels.store import Maps

PROBABILITY = "Each cell: its most probable class, by a softmax in which logits that are not stored are 0."
# Pixels.
LONG_SIDE, MAX_LONG_SIDE, MIN_CELL = 900, 2000, 48  # in a smaller cell the text is not legible
MARGIN, LINE_HEIGHT, LEGEND_WIDTH = 28, 28, 400
MAX_TINT = 0.45  # opacity of a cell's colour at probability 1
SATURATION = 0.45  # of the image, so that the colours of the cells stand out


def draw_sample(labels: str, catalog: Catalog, image: str, picture: Path) -> None:
    """Write the figure of an image, given as "CLASS/IMAGE" or by its index in the catalog."""
    index = _index_of(catalog, image)
    source = open_labels(labels, catalog, None)
    try:
        maps = source.read(index)
        pixels = Image.fromarray(decode_rgb(catalog, index))
    except BadSampleError as problem:
        raise UserError(f"{problem}. Choose another image, or repair this one.") from None
    finally:
        source.close()
    top, rows, columns = maps[0].shape
    header = (
        f"{catalog.name(index)}  (image {index})",
        f"Folder: {catalog.classes[catalog.targets[index]]}, class {catalog.targets[index]}",
        f"Map: {rows} x {columns} cells, {top} classes each. Teacher: {source.teacher}",
        f"A map covers {describe_coverage(source.geometry, assumed=source.geometry_assumed)}",
        PROBABILITY,
    )
    figure = draw_labels(pixels, maps, source.geometry, catalog.classes, header)
    try:
        with atomic_write(picture) as file:
            figure.save(file, format="PNG")
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}. Name another file.") from None


def _index_of(catalog: Catalog, image: str) -> int:
    names = list(names_of(catalog))
    if image.isdecimal() and int(image) < len(names):
        return int(image)
    found = [index for index, name in enumerate(names) if image == name]
    found = found or [index for index, name in enumerate(names) if image == label_key(name)]
    if len(found) == 1:
        return found[0]
    raise UserError(
        f"{catalog.source} has {'several images' if found else 'no image'} {image}. Give CLASS/IMAGE, for "
        f"example {names[found[0] if found else 0]}, or an index from 0 to {len(names) - 1}."
    )


def draw_labels(
    image: Image.Image, maps: Maps, geometry: MapGeometry, classes: Sequence[str], header: Sequence[str]
) -> Image.Image:
    """Draw lines of text, and an image with the most probable class of every cell of its map, and a legend.

    `maps` are logits and ids (k, height, width) of `classes`.
    """
    stored = probabilities(maps[0], len(classes))
    best = stored.argmax(axis=0)[None]  # (1, height, width)
    ids, highest = (np.take_along_axis(values, best, axis=0)[0] for values in (maps[1], stored))
    colors = palette_colors(ids)
    enlarged, area = _enlarge(image, geometry, ids.shape)
    _draw_cells(enlarged, area, ids, highest, colors)
    top, left = MARGIN + LINE_HEIGHT * (len(header) + 1), enlarged.width + 2 * MARGIN
    size = (left + LEGEND_WIDTH + MARGIN, top + enlarged.height + MARGIN)
    canvas = Image.new("RGB", size, BACKGROUND)
    canvas.paste(enlarged, (MARGIN, top))
    draw, font = ImageDraw.Draw(canvas), load_font(17)
    for line, text in enumerate(header):
        draw.text((MARGIN, MARGIN + line * LINE_HEIGHT), text, TEXT, font)
    for line, (number, color) in enumerate(list(colors.items())[: enlarged.height // LINE_HEIGHT]):
        y, cells = top + line * LINE_HEIGHT, ids == number
        mean = f"{cells.sum()} cells, {100 * highest[cells].mean():.0f} % on average"
        draw.rectangle((left, y, left + 20, y + 20), fill=color)
        draw.text((left + 30, y), f"{number}  {classes[number][:20]}: {mean}", TEXT, font)
    return canvas


def _enlarge(
    image: Image.Image, geometry: MapGeometry, grid: tuple[int, ...]
) -> tuple[Image.Image, tuple[int, ...]]:
    """Return the image, enlarged so that text fits its cells, and the box of the grid in it, in pixels.

    Where the grid extends beyond the image, the image is padded with black, as it was for the teacher.
    """
    (covered,) = geometry.covered(np.array([[image.height, image.width]]))  # top, left, height, width
    cell = covered[2:] * (image.height, image.width) / grid  # height and width before it is enlarged
    scale = max(LONG_SIDE / max(image.size), MIN_CELL / cell.min())
    scale = min(scale, MAX_LONG_SIDE / max(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    faded = ImageEnhance.Color(image.convert("RGB")).enhance(SATURATION)
    enlarged = faded.resize((width, height), Image.Resampling.BICUBIC)
    corners = np.stack([covered[:2], covered[:2] + covered[2:]]) * (height, width)
    (top, left), (bottom, right) = corners.round().astype(int).tolist()
    x, y = max(0, -left, right - width), max(0, -top, bottom - height)  # of the borders
    return ImageOps.expand(enlarged, (x, y), (0, 0, 0)), (left + x, top + y, right + x, bottom + y)


def _draw_cells(
    image: Image.Image,
    area: tuple[int, ...],
    ids: NDArray[np.integer[Any]],
    highest: NDArray[np.float32],
    colors: Mapping[int, Color],
) -> None:
    """Tint each cell in the colour of its class, and write the number of the class and its probability."""
    edges_x = np.linspace(area[0], area[2], ids.shape[1] + 1).round().astype(int).tolist()
    edges_y = np.linspace(area[1], area[3], ids.shape[0] + 1).round().astype(int).tolist()
    font = load_font(max(8, min(edges_x[1] - edges_x[0], edges_y[1] - edges_y[0], 60) // 3))
    draw = ImageDraw.Draw(image, "RGBA")
    for row, column in np.ndindex(ids.shape):
        number, probability = int(ids[row, column]), float(highest[row, column])
        box = (edges_x[column], edges_y[row], edges_x[column + 1] - 1, edges_y[row + 1] - 1)
        tint = (*colors[number], round(255 * MAX_TINT * probability))
        draw.rectangle(box, fill=tint, outline=(255, 255, 255, 110))
        draw.multiline_text(
            ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2),
            f"{number}\n{100 * probability:.0f} %",
            fill=(255, 255, 255, 255),
            font=font,
            anchor="mm",
            align="center",
            stroke_width=2,
            stroke_fill=(0, 0, 0, 190),
        )

"""Draw a training image under the grid of its label map: each cell with its most probable class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.reading import decode_rgb
from horovod_volo.monitor.pictures import (
    BACKGROUND,
    GREY,
    PALETTE,
    SECONDARY_TEXT,
    TEXT,
    Color,
    load_font,
    palette_colors,
)
from horovod_volo.token_labels.geometry import MapGeometry, describe_coverage
from horovod_volo.token_labels.keys import label_key, names_of
from horovod_volo.token_labels.probability import probabilities
from horovod_volo.token_labels.source import open_labels
from horovod_volo.token_labels.store import Maps

Box = tuple[int, int, int, int]  # left, top, right, bottom

PROBABILITY = "Each cell: its most probable class, by a softmax in which logits that are not stored are 0."

# Pixels.
LONG_SIDE, MAX_LONG_SIDE = 900, 2000
MIN_CELL_WIDTH, MIN_CELL_HEIGHT = 58, 46  # the text in a cell stays legible
MARGIN = 28
LEGEND_WIDTH = 330
LINE_HEIGHT = 46
BAR_HEIGHT = 5  # the bar at the foot of a cell; its length shows the probability
SMALL, MEDIUM, LARGE = 13, 17, 24  # font sizes

MAX_TINT = 0.45  # opacity of a cell's colour at probability 1
SATURATION = 0.45  # of the image, so that the colors of the cells stand out
MIN_LETTERS = 4  # of a name that is cut to fit


def draw_sample(labels: str, catalog: Catalog, image: str, picture: Path) -> None:
    """Write the figure of an image, given as "CLASS/IMAGE" or by its index in the catalog."""
    index = _index_of(catalog, image)
    source = open_labels(labels, catalog, None)
    try:
        scores, ids = source.read(index)
        pixels = Image.fromarray(decode_rgb(catalog, index))
    except BadSampleError as problem:
        raise UserError(f"{problem}. Choose another image, or repair this one.") from None
    finally:
        source.close()
    top, rows, columns = scores.shape
    header = (
        f"{catalog.name(index)}  (image {index})",
        f"Folder: {catalog.classes[catalog.targets[index]]}, class {catalog.targets[index]}",
        f"Map: {rows} x {columns} cells, {top} classes each. Teacher: {source.teacher}",
        f"A map covers {describe_coverage(source.geometry, assumed=source.geometry_assumed)}",
        PROBABILITY,
    )
    figure = draw_labels(pixels, (scores, ids), source.geometry, catalog.classes, header)
    try:
        with atomic_write(picture) as file:
            figure.save(file, format="PNG")
    except OSError as error:
        raise UserError(f"{picture} cannot be written: {error.strerror}. Name another file.") from None


def _index_of(catalog: Catalog, image: str) -> int:
    if image.isdecimal():
        if int(image) < len(catalog):
            return int(image)
        raise UserError(f"there is no image {image}: the last index is {len(catalog) - 1}.")
    names = list(names_of(catalog))
    found = [index for index, name in enumerate(names) if image in (name, label_key(name))]
    if image in names or len(found) == 1:
        return names.index(image) if image in names else found[0]
    raise UserError(
        f"{catalog.source} has {'several images' if found else 'no image'} {image}. Give CLASS/IMAGE, for "
        f"example {names[found[0] if found else 0]}, or an index from 0 to {len(catalog) - 1}."
    )


def draw_labels(
    image: Image.Image, maps: Maps, geometry: MapGeometry, classes: Sequence[str], header: Sequence[str]
) -> Image.Image:
    """Draw lines of text, and an image with the most probable class of every cell of its map, and a legend.

    `maps` are logits and ids (k, height, width) of `classes`.
    """
    scores, all_ids = maps
    cell_probabilities = probabilities(scores, len(classes))
    best = cell_probabilities.argmax(axis=0)[None]  # (1, height, width)
    ids = np.take_along_axis(all_ids, best, axis=0)[0]  # (height, width)
    top_probabilities = np.take_along_axis(cell_probabilities, best, axis=0)[0]  # (height, width)
    colors = palette_colors(ids)
    enlarged, area = _enlarge(image, geometry, ids.shape)
    _draw_cells(enlarged, area, ids, top_probabilities, colors, classes)
    legend = _legend(ids, top_probabilities, colors, classes)

    top = MARGIN + LARGE + 14 + (SMALL + 6) * (len(header) - 1) + 12
    height = max(enlarged.height, LINE_HEIGHT * (min(len(colors), len(PALETTE)) + 2))
    canvas = Image.new("RGB", (enlarged.width + LEGEND_WIDTH + 3 * MARGIN, top + height + MARGIN), BACKGROUND)
    canvas.paste(enlarged, (MARGIN, top))
    draw = ImageDraw.Draw(canvas)
    draw.text((MARGIN, MARGIN), header[0], TEXT, load_font(LARGE))
    for line, caption in enumerate(header[1:]):
        position = (MARGIN, MARGIN + LARGE + 14 + line * (SMALL + 6))
        draw.text(position, caption, SECONDARY_TEXT, load_font(SMALL))
    left = enlarged.width + 2 * MARGIN
    for line, (color, name, note) in enumerate(legend):
        y = top + line * LINE_HEIGHT
        draw.rounded_rectangle((left, y + 2, left + 26, y + 34), 5, fill=color)
        draw.text((left + 40, y), name, TEXT, load_font(MEDIUM))
        draw.text((left + 40, y + MEDIUM + 4), note, SECONDARY_TEXT, load_font(SMALL))
    return canvas


def _enlarge(image: Image.Image, geometry: MapGeometry, grid: tuple[int, ...]) -> tuple[Image.Image, Box]:
    """Return the image, enlarged so that text fits its cells, and the box of the grid in it, in pixels.

    Where the grid extends beyond the image, the image is padded with black, as it was for the teacher.
    """
    (covered,) = geometry.covered(np.array([[image.height, image.width]]))  # top, left, height, width
    scale = max(
        LONG_SIDE / max(image.size),
        MIN_CELL_WIDTH * grid[1] / (covered[3] * image.width),
        MIN_CELL_HEIGHT * grid[0] / (covered[2] * image.height),
    )
    scale = min(scale, MAX_LONG_SIDE / max(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    faded = ImageEnhance.Color(image.convert("RGB")).enhance(SATURATION)
    enlarged = faded.resize((width, height), Image.Resampling.BICUBIC)
    top, left, bottom, right = (
        round(edge) for edge in (*covered[:2], *(covered[:2] + covered[2:])) * np.array([height, width] * 2)
    )
    border_x, border_y = max(0, -left, right - width), max(0, -top, bottom - height)
    padded = ImageOps.expand(enlarged, (border_x, border_y), (0, 0, 0))
    return padded, (left + border_x, top + border_y, right + border_x, bottom + border_y)


def _draw_cells(
    image: Image.Image,
    area: Box,
    ids: NDArray[np.integer[Any]],
    top_probabilities: NDArray[np.float32],
    colors: Mapping[int, Color],
    classes: Sequence[str],
) -> None:
    rows, columns = ids.shape
    edges_x = np.linspace(area[0], area[2], columns + 1).round().astype(int).tolist()
    edges_y = np.linspace(area[1], area[3], rows + 1).round().astype(int).tolist()
    cell_width, cell_height = edges_x[1] - edges_x[0], edges_y[1] - edges_y[0]
    font = load_font(max(8, min(cell_width // 4, cell_height // 3, MEDIUM)))
    captions = cell_captions(sorted(colors), classes, cell_width - 6, font)
    draw = ImageDraw.Draw(image, "RGBA")
    for row, column in np.ndindex(rows, columns):
        number, probability = int(ids[row, column]), float(top_probabilities[row, column])
        box = (edges_x[column], edges_y[row], edges_x[column + 1] - 1, edges_y[row + 1] - 1)
        tint = (*colors[number], round(255 * MAX_TINT * probability))
        draw.rectangle(box, fill=tint, outline=(255, 255, 255, 110))
        end = box[0] + 1 + round(probability * (box[2] - box[0] - 2))
        draw.rectangle((box[0] + 1, box[3] - BAR_HEIGHT, end, box[3] - 1), fill=(*colors[number], 255))
        draw.multiline_text(
            ((box[0] + box[2]) / 2, (box[1] + box[3] - BAR_HEIGHT) / 2),
            f"{captions[number]}\n{100 * probability:.0f} %",
            fill=(255, 255, 255, 255),
            font=font,
            anchor="mm",
            align="center",
            spacing=2,
            stroke_width=2,
            stroke_fill=(0, 0, 0, 190),
        )


def cell_captions(
    present: Sequence[int], classes: Sequence[str], width: int, font: ImageFont.FreeTypeFont
) -> dict[int, str]:
    """Return the text for each class: its name, cut to fit; all numbers if cut names are ambiguous."""
    names = {number: _cut(classes[number], font, width) for number in present}
    distinct = len(set(names.values())) == len(names)
    return names if distinct and all(names.values()) else {number: str(number) for number in present}


def _cut(name: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a name to fit the width; return "" if fewer than MIN_LETTERS would be left."""
    if font.getlength(name) <= width:
        return name
    for letters in range(len(name) - 1, MIN_LETTERS - 1, -1):
        if font.getlength(f"{name[:letters]}…") <= width:
            return f"{name[:letters]}…"
    return ""


def _legend(
    ids: NDArray[np.integer[Any]],
    top_probabilities: NDArray[np.float32],
    colors: Mapping[int, Color],
    classes: Sequence[str],
) -> list[tuple[Color, str, str]]:
    """Return colour, name and note of each class with a colour of its own, and of the others together."""
    entries = []
    for number in list(colors)[: len(PALETTE)]:
        cells = ids == number
        name = _cut(classes[number], load_font(MEDIUM), LEGEND_WIDTH - 120) or classes[number][:MIN_LETTERS]
        mean = 100 * float(top_probabilities[cells].mean())
        note = f"{_counted(int(cells.sum()), 'cell')}, {mean:.0f} % on average"
        entries.append((colors[number], f"{number}  {name}", note))
    others = list(colors)[len(PALETTE) :]
    if others:
        cells = int(np.isin(ids, others).sum())
        more = _counted(len(others), "more class", "es")
        entries.append((GREY, more, _counted(cells, "cell")))
    return entries


def _counted(number: int, singular: str, ending: str = "s") -> str:
    return f"{number} {singular}{ending * (number != 1)}"

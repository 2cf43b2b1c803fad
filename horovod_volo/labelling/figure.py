"""Draw an image under the grid of its label map: the most probable class of every cell, and a legend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps

from horovod_volo.token_labels.geometry import MapGeometry
from horovod_volo.token_labels.probability import probabilities

Color = tuple[int, int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom

# Distinguishable with most forms of colour blindness. All classes after the most frequent ones are grey.
PALETTE: tuple[Color, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (148, 82, 0),
    (117, 112, 179),
)
GREY: Color = (120, 120, 120)
TEXT: Color = (25, 25, 25)
SECONDARY_TEXT: Color = (105, 105, 105)
BACKGROUND: Color = (255, 255, 255)

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


@dataclass(frozen=True)
class LabelledImage:
    """An image, its label map and the text above them."""

    image: Image.Image
    scores: NDArray[np.float16]  # (k, height, width) logits
    ids: NDArray[np.integer[Any]]  # (k, height, width)
    classes: Sequence[str]
    title: str
    captions: Sequence[str]
    geometry: MapGeometry


def draw_labels(labelled: LabelledImage) -> Image.Image:
    """Draw the image, in every cell its most probable class and the probability, and a legend."""
    cell_probabilities = probabilities(labelled.scores, len(labelled.classes))
    best = cell_probabilities.argmax(axis=0)[None]  # (1, height, width)
    ids = np.take_along_axis(labelled.ids, best, axis=0)[0]  # (height, width)
    top_probabilities = np.take_along_axis(cell_probabilities, best, axis=0)[0]  # (height, width)
    by_frequency = [int(number) for number, _ in Counter(ids.ravel().tolist()).most_common()]
    colors = dict(zip(by_frequency, PALETTE, strict=False))

    image, area = _enlarge(labelled.image, labelled.geometry, ids.shape)
    header = MARGIN + LARGE + 14 + (SMALL + 6) * len(labelled.captions) + 12
    height = max(image.height, LINE_HEIGHT * (min(len(by_frequency), len(PALETTE)) + 2))
    canvas = Image.new("RGB", (image.width + LEGEND_WIDTH + 3 * MARGIN, header + height + MARGIN), BACKGROUND)
    _write_header(ImageDraw.Draw(canvas), labelled)
    _draw_cells(image, area, ids, top_probabilities, colors, labelled.classes)
    canvas.paste(image, (MARGIN, header))
    _draw_legend(canvas, (image.width + 2 * MARGIN, header), ids, top_probabilities, colors, labelled.classes)
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


def _write_header(draw: ImageDraw.ImageDraw, labelled: LabelledImage) -> None:
    draw.text((MARGIN, MARGIN), labelled.title, TEXT, load_font(LARGE))
    for line, caption in enumerate(labelled.captions):
        position = (MARGIN, MARGIN + LARGE + 14 + line * (SMALL + 6))
        draw.text(position, caption, SECONDARY_TEXT, load_font(SMALL))


def _draw_cells(
    image: Image.Image,
    area: Box,
    ids: NDArray[np.integer[Any]],
    top_probabilities: NDArray[np.float32],
    colors: dict[int, Color],
    classes: Sequence[str],
) -> None:
    rows, columns = ids.shape
    edges_x = np.linspace(area[0], area[2], columns + 1).round().astype(int).tolist()
    edges_y = np.linspace(area[1], area[3], rows + 1).round().astype(int).tolist()
    cell_width, cell_height = edges_x[1] - edges_x[0], edges_y[1] - edges_y[0]
    font = load_font(max(8, min(cell_width // 4, cell_height // 3, MEDIUM)))
    captions = cell_captions(sorted(set(ids.ravel().tolist())), classes, cell_width - 6, font)
    draw = ImageDraw.Draw(image, "RGBA")
    for row, column in np.ndindex(rows, columns):
        number, probability = int(ids[row, column]), float(top_probabilities[row, column])
        box = (edges_x[column], edges_y[row], edges_x[column + 1] - 1, edges_y[row + 1] - 1)
        color = colors.get(number, GREY)
        tint = (*color, round(255 * MAX_TINT * probability))
        draw.rectangle(box, fill=tint, outline=(255, 255, 255, 110))
        end = box[0] + 1 + round(probability * (box[2] - box[0] - 2))
        draw.rectangle((box[0] + 1, box[3] - BAR_HEIGHT, end, box[3] - 1), fill=(*color, 255))
        draw.multiline_text(
            ((box[0] + box[2]) / 2, (box[1] + box[3] - BAR_HEIGHT) / 2),
            f"{captions[number]}\n{_percent(probability)}",
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


def _draw_legend(
    canvas: Image.Image,
    corner: tuple[int, int],
    ids: NDArray[np.integer[Any]],
    top_probabilities: NDArray[np.float32],
    colors: dict[int, Color],
    classes: Sequence[str],
) -> None:
    draw = ImageDraw.Draw(canvas)
    left, top = corner
    entries = []  # colour, name and note of each
    for number, color in colors.items():
        cells = ids == number
        name = _cut(classes[number], load_font(MEDIUM), LEGEND_WIDTH - 120) or classes[number][:MIN_LETTERS]
        mean = _percent(float(top_probabilities[cells].mean()))
        entries.append((color, f"{number}  {name}", f"{_count(int(cells.sum()), 'cell')}, {mean} on average"))
    others = ids[~np.isin(ids, list(colors))]
    if len(others):
        more = _count(len(np.unique(others)), "more class", "es")
        entries.append((GREY, more, _count(len(others), "cell")))
    for line, (color, name, note) in enumerate(entries):
        y = top + line * LINE_HEIGHT
        draw.rounded_rectangle((left, y + 2, left + 26, y + 34), 5, fill=color)
        draw.text((left + 40, y), name, TEXT, load_font(MEDIUM))
        draw.text((left + 40, y + MEDIUM + 4), note, SECONDARY_TEXT, load_font(SMALL))


def _count(number: int, singular: str, ending: str = "s") -> str:
    return f"{number} {singular}{ending * (number != 1)}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font that is built into Pillow."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this build of Pillow has no FreeType, which drawing text of a given size needs")
    return font

"""One picture of an image and what its label map says of every part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps

from horovod_volo.data.labels.geometry import MapGeometry
from horovod_volo.data.labels.probability import probabilities

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom

# Colours that stay apart for most colour-blind eyes; classes beyond them share the grey.
PALETTE: tuple[Colour, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (148, 82, 0),
    (117, 112, 179),
)
GREY: Colour = (120, 120, 120)
INK: Colour = (25, 25, 25)
PALE_INK: Colour = (105, 105, 105)
PAPER: Colour = (255, 255, 255)

LONG_SIDE, LONGEST_SIDE = 900, 2000
CELL_WIDTH, CELL_HEIGHT = 58, 46  # at least, for the text in it to be legible
MARGIN = 28
LEGEND_WIDTH = 330
LINE_HEIGHT = 46
STRONGEST_TINT = 0.45
COLOUR_KEPT = 0.45  # of the image, so that the tints stand out from it
BAR_HEIGHT = 5  # of the bar below a cell whose length is the probability
SMALL, USUAL, LARGE = 13, 17, 24
FEWEST_LETTERS = 4


@dataclass(frozen=True)
class LabelledImage:
    """An image and its label map."""

    image: Image.Image
    scores: NDArray[np.float16]  # (k, height, width)
    ids: NDArray[np.integer[Any]]  # (k, height, width)
    classes: Sequence[str]
    title: str
    notes: Sequence[str]
    geometry: MapGeometry  # which part of the image the map covers


def draw_labels(labelled: LabelledImage) -> Image.Image:
    """Draw the image under its token grid, the top class and its probability in every cell, and a legend."""
    shares = probabilities(labelled.scores, len(labelled.classes))
    best = shares.argmax(axis=0)[None]  # (1, height, width)
    ids = np.take_along_axis(labelled.ids, best, axis=0)[0]  # (height, width)
    sure = np.take_along_axis(shares, best, axis=0)[0]  # (height, width)
    ranking = [int(number) for number, _ in Counter(ids.ravel().tolist()).most_common()]
    colours = dict(zip(ranking, PALETTE, strict=False))

    image, area = _enlarged(labelled.image, labelled.geometry, ids.shape)
    header = MARGIN + LARGE + 14 + (SMALL + 6) * len(labelled.notes) + 12
    height = max(image.height, LINE_HEIGHT * (min(len(ranking), len(PALETTE)) + 2))
    canvas = Image.new("RGB", (image.width + LEGEND_WIDTH + 3 * MARGIN, header + height + MARGIN), PAPER)
    _write_header(ImageDraw.Draw(canvas), labelled)
    _draw_cells(image, area, ids, sure, colours, labelled.classes)
    canvas.paste(image, (MARGIN, header))
    _draw_legend(canvas, (image.width + 2 * MARGIN, header), ids, sure, colours, labelled.classes)
    return canvas


def _enlarged(image: Image.Image, geometry: MapGeometry, grid: tuple[int, ...]) -> tuple[Image.Image, Box]:
    """Return the image large enough for the text in its cells, and the box that the grid covers.

    Where the grid reaches beyond the image, the image has black borders, as the teacher saw it.
    """
    (covered,) = geometry.covered(np.array([[image.height, image.width]]))  # top, left, height, width
    wanted = max(
        LONG_SIDE / max(image.size),
        CELL_WIDTH * grid[1] / (covered[3] * image.width),
        CELL_HEIGHT * grid[0] / (covered[2] * image.height),
    )
    scale = min(wanted, LONGEST_SIDE / max(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    pale = ImageEnhance.Color(image.convert("RGB")).enhance(COLOUR_KEPT)
    large = pale.resize((width, height), Image.Resampling.BICUBIC)
    top, left, bottom, right = (
        round(end) for end in (*covered[:2], *(covered[:2] + covered[2:])) * np.array([height, width] * 2)
    )
    border_x, border_y = max(0, -left, right - width), max(0, -top, bottom - height)
    bordered = ImageOps.expand(large, (border_x, border_y), (0, 0, 0))
    return bordered, (left + border_x, top + border_y, right + border_x, bottom + border_y)


def _write_header(draw: ImageDraw.ImageDraw, labelled: LabelledImage) -> None:
    draw.text((MARGIN, MARGIN), labelled.title, INK, font_of(LARGE))
    for number, note in enumerate(labelled.notes):
        place = (MARGIN, MARGIN + LARGE + 14 + number * (SMALL + 6))
        draw.text(place, note, PALE_INK, font_of(SMALL))


def _draw_cells(
    image: Image.Image,
    area: Box,
    ids: NDArray[np.integer[Any]],
    sure: NDArray[np.float32],
    colours: dict[int, Colour],
    classes: Sequence[str],
) -> None:
    rows, columns = ids.shape
    edges_x = np.linspace(area[0], area[2], columns + 1).round().astype(int).tolist()
    edges_y = np.linspace(area[1], area[3], rows + 1).round().astype(int).tolist()
    cell_width, cell_height = edges_x[1] - edges_x[0], edges_y[1] - edges_y[0]
    font = font_of(max(8, min(cell_width // 4, cell_height // 3, USUAL)))
    words = shown_words(sorted(set(ids.ravel().tolist())), classes, cell_width - 6, font)
    draw = ImageDraw.Draw(image, "RGBA")
    for row, column in np.ndindex(rows, columns):
        number, share = int(ids[row, column]), float(sure[row, column])
        box = (edges_x[column], edges_y[row], edges_x[column + 1] - 1, edges_y[row + 1] - 1)
        colour = colours.get(number, GREY)
        tint = (*colour, round(255 * STRONGEST_TINT * share))
        draw.rectangle(box, fill=tint, outline=(255, 255, 255, 110))
        end = box[0] + 1 + round(share * (box[2] - box[0] - 2))
        draw.rectangle((box[0] + 1, box[3] - BAR_HEIGHT, end, box[3] - 1), fill=(*colour, 255))
        draw.multiline_text(
            ((box[0] + box[2]) / 2, (box[1] + box[3] - BAR_HEIGHT) / 2),
            f"{words[number]}\n{_per_cent(share)}",
            fill=(255, 255, 255, 255),
            font=font,
            anchor="mm",
            align="center",
            spacing=2,
            stroke_width=2,
            stroke_fill=(0, 0, 0, 190),
        )


def shown_words(
    present: Sequence[int], classes: Sequence[str], width: int, font: ImageFont.FreeTypeFont
) -> dict[int, str]:
    """Return what stands for each class in a cell: its name, cut to fit, or its number where names blur."""
    words = {number: _cut(classes[number], font, width) for number in present}
    told_apart = len(set(words.values())) == len(words)
    return words if told_apart and all(words.values()) else {number: str(number) for number in present}


def _cut(name: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """Shorten a name until it fits; empty where too few letters would be left."""
    if font.getlength(name) <= width:
        return name
    for letters in range(len(name) - 1, FEWEST_LETTERS - 1, -1):
        if font.getlength(f"{name[:letters]}…") <= width:
            return f"{name[:letters]}…"
    return ""


def _draw_legend(
    canvas: Image.Image,
    corner: tuple[int, int],
    ids: NDArray[np.integer[Any]],
    sure: NDArray[np.float32],
    colours: dict[int, Colour],
    classes: Sequence[str],
) -> None:
    draw = ImageDraw.Draw(canvas)
    left, top = corner
    for line, (number, colour) in enumerate(colours.items()):
        cells = ids == number
        y = top + line * LINE_HEIGHT
        draw.rounded_rectangle((left, y + 2, left + 26, y + 34), 5, fill=colour)
        name = _cut(classes[number], font_of(USUAL), LEGEND_WIDTH - 120) or classes[number][:FEWEST_LETTERS]
        draw.text((left + 40, y), f"{number}  {name}", INK, font_of(USUAL))
        facts = f"{_counted(int(cells.sum()))}, {_per_cent(float(sure[cells].mean()))} on average"
        draw.text((left + 40, y + USUAL + 4), facts, PALE_INK, font_of(SMALL))
    others = {
        number: cells for number, cells in Counter(ids.ravel().tolist()).items() if number not in colours
    }
    if others:
        y = top + len(colours) * LINE_HEIGHT
        draw.rounded_rectangle((left, y + 2, left + 26, y + 34), 5, fill=GREY)
        draw.text(
            (left + 40, y),
            f"{len(others)} more " + ("class" if len(others) == 1 else "classes"),
            INK,
            font_of(USUAL),
        )
        draw.text((left + 40, y + USUAL + 4), _counted(sum(others.values())), PALE_INK, font_of(SMALL))


def _counted(cells: int) -> str:
    return f"{cells} cell" if cells == 1 else f"{cells} cells"


def _per_cent(share: float) -> str:
    return f"{100 * share:.0f} %"


def font_of(size: int) -> ImageFont.FreeTypeFont:
    """Return Pillow's own font, which is on every machine."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this Pillow was built without FreeType and cannot write text of a chosen size")
    return font

"""Draw what a label map covers of its training image, each cell with its most probable class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.reading import decode_rgb
from horovod_volo.labelling.verify import probabilities
from horovod_volo.monitor.pictures import BACKGROUND, TEXT, load_font, palette_colors
from horovod_volo.token_labels.geometry import MapGeometry
from horovod_volo.token_labels.keys import label_key, names_of
from horovod_volo.token_labels.source import open_labels
from horovod_volo.token_labels.store import Maps

# Pixels.
LONG_SIDE, MAX_LONG_SIDE, MIN_CELL = 900, 2000, 48  # in a smaller cell the text is not legible
MARGIN, LINE_HEIGHT, LEGEND_WIDTH = 28, 28, 400
MAX_TINT = 0.45  # opacity of a cell's colour at probability 1
_SATURATION = 0.45  # of the image, so that the colours of the cells stand out


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
    header = (
        f"{catalog.name(index)}  (image {index}, class {catalog.targets[index]})",
        f"Teacher: {source.teacher}",
        f"A map covers {source.geometry.description}{' (assumed)' * source.geometry_assumed}",
        "Each cell: its most probable class, by a softmax in which logits that are not stored are 0.",
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
    """Draw lines of text, what the map covers with the most probable class of every cell, and a legend.

    `maps` are logits and ids (k, height, width) of `classes`.
    """
    stored = probabilities(maps[0], len(classes))
    best = stored.argmax(axis=0)[None]  # (1, height, width)
    ids, highest = (np.take_along_axis(values, best, axis=0)[0] for values in (maps[1], stored))
    colors = palette_colors(ids)
    tint = np.array([[colors[int(kind)] for kind in row] for row in ids], dtype=np.uint8)

    (covered,) = geometry.covered(np.array([[image.height, image.width]]))
    top, left, tall, wide = (covered * np.tile([image.height, image.width], 2)).tolist()  # in pixels
    box = (round(left), round(top), round(left + wide), round(top + tall))
    part = image.convert("RGB").crop(box)  # black beyond the image
    cell = np.array([tall, wide]) / ids.shape
    scale = min(max(LONG_SIDE / max(tall, wide), MIN_CELL / cell.min()), MAX_LONG_SIDE / max(tall, wide))
    height, width = (np.maximum(1, (cell * scale).round()) * ids.shape).astype(int).tolist()
    faded = ImageEnhance.Color(part).enhance(_SATURATION).resize((width, height), Image.Resampling.BICUBIC)
    cells = (Image.fromarray(each) for each in (tint, (255 * MAX_TINT * highest).round().astype(np.uint8)))
    tinted, opacity = (each.resize(faded.size, Image.Resampling.NEAREST) for each in cells)

    below = MARGIN + LINE_HEIGHT * (len(header) + 1)
    size = (width + LEGEND_WIDTH + 3 * MARGIN, below + height + MARGIN)
    canvas = Image.new("RGB", size, BACKGROUND)
    canvas.paste(Image.composite(tinted, faded, opacity), (MARGIN, below))
    draw, font = ImageDraw.Draw(canvas), load_font(17)
    for row, column in np.ndindex(ids.shape):
        x, y = ((place + 0.5) / count for place, count in ((column, ids.shape[1]), (row, ids.shape[0])))
        text = f"{ids[row, column]}\n{100 * highest[row, column]:.0f} %"
        place = MARGIN + x * width, below + y * height
        draw.multiline_text(
            place, text, "white", load_font(15), "mm", align="center", stroke_width=2, stroke_fill="black"
        )
    for line, text in enumerate(header):
        draw.text((MARGIN, MARGIN + line * LINE_HEIGHT), text, TEXT, font)
    for line, (number, color) in enumerate(list(colors.items())[: height // LINE_HEIGHT]):
        x, y = width + 2 * MARGIN, below + line * LINE_HEIGHT
        mean = f"{(ids == number).sum()} cells, {100 * highest[ids == number].mean():.0f} % on average"
        draw.rectangle((x, y, x + 20, y + 20), fill=color)
        draw.text((x + 30, y), f"{number}  {classes[number][:20]}: {mean}", TEXT, font)
    return canvas

"""Draw one image of the demo set, with the truth about where its object is.

Ten shapes on cluttered backgrounds: small enough to learn in minutes, hard enough that colour, brightness
or area say nothing. Invariant: the class decides the shape and nothing else. Every random number of a scene
is drawn without knowing the class, and all shapes of a scene would have the same area.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, degrees, pi, sin, sqrt

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from horovod_volo.data.demo.demo_shapes import SHAPES, Floats, area_in_unit_circle

# Cells per side of a label map; square for every image, as published label maps are.
GRID = 8
# Everything with an edge is drawn this many times larger and averaged down, which smooths the edges.
OVERSAMPLING = 2
# The object's area as a share of the square over the image's shorter side: least and most.
AREA_SHARES = (0.24, 0.45)

Colour = tuple[int, int, int]
Point = tuple[float, float]


@dataclass(frozen=True)
class DemoImage:
    """A picture and the share of each of its GRID x GRID cells that shows the object."""

    picture: Image.Image
    coverage: Floats


def draw_demo_image(name: str, random: np.random.Generator, *, image_side: int) -> DemoImage:
    """Draw an object of class `name` in a random scene with sides of 0.9 to 1.4 times `image_side`."""
    width, height = random.integers(9 * image_side // 10, 14 * image_side // 10 + 1, 2).tolist()
    brightness = random.uniform(0.15, 0.85)
    canvas = _background(random, width, height, brightness).resize(
        (width * OVERSAMPLING, height * OVERSAMPLING), Image.Resampling.NEAREST
    )
    _add_fragments(canvas, random, brightness)
    placement = _placement(random, canvas)
    mask = _add_object(canvas, random, name, placement, brightness)
    _hide_part(canvas, mask, random, placement, brightness)
    coverage = mask.resize((GRID, GRID), Image.Resampling.BOX)
    return DemoImage(
        picture=_photograph(canvas.reduce(OVERSAMPLING), random),
        coverage=np.asarray(coverage, np.float32) / np.float32(255),
    )


def _colour(random: np.random.Generator, brightness: float, saturation: float) -> Colour:
    """A colour of random hue whose luma is about `brightness`."""
    hue, third = random.uniform(0, 2 * pi), 2 * pi / 3
    red, green, blue = (0.5 + 0.5 * cos(hue + turn) for turn in (0, third, -third))
    shift = brightness - saturation * (0.30 * red + 0.59 * green + 0.11 * blue)
    red, green, blue = (min(max(255 * (saturation * part + shift), 0), 255) for part in (red, green, blue))
    return int(red), int(green), int(blue)


def _contrasting(random: np.random.Generator, brightness: float) -> float:
    """A brightness that a person tells from the given one at a glance."""
    gap = 0.35
    if brightness > 0.5:
        return random.uniform(0.05, brightness - gap)
    return random.uniform(brightness + gap, 0.95)


def _ramp(random: np.random.Generator, width: int, height: int) -> Floats:
    """A plane that rises in a random direction, from about -1 to about 1; (height, width)."""
    angle = random.uniform(0, 2 * pi)
    x = np.arange(width, dtype=np.float32) * (1.5 * cos(angle) / width) - 0.75 * cos(angle)
    y = np.arange(height, dtype=np.float32) * (1.5 * sin(angle) / height) - 0.75 * sin(angle)
    return x + y[:, None]


def _background(random: np.random.Generator, width: int, height: int, brightness: float) -> Image.Image:
    """Two colours of like brightness, blended by a ramp, clouds and a fine ripple."""
    cells = random.integers(3, 9)
    clouds = Image.fromarray(random.standard_normal((cells, cells), np.float32))
    blend = 0.5 + 0.35 * _ramp(random, width, height)  # (height, width)
    blend += random.uniform(0.1, 0.4) * np.asarray(clouds.resize((width, height), Image.Resampling.BICUBIC))
    blend += random.uniform(0, 0.3) * np.sin(random.uniform(10, 40) * _ramp(random, width, height))
    spread = random.uniform(-0.12, 0.12)
    first = _colour(random, brightness - spread, random.uniform(0.1, 0.5))
    second = _colour(random, brightness + spread, random.uniform(0.1, 0.5))
    picture = Image.new("RGB", (width, height), first)
    picture.paste(second, mask=Image.fromarray(np.clip(255 * blend, 0, 255).astype(np.uint8)))
    return picture


def _add_fragments(canvas: Image.Image, random: np.random.Generator, brightness: float) -> None:
    """Scatter strokes, dots and short arcs, which belong to no class."""
    draw = ImageDraw.Draw(canvas)
    side = min(canvas.size)
    for kind in random.integers(0, 3, random.integers(2, 7)):
        colour = _colour(random, brightness + random.uniform(-0.3, 0.3), random.uniform(0.1, 0.6))
        x, y = random.uniform(0, canvas.width), random.uniform(0, canvas.height)
        length, thickness = random.uniform(0.05, 0.15) * side, round(random.uniform(0.01, 0.035) * side)
        angle = random.uniform(0, 2 * pi)
        if kind == 0:
            reach_x, reach_y = 1.5 * length * cos(angle), 1.5 * length * sin(angle)
            draw.line((x - reach_x, y - reach_y, x + reach_x, y + reach_y), colour, thickness)
        elif kind == 1:
            draw.polygon(_blob(random, x, y, 0.5 * length), colour)
        else:
            box = (x - length, y - length, x + length, y + length)
            draw.arc(box, degrees(angle), degrees(angle) + 100, colour, thickness)


def _blob(random: np.random.Generator, x: float, y: float, radius: float) -> list[Point]:
    """The corners of an irregular polygon inside a circle."""
    corners = int(random.integers(6, 10))
    draws = zip(
        range(corners), random.uniform(0, 0.7, corners), random.uniform(0.75, 1, corners), strict=True
    )
    polar = [(2 * pi * (corner + delay) / corners, radius * share) for corner, delay, share in draws]
    return [(x + reach * cos(angle), y + reach * sin(angle)) for angle, reach in polar]


@dataclass(frozen=True)
class Placement:
    """Where the object lies on the canvas: its centre and area in pixels, how it is turned and mirrored."""

    x: float
    y: float
    area: float
    angle: float
    mirror: int


def _placement(random: np.random.Generator, canvas: Image.Image) -> Placement:
    return Placement(
        x=random.uniform(0.43, 0.57) * canvas.width,
        y=random.uniform(0.43, 0.57) * canvas.height,
        area=random.uniform(*AREA_SHARES) * min(canvas.size) ** 2,
        angle=random.uniform(-pi / 8, pi / 8),
        mirror=-1 if random.uniform() < 0.5 else 1,
    )


def _add_object(
    canvas: Image.Image, random: np.random.Generator, name: str, placement: Placement, brightness: float
) -> Image.Image:
    """Draw the object and its shadow in colours that stand out; return the object's mask."""
    main_brightness = _contrasting(random, brightness)
    main = _colour(random, main_brightness, random.uniform(0.3, 0.9))
    second = _colour(random, _contrasting(random, main_brightness), random.uniform(0.3, 0.9))

    # Only the square around the object is computed; pasting cuts off what lies outside the canvas.
    radius = sqrt(placement.area / area_in_unit_circle(name))
    left, top, extent = int(placement.x - radius), int(placement.y - radius), int(2 * radius) + 2
    steps = np.arange(extent, dtype=np.float32) + 0.5
    x, y = (steps + (left - placement.x)) / radius, (steps[:, None] + (top - placement.y)) / radius
    cosine, sine = cos(placement.angle), sin(placement.angle)
    inside, tinted = SHAPES[name](placement.mirror * (cosine * x + sine * y), cosine * y - sine * x)
    opaque = Image.fromarray(inside * np.uint8(255))

    drop = round(0.025 * min(canvas.size))
    shadow = Image.new("L", (extent + 2 * drop, extent + 2 * drop))
    shadow.paste(90, (drop, drop), opaque)
    canvas.paste((0, 0, 0), (left, top), shadow.filter(ImageFilter.BoxBlur(drop)))
    canvas.paste(main, (left, top), opaque)
    canvas.paste(second, (left, top), Image.fromarray((inside & tinted) * np.uint8(255)))
    mask = Image.new("L", canvas.size)
    mask.paste(opaque, (left, top))
    return mask


def _hide_part(
    canvas: Image.Image,
    mask: Image.Image,
    random: np.random.Generator,
    placement: Placement,
    brightness: float,
) -> None:
    """Cover a part of the object with a blob as bright as the background, and cut it from the mask."""
    # A blob of at most a quarter of the object's area cannot hide more than a quarter of it.
    radius = sqrt(placement.area * random.uniform(0, 0.25) / pi)
    bearing, distance = random.uniform(0, 2 * pi), random.uniform(0.3, 0.8) * sqrt(placement.area)
    blob = _blob(random, placement.x + distance * cos(bearing), placement.y + distance * sin(bearing), radius)
    ImageDraw.Draw(canvas).polygon(blob, _colour(random, brightness, random.uniform(0.1, 0.5)))
    ImageDraw.Draw(mask).polygon(blob, 0)


def _photograph(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    """Light the scene from one side and add a film's grain."""
    pixels = np.asarray(picture, np.float32)  # (height, width, 3)
    light = 1 + random.uniform(0, 0.2) * _ramp(random, *picture.size)  # (height, width)
    grain = random.uniform(1, 6) * random.standard_normal(light.shape, np.float32)
    pixels = pixels * light[..., None] + grain[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

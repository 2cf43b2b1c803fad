"""Draw one image of the demo set and the exact coverage of each cell by its object.

Ten shapes on cluttered backgrounds: learnable in minutes, but not from color, brightness or area. Invariant:
only the shape depends on the class. All random numbers of a scene are drawn independently of the class, and
all shapes have the same area in the same scene.
"""

from collections.abc import Callable
from functools import cache
from math import cos, degrees, pi, sin, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Color = tuple[int, int, int]
Point = tuple[float, float]

# Cells per side of a label map; the maps are square for every aspect ratio, like the published ones.
GRID = 8
# Shapes are drawn this many times larger and averaged, for antialiasing.
OVERSAMPLING = 2
# Bounds of the object's area as a fraction of the squared shorter side of the image.
AREA_FRACTIONS = (0.24, 0.45)


def _disc(x: Floats, y: Floats) -> Mask:
    return x * x + y * y < 1


def _cross(x: Floats, y: Floats) -> Mask:
    near, far = np.minimum(np.abs(x), np.abs(y)), np.maximum(np.abs(x), np.abs(y))
    return (near < 0.27) & (far < 0.95)


def _frame(x: Floats, y: Floats) -> Mask:
    distance = np.maximum(np.abs(x), np.abs(y))
    return (distance < 0.71) & (distance > 0.4)


def _heart(x: Floats, y: Floats) -> Mask:
    x, y = 1.25 * x, 1.25 * y + 0.25
    return (x * x + y * y - 1) ** 3 < x * x * y**3


def _spiral(x: Floats, y: Floats) -> Mask:
    turns = 2 * np.hypot(x, y) - np.arctan2(y, x) / (2 * pi)
    return _disc(x, y) & (turns % 1 < 0.5)


def _star(x: Floats, y: Floats) -> Mask:
    # Fold the five points onto one half point, whose tip is at (1, 0); one straight edge bounds it.
    half = pi / 5
    angle = np.abs((np.arctan2(y, x) + half) % (2 * half) - half)
    radius = np.hypot(x, y)
    notch_x, notch_y = 0.45 * cos(half), 0.45 * sin(half)
    along, across = radius * np.cos(angle), radius * np.sin(angle)
    return (1 - along) * notch_y > across * (1 - notch_x)


# A shape returns a mask of the points (x, y) inside. Invariant: it lies within the unit circle, and its
# mirror image is of the same class, because training flips images.
SHAPES: dict[str, Callable[[Floats, Floats], Mask]] = {
    "checker": _disc,
    "crescent": lambda x, y: _disc(x, y) & ((x - 0.45) ** 2 + y * y > 0.78**2),
    "cross": _cross,
    "frame": _frame,
    "heart": _heart,
    "ring": lambda x, y: _disc(x, y) & ~_disc(x / 0.58, y / 0.58),
    "spiral": _spiral,
    "star": _star,
    "stripes": _disc,
    "triangle": lambda x, y: np.maximum(-y, 0.5 * y + 0.75**0.5 * np.abs(x)) < 0.5,
}
# The points in the second colour, of shapes that have one.
PATTERNS: dict[str, Callable[[Floats, Floats], Mask]] = {
    "checker": lambda x, y: (np.floor(2 * x) + np.floor(2 * y)) % 2 == 0,
    "stripes": lambda _, y: np.floor(2.5 * y + 0.5) % 2 == 0,
}
CLASSES = tuple(sorted(SHAPES))  # class numbers are indices into the sorted folder names


@cache
def area_in_unit_circle(name: str) -> float:
    """Return the area of a shape, measured on a fine grid."""
    steps = np.arange(-0.9975, 1, 0.005, dtype=np.float32)
    return 4 * float(SHAPES[name](*np.meshgrid(steps, steps)).mean())


class Placement(NamedTuple):
    """Pose of the object: centre and area in pixels, rotation in radians, and mirror 1 or -1."""

    x: float
    y: float
    area: float
    angle: float
    mirror: int


def draw_demo_image(name: str, random: np.random.Generator, *, image_side: int) -> tuple[Image.Image, Floats]:
    """Draw an object of class `name` in a random scene with sides of 0.9 to 1.4 `image_side`.

    Returns the image, and the fraction of each of its GRID x GRID cells that the object covers.
    """
    width, height = random.integers(9 * image_side // 10, 14 * image_side // 10 + 1, 2).tolist()
    brightness = random.uniform(0.15, 0.85)
    canvas = scenery(random, width, height, brightness)
    placement = Placement(
        x=random.uniform(0.43, 0.57) * canvas.width,
        y=random.uniform(0.43, 0.57) * canvas.height,
        area=random.uniform(*AREA_FRACTIONS) * min(canvas.size) ** 2,
        angle=random.uniform(-pi / 8, pi / 8),
        mirror=-1 if random.uniform() < 0.5 else 1,
    )
    mask = add_object(canvas, random, name, placement, brightness)
    _hide_part(canvas, mask, random, placement, brightness)
    coverage = mask.resize((GRID, GRID), Image.Resampling.BOX)
    image = add_lighting_and_grain(canvas.reduce(OVERSAMPLING), random)
    return image, np.asarray(coverage, np.float32) / np.float32(255)


def scenery(random: np.random.Generator, width: int, height: int, brightness: float) -> Image.Image:
    """Return a canvas, OVERSAMPLING times as large, with a background and fragments that are no object."""
    size = (width * OVERSAMPLING, height * OVERSAMPLING)
    canvas = _background(random, width, height, brightness).resize(size, Image.Resampling.NEAREST)
    _add_fragments(canvas, random, brightness)
    return canvas


def _random_color(
    random: np.random.Generator, brightness: float, saturation: float, hue: float | None = None
) -> Color:
    """Return a colour of the given or a random hue, in radians, whose luma is approximately `brightness`."""
    hue, third = random.uniform(0, 2 * pi) if hue is None else hue, 2 * pi / 3
    red, green, blue = (0.5 + 0.5 * cos(hue + shift) for shift in (0, third, -third))
    offset = brightness - saturation * (0.30 * red + 0.59 * green + 0.11 * blue)
    red, green, blue = (min(max(255 * (saturation * part + offset), 0), 255) for part in (red, green, blue))
    return int(red), int(green), int(blue)


def _contrasting_brightness(random: np.random.Generator, brightness: float) -> float:
    """Return a brightness that clearly differs from the given one."""
    gap = 0.35
    if brightness > 0.5:
        return random.uniform(0.05, brightness - gap)
    return random.uniform(brightness + gap, 0.95)


def _ramp(random: np.random.Generator, width: int, height: int) -> Floats:
    """Return a linear ramp (height, width) in a random direction, from about -1 to about 1."""
    angle = random.uniform(0, 2 * pi)
    x = np.arange(width, dtype=np.float32) * (1.5 * cos(angle) / width) - 0.75 * cos(angle)
    y = np.arange(height, dtype=np.float32) * (1.5 * sin(angle) / height) - 0.75 * sin(angle)
    return x + y[:, None]


def _background(random: np.random.Generator, width: int, height: int, brightness: float) -> Image.Image:
    """Return two colours of similar brightness, blended by a ramp, clouds and a fine ripple."""
    cells = random.integers(3, 9)
    clouds = Image.fromarray(random.standard_normal((cells, cells), np.float32))
    blend = 0.5 + 0.35 * _ramp(random, width, height)  # (height, width)
    blend += random.uniform(0.1, 0.4) * np.asarray(clouds.resize((width, height), Image.Resampling.BICUBIC))
    blend += random.uniform(0, 0.3) * np.sin(random.uniform(10, 40) * _ramp(random, width, height))
    spread = random.uniform(-0.12, 0.12)
    first = _random_color(random, brightness - spread, random.uniform(0.1, 0.5))
    second = _random_color(random, brightness + spread, random.uniform(0.1, 0.5))
    image = Image.new("RGB", (width, height), first)
    image.paste(second, mask=Image.fromarray(np.clip(255 * blend, 0, 255).astype(np.uint8)))
    return image


def _add_fragments(canvas: Image.Image, random: np.random.Generator, brightness: float) -> None:
    """Draw lines, blobs and short arcs that belong to no class."""
    draw = ImageDraw.Draw(canvas)
    side = min(canvas.size)
    for kind in random.integers(0, 3, random.integers(2, 7)):
        color = _random_color(random, brightness + random.uniform(-0.3, 0.3), random.uniform(0.1, 0.6))
        x, y = random.uniform(0, canvas.width), random.uniform(0, canvas.height)
        length, thickness = random.uniform(0.05, 0.15) * side, round(random.uniform(0.01, 0.035) * side)
        angle = random.uniform(0, 2 * pi)
        if kind == 0:
            reach_x, reach_y = 1.5 * length * cos(angle), 1.5 * length * sin(angle)
            draw.line((x - reach_x, y - reach_y, x + reach_x, y + reach_y), color, thickness)
        elif kind == 1:
            draw.polygon(_blob(random, x, y, 0.5 * length), color)
        else:
            box = (x - length, y - length, x + length, y + length)
            draw.arc(box, degrees(angle), degrees(angle) + 100, color, thickness)


def _blob(random: np.random.Generator, x: float, y: float, radius: float) -> list[Point]:
    """Return the corners of an irregular polygon inside a circle."""
    corners = int(random.integers(6, 10))
    draws = zip(
        range(corners), random.uniform(0, 0.7, corners), random.uniform(0.75, 1, corners), strict=True
    )
    polar = [(2 * pi * (corner + delay) / corners, radius * fraction) for corner, delay, fraction in draws]
    return [(x + reach * cos(angle), y + reach * sin(angle)) for angle, reach in polar]


def add_object(
    canvas: Image.Image,
    random: np.random.Generator,
    name: str,
    placement: Placement,
    brightness: float,
    hue: float | None = None,
) -> Image.Image:
    """Draw the object and its shadow in contrasting colours, of a `hue` in radians; return its mask."""
    main_brightness = _contrasting_brightness(random, brightness)
    main = _random_color(random, main_brightness, random.uniform(0.3, 0.9), hue)
    second_brightness = _contrasting_brightness(random, main_brightness)
    second = _random_color(random, second_brightness, random.uniform(0.3, 0.9), hue)

    # Only the square around the object is computed; `paste` clips it to the canvas.
    radius = sqrt(placement.area / area_in_unit_circle(name))
    left, top, extent = int(placement.x - radius), int(placement.y - radius), int(2 * radius) + 2
    steps = np.arange(extent, dtype=np.float32) + 0.5
    x, y = (steps + (left - placement.x)) / radius, (steps[:, None] + (top - placement.y)) / radius
    cosine, sine = cos(placement.angle), sin(placement.angle)
    points = placement.mirror * (cosine * x + sine * y), cosine * y - sine * x
    inside = SHAPES[name](*points)
    opaque = Image.fromarray(inside * np.uint8(255))

    drop = round(0.025 * min(canvas.size))
    shadow = Image.new("L", (extent + 2 * drop, extent + 2 * drop))
    shadow.paste(90, (drop, drop), opaque)
    canvas.paste((0, 0, 0), (left, top), shadow.filter(ImageFilter.BoxBlur(drop)))
    canvas.paste(main, (left, top), opaque)
    if name in PATTERNS:
        pattern = inside & PATTERNS[name](*points)
        canvas.paste(second, (left, top), Image.fromarray(pattern * np.uint8(255)))
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
    """Cover part of the object with a blob as bright as the background; remove it from the mask."""
    # The blob has at most a quarter of the object's area.
    radius = sqrt(placement.area * random.uniform(0, 0.25) / pi)
    bearing, distance = random.uniform(0, 2 * pi), random.uniform(0.3, 0.8) * sqrt(placement.area)
    blob = _blob(random, placement.x + distance * cos(bearing), placement.y + distance * sin(bearing), radius)
    ImageDraw.Draw(canvas).polygon(blob, _random_color(random, brightness, random.uniform(0.1, 0.5)))
    ImageDraw.Draw(mask).polygon(blob, 0)


def add_lighting_and_grain(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Brighten the image towards one side and add noise."""
    pixels = np.asarray(image, np.float32)  # (height, width, 3)
    light = 1 + random.uniform(0, 0.2) * _ramp(random, *image.size)  # (height, width)
    grain = random.uniform(1, 6) * random.standard_normal(light.shape, np.float32)
    pixels = pixels * light[..., None] + grain[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

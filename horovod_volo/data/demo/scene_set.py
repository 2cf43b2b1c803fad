"""Make the demo scenes: images of several objects with a mask each, to learn segmentation from.

    python -m horovod_volo.data.demo.scene_set FOLDER [--train 1000] [--val 200]

Writes FOLDER/images/SPLIT/NAME.jpg, FOLDER/masks/SPLIT/NAME.png and FOLDER/classes.txt. The objects are the
solid shapes of the demo set, each in a hue of its own, so that minutes are enough to learn them; the first
class is the ground. Invariants: a scene depends only on (seed, split,
number); FOLDER is created atomically.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from math import pi
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from horovod_volo.data.demo.demo_image import (
    OVERSAMPLING,
    Placement,
    add_fragments,
    add_lighting_and_grain,
    add_object,
    background,
)
from horovod_volo.data.demo.demo_set import SPLIT_STREAMS, is_same_set, publish, run_command

# Increase when the content of the set changes, so that folders of earlier versions are not reused.
_EDITION = 1
SCENE_CLASSES = ("ground", "checker", "cross", "heart", "star", "stripes", "triangle")
_OBJECTS = (3, 8)
_HUE_JITTER = pi / 10
_AREAS = (0.05, 0.16)  # of an object, as a fraction of the squared shorter side


class DemoScene(NamedTuple):
    """An image and the class of each of its pixels."""

    image: Image.Image
    mask: Image.Image


def draw_scene(random: np.random.Generator, *, side: int) -> DemoScene:
    """Draw some objects in a scene with sides of 0.75 to 1.5 `side`; later ones cover earlier ones."""
    width, height = random.integers(3 * side // 4, 3 * side // 2 + 1, 2).tolist()
    brightness = random.uniform(0.15, 0.85)
    large = (width * OVERSAMPLING, height * OVERSAMPLING)
    canvas = background(random, width, height, brightness).resize(large, Image.Resampling.NEAREST)
    add_fragments(canvas, random, brightness)
    mask = Image.new("L", large)
    for _ in range(int(random.integers(_OBJECTS[0], _OBJECTS[1] + 1))):
        target = int(random.integers(1, len(SCENE_CLASSES)))
        placement = Placement(
            x=random.uniform(0.1, 0.9) * large[0],
            y=random.uniform(0.1, 0.9) * large[1],
            area=random.uniform(*_AREAS) * min(large) ** 2,
            angle=random.uniform(-pi / 8, pi / 8),
            mirror=-1 if random.uniform() < 0.5 else 1,
        )
        hue = 2 * pi * target / len(SCENE_CLASSES) + random.uniform(-_HUE_JITTER, _HUE_JITTER)
        covered = add_object(canvas, random, SCENE_CLASSES[target], placement, brightness, hue)
        mask.paste(target, (0, 0), covered)
    # The class at the centre of each pixel: means of classes would be other classes.
    centres = np.asarray(mask)[OVERSAMPLING // 2 :: OVERSAMPLING, OVERSAMPLING // 2 :: OVERSAMPLING]
    return DemoScene(
        add_lighting_and_grain(canvas.reduce(OVERSAMPLING), random),
        Image.fromarray(np.ascontiguousarray(centres)),
    )


def make_scene_set(
    folder: Path, *, train: int = 1000, val: int = 200, side: int = 128, seed: int = 0
) -> None:
    """Create the scenes in `folder`; do nothing if the same ones are already there."""
    description = {"scenes": _EDITION, "train": train, "val": val, "side": side, "seed": seed}
    if is_same_set(folder, description):
        return
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for split, count in (("train", train), ("val", val)):
            for kind in ("images", "masks"):
                (partial / kind / split).mkdir(parents=True)
            for number in range(count):
                random = np.random.default_rng((seed, SPLIT_STREAMS[split], number))
                scene = draw_scene(random, side=side)
                scene.image.save(partial / "images" / split / f"{number:05}.jpg", quality=90)
                scene.mask.save(partial / "masks" / split / f"{number:05}.png")
        (partial / "classes.txt").write_text("\n".join(SCENE_CLASSES) + "\n")
        publish(partial, folder, description)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    description = "Make a small segmentation set for first runs of the trainer."
    run_command(make_scene_set, "scene_set", description, train=1000, val=200, arguments=arguments)


if __name__ == "__main__":
    main()

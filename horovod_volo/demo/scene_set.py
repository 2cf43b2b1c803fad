"""Make the demo scenes: images of several objects, with masks and boxes, to learn to find them.

    python -m horovod_volo.demo.scene_set FOLDER [--train 1000] [--val 200]

Writes FOLDER/images/SPLIT/NAME.jpg, FOLDER/masks/SPLIT/NAME.png, FOLDER/classes.txt and, in COCO's form,
FOLDER/boxes/SPLIT.json. The objects are the solid shapes of the demo set, each class in a hue of its own, so
that minutes are enough to learn them; the first class of the masks is the ground, which has no box. A box
surrounds what is visible of an object. Invariants: a scene depends only on (seed, split, number); FOLDER is
created atomically.
"""

import json
from collections.abc import Sequence
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.demo.demo_image import OVERSAMPLING, Placement, add_lighting_and_grain, add_object, scenery
from horovod_volo.demo.demo_set import SPLIT_STREAMS, new_set, run_command

# Increase when the content of the set changes, so that folders of earlier versions are not reused.
_EDITION = 2
SCENE_CLASSES = ("ground", "checker", "cross", "heart", "star", "stripes", "triangle")
_OBJECTS = (3, 8)
_HUE_JITTER = pi / 10
_AREAS = (0.05, 0.16)  # of an object, as a fraction of the squared shorter side
_LEAST_VISIBLE = 12  # pixels; an object of which less is visible has no box


Objects = list[dict[str, Any]]  # what is visible of them, as annotations of COCO without numbers


def draw_scene(random: np.random.Generator, *, side: int) -> tuple[Image.Image, Image.Image, Objects]:
    """Draw some objects in a scene with sides of 0.75 to 1.5 `side`; later ones cover earlier ones.

    Returns an image, the class of each of its pixels, and its objects.
    """
    width, height = random.integers(3 * side // 4, 3 * side // 2 + 1, 2).tolist()
    brightness = random.uniform(0.15, 0.85)
    canvas = scenery(random, width, height, brightness)
    mask, owners = Image.new("L", canvas.size), Image.new("L", canvas.size)
    targets = [0]
    for _ in range(int(random.integers(_OBJECTS[0], _OBJECTS[1] + 1))):
        target = int(random.integers(1, len(SCENE_CLASSES)))
        placement = Placement(
            x=random.uniform(0.1, 0.9) * canvas.width,
            y=random.uniform(0.1, 0.9) * canvas.height,
            area=random.uniform(*_AREAS) * min(canvas.size) ** 2,
            angle=random.uniform(-pi / 8, pi / 8),
            mirror=-1 if random.uniform() < 0.5 else 1,
        )
        hue = 2 * pi * target / len(SCENE_CLASSES) + random.uniform(-_HUE_JITTER, _HUE_JITTER)
        covered = add_object(canvas, random, SCENE_CLASSES[target], placement, brightness, hue)
        mask.paste(target, (0, 0), covered)
        owners.paste(len(targets), (0, 0), covered)
        targets.append(target)
    image = add_lighting_and_grain(canvas.reduce(OVERSAMPLING), random)
    return image, Image.fromarray(_at_centres(mask)), _visible(_at_centres(owners), targets)


def _at_centres(canvas: Image.Image) -> NDArray[np.uint8]:
    """Return the value at the centre of each pixel: means of classes would be other classes."""
    half = OVERSAMPLING // 2
    return np.ascontiguousarray(np.asarray(canvas)[half::OVERSAMPLING, half::OVERSAMPLING])


def _visible(owners: NDArray[np.uint8], targets: Sequence[int]) -> Objects:
    """Return the objects that own enough pixels; `targets` are the classes by number, from 1."""
    found = []
    for number in range(1, len(targets)):
        rows, columns = np.nonzero(owners == number)
        if len(rows) >= _LEAST_VISIBLE:
            left, top = int(columns.min()), int(rows.min())
            box = (left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top)
            found.append({"category_id": targets[number], "bbox": box, "area": len(rows), "iscrowd": 0})
    return found


def make_scene_set(
    folder: Path, *, train: int = 1000, val: int = 200, side: int = 128, seed: int = 0
) -> None:
    """Create the scenes in `folder`; do nothing if the same ones are already there."""
    description = {"scenes": _EDITION, "train": train, "val": val, "side": side, "seed": seed}
    with new_set(folder, description) as partial:
        if partial is None:
            return
        for kind in ("images/train", "images/val", "masks/train", "masks/val", "boxes"):
            (partial / kind).mkdir(parents=True)
        for split, count in (("train", train), ("val", val)):
            sizes, objects = [], []
            for number in range(count):
                random = np.random.default_rng((seed, SPLIT_STREAMS[split], number))
                image, mask, found = draw_scene(random, side=side)
                image.save(partial / "images" / split / f"{number:05}.jpg", quality=90)
                mask.save(partial / "masks" / split / f"{number:05}.png")
                sizes.append(image.size)
                objects.append(found)
            (partial / "boxes" / f"{split}.json").write_text(json.dumps(_in_cocos_form(sizes, objects)))
        (partial / "classes.txt").write_text("\n".join(SCENE_CLASSES) + "\n")


def _in_cocos_form(sizes: list[tuple[int, int]], objects: list[Objects]) -> dict[str, Any]:
    images = [
        {"id": number, "file_name": f"{number:05}.jpg", "width": width, "height": height}
        for number, (width, height) in enumerate(sizes)
    ]
    pairs = [(image, each) for image, found in enumerate(objects) for each in found]
    annotations = [
        {"id": number, "image_id": image, **each} for number, (image, each) in enumerate(pairs, start=1)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(SCENE_CLASSES) if number]
    return {"images": images, "annotations": annotations, "categories": categories}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    description = "Make a small set with masks and boxes for first runs of the trainer."
    run_command(make_scene_set, "scene_set", description, arguments)


if __name__ == "__main__":
    main()

"""The list of a split's images and masks, in the layout of ADE20K, of Cityscapes, or of one's own data:

images/{training,validation}/NAME.jpg            annotations/{training,validation}/NAME.png
leftImg8bit/{train,val}/CITY/X_leftImg8bit.png   gtFine/{train,val}/CITY/X_gtFine_labelTrainIds.png
images/{train,val}/NAME.jpg                      masks/{train,val}/NAME.png, classes.txt
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.split_folder import CLASSES_FILE, Split, check_links, paths_below
from horovod_volo.data.reading import UNDECODABLE, open_image

Mask = NDArray[np.uint8]  # (height, width) classes; IGNORED where there is none

_IMAGES = (".jpg", ".jpeg", ".png")
_MOST_CLASSES = 255
MASK_FOLDERS = ("leftImg8bit", "annotations", "masks")  # one of them tells the layout
# Names of the classes, separated by commas.
_CITYSCAPES = (
    "road, sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky, "
    "person, rider, car, truck, bus, train, motorcycle, bicycle"
)
_ADE20K = (
    "wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, "
    "earth, door, table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, "
    "mirror, rug, field, armchair, seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, "
    "box, column, signboard, chest of drawers, counter, sand, sink, skyscraper, fireplace, refrigerator, "
    "grandstand, path, stairs, runway, case, pool table, pillow, screen door, stairway, river, bridge, "
    "bookcase, blind, coffee table, toilet, flower, book, hill, bench, countertop, stove, palm, kitchen "
    "island, computer, swivel chair, boat, bar, arcade machine, hovel, bus, towel, light, truck, tower, "
    "chandelier, awning, streetlight, booth, television receiver, airplane, dirt track, apparel, pole, land, "
    "bannister, escalator, ottoman, bottle, buffet, poster, stage, van, ship, fountain, conveyer belt, "
    "canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent, bag, minibike, "
    "cradle, oven, ball, food, step, tank, trade name, microwave, pot, animal, bicycle, lake, dishwasher, "
    "screen, blanket, sculpture, hood, sconce, vase, traffic light, tray, ashcan, fan, pier, crt screen, "
    "plate, monitor, bulletin board, shower, radiator, glass, clock, flag"
)


@dataclass(frozen=True)
class SceneLayout:
    name: str
    classes: tuple[str, ...]
    zero_is_ignored: bool  # and the classes count from 1
    images: str = ""  # folders, with one for each split; in packed shards there are none
    masks: str = ""
    splits: Mapping[Split, str] = field(default_factory=dict)
    image_ending: str = ""  # of the names, which that of masks replaces; empty: any image
    mask_ending: str = ".png"


@dataclass(frozen=True)
class SceneList:
    """The images and masks of a split; `names` are relative to the folder of the images, sorted."""

    root: Path
    layout: SceneLayout
    split: Split
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def classes(self) -> Sequence[str]:
        return self.layout.classes

    @property
    def digest(self) -> str:
        listed = "\n".join([self.layout.name, *self.classes, *self.names])
        return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()

    def location(self, index: int) -> str:
        return str(self.folder(self.layout.images) / self.names[index])

    def read(self, index: int) -> NDArray[np.uint8]:
        return np.frombuffer(file_content(self.location(index)), dtype=np.uint8)

    def read_mask(self, index: int, size: tuple[int, int]) -> Mask:
        """Return the mask of an image of this height and width; raise BadSampleError if it is damaged."""
        from horovod_volo.core.batch import IGNORED  # imports torch, which packing does not need

        where = self.mask_location(index)
        try:
            with open_image(self.encoded_mask(index)) as image:
                if image.mode not in ("L", "P"):
                    raise BadSampleError(f"{where} is no mask: its mode is {image.mode}, not 8 bits")
                stored = np.array(image)
        except UNDECODABLE as error:
            raise BadSampleError(f"{where} is not a complete mask: {error}") from error
        if stored.shape != size:
            raise BadSampleError(f"{where} has {_shape(stored.shape)} pixels, its image {_shape(size)}")
        mask: Mask = stored
        if self.layout.zero_is_ignored:  # 0 becomes 255 by itself, and 255 stays
            mask = np.where(stored == IGNORED, stored, stored - np.uint8(1))
        labelled = mask[mask != IGNORED]
        if labelled.size and int(labelled.max()) >= len(self.classes):
            raise BadSampleError(
                f"{where} has label {int(labelled.max())}, but there are {len(self.classes)} classes"
            )
        return mask

    def mask_location(self, index: int) -> str:
        """Return where a mask is, for messages."""
        return str(self.mask_path(index))

    def encoded_mask(self, index: int) -> bytes:
        """Return a mask's file; raise BadSampleError if it cannot be read."""
        return file_content(self.mask_path(index))

    def close(self) -> None:
        """Close the files that are kept open; of images and masks in folders there are none."""

    def mask_path(self, index: int) -> Path:
        """Return where the mask of an image is."""
        name = self.names[index]
        stem = name.removesuffix(self.layout.image_ending or Path(name).suffix)
        return self.folder(self.layout.masks) / f"{stem}{self.layout.mask_ending}"

    def folder(self, kind: str) -> Path:
        """Return this split's folder of images or masks."""
        return self.root / kind / self.layout.splits[self.split]


def find_layout(root: Path) -> SceneLayout:
    """Return the layout of a data set; raise UserError if it has none of them."""
    splits: dict[Split, str] = {"train": "train", "val": "val"}
    if (root / "leftImg8bit").is_dir():
        folders, endings = ("leftImg8bit", "gtFine"), ("_leftImg8bit.png", "_gtFine_labelTrainIds.png")
        return SceneLayout("cityscapes", tuple(_CITYSCAPES.split(", ")), False, *folders, splits, *endings)
    if (root / "annotations").is_dir():
        names: dict[Split, str] = {"train": "training", "val": "validation"}
        return SceneLayout("ade20k", tuple(_ADE20K.split(", ")), True, "images", "annotations", names)
    if (root / "masks").is_dir():
        return SceneLayout("plain", read_classes(root), False, "images", "masks", splits)
    raise UserError(
        f"{root} has no masks. Give a folder with images/train, images/val, masks/train, masks/val and "
        "classes.txt, or ADE20K's or Cityscapes' folder."
    )


def list_scenes(root: Path, layout: SceneLayout, split: Split) -> SceneList:
    """List a split; raise UserError if it has no images, or if masks are missing."""
    scenes = SceneList(root, layout, split, ())
    folder = scenes.folder(layout.images)
    endings = (layout.image_ending.lower(),) if layout.image_ending else _IMAGES
    found = paths_below(folder)
    names = sorted(
        path for path in found if path.lower().endswith(endings) and not Path(path).name.startswith(".")
    )
    if not names:
        raise UserError(f"{folder} has no images. Put the images of the {split} split there.")
    check_links(folder, [name for name in names if not found[name]], len(names))
    scenes = SceneList(root, layout, split, tuple(names))
    masks = scenes.folder(layout.masks)
    present = paths_below(masks)
    expected = [str(scenes.mask_path(index).relative_to(masks)) for index in range(len(names))]
    missing = [index for index, path in enumerate(expected) if not present.get(path)]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(names)} images in {folder} have no mask; the first: there "
            f"is no {scenes.mask_path(missing[0])}. Add the masks, or remove the images."
        )
    return scenes


def read_classes(root: Path) -> tuple[str, ...]:
    """Return the names in classes.txt; raise UserError if it cannot be read."""
    path = root / CLASSES_FILE
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}). Write the names of the classes there, one a line; label 0 is "
            "the first."
        ) from None
    if not 1 < len(names) <= _MOST_CLASSES or len(set(names)) != len(names):
        raise UserError(f"{path} has {len(names)} lines: name 2 to {_MOST_CLASSES} classes, each once.")
    return names


def file_content(path: str | Path) -> bytes:
    """Return a file's bytes; raise BadSampleError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadSampleError(f"{path} cannot be read: {error.strerror}") from error


def _shape(size: Sequence[int]) -> str:
    return f"{size[1]} x {size[0]}"

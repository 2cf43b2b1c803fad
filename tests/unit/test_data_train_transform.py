"""All augmentation of a training image, against the same operations by Pillow, image by image."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_images import PLAIN, encoded, only_batch, smooth, unnormalised, write_images
from numpy.typing import NDArray
from PIL import Image
from published_augment import NAMES, operations_of, timm_augment

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import Labels
from horovod_volo.data import loader as loader_module
from horovod_volo.data import train_transform
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import Parts, augment_part, parts_needed
from horovod_volo.data.augmentation.crop_flip import draw_crops, warp_maps
from horovod_volo.data.augmentation.geometric_ops import FILL
from horovod_volo.data.augmentation.policy import Operations, draw_operations
from horovod_volo.data.augmentation.random_erasing import draw_erasures
from horovod_volo.data.image_decoder import build_train_pipeline, resizing_inputs
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.prefetcher import BatchPrefetcher, ImageThreadPool
from horovod_volo.data.train_transform import PendingTrainBatch, TrainTransform

SEED, EPOCH, SIDE, IMAGES = 3, 2, 64, 60
RESIZED = 12
SETTINGS = Data(batch_size=IMAGES, hflip=0.5, vflip=0.3)  # the rest as published
SIZES = [(160, 110), (97, 151), (64, 64), (210, 145)]  # width, height


@pytest.mark.parametrize("randaugment_on", ["crop", "image"])
def test_augmented_images_equal_pillows(tmp_path: Path, randaugment_on: Any) -> None:
    settings = replace(SETTINGS, randaugment_on=randaugment_on)
    images = {f"train/a/{n:02d}.jpg": smooth(*SIZES[n % len(SIZES)], seed=n) for n in range(IMAGES)}
    catalog = build_catalog(str(write_images(tmp_path, images, quality=95)), "train", None)
    batch = only_batch(catalog, None, settings, side=SIDE, seed=SEED, epoch=EPOCH)
    boxes = draw_erasures(SEED, EPOCH, batch.indices, settings, SIDE).boxes
    colours = unnormalised(batch.images)
    differences, erased = [], 0
    for position, index in enumerate(batch.indices):
        drawn = draw_operations(SEED, EPOCH, np.array([index]), settings)
        path = catalog.location(index)
        theirs = augmented_by_pillow(path, int(index), settings, drawn, seed=SEED, epoch=EPOCH, side=SIDE)
        unerased = np.ones((SIDE, SIDE), dtype=np.bool_)
        for top, left, height, width in boxes[position]:
            unerased[top : top + height, left : left + width] = False
        difference = np.abs(colours[position].transpose(1, 2, 0) - theirs.astype(float))
        differences.append(difference[unerased].mean())
        erased += not unerased.all()
        if not unerased.all():  # erased pixels are noise
            assert np.abs(colours[position][:, ~unerased].std() - 57) < 15
    assert 0.1 < erased / IMAGES < 0.45
    operated = draw_operations(SEED, EPOCH, batch.indices, settings).kinds
    assert len(np.unique(operated)) > len(NAMES) - 3  # nearly all operations occur
    assert np.mean(differences) < 1.0  # of 255 levels
    assert max(differences) < 8  # operations that stretch colours enlarge small differences


@pytest.mark.parametrize("amount", [0.35, -0.23])
@pytest.mark.parametrize("kind", ops.GEOMETRIC)
def test_moved_label_maps_equal_pillows_moved_images(kind: ops.Operation, amount: float) -> None:
    """The crop is the whole image, so map and image coincide; the colour of a pixel is its cell's number."""
    cells = 14
    argument = 70 * amount if kind == ops.ROTATE else amount
    numbers = np.arange(1, cells**2 + 1).reshape(cells, cells)
    operations = Operations(np.array([[kind]]), np.array([[argument]], np.float32), np.array([[False]]))
    whole = np.array([[0, 0, 1, 1]], np.float32)
    maps = (numbers[None, None].astype(dtype) for dtype in (np.float16, np.int32))
    moved, ids = warp_maps(*maps, whole, operations, np.ones((1, 2)), whole)
    picture = np.repeat(numbers[:, :, None], 3, axis=2).astype(np.uint8)
    theirs = timm_augment(kind, picture, argument, bicubic=False, nearest=True)
    shown_by_pillow = ~(theirs == FILL).all(axis=-1)
    assert 0.3 < shown_by_pillow.mean() < 1
    shown = moved[0, 0] != 0
    assert shown[shown_by_pillow].all()
    assert (shown & ~shown_by_pillow).sum() <= cells  # cells on the edge of the image
    assert (ids[0, 0][shown_by_pillow] == theirs[:, :, 0][shown_by_pillow]).all()
    assert (moved[0, 0][shown] == ids[0, 0][shown]).all()


def batch_resized_by(*, dali: bool) -> torch.Tensor:
    settings = Data(**(PLAIN | {"train_interpolation": "random", "vflip": 0.5, "aa": "rand-m9-inc1"}))
    pictures = [smooth(90 + 7 * number, 120 - 3 * number, seed=number) for number in range(RESIZED)]
    sizes = np.array([(picture.height, picture.width) for picture in pictures])
    indices = np.arange(RESIZED)
    crop_flip = draw_crops(4, 0, indices, sizes, settings)
    assert 0 < crop_flip.bicubic.sum() < RESIZED
    boxes = crop_flip.stored(crop_flip.boxes, sizes)
    jpegs = [np.frombuffer(encoded(picture, quality=95), dtype=np.uint8) for picture in pictures]
    inputs = (jpegs, list(boxes[:, :2]), list(boxes[:, 2:]))
    drawn = draw_operations(4, 0, indices, settings), draw_erasures(4, 0, indices, settings, SIDE)
    device = torch.device("cpu")
    with closing(ImageThreadPool(2, "transform")) as threads:
        common: dict[str, Any] = {"image_size": SIDE, "device": device}
        transform = TrainTransform(settings, seed=4, resized=dali, threads=threads, **common)
        build = partial(build_train_pipeline, batch=RESIZED, threads=1, resize=dali, **common)
        prefetcher = BatchPrefetcher(build, device, 1, lambda index: None, transform)
        flips = (crop_flip.flip_horizontal, crop_flip.flip_vertical, crop_flip.bicubic)
        inputs += resizing_inputs(*flips) if dali else ()
        labels = Labels(torch.zeros(RESIZED))
        pending = PendingTrainBatch(indices, inputs, labels, indices, crop_flip, *drawn)
        ((_, images),) = prefetcher.batches([lambda: pending])
        prefetcher.close()
    return images


def test_dali_and_torch_give_the_same_images() -> None:
    ours, theirs = batch_resized_by(dali=False), batch_resized_by(dali=True)
    difference = (ours - theirs).abs().mean(dim=(1, 2, 3)) * 255 * 0.225
    # Operations that use a histogram or discard bits can enlarge differences of rounding in a few images.
    assert float(difference.median()) < 1
    assert float(difference.max()) < 6


def test_crops_are_the_same_transformed_together_and_one_by_one(monkeypatch) -> None:
    together = batch_resized_by(dali=False)
    monkeypatch.setattr(train_transform, "_SMALL_SIDE", 0)
    assert torch.equal(together, batch_resized_by(dali=False))


DRAWN_SEED, DRAWN_EPOCH = 5, 1
ON_IMAGE = Data(batch_size=RESIZED, hflip=0.5, vflip=0.5, reprob=0.0, randaugment_on="image")
HISTOGRAM = tuple(each for each in ops.RAND_V1 if each.kind is ops.Kind.HISTOGRAM)


def test_a_crop_outside_the_moved_image_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = operations_of([(ops.TRANSLATE_X, 1.2), (ops.ROTATE, -22.0)], RESIZED, bicubic=True)
    monkeypatch.setattr(loader_module, "draw_operations", lambda *_: drawn)
    images = {f"train/a/{number:02d}.png": smooth(90, 60, seed=number) for number in range(RESIZED)}
    catalog = build_catalog(str(write_images(tmp_path, images)), "train", None)
    batch = only_batch(catalog, None, ON_IMAGE, side=SIDE, seed=DRAWN_SEED, epoch=DRAWN_EPOCH)
    assert np.abs(unnormalised(batch.images) - np.array(FILL)[:, None, None]).max() < 1


def random_crops(number: int) -> tuple[NDArray[np.int32], NDArray[np.int64], Operations]:
    indices, sizes = np.arange(number), np.tile(np.array([375, 500]), (number, 1))
    crops = draw_crops(DRAWN_SEED, DRAWN_EPOCH, indices, sizes, ON_IMAGE).boxes
    return crops, sizes, draw_operations(DRAWN_SEED, DRAWN_EPOCH, indices, ON_IMAGE)


def test_the_decoded_part_is_inside_the_image_and_no_larger_than_needed() -> None:
    crops, sizes, operations = random_crops(3000)
    parts = parts_needed(crops, sizes, operations)
    low, high = parts.boxes[..., :2], parts.boxes[..., :2] + parts.boxes[..., 2:]
    assert (low >= 0).all()
    assert (parts.boxes[..., 2:] > 0).all()
    assert (high <= sizes[:, None]).all()
    assert (parts.boxes[:, -1] == crops).all()
    whole = (parts.decoded[:, 2:] == sizes).all(axis=1)
    counted = np.isin(operations.kinds[:, 0], HISTOGRAM)
    assert whole[counted].all()
    pointwise = ~np.isin(operations.kinds, (*ops.GEOMETRIC, *HISTOGRAM, ops.SHARPNESS)).any(axis=1)
    assert (parts.decoded[pointwise] == crops[pointwise]).all()
    decoded = (parts.decoded[:, 2:].prod(axis=1) / sizes.prod(axis=1)).mean()
    cut = (crops[:, 2:].prod(axis=1) / sizes.prod(axis=1)).mean()
    assert cut < decoded < 0.75


def test_an_operation_of_a_plugin_counts_whole_images(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops.Operation(1000, "Own", ops.Kind.HISTOGRAM, ops.no_argument, ops.EQUALIZE.function)
    monkeypatch.setitem(ops.OPERATIONS, 1000, own)
    crops, sizes, _ = random_crops(4)
    drawn = (operations_of([(kind, 0.0)], 4) for kind in (own, ops.EQUALIZE))
    found, expected = (parts_needed(crops, sizes, operations) for operations in drawn)
    assert (found.decoded == expected.decoded).all()
    assert (found.decoded[:, 2:] == sizes).all()


def test_pixels_that_are_not_decoded_do_not_matter() -> None:
    """Each crop is computed from its decoded part, and cut from the whole image after its operations."""
    crops, sizes, _ = random_crops(60)
    operations = draw_operations(DRAWN_SEED, DRAWN_EPOCH, np.arange(60), ON_IMAGE)
    image = torch.from_numpy(np.asarray(smooth(500, 375, seed=1)).copy()).permute(2, 0, 1)[None]
    parts = parts_needed(crops, sizes, operations)
    whole_images = np.tile(np.array([0, 0, 375, 500], np.int32), (len(crops), 1))
    whole_parts = parts_needed(whole_images, sizes, operations)
    for position, (top, left, height, width) in enumerate(crops.tolist()):
        rows = slice(position, position + 1)
        ours = augment_part(part_of(image, parts, position), operations.of(rows), parts.of(rows))
        whole = augment_part(part_of(image, whole_parts, position), operations.of(rows), whole_parts.of(rows))
        expected = whole[..., top : top + height, left : left + width]
        assert (ours.int() - expected.int()).abs().float().mean() < 0.02


def part_of(image: torch.Tensor, parts: Parts, position: int) -> torch.Tensor:
    top, left, height, width = parts.decoded[position].tolist()
    return image[..., top : top + height, left : left + width]


def augmented_by_pillow(
    path: str, index: int, settings: Data, drawn: Operations, *, seed: int, epoch: int, side: int
) -> NDArray[np.uint8]:
    """Return the image (side, side, 3) before random erasing; `drawn` are the operations of this sample."""
    alone = np.array([index])
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    crop_flip = draw_crops(seed, epoch, alone, np.array([[image.height, image.width]]), settings)
    if crop_flip.flip_horizontal[0]:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if crop_flip.flip_vertical[0]:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if settings.randaugment_on == "image":
        image = Image.fromarray(augmented(image, drawn))
    top, left, height, width = crop_flip.boxes[0].tolist()
    chosen = Image.Resampling.BICUBIC if crop_flip.bicubic[0] else Image.Resampling.BILINEAR
    cut = image.crop((left, top, left + width, top + height)).resize((side, side), chosen)
    return augmented(cut, drawn) if settings.randaugment_on == "crop" else np.asarray(cut)


def augmented(image: Image.Image, drawn: Operations) -> NDArray[np.uint8]:
    colours = np.asarray(image)
    for kind, amount, bicubic in zip(drawn.kinds[0], drawn.arguments[0], drawn.bicubic[0], strict=True):
        if kind != ops.NONE:
            colours = timm_augment(kind, colours, float(amount), bicubic=bool(bicubic))
    return colours

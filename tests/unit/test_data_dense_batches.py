"""Windows of images with masks or boxes: one map, the references' distributions, functions of the seed."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import pytest
import torch
from box_samples import annotation, kolmogorov, rank_alone, write_coco
from box_samples import image as listed
from numpy.typing import NDArray
from nvidia.dali import Pipeline
from PIL import Image

from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Model, Run
from horovod_volo.config.task_settings import Detection, Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.dense import box_loader
from horovod_volo.dense.box_list import BoxList, list_boxes
from horovod_volo.dense.box_loader import BoxTrainLoader, ColorChange, Window, draw_box_plan
from horovod_volo.dense.dense_batches import DenseBatch
from horovod_volo.dense.scene_list import SceneList, find_layout, list_scenes
from horovod_volo.dense.scene_loader import Distortion, ScenePlan, SceneTrainLoader, draw_plan

SETTINGS = Segmentation(scene_size=(256.0, 64.0), photometric=False)
CROP = 64
DATA, RUN = Data(batch_size=4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)), Run(seed=3)
COLORS = torch.tensor([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]])


def painted_mask(random: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    mask = np.zeros((height, width), dtype=np.uint8)
    for label in range(1, len(COLORS)):
        top, left = random.integers(0, height - 12), random.integers(0, width - 12)
        mask[top : top + random.integers(10, height), left : left + random.integers(10, width)] = label
    return mask


def write_scenes(folder: Path, sizes: list[tuple[int, int]]) -> SceneList:
    """Write images whose colours are those of their masks' classes."""
    random = np.random.default_rng(0)
    for kind in ("images", "masks"):
        for split in ("train", "val"):
            (folder / kind / split).mkdir(parents=True)
    for number, size in enumerate(sizes):
        mask = painted_mask(random, *size)
        for kind, pixels in (("images", COLORS.numpy().astype(np.uint8)[mask]), ("masks", mask)):
            Image.fromarray(pixels).save(folder / kind / "train" / f"{number}.png")
    (folder / "classes.txt").write_text("\n".join("abcde"))
    return list_scenes(folder, find_layout(folder), "train")


def batches_of(build: Any, images: Any, side: int, epochs: int, **settings: Any) -> list[DenseBatch]:
    alone = rank_alone(data=DATA, run=RUN, model=Model(img_size=side), **settings)
    with closing(build(images, alone)) as loader:
        return [batch for epoch in range(epochs) for batch in loader.batches(epoch, 0)]


def test_image_and_mask_agree_to_a_pixel(tmp_path: Path) -> None:
    """More than a pixel from the edges of painted rectangles, colours are next to those of their classes."""
    scenes = write_scenes(tmp_path, [(40, 90), (97, 61), (130, 200), (64, 64)] * 2)
    compared = 0
    for batch in batches_of(SceneTrainLoader, scenes, CROP, epochs=5, segmentation=SETTINGS):
        for image, mask in zip(batch.images, *batch.targets, strict=True):
            windows = torch.nn.functional.unfold(mask[None, None].float(), 3, padding=1).view(9, CROP, CROP)
            inner = (windows == mask).all(dim=0) & (mask != IGNORED)
            distances = (image[None] - COLORS.view(-1, 3, 1, 1) / 255).square().sum(dim=1)
            assert (distances.argmin(dim=0) == mask)[inner].all()
            assert (image[:, mask == IGNORED] == 0).all()
            compared += int(inner.sum())
    assert compared > 40_000


def test_masks_take_the_nearest_pixel() -> None:
    """As torch's rule, which is that of DALI."""
    random = np.random.default_rng(0)
    mask = random.integers(0, 255, (37, 53), dtype=np.uint8)
    for scaled in ((91, 20), (37, 53), (64, 130)):
        plan = ScenePlan((37, 53), scaled, (0, 0), scaled, flip=False, distortion=Distortion())
        stored = torch.from_numpy(mask)[None, None].float()
        expected = torch.nn.functional.interpolate(stored, scaled, mode="nearest-exact")
        assert np.array_equal(plan.cut(mask), expected[0, 0].numpy())


def test_crops_are_distributed_as_the_reference_draws_them() -> None:
    """Ratios, offsets and flips of 4,000 plans, by the Kolmogorov-Smirnov distance."""
    mask = np.zeros((80, 120), dtype=np.uint8)
    settings = replace(SETTINGS, class_share=1.0)
    plans = [draw_plan(settings, CROP, mask, 7, 0, sample) for sample in range(4000)]
    random = np.random.default_rng(1)
    expected = []
    for _ in range(4000):
        ratio = random.uniform(0.5, 2.0)
        scale = min(int(256 * ratio) / 120, int(64 * ratio) / 80)
        height, width = int(80 * scale + 0.5), int(120 * scale + 0.5)
        top, left = (random.integers(0, max(side - CROP, 0) + 1) for side in (height, width))
        expected.append((height, width, top, left))
    found = [(*plan.scaled, *plan.corner) for plan in plans]
    for ours, theirs in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
        assert kolmogorov(np.array(ours), np.array(theirs)) < 0.04
    assert 0.47 < np.mean([plan.flip for plan in plans]) < 0.53
    for seed, epoch in ((8, 0), (7, 1)):
        assert draw_plan(settings, CROP, mask, seed, epoch, 0) != plans[0]


def test_crops_of_one_class_are_drawn_again() -> None:
    """The first of eleven crops in which no class has three quarters is taken, or the last."""
    mask = np.zeros((160, 160), dtype=np.uint8)
    mask[:70, :70], mask[100:, :30] = 1, IGNORED
    settings = replace(SETTINGS, scene_size=(160.0, 160.0), resize_range=(1.0, 1.0))
    dull = dict.fromkeys((0.75, 1.0), 0)
    for share in dull:
        for sample in range(300):
            plan = draw_plan(replace(settings, class_share=share), CROP, mask, 0, 0, sample)
            window = plan.cut(mask)
            counts = [int((window == label).sum()) for label in (0, 1)]
            dull[share] += max(counts) >= 0.75 * sum(counts)
    chance = dull[1.0] / 300
    assert 0.5 < chance < 0.95
    assert abs(dull[0.75] / 300 - chance**11) < 0.1


PLAIN = Detection(hue=0.0)
SIDE = 96
CHANNEL_OF_CLASS = {1: 0, 2: 1, 3: 2}  # the painted colours: red, green, blue


def painted(folder: Path, count: int = 24) -> BoxList:
    """Write images with a box of each class, which do not overlap."""
    drawn = np.random.default_rng(0)
    images, boxes = [], []
    for number in range(count):
        width, height = drawn.integers(60, 200, 2).tolist()
        images.append(listed(number, width, height))
        for part, category in enumerate((1, 18, 90)):
            third = width // 3
            left, right = (part * third + np.sort(drawn.choice(third - 1, 2, replace=False))).tolist()
            top, bottom = np.sort(drawn.choice(height - 1, 2, replace=False)).tolist()
            boxes.append(annotation(number, (left, top, right - left + 1, bottom - top + 1), category))
    write_coco(folder, images, boxes)
    return list_boxes(folder, "train")


def test_painted_boxes_and_their_pixels_agree_to_a_pixel(tmp_path, monkeypatch):
    monkeypatch.setattr(box_loader, "_RANGES", ((1.0, 1.0),) * 3)
    compared, cut = 0, 0
    for batch in batches_of(BoxTrainLoader, painted(tmp_path), SIDE, epochs=6, detection=PLAIN):
        for pixels, boxes, classes in zip(batch.images, *batch.targets, strict=True):
            for box, kind in zip(boxes, classes.tolist(), strict=True):
                if kind == 0:
                    continue
                channel = CHANNEL_OF_CLASS[kind]
                others = [other for other in range(3) if other != channel]
                inside = (pixels[channel] > 0.745) & (pixels[others].amax(dim=0) < 0.255)
                if (box[2:] - box[:2]).min() * SIDE < 3:  # too thin to have a pixel of pure colour
                    continue
                rows, columns = torch.nonzero(inside, as_tuple=True)
                found = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
                assert (torch.tensor(found) - box * SIDE).abs().max() <= 1.0
                compared += 1
                cut += bool((box == 0).any() or (box == 1).any())
    assert compared > 250
    assert cut > 40


def test_images_without_boxes_are_whole_and_their_rows_are_zero(tmp_path: Path) -> None:
    write_coco(tmp_path, [listed(number, 50, 40) for number in range(4)], [annotation(2, (5, 5, 20, 20))])
    images = list_boxes(tmp_path, "train")
    (batch,) = batches_of(BoxTrainLoader, images, SIDE, epochs=1, detection=PLAIN)
    empty = batch.indices != 2
    boxes, classes = batch.targets
    assert boxes.shape == (4, 1, 4)
    assert not boxes[torch.from_numpy(empty)].any()
    assert classes.squeeze(1).tolist() == [0 if each else 1 for each in empty]
    plan = draw_box_plan(PLAIN, (40, 50), np.zeros((0, 4)), 0, 0, 0)
    assert plan.window == Window(0, 0, 40, 50)


def reference_window(boxes: NDArray[np.float64], draws: random.Random) -> tuple[float, ...]:
    """Return SSD's window as in the reference: left, top, right, bottom as fractions, in a plain loop."""
    while True:
        limit = draws.choice((None, 0.1, 0.3, 0.5, 0.7, 0.9, -1.0))
        if limit is None:
            return 0.0, 0.0, 1.0, 1.0
        width, height = draws.uniform(0.3, 1), draws.uniform(0.3, 1)
        if width / height < 0.5 or width / height > 2:
            continue
        left, top = draws.uniform(0, 1 - width), draws.uniform(0, 1 - height)
        window = np.array([left, top, left + width, top + height])
        corner = np.maximum(boxes[:, :2], window[:2])
        common = (np.minimum(boxes[:, 2:], window[2:]) - corner).clip(0).prod(axis=1)
        union = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + width * height - common
        if not (common / union > limit).all():
            continue
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        if ((centres > window[:2]) & (centres < window[2:])).all(axis=1).any():
            return tuple(window)


def properties(window: tuple[float, ...], boxes: NDArray[np.float64]) -> list[float]:
    left, top, right, bottom = window
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    kept = ((centres > window[:2]) & (centres < window[2:])).all(axis=1).sum()
    width, height = right - left, bottom - top
    return [width * height, width / height, left, top, float(kept)]


@pytest.mark.parametrize("count", [1, 3])
def test_windows_have_the_distribution_of_the_reference(count: int) -> None:
    size, samples = (1000, 1600), 4000
    boxes = np.array([[0.1, 0.2, 0.6, 0.7], [0.5, 0.5, 0.8, 0.95], [0.3, 0.05, 0.5, 0.4]])[:count]
    scale = np.array([size[1], size[0]] * 2)
    draws = random.Random(0)
    expected = np.array([properties(reference_window(boxes, draws), boxes) for _ in range(samples)])
    found = []
    for sample in range(samples):
        top, left, height, width = draw_box_plan(Detection(), size, boxes * scale, 7, 0, sample).window
        window = np.array([left, top, left + width, top + height]) / scale
        found.append(properties(tuple(window), boxes))
    # At the level of 0.1 % the distance of two such samples is below 0.0436.
    names = ("area", "shape", "left", "top", "kept")
    for name, ours, theirs in zip(names, np.array(found).T, expected.T, strict=True):
        ours, theirs = (each.round(2) for each in (ours, theirs))  # whole pixels
        assert kolmogorov(ours, theirs) < 0.0436, name


def test_flips_and_colours_are_drawn_evenly() -> None:
    boxes = np.array([[10.0, 10.0, 30.0, 30.0]])
    plans = [draw_box_plan(Detection(), (50, 50), boxes, 1, 2, sample) for sample in range(2000)]
    assert 0.46 < np.mean([plan.flip for plan in plans]) < 0.54
    for seed, epoch in ((2, 2), (1, 3)):
        assert draw_box_plan(Detection(), (50, 50), boxes, seed, epoch, 0).colors != plans[0].colors
    ranges = {
        "hue": (-18, 18),
        "saturation": (0.5, 1.5),
        "contrast": (0.5, 1.5),
        "brightness": (0.875, 1.125),
    }
    for name, (low, high) in ranges.items():
        values = np.array([getattr(plan.colors, name) for plan in plans])
        assert low <= values.min() < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < values.max() <= high
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.03 * (high - low))


@pytest.mark.parametrize(
    "change",
    [
        ColorChange(hue=-40.0),
        ColorChange(saturation=1.5),
        ColorChange(saturation=0.5, hue=10.0),
        ColorChange(contrast=0.5),
        ColorChange(contrast=1.4, brightness=0.875),
    ],
)
def test_colours_change_as_in_dali(change: ColorChange) -> None:
    pixels = np.random.default_rng(0).integers(60, 190, (64, 64, 3)).astype(np.uint8)
    mapped = np.clip(pixels @ change.affine()[:, :3].T + change.affine()[:, 3], 0, 255)
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    with pipeline:
        images = fn.external_source(source=lambda: [pixels], ndim=3, layout="HWC")
        images = fn.hsv(images, hue=change.hue, saturation=change.saturation)
        factors = {"brightness": change.brightness, "contrast": change.contrast}
        pipeline.set_outputs(fn.brightness_contrast(images, contrast_center=128.0, **factors))
    pipeline.build()
    (result,) = pipeline.run()
    # DALI rounds twice, and to whole levels.
    difference = np.abs(mapped - np.array(result.as_array())[0])
    assert difference.max() < 2.5
    assert difference.mean() < 0.6

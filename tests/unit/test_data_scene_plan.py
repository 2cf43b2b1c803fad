"""Windows of images and masks: one geometry, mmsegmentation's distributions, functions of the seed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from box_samples import kolmogorov, rank_alone
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.config.data_settings import Data
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.data.image_decoder import Normalization
from horovod_volo.data.ordered_batches import OrderOfRank
from horovod_volo.dense.dense_batches import DenseBatch
from horovod_volo.dense.scene_list import SceneList, find_layout, list_scenes
from horovod_volo.dense.scene_loader import Distortion, ScenePlan, SceneTrainLoader, draw_plan

SETTINGS = Segmentation(scene_size=(256.0, 64.0), photometric=False)
CROP = 64
COLORS = torch.tensor([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]])


def painted(random: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Return a mask of a few large rectangles."""
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
        mask = painted(random, *size)
        Image.fromarray(COLORS.numpy().astype(np.uint8)[mask]).save(
            folder / "images" / "train" / f"{number}.png"
        )
        Image.fromarray(mask).save(folder / "masks" / "train" / f"{number}.png")
    (folder / "classes.txt").write_text("\n".join("abcde"))
    return list_scenes(folder, find_layout(folder), "train")


def batches(scenes: SceneList, settings: Segmentation, epochs: int = 1, **changes: Any) -> list[DenseBatch]:
    order = {"seed": 3, "rank": 0, "size": 1, "accumulation": 1} | changes
    plain = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    loader = SceneTrainLoader(
        scenes, Data(batch_size=4), settings, CROP, OrderOfRank(**order), rank_alone(plain)
    )
    with closing(loader):
        return [batch for epoch in range(epochs) for batch in loader.batches(epoch, 0)]


def test_image_and_mask_agree_to_a_pixel(tmp_path: Path) -> None:
    """More than a pixel from the edges of painted rectangles, colours are next to those of their classes."""
    scenes = write_scenes(tmp_path, [(40, 90), (97, 61), (130, 200), (64, 64)] * 2)
    found = batches(scenes, SETTINGS, epochs=5)
    compared = 0
    for batch in found:
        for image, mask in zip(batch.images, *batch.targets, strict=True):
            windows = torch.nn.functional.unfold(mask[None, None].float(), 3, padding=1).view(9, CROP, CROP)
            inner = (windows == mask).all(dim=0) & (mask != IGNORED)
            distances = (image[None] - COLORS.view(-1, 3, 1, 1) / 255).square().sum(dim=1)
            assert (distances.argmin(dim=0) == mask)[inner].all()
            assert (image[:, mask == IGNORED] == 0).all()
            compared += int(inner.sum())
    assert compared > 40_000


def test_a_batch_is_a_function_of_seed_epoch_and_step(tmp_path: Path) -> None:
    scenes = write_scenes(tmp_path, [(40, 90), (97, 61), (130, 200), (64, 64)] * 2)
    settings = replace(SETTINGS, photometric=True)
    first, again, other = (batches(scenes, settings, seed=seed) for seed in (1, 1, 2))
    for one, two, three in zip(first, again, other, strict=True):
        assert torch.equal(one.images, two.images)
        assert torch.equal(*one.targets, *two.targets)
        assert not torch.equal(one.images, three.images)
    # Two ranks see what one would have seen.
    of_ranks = [batches(scenes, settings, seed=1, rank=rank, size=2) for rank in (0, 1)]
    seen = {
        int(index): image for batch in first for index, image in zip(batch.indices, batch.images, strict=True)
    }
    for batch in (batch for rank in of_ranks for batch in rank):
        for index, image in zip(batch.indices, batch.images, strict=True):
            assert torch.equal(image, seen[int(index)])


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

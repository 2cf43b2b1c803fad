"""A teacher's images are resized to a square without cropping; damaged ones are left out and reported."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from coded_images import smooth, write_images
from PIL import Image

from horovod_volo.cluster.world import RankResources
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.labelling.generate import TeacherImages

SIDE = 48
SIZES = [(90, 40), (33, 70), (64, 64), (120, 61), (50, 50), (47, 31), (200, 100), (31, 90), (55, 44)]


@pytest.fixture
def folder(tmp_path):
    images = {f"train/a/{n}.png": smooth(*size, seed=n) for n, size in enumerate(SIZES)}
    return write_images(tmp_path, images)


def opened(folder, batch=2):
    catalog = build_catalog(str(folder), "train", None)
    images = TeacherImages(catalog, SIDE, batch, RankResources(torch.device("cpu"), 2, ""))
    return closing(images)


def pixels_by_index(images, indices):
    found = {}
    for batch_indices, pixels in images.pixels(indices):
        found |= dict(zip(batch_indices, 255 * pixels.numpy(), strict=True))
    return found


def test_pixels_equal_pils(folder):
    with opened(folder) as images:
        for indices in (range(4), range(4, 9)):  # pixels() can be called again
            found = pixels_by_index(images, indices)
            assert list(found) == list(indices)
            for index, pixels in found.items():
                with Image.open(folder / f"train/a/{index}.png") as image:
                    resized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                assert np.abs(pixels - np.asarray(resized).transpose(2, 0, 1)).mean() < 0.35
        assert images.bad_samples.new_messages() == []


@pytest.mark.parametrize("batch", [1, 2, 4, 20])
def test_damaged_images_are_left_out_and_reported(folder, batch):
    with opened(folder, batch) as images:
        whole = pixels_by_index(images, range(9))
    damaged = {0: b"", 3: b"no image at all", 4: (folder / "train/a/4.png").read_bytes()[:60], 8: None}
    for index, content in damaged.items():
        path = folder / f"train/a/{index}.png"
        if content is not None:
            path.write_bytes(content)
    with opened(folder, batch) as images:
        (folder / "train/a/8.png").unlink()
        found = pixels_by_index(images, range(9))
        problems = images.bad_samples.new_messages()
    assert list(found) == [1, 2, 5, 6, 7]
    for index, pixels in found.items():
        assert np.array_equal(pixels, whole[index])
    assert sorted(problem.split(".png")[0][-1] for problem in problems) == ["0", "3", "4", "8"]


def test_only_damaged_images_give_no_batch(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    for number in range(5):
        (tmp_path / "train" / "a" / f"{number}.jpg").write_bytes(b"no image")
    with opened(tmp_path) as images:
        assert pixels_by_index(images, range(5)) == {}
        assert len(images.bad_samples.new_messages()) == 5

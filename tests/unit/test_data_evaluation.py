"""Evaluation images equal those of timm's evaluation transform, including black borders."""

from contextlib import closing

import numpy as np
import pytest
from coded_images import smooth, unnormalised, write_images
from image_loaders import eval_loader
from PIL import Image

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
from timm.data import create_transform

from horovod_volo.config.data_settings import Data
from horovod_volo.data.images.catalog import build_catalog

# width, height
SIZES = [(300, 200), (199, 301), (91, 61), (64, 64), (40, 57), (500, 375), (224, 225), (33, 160)]


def evaluated(folder, *, batch_size=3, **options):
    """Return the catalog and all batches of one rank."""
    catalog = build_catalog(str(folder), "val", None)
    with closing(eval_loader(catalog, Data(batch_size=1, eval_batch_size=batch_size), **options)) as loader:
        return catalog, list(loader)


def timm_pixels(file, image_size, crop_pct, interpolation, crop_mode):
    """Return timm's pixels (3, height, width) of a file, and the mask of its black border."""
    transform = create_transform(
        image_size,
        is_training=False,
        interpolation=interpolation,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        normalize=False,
    )
    with Image.open(file) as image:
        white = Image.new("RGB", image.size, "white")
        return transform(image.convert("RGB")).numpy().astype(float), transform(white)[0].numpy() == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    images = {f"val/a/{n}.png": smooth(*size, seed=n) for n, size in enumerate(SIZES)}
    return write_images(tmp_path_factory.mktemp("images"), images)


@pytest.mark.parametrize("image_size", [64, 224])
@pytest.mark.parametrize("crop_pct", [0.875, 0.96, 1.0, 1.15])
@pytest.mark.parametrize(
    ("interpolation", "crop_mode"), [("bicubic", "center"), ("bilinear", "center"), ("bicubic", "squash")]
)
def test_pixels_equal_timms(folder, image_size, crop_pct, interpolation, crop_mode):
    """With timm's crop_mode "squash" both sides are resized to the same length before the crop."""
    how = {"crop_pct": crop_pct, "interpolation": interpolation, "crop_mode": crop_mode}
    catalog, batches = evaluated(folder, image_size=image_size, **how)
    ours = np.concatenate([unnormalised(batch.images) for batch in batches])
    assert len(ours) == len(SIZES)
    for index, pixels in enumerate(ours):
        theirs, border = timm_pixels(catalog.location(index), image_size, **how)
        difference = np.abs(pixels - theirs)
        assert difference.mean() < 0.35
        assert difference.max() < 1.01  # one level, where PIL rounds the other way
        assert border.any() == (crop_pct > 1)
        assert np.abs(pixels[:, border]).max(initial=0) < 1e-3


@pytest.mark.parametrize("size", [1, 3, 9])
def test_all_ranks_together_read_each_image_once(folder, size):
    indices = []
    for rank in range(size):
        _, batches = evaluated(folder, image_size=32, crop_pct=1.0, rank=rank, size=size)
        assert all(len(batch.images) == len(batch.classes) == len(batch.indices) for batch in batches)
        assert [len(batch.indices) for batch in batches[:-1]] == [3] * (len(batches) - 1)
        indices += [index for batch in batches for index in batch.indices]
    assert sorted(indices) == list(range(len(SIZES)))

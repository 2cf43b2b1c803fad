"""Evaluation images and their predictions are those of timm, on any number of ranks."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coded_images import eval_loader, smooth, unnormalised, write_images
from numpy.typing import NDArray
from PIL import Image
from published_augment import timm_pixels
from torch import nn

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import IMAGENET_MEAN, IMAGENET_STD
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.engine.accuracy import ImageScores
from horovod_volo.evaluation.predictions import predict
from horovod_volo.models.pretrained import PretrainedModel

# width, height
SIZES = [(300, 200), (199, 301), (91, 61), (64, 64), (40, 57), (500, 375), (224, 225), (33, 160)]


def evaluated(folder, *, batch_size=3, **options):
    catalog = build_catalog(str(folder), "val", None)
    with closing(eval_loader(catalog, Data(batch_size=1, eval_batch_size=batch_size), **options)) as loader:
        return catalog, list(loader)


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


SIDE, CROP_PCT, CLASSES = 32, 0.6, 7
CROPPED = ((90, 60), (60, 90), (64, 64), (120, 41), (53, 57))  # resized to a shorter side of 53
CPU = torch.device("cpu")


class Linear(nn.Module):
    """Logits that depend on every pixel's place and colour, and on no other image: not even by rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.randn(3 * SIDE * SIDE, CLASSES, generator=torch.Generator().manual_seed(0)) / 8

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.flatten(1).double() @ self.weights.double()).float()


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    images = {f"val/{'ab'[n % 2]}/{n}.png": smooth(*size, seed=n) for n, size in enumerate(CROPPED)}
    return build_catalog(str(write_images(tmp_path_factory.mktemp("images"), images)), "val", None)


def probabilities_by_hand(path: str) -> NDArray[np.float64]:
    """Return the probabilities of the crop that timm takes."""
    pixels, _ = timm_pixels(path, SIDE, crop_pct=CROP_PCT)
    image = torch.from_numpy(pixels.astype(np.float32))[None] / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    return np.asarray(Linear()((image - mean) / std).double().softmax(dim=1)[0])


def test_the_counts_are_the_same_on_any_number_of_ranks(catalog: Catalog) -> None:
    counts = []
    for size in (1, 3, len(CROPPED) + 2):  # so that two have none
        scores = ImageScores(CPU)
        for rank in range(size):
            ranks = {"rank": rank, "size": size}
            with closing(eval_loader(catalog, Data(batch_size=2), crop_pct=CROP_PCT, **ranks)) as opened:
                for batch in opened:
                    scores.add(batch, Linear()(batch.images))
        counts.append(scores.gather(catalog, World.single())[0])
    for others in counts[1:]:
        assert counts[0]._replace(loss_sum=0) == others._replace(loss_sum=0)
        assert counts[0].loss_sum == pytest.approx(others.loss_sum, rel=1e-6)
    assert counts[0].images == len(catalog)
    wanted = [
        -np.log(probabilities_by_hand(catalog.location(index))[target])
        for index, target in enumerate(catalog.targets.tolist())
    ]
    assert counts[0].loss_sum == pytest.approx(sum(wanted), rel=0.02)


def test_a_prediction_of_files_is_that_of_an_evaluation(catalog: Catalog, tmp_path: Path) -> None:
    statistics = (IMAGENET_MEAN, IMAGENET_STD)
    trained = PretrainedModel(Linear(), "none", SIDE, CLASSES, CROP_PCT, *statistics, "bicubic", [])
    files = [Path(catalog.location(index)) for index in range(len(catalog))]
    how: dict[str, Any] = {"top": CLASSES, "crop_pct": 0.0, "batch_size": 2, "precision": "fp32"}
    line, bad = tmp_path / "line.png", list[str]()
    Image.new("L", (65_500, 1)).save(line)
    found = dict(predict(trained, [*files, line], bad, **how))
    (message,) = bad
    assert message.startswith(f"{line} has more than 100 million pixels when it is resized")
    assert list(found) == list(range(len(files)))
    assert dict(predict(trained, [bytearray(files[0].read_bytes())], bad, **how))[0] == found[0]
    with pytest.raises(UserError, match=r"image 0 is an array of shape \(9,\) .* Give \(height, width, 3\)"):
        list(predict(trained, [np.zeros(9, np.uint8)], bad, **how))
    for number, file in enumerate(files):
        wanted, shares = probabilities_by_hand(str(file)), dict(found[number])
        assert [shares[f"class {number}"] for number in range(CLASSES)] == pytest.approx(wanted, abs=1e-4)

"""Images decoded, augmented and normalised on a device equal those of the CPU; kernels equal the operators.

On the CPU the kernels run in Triton's interpreter, which must be enabled before Triton is first imported:
test_kernel_choice.py starts a separate process for these cases.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_process import INTERPRETED, skip_elsewhere
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core import operators
from horovod_volo.core.batch import EvalBatch, TrainBatch
from horovod_volo.core.operators import use_kernels
from horovod_volo.data.augmentation import color_ops, geometric_ops
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import augment_, augment_part, parts_needed
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.policy import Operations, draw_operations
from horovod_volo.data.augmentation.random_erasing import NOISE_LENGTH, Eraser, Erasures, draw_erasures
from horovod_volo.data.image_decoder import IMAGENET_STD
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.kernels import augment
from horovod_volo.token_labels.source import open_labels

# Of 255 levels, averaged over all images. In training the decoder on the GPU repeats chroma rows and columns,
# and that on the CPU interpolates, a difference of 1.3 for such images. In evaluation both interpolate, and
# only rounding differs. The CPU is compared with itself.
LARGEST_MEAN_DIFFERENCE = {
    ("cpu", "train"): 0.0,
    ("cpu", "val"): 0.0,
    ("cuda", "train"): 2.0,
    ("cuda", "val"): 1.0,
}

# No operations, which would enlarge small differences; they are compared below.
DECODED = Data(batch_size=6, vflip=0.5, train_interpolation="bicubic", aa="", color_jitter=0.0, reprob=0.0)
CPU = torch.device("cpu")

SIZES: dict[str, Any] = {"image_size": 64, "rank": 0, "size": 1, "threads": 2}

BatchesOf = Callable[[Path, torch.device], list[TrainBatch] | list[EvalBatch]]


def train_batches(folder: Path, device: torch.device, settings: Data = DECODED) -> list[TrainBatch]:
    catalog = build_catalog(str(folder), "train", None)
    labels = open_labels(str(folder / "token_labels"), catalog, None)
    loader = TrainLoader(catalog, labels, settings, seed=3, accumulation=1, device=device, **SIZES)
    with closing(loader):
        return list(loader.batches(0, 0))


def eval_batches(folder: Path, device: torch.device) -> list[EvalBatch]:
    catalog = build_catalog(str(folder), "val", None)
    with closing(EvalLoader(catalog, DECODED, crop_pct=0.9, device=device, **SIZES)) as loader:
        return list(loader)


def classes_of(batch: TrainBatch | EvalBatch) -> Tensor:
    return batch.classes if isinstance(batch, EvalBatch) else batch.labels.classes


def mean_difference(images: Tensor, expected: Tensor) -> float:
    """Return the mean difference in levels of 255 of normalised images (batch, 3, height, width)."""
    by_channel = (images - expected).abs().mean(dim=(0, 2, 3))  # (3,)
    return float(255 * (by_channel * torch.tensor(IMAGENET_STD)).mean())


# Torch resizes each image, as it does after operations on whole images.
in_whole_images = partial(train_batches, settings=replace(DECODED, randaugment_on="image"))


@pytest.mark.parametrize(
    ("split", "batches_of"), [("train", train_batches), ("train", in_whole_images), ("val", eval_batches)]
)
def test_images_equal_the_cpus(images: Path, device: torch.device, split: str, batches_of: BatchesOf) -> None:
    expected = batches_of(images, CPU)
    found = batches_of(images, device)
    for batch, other in zip(found, expected, strict=True):
        assert batch.images.device == classes_of(batch).device == device
        assert batch.indices.tolist() == other.indices.tolist()
        assert classes_of(batch).tolist() == classes_of(other).tolist()
        for name in ("scores", "ids", "boxes") if split == "train" else ():
            maps, of_other = getattr(batch.labels.maps, name), getattr(other.labels.maps, name)
            assert maps.device == device
            assert torch.equal(maps.cpu(), of_other)
    pixels = torch.cat([batch.images.cpu() for batch in found])
    expected_pixels = torch.cat([batch.images for batch in expected])
    assert mean_difference(pixels, expected_pixels) <= LARGEST_MEAN_DIFFERENCE[device.type, split]
    # The difference between two different images is far above the bound.
    assert mean_difference(pixels, expected_pixels.roll(1, dims=0)) > 10


if INTERPRETED:  # fewer programs with larger tiles, because they run one after the other
    augment._BLOCK = 2**13
SIDE, IMAGES = 64, 256
SETTINGS = Data(aa="rand-m9-n3-p0.7-mstd0.5-inc1", reprob=0.5)
KERNELS_CASES = 7  # number of tests of kernels on one device


def test_operations_equal_the_cpus(device: torch.device) -> None:
    waves = torch.rand(IMAGES, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(255 * waves, (SIDE, SIDE), mode="bilinear").to(torch.uint8)
    operations = draw_operations(1, 0, np.arange(IMAGES), SETTINGS)
    assert set(np.unique(operations.kinds)) == {ops.NONE, *ops.RAND_V1}
    batched = images.clone().to(device)
    augment_(batched, operations)
    alone = images.clone()
    for place in range(IMAGES):
        augment_(alone[place : place + 1], operations.of(slice(place, place + 1)))
    difference = (batched.cpu().int() - alone.int()).abs().float()
    assert difference.mean() <= (0.0 if device.type == "cpu" else 0.5)
    assert (alone.int() - images.int()).abs().float().mean() > 20


def test_operations_before_the_crop_equal_the_cpus(device: torch.device) -> None:
    waves = torch.rand(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    image = torch.nn.functional.interpolate(255 * waves, (90, 120), mode="bilinear").to(torch.uint8)
    indices, sizes = np.arange(IMAGES), np.tile(np.array([90, 120]), (IMAGES, 1))
    operations = draw_operations(1, 0, indices, SETTINGS)
    parts = parts_needed(draw_crops(1, 0, indices, sizes, SETTINGS).boxes, sizes, operations)
    differences = []
    for place, (top, left, height, width) in enumerate(parts.decoded.tolist()):
        part = image[..., top : top + height, left : left + width]
        rows = slice(place, place + 1)
        alone = operations.of(rows), parts.of(rows)
        crop, expected = augment_part(part.to(device), *alone), augment_part(part, *alone)
        differences.append(float((crop.cpu().int() - expected.int()).abs().float().mean()))
    assert np.mean(differences) <= (0.0 if device.type == "cpu" else 0.5)


def test_erased_boxes_equal_the_cpus(device: torch.device) -> None:
    drawn = draw_erasures(1, 0, np.arange(IMAGES), SETTINGS, SIDE)
    expected = torch.zeros(IMAGES, 3, SIDE, SIDE)
    Eraser(1, SETTINGS, SIDE, torch.device("cpu")).erase_(expected, drawn)
    found = torch.zeros(IMAGES, 3, SIDE, SIDE, device=device)
    Eraser(1, SETTINGS, SIDE, device).erase_(found, drawn)
    assert expected.any()
    assert torch.equal(found.cpu(), expected)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Use the kernels on the CPU too, and torch's form of what Pillow does there."""
    skip_elsewhere(device)
    monkeypatch.setattr(operators, "_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(operators, "_used", {"augmentation"})
    monkeypatch.setattr(
        geometric_ops,
        "_rotate_by_pillow",
        lambda images, matrices, shape: geometric_ops.rotate_by_torch(images, matrices, shape, bicubic=True),
    )


def drawn_images(count: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Draw images whose channels differ in range; one channel of the first has a single color."""
    random = torch.Generator().manual_seed(sum(shape))
    waves = torch.rand(count, 3, 7, 9, generator=random) * torch.tensor([255.0, 190.0, 120.0]).view(3, 1, 1)
    images = torch.nn.functional.interpolate(waves, shape, mode="bicubic")
    images += 20 * torch.rand(images.shape, generator=random)
    images[0, 1] = 77
    return images.clamp(0, 255).to(device, torch.uint8)


def by_operators(images: Tensor, operations: Operations) -> Tensor:
    images = images.clone()
    use_kernels(())
    augment_(images, operations)
    use_kernels(["augmentation"])
    return images


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("shape", [(45, 38), (121, 96)], ids=str)
def test_kernels_equal_the_operators(device: torch.device, shape: tuple[int, int]) -> None:
    """Each operation with the smallest and largest arguments that policies draw, on separate images."""
    # Programs are slow in the interpreter: fewer on large images.
    levels = np.array([0.0, 0.37, 1.0] if shape[0] < 50 else [0.9])
    for operation in ops.RAND_V1:
        signs = ((np.full(len(levels), -1.0), True), (np.full(len(levels), 1.0), False))
        of_signs = [operation.argument(levels, sign, increasing) for sign, increasing in signs]
        arguments = np.concatenate(of_signs).astype(np.float32)[:, None]
        images = drawn_images(len(arguments), shape, device)
        for bicubic in (False, True) if operation.kind is ops.Kind.GEOMETRIC else (False,):
            kinds = np.full(arguments.shape, int(operation))
            operations = Operations(kinds, arguments, np.full(arguments.shape, bicubic))
            found = images.clone()
            augment_(found, operations)
            difference = (found.int() - by_operators(images, operations).int()).abs()
            where = operation.name, bicubic
            if operation.kind is ops.Kind.GEOMETRIC:
                # PyTorch fuses some multiplications and additions, which shows where a color is constant.
                assert difference.max() <= 1, where
                assert (difference[1:] > 0).float().mean() <= 0.02, where
            else:
                assert not difference.any(), where


@pytest.mark.usefixtures("_kernels")
def test_layers_and_operations_of_plugins(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers follow each other, an odd number of them too, and a plugin's operation has its own function."""
    for number, function in ((1001, lambda images, _: images // 2), (1002, color_ops.invert)):
        entry = ops.Operation(number, f"Plugins{number}", ops.Kind.COLOR, ops.INVERT.argument, function)
        monkeypatch.setitem(ops.OPERATIONS, number, entry)
    drawn = draw_operations(1, 0, np.arange(24), SETTINGS)
    kinds = drawn.kinds.copy()
    kinds[::5, 1], kinds[1::5, 2] = 1001, 1002
    operations = replace(drawn, kinds=kinds)
    images = drawn_images(len(kinds), (33, 33), device)
    found = images.clone()
    augment_(found, operations)
    expected = by_operators(images, operations)
    assert (found.int() - expected.int()).abs().float().mean() <= 0.02
    colors = ~operations.geometric
    assert torch.equal(found[colors], expected[colors])
    nothing = found.clone()
    without_layers = (part[:, :0] for part in (operations.kinds, operations.arguments, operations.bicubic))
    augment_(found, Operations(*without_layers))
    assert torch.equal(found, nothing)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_normalizing_and_erasing_equal_the_operators(device: torch.device, mode: str) -> None:
    settings = replace(SETTINGS, remode=mode, recount=3, reprob=0.7)
    drawn = draw_erasures(1, 0, np.arange(12), settings, SIDE)
    eraser = Eraser(1, settings, SIDE, device)
    mean, std = (
        torch.tensor(values, device=device).view(3, 1, 1)
        for values in ([124.1, 116.3, 104.0], [58.4, 57.1, 57.4])
    )
    pixels = drawn_images(12, (SIDE, SIDE), device)
    expected = pixels.float().sub_(mean).div_(std)
    untouched = expected.clone()
    eraser.erase_(expected, drawn)
    assert not torch.equal(expected, untouched)
    assert torch.equal(eraser.normalize(pixels, mean, std, drawn), expected)


@pytest.mark.usefixtures("_kernels")
def test_kernels_equal_the_operators_on_the_largest_box(device: torch.device) -> None:
    """The noise of a box that begins last and covers a third of a large image."""
    side, height = 1536, 890
    drawn = Erasures(np.array([[[7, 9, height, height]]]), np.array([[NOISE_LENGTH - 1]]))
    eraser = Eraser(1, SETTINGS, side, device)
    pixels = torch.zeros(1, 3, side, side, dtype=torch.uint8, device=device)
    mean, std = torch.zeros(3, 1, 1, device=device), torch.ones(3, 1, 1, device=device)
    found = eraser.normalize(pixels, mean, std, drawn)
    expected = pixels.float()
    eraser.erase_(expected, drawn)
    assert torch.equal(found, expected)

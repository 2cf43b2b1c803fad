"""Crops, RandAugment, colour jitter and erasing: distributed as in timm and torchvision, equal to Pillow."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from box_samples import kolmogorov
from coded_images import noisy
from numpy.typing import NDArray
from published_augment import NAMES, SPELLING, operations_of, record_draws, timm_augment, timm_erasing
from torchvision.transforms import RandomResizedCrop

from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation import color_ops
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation import policy as policies
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL, rotate_by_torch
from horovod_volo.data.augmentation.operations import source_matrices
from horovod_volo.data.augmentation.random_erasing import NOISE_LENGTH, Eraser, Erasures, draw_erasures

SIDE = 96
DRAWS = 6000
# Kolmogorov-Smirnov distance that two samples of 6,000 from one distribution exceed once in a thousand times.
SAME_DISTRIBUTION = 1.95 * np.sqrt(2 / DRAWS)
ARGUMENTS = {
    ops.AUTO_CONTRAST: (0.0,),
    ops.EQUALIZE: (0.0,),
    ops.INVERT: (0.0,),
    ops.ROTATE: (-27.0,),
    ops.POSTERIZE: (1.0,),
    ops.SOLARIZE: (26.0,),
    ops.SOLARIZE_ADD: (99.0,),
    ops.COLOR: (0.19, 1.81),
    ops.CONTRAST: (0.19, 1.81),
    ops.BRIGHTNESS: (0.19, 1.81),
    ops.SHARPNESS: (0.19, 1.81),
    ops.SHEAR_X: (0.27,),
    ops.SHEAR_Y: (-0.27,),
    ops.TRANSLATE_X: (-0.4,),
    ops.TRANSLATE_Y: (0.4,),
}


def photographs() -> list[NDArray[np.uint8]]:
    """Return three images without the darkest and brightest levels, so that every operation changes them."""
    return [np.uint8(20 + 0.8 * np.asarray(noisy(SIDE, SIDE, seed))) for seed in range(3)]


def as_batch(images: list[NDArray[np.uint8]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("kind", list(ARGUMENTS))
def test_an_operation_equals_pillows(kind: ops.Operation, bicubic: bool) -> None:
    photos = photographs()
    for amount in ARGUMENTS[kind]:
        ours = as_batch(photos)
        augment_(ours, operations_of([(kind, amount)], len(photos), bicubic=bicubic))
        theirs = as_batch([timm_augment(kind, photo, amount, bicubic=bicubic) for photo in photos])
        assert (ours.int() - theirs.int()).abs().float().mean() <= 0.01
        change = (theirs.int() - as_batch(photos).int()).abs().float()
        assert change.mean() > 3


def test_the_bicubic_rotation_for_gpus_equals_pillows() -> None:
    """This is the code for GPUs; on the CPU the loader rotates with Pillow."""
    photos = photographs()
    angles = np.array([-27.0, 14.0, 3.0], dtype=np.float32)
    sizes = np.full((3, 2), SIDE)
    matrices = source_matrices(np.full(3, ops.ROTATE), angles, sizes)
    ours = rotate_by_torch(as_batch(photos), matrices, (SIDE, SIDE), bicubic=True)
    for image, photo, angle in zip(ours, photos, angles.tolist(), strict=True):
        theirs = timm_augment(ops.ROTATE, photo, angle, bicubic=True)
        filled = torch.from_numpy((theirs == FILL).all(axis=-1)).float()
        shown = torch.nn.functional.max_pool2d(filled[None], 3, 1, padding=1)[0] == 0  # (side, side)
        assert shown.float().mean() > 0.3
        assert (image.int() - as_batch([theirs])[0].int()).abs()[:, shown].max() <= 1


def test_posterizing_to_no_bits_is_black_and_one_colour_is_not_stretched() -> None:
    flat = torch.full((1, 3, SIDE, SIDE), 77, dtype=torch.uint8)
    for kind, expected in ((ops.POSTERIZE, 0 * flat), (ops.AUTO_CONTRAST, flat), (ops.EQUALIZE, flat)):
        ours = flat.clone()
        augment_(ours, operations_of([(kind, 0.0)], 1))
        assert torch.equal(ours, expected)


def test_operations_have_the_frequencies_and_strengths_of_timms() -> None:
    random.seed(1)
    np.random.seed(1)
    drawn_by_timm = record_draws(DRAWS)
    drawn = policies.draw_operations(3, 1, np.arange(DRAWS), Data(aa=SPELLING))
    for kind in ops.RAND_V1:
        name = NAMES[kind]
        theirs = np.array(drawn_by_timm[name])
        ours = drawn.arguments[drawn.kinds == kind]
        expected = 2 * DRAWS * 0.5 / 15
        assert abs(len(ours) - expected) < 4.5 * np.sqrt(expected)
        assert abs(len(theirs) - expected) < 4.5 * np.sqrt(expected)
        assert kolmogorov(ours, theirs) < 1.95 * np.sqrt(1 / len(ours) + 1 / len(theirs)), name
    moved = np.isin(drawn.kinds, ops.GEOMETRIC)
    assert abs(drawn.bicubic[moved].mean() - 0.5) < 0.05
    assert policies.draw_operations(0, 0, np.arange(200), Data(train_interpolation="bicubic")).bicubic.all()
    together = (drawn.kinds[:, 0] > 0) & (drawn.kinds[:, 1] > 0)
    assert abs(together.mean() - 0.25) < 0.03  # each layer is applied independently


def assert_same_boxes(ours: NDArray[Any], theirs: NDArray[Any]) -> None:
    """Check that boxes (boxes, 4) of top, left, height and width have one distribution."""

    def measures(boxes: NDArray[Any]) -> dict[str, NDArray[Any]]:
        top, left, height, width = boxes.T
        whole = {"top": top, "left": left, "height": height, "width": width, "area": height * width}
        return whole | {"aspect": width / height, "centre row": top + height / 2}

    expected = measures(theirs)
    for name, values in measures(ours).items():
        assert kolmogorov(values, expected[name]) < SAME_DISTRIBUTION, name


def test_erased_boxes_are_distributed_as_timms() -> None:
    drawn = draw_erasures(0, 0, np.arange(4 * DRAWS), Data(reprob=0.25), 64)
    boxes = drawn.boxes[:, 0][drawn.boxes[:, 0, 2] > 0]
    random.seed(1)
    theirs = timm_erasing(4 * DRAWS, 64)
    for count in (len(boxes), len(theirs)):
        assert abs(count - DRAWS) < 4.5 * np.sqrt(4 * DRAWS * 0.25 * 0.75)
    assert_same_boxes(boxes, theirs)
    assert (boxes[:, :2] + boxes[:, 2:] <= 64).all()


def test_erased_boxes_have_the_contents_of_their_mode() -> None:
    images = torch.full((64, 3, 64, 64), 9.0)
    for mode, deviation in (("pixel", 1.0), ("rand", 1.0), ("const", 0.0)):
        settings = Data(reprob=1.0, remode=mode)  # type: ignore[arg-type]
        drawn, erased = draw_erasures(1, 2, np.arange(64), settings, 64), images.clone()
        Eraser(1, settings, 64, torch.device("cpu")).erase_(erased, drawn)
        assert int((erased != 9).sum()) == 3 * drawn.boxes[..., 2:].prod(axis=-1).sum()
        content = erased[erased != 9]
        assert abs(float(content.std()) - deviation) < 0.25
        assert abs(float(content.mean())) < 0.35


def test_the_noise_reaches_for_the_largest_box_of_a_large_image() -> None:
    side, height = 1536, 890  # a third of the image
    box = Erasures(np.array([[[7, 9, height, height]]]), np.array([[NOISE_LENGTH - 1]]))
    images = torch.full((1, 3, side, side), 9.0)
    Eraser(1, Data(remode="pixel"), side, torch.device("cpu")).erase_(images, box)
    erased = images[0, :, 7 : 7 + height, 9 : 9 + height]
    assert int((images != 9).sum()) == erased.numel()
    assert abs(float(erased[:, -100:].std()) - 1) < 0.02


def test_several_boxes_divide_the_erased_area() -> None:
    drawn = draw_erasures(0, 0, np.arange(DRAWS), Data(reprob=1.0, recount=3), 64)
    assert {*(drawn.boxes[..., 2] > 0).sum(axis=1)} == {1, 2, 3}
    area = drawn.boxes[..., 2:].prod(axis=-1).sum(axis=1) / 64**2
    assert area.max() < 1 / 3 + 0.02


def test_colour_jitter_without_rand_augment() -> None:
    drawn = policies.draw_operations(0, 0, np.arange(DRAWS), Data(aa="", color_jitter=0.4))
    assert (np.sort(drawn.kinds, axis=1) == [ops.COLOR, ops.CONTRAST, ops.BRIGHTNESS]).all()
    assert len(np.unique(drawn.kinds, axis=0)) == 6
    assert kolmogorov(drawn.arguments.ravel(), np.linspace(0.6, 1.4, DRAWS)) < SAME_DISTRIBUTION
    assert policies.draw_operations(0, 0, np.arange(3), Data(aa="", color_jitter=0.0)).kinds.shape == (3, 0)


def test_spellings() -> None:
    numbers = policies.parse_policy("rand-m7-n3-p0.8-mstd101-mmax20-inc0")
    assert (numbers.magnitude, numbers.layers, numbers.probability) == (7, 3, 0.8)
    assert (numbers.magnitude_std, numbers.max_magnitude, numbers.increasing) == (101, 20, False)
    drawn = policies.draw_operations(0, 0, np.arange(DRAWS), Data(aa="rand-m8-n3-mstd101"))
    degrees = np.abs(drawn.arguments[drawn.kinds == ops.ROTATE])
    assert drawn.kinds.shape[1] == 3
    assert kolmogorov(degrees, np.linspace(0, 24, DRAWS)) < 0.08  # magnitudes are uniform up to 8


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ("v0", "rand"),
        ("rand-m9-tweights", "inc"),
        ("rand-9", "'9'"),
        ("rand-m", "'m'"),
        ("rand-n2.5", "n2.5"),
    ],
)
def test_wrong_spellings_say_what_is_known(policy: str, named: str) -> None:
    with pytest.raises(UserError, match=f"--aa.*{named}"):
        policies.parse_policy(policy)


def test_the_published_list_is_fixed() -> None:
    names = "AutoContrast Equalize Invert Rotate Posterize Solarize SolarizeAdd Color Contrast Brightness"
    names += " Sharpness ShearX ShearY TranslateXRel TranslateYRel"
    assert [operation.name for operation in ops.RAND_V1] == names.split()
    assert [int(operation) for operation in ops.RAND_V1] == list(range(1, 16))
    drawn = policies.draw_operations(3, 1, np.arange(6), Data(aa=SPELLING))
    assert drawn.kinds.tolist() == [[0, 12], [0, 11], [4, 0], [14, 1], [0, 0], [2, 9]]


def test_operations_are_drawn_from_the_set_that_is_named() -> None:
    own = ops.Operation(1000, "Own", ops.Kind.COLOR, lambda level, sign, increasing: level, color_ops.invert)
    policies.register_rand_augment("mine", [ops.INVERT, own])
    try:
        drawn = policies.draw_operations(3, 1, np.arange(200), Data(aa="mine-m9-p1"))
    finally:
        del policies.POLICIES["mine"], ops.OPERATIONS[1000]
    assert set(np.unique(drawn.kinds)) == {int(ops.INVERT), 1000}
    assert set(np.unique(drawn.arguments.round(4))) == {0.0, np.float32(0.9)}


@pytest.mark.parametrize(("number", "kind", "name"), [(17, "COLOR", "mine"), (1000, "GEOMETRIC", "mine")])
def test_operations_with_reserved_numbers_kinds_or_names_are_refused(number, kind, name):
    wrong = ops.Operation(number, "Wrong", ops.Kind[kind], ops.no_argument, color_ops.invert)
    with pytest.raises(UserError, match="cannot be registered"):
        policies.register_rand_augment(name, [wrong])
    with pytest.raises(UserError, match="cannot be named"):
        policies.register_rand_augment("rand", [ops.INVERT])
    assert number not in ops.OPERATIONS
    assert "mine" not in policies.POLICIES


def sizes_of(count, seed=0):
    return np.random.default_rng(seed).integers(20, 500, size=(count, 2))


def test_draws_depend_on_seed_epoch_and_sample_alone():
    """Crops and flips, operations and erased boxes do not depend on the rest of their batch."""
    settings = Data(hflip=0.5, vflip=0.3, aa="rand-m9-p1", reprob=1.0, recount=3)
    sizes = sizes_of(300)

    def draws(seed, epoch, samples):
        crops = draw_crops(seed, epoch, samples, sizes[samples], settings)
        operations = policies.draw_operations(seed, epoch, samples, settings)
        erasures = draw_erasures(seed, epoch, samples, settings, 64)
        yield np.column_stack([crops.boxes, crops.flip_horizontal, crops.flip_vertical])
        yield np.column_stack([operations.kinds, operations.arguments])
        yield erasures.boxes.reshape(len(samples), -1)

    samples = np.arange(100, 164)
    for part in (slice(0, 1), slice(10, 17), slice(63, None, -1)):
        for whole, alone in zip(draws(3, 5, samples), draws(3, 5, samples[part]), strict=True):
            assert (whole[part] == alone).all()
    for seed, epoch, first in ((3, 6, 100), (4, 5, 100), (3, 5, 164)):
        others = draws(seed, epoch, np.arange(first, first + 64))
        for whole, other in zip(draws(3, 5, samples), others, strict=True):
            assert (whole == other).all(axis=1).mean() < 0.1


def test_boxes_lie_inside_their_images():
    sizes = np.concatenate([sizes_of(500), [[1, 1], [1, 300], [300, 1], [2, 3]]])
    boxes = draw_crops(0, 0, np.arange(504), sizes, Data()).boxes
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips_have_the_set_probability_and_are_independent(probability):
    settings = Data(hflip=probability, vflip=0.5)
    crop_flip = draw_crops(0, 0, np.arange(DRAWS), np.full((DRAWS, 2), 50), settings)
    deviation = np.sqrt(probability * (1 - probability) / DRAWS)
    assert abs(crop_flip.flip_horizontal.mean() - probability) <= 4 * deviation
    both = (crop_flip.flip_horizontal & crop_flip.flip_vertical).mean()
    assert abs(both - probability / 2) < 4 * 0.5 / np.sqrt(DRAWS)


@pytest.mark.parametrize(
    ("size", "scale"),
    [((375, 500), (0.08, 1.0)), ((64, 64), (0.08, 1.0)), ((333, 111), (0.3, 1.0)), ((40, 300), (0.08, 1.0))],
)
def test_boxes_are_distributed_as_torchvisions(size, scale):
    crop_flip = draw_crops(9, 0, np.arange(DRAWS), np.full((DRAWS, 2), size), Data(scale=scale))
    torch.manual_seed(0)
    image, ratio = torch.empty(3, *size), [3 / 4, 4 / 3]
    theirs = [RandomResizedCrop.get_params(image, list(scale), ratio) for _ in range(DRAWS)]
    assert_same_boxes(crop_flip.boxes, np.array(theirs))


@pytest.mark.parametrize(
    ("size", "box"),
    [((10, 400), (0, 193, 10, 13)), ((400, 10), (193, 0, 13, 10)), ((30, 30), (0, 0, 30, 30))],
)
def test_the_fallback_is_torchvisions_central_crop(size, box):
    settings = Data(scale=(4.0, 4.0))  # four times the image never fits
    crop_flip = draw_crops(0, 0, np.arange(3), np.full((3, 2), size), settings)
    theirs = RandomResizedCrop.get_params(torch.empty(3, *size), [4.0, 4.0], [3 / 4, 4 / 3])
    assert theirs == box
    assert (crop_flip.boxes == box).all()

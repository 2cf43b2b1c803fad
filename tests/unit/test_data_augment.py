"""Crops, RandAugment, colour jitter and erasing: distributed as in timm and torchvision, equal to Pillow."""

import random

import numpy as np
import pytest
import torch
from box_samples import kolmogorov
from numpy.typing import NDArray
from published_augment import NAMES, SPELLING, operations_of, record_draws, timm_augment, timm_erasing
from torchvision.transforms import RandomResizedCrop

from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation import color_ops
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.geometric_ops import FILL, rotate_by_torch
from horovod_volo.data.augmentation.operations import source_matrices
from horovod_volo.data.augmentation.policy import (
    POLICIES,
    draw_operations,
    parse_policy,
    register_rand_augment,
)
from horovod_volo.data.augmentation.random_erasing import NOISE_LENGTH, Eraser, Erasures, draw_erasures

SIDE = 96
DRAWS = 6000
# Kolmogorov-Smirnov distance that two samples of 6,000 from one distribution exceed once in a thousand times.
SAME_DISTRIBUTION = 1.95 * np.sqrt(2 / DRAWS)
ARGUMENTS = {
    ops.AUTO_CONTRAST: 0.0,
    ops.EQUALIZE: 0.0,
    ops.INVERT: 0.0,
    ops.ROTATE: -27.0,
    ops.POSTERIZE: 1.0,
    ops.SOLARIZE: 26.0,
    ops.SOLARIZE_ADD: 99.0,
    ops.COLOR: 1.81,
    ops.CONTRAST: 0.19,
    ops.BRIGHTNESS: 1.81,
    ops.SHARPNESS: 1.81,
    ops.SHEAR_X: 0.27,
    ops.SHEAR_Y: -0.27,
    ops.TRANSLATE_X: -0.4,
    ops.TRANSLATE_Y: 0.4,
}


def photograph(seed: int) -> NDArray[np.uint8]:
    """Return an image (side, side, 3) whose spectrum falls like that of a photograph."""
    source = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None])
    frequency[0, 0] = 1
    channels = []
    for _ in range(3):
        waves = source.normal(size=frequency.shape) + 1j * source.normal(size=frequency.shape)
        channel = np.fft.irfft2(waves / frequency, s=(SIDE, SIDE))
        channels.append(118 + 45 * channel / channel.std())
    return np.stack(channels, axis=-1).clip(20, 230).astype(np.uint8)


def as_batch(images: list[NDArray[np.uint8]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("kind", list(ARGUMENTS))
def test_an_operation_equals_pillows(kind: ops.Operation, bicubic: bool) -> None:
    amounts = [ARGUMENTS[kind]]
    if kind in (ops.COLOR, ops.CONTRAST, ops.BRIGHTNESS, ops.SHARPNESS):
        amounts = [0.19, 1.81]
    photos = [photograph(seed) for seed in range(3)]
    for amount in amounts:
        ours = as_batch(photos)
        augment_(ours, operations_of([(kind, amount)], len(photos), bicubic=bicubic))
        theirs = as_batch([timm_augment(kind, photo, amount, bicubic=bicubic) for photo in photos])
        difference = (ours.int() - theirs.int()).abs().float()
        assert difference.mean() <= 0.01
        assert (
            theirs.int() - as_batch(photos).int()
        ).abs().float().mean() > 3  # the operation changes the image


def test_the_bicubic_rotation_for_gpus_equals_pillows() -> None:
    """This is the code for GPUs; on the CPU the loader rotates with Pillow."""
    photos = [photograph(seed) for seed in range(3)]
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
    drawn = draw_operations(3, 1, np.arange(DRAWS), Data(aa=SPELLING))
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
    assert draw_operations(0, 0, np.arange(200), Data(train_interpolation="bicubic")).bicubic.all()
    together = (drawn.kinds[:, 0] > 0) & (drawn.kinds[:, 1] > 0)
    assert abs(together.mean() - 0.25) < 0.03  # each layer is applied independently


def test_erased_boxes_are_distributed_as_timms() -> None:
    settings = Data(reprob=0.25)
    drawn = draw_erasures(0, 0, np.arange(4 * DRAWS), settings, 64)
    boxes = drawn.boxes[:, 0][drawn.boxes[:, 0, 2] > 0]
    theirs = timm_erasing(4 * DRAWS, 64)
    for count in (len(boxes), len(theirs)):
        assert abs(count - DRAWS) < 4.5 * np.sqrt(4 * DRAWS * 0.25 * 0.75)
    for of_box in (
        lambda box: box[:, 2] * box[:, 3],
        lambda box: box[:, 2] / box[:, 3],
        lambda box: box[:, 0],
    ):
        assert kolmogorov(of_box(boxes), of_box(theirs)) < SAME_DISTRIBUTION
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
    again = images.clone()
    Eraser(1, settings, 64, torch.device("cpu")).erase_(
        again, draw_erasures(1, 2, np.arange(64), settings, 64)
    )
    assert torch.equal(again, erased)


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
    assert (
        drawn.boxes[31] == draw_erasures(0, 0, np.array([31]), Data(reprob=1.0, recount=3), 64).boxes[0]
    ).all()
    counts = (drawn.boxes[..., 2] > 0).sum(axis=1)
    assert set(counts) == {1, 2, 3}
    area = drawn.boxes[..., 2:].prod(axis=-1).sum(axis=1) / 64**2
    assert area.max() < 1 / 3 + 0.02


def test_colour_jitter_without_rand_augment() -> None:
    drawn = draw_operations(0, 0, np.arange(DRAWS), Data(aa="", color_jitter=0.4))
    assert (np.sort(drawn.kinds, axis=1) == [ops.COLOR, ops.CONTRAST, ops.BRIGHTNESS]).all()
    assert len(np.unique(drawn.kinds, axis=0)) == 6
    assert kolmogorov(drawn.arguments.ravel(), np.linspace(0.6, 1.4, DRAWS)) < SAME_DISTRIBUTION
    assert draw_operations(0, 0, np.arange(3), Data(aa="", color_jitter=0.0)).kinds.shape == (3, 0)


def test_spellings() -> None:
    numbers = parse_policy("rand-m7-n3-p0.8-mstd101-mmax20-inc0")
    assert (numbers.magnitude, numbers.layers, numbers.probability) == (7, 3, 0.8)
    assert (numbers.magnitude_std, numbers.max_magnitude, numbers.increasing) == (101, 20, False)
    drawn = draw_operations(0, 0, np.arange(DRAWS), Data(aa="rand-m8-n3-mstd101"))
    degrees = np.abs(drawn.arguments[drawn.kinds == ops.ROTATE])
    assert drawn.kinds.shape[1] == 3
    assert kolmogorov(degrees, np.linspace(0, 24, DRAWS)) < 0.08  # magnitudes are uniform up to 8


def test_a_draw_depends_on_its_sample_and_epoch_alone() -> None:
    whole, alone, later = (
        draw_operations(7, epoch, np.array(samples), Data(aa=SPELLING))
        for epoch, samples in ((3, range(50)), (3, [31]), (4, range(50)))
    )
    assert (whole.of(slice(31, 32)).kinds == alone.kinds).all()
    assert (whole.of(slice(31, 32)).arguments == alone.arguments).all()
    assert (whole.kinds != later.kinds).any()


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
        parse_policy(policy)


def test_the_published_list_is_fixed() -> None:
    names = "AutoContrast Equalize Invert Rotate Posterize Solarize SolarizeAdd Color Contrast Brightness"
    names += " Sharpness ShearX ShearY TranslateXRel TranslateYRel"
    assert [operation.name for operation in ops.RAND_V1] == names.split()
    assert [int(operation) for operation in ops.RAND_V1] == list(range(1, 16))
    assert draw_operations(3, 1, np.arange(6), Data(aa=SPELLING)).kinds.tolist() == [
        [0, 12],
        [0, 11],
        [4, 0],
        [14, 1],
        [0, 0],
        [2, 9],
    ]


def test_operations_are_drawn_from_the_set_that_is_named() -> None:
    own = ops.Operation(1000, "Own", ops.Kind.COLOR, lambda level, sign, increasing: level, color_ops.invert)
    register_rand_augment("mine", [ops.INVERT, own])
    try:
        drawn = draw_operations(3, 1, np.arange(200), Data(aa="mine-m9-p1"))
    finally:
        del POLICIES["mine"], ops.OPERATIONS[1000]
    assert set(np.unique(drawn.kinds)) == {int(ops.INVERT), 1000}
    assert set(np.unique(drawn.arguments.round(4))) == {0.0, np.float32(0.9)}


@pytest.mark.parametrize(("number", "kind", "name"), [(17, "COLOR", "mine"), (1000, "GEOMETRIC", "mine")])
def test_operations_with_reserved_numbers_kinds_or_names_are_refused(number, kind, name):
    wrong = ops.Operation(
        number, "Wrong", ops.Kind[kind], lambda level, sign, increasing: level, color_ops.invert
    )
    with pytest.raises(UserError, match="cannot be registered"):
        register_rand_augment(name, [wrong])
    with pytest.raises(UserError, match="cannot be named"):
        register_rand_augment("rand", [ops.INVERT])
    assert number not in ops.OPERATIONS
    assert "mine" not in POLICIES


SAMPLES = 4000


def sizes_of(count, seed=0):
    return np.random.default_rng(seed).integers(20, 500, size=(count, 2))


def test_a_crop_does_not_depend_on_the_rest_of_its_batch():
    settings = Data(hflip=0.5, vflip=0.3)
    indices, sizes = np.arange(100, 164), sizes_of(64)
    whole = draw_crops(3, 5, indices, sizes, settings)
    for part in (slice(0, 1), slice(10, 17), slice(63, None, -1)):
        alone = draw_crops(3, 5, indices[part], sizes[part], settings)
        assert (alone.boxes == whole.boxes[part]).all()
        assert (alone.flip_horizontal == whole.flip_horizontal[part]).all()
        assert (alone.flip_vertical == whole.flip_vertical[part]).all()
    for seed, epoch, first in ((3, 6, 100), (4, 5, 100), (3, 5, 164)):
        other = draw_crops(seed, epoch, np.arange(first, first + 64), sizes, settings)
        assert (whole.boxes == other.boxes).all(axis=1).mean() < 0.1


def test_boxes_lie_inside_their_images():
    sizes = np.concatenate([sizes_of(500), [[1, 1], [1, 300], [300, 1], [2, 3]]])
    boxes = draw_crops(0, 0, np.arange(504), sizes, Data()).boxes
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips_have_the_set_probability_and_are_independent(probability):
    crop_flip = draw_crops(
        0, 0, np.arange(SAMPLES), np.full((SAMPLES, 2), 50), Data(hflip=probability, vflip=0.5)
    )
    deviation = np.sqrt(probability * (1 - probability) / SAMPLES)
    assert abs(crop_flip.flip_horizontal.mean() - probability) <= 4 * deviation
    both = (crop_flip.flip_horizontal & crop_flip.flip_vertical).mean()
    assert abs(both - probability / 2) < 4 * 0.5 / np.sqrt(SAMPLES)


@pytest.mark.parametrize(
    ("size", "scale"),
    [((375, 500), (0.08, 1.0)), ((64, 64), (0.08, 1.0)), ((333, 111), (0.3, 1.0)), ((40, 300), (0.08, 1.0))],
)
def test_boxes_are_distributed_as_torchvisions(size, scale):
    crop_flip = draw_crops(9, 0, np.arange(SAMPLES), np.full((SAMPLES, 2), size), Data(scale=scale))
    torch.manual_seed(0)
    image = torch.empty(3, *size)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(SAMPLES)]
    )
    measures = {
        "top": lambda boxes: boxes[:, 0],
        "left": lambda boxes: boxes[:, 1],
        "height": lambda boxes: boxes[:, 2],
        "width": lambda boxes: boxes[:, 3],
        "area": lambda boxes: boxes[:, 2] * boxes[:, 3],
        "aspect": lambda boxes: boxes[:, 3] / boxes[:, 2],
        "centre row": lambda boxes: boxes[:, 0] + boxes[:, 2] / 2,
    }
    critical = 1.95 * np.sqrt(2 / SAMPLES)  # exceeded once in a thousand times by equal distributions
    for name, measure in measures.items():
        assert kolmogorov(measure(crop_flip.boxes), measure(theirs)) < critical, name


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


def test_stored_boxes_are_the_crops_of_the_unflipped_image():
    sizes = sizes_of(200, seed=4)
    crop_flip = draw_crops(1, 1, np.arange(200), sizes, Data(hflip=0.5, vflip=0.5))
    for number, (size, stored) in enumerate(
        zip(sizes, crop_flip.stored(crop_flip.boxes, sizes), strict=True)
    ):
        pixels = np.arange(size[0] * size[1]).reshape(size)
        vertical = -1 if crop_flip.flip_vertical[number] else 1
        horizontal = -1 if crop_flip.flip_horizontal[number] else 1
        top, left, height, width = crop_flip.boxes[number]
        expected = pixels[::vertical, ::horizontal][top : top + height, left : left + width]
        top, left, height, width = stored
        cut = pixels[top : top + height, left : left + width][::vertical, ::horizontal]
        assert (cut == expected).all()

"""AutoAugment, 3-Augment and AugMix: distributions equal timm's, and images equal Pillow's."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from pillow_augment import apply_operations
from published_augment import FILL, NAMES
from test_data_augment import as_batch, distance, photograph

from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.further_policies import GAUSSIAN_BLUR, gaussian_blur
from horovod_volo.data.augmentation.policy import POLICIES, Operations, draw_operations, parse_policy
from horovod_volo.models.timm_api import allow_posterize_to_no_bits

DRAWS = 6000
KINDS = {name: kind for kind, name in NAMES.items()} | {
    kind.name: kind for kind in ops.OPERATIONS.values()
}  # by all of timm's names
KINDS |= {"PosterizeOriginal": ops.POSTERIZE, "Desaturate": ops.COLOR, "GaussianBlurRand": GAUSSIAN_BLUR}
AUGMIX = "augmix-m5-w4-d2"
AUTO_AUGMENT = ("original", "originalr", "v0", "v0r", "3a")


def recorded(policy: str, images: int) -> dict[ops.Operation, list[float]]:
    """Return the arguments of each of our operations that timm's transform draws for so many images."""
    from timm.data import auto_augment as timms

    calls: dict[ops.Operation, list[float]] = defaultdict(list)
    hparams = {"img_mean": FILL}
    is_augmix = policy.startswith("augmix")
    make = timms.augment_and_mix_transform if is_augmix else timms.auto_augment_transform
    transform = make(policy, hparams)
    steps = transform.ops if is_augmix else [step for pair in transform.policy for step in pair]
    for step in steps:

        def record(image: Any, *given: float, _name: str = step.name, **_: Any) -> Any:
            argument = float(given[0]) if given else 0.0
            if _name == "Desaturate":  # the factor that its function hands to the blend
                argument = 1 - argument
            if _name == "GaussianBlurRand":
                argument = random.uniform(0.1, 2 * argument)
            calls[KINDS[_name]].append(argument)
            return image

        step.aug_fn = record
    image = Image.new("RGB", (2, 2))
    for _ in range(images):
        transform(image)
    return calls


@pytest.mark.parametrize(
    "policy", [*AUTO_AUGMENT, "v0-mstd0.5", "augmix-m5-w4-d2", "augmix-m4-w2", "augmix-w2-mstd1"]
)
def test_operations_have_the_frequencies_and_strengths_of_timms(policy: str) -> None:
    random.seed(3)
    np.random.seed(3)
    images = DRAWS // 4 if policy.startswith("augmix") else DRAWS
    theirs = recorded(policy, images)
    drawn = draw_operations(5, 2, np.arange(images), Data(aa=policy, color_jitter=0.0))
    applied = {ops.OPERATIONS[kind] for kind in np.unique(drawn.kinds).tolist() if kind}
    assert applied == theirs.keys()
    for kind, arguments in theirs.items():
        ours, expected = drawn.arguments[drawn.kinds == kind], np.array(arguments)
        if kind in ops.GEOMETRIC:  # one of magnitude 0 moves nothing, and we draw none
            expected = expected[expected != 0]
        # The counts are sums over layers of binomial ones; both differ from their mean.
        assert abs(len(ours) - len(expected)) < 4.5 * np.sqrt(2 * max(len(ours), len(expected))), kind.name
        assert distance(ours, expected) < 1.95 * np.sqrt(1 / len(ours) + 1 / len(expected)), kind.name
    if policy != "3a":
        moved = np.isin(drawn.kinds, ops.GEOMETRIC)
        assert abs(drawn.bicubic[moved].mean() - 0.5) < 0.06


def test_the_policies_are_timms() -> None:
    from timm.data.auto_augment import auto_augment_policy

    for name in AUTO_AUGMENT:
        policy = POLICIES.find(name).sub_policies
        theirs = auto_augment_policy(name)
        found = [[(step.name, step.prob, step.magnitude) for step in pair] for pair in theirs]
        assert found == [list(map(tuple, pair)) for pair in policy], name


@pytest.mark.parametrize("policy", AUTO_AUGMENT)
def test_images_equal_pillows(policy: str) -> None:
    allow_posterize_to_no_bits()
    images = 40
    photos = [photograph(seed) for seed in range(images)]
    drawn = draw_operations(1, 0, np.arange(images), Data(aa=policy))
    ours = as_batch(photos)
    augment_(ours, drawn)
    expected = [
        np.asarray(apply_operations(Image.fromarray(photo), drawn.of(slice(row, row + 1))))
        for row, photo in enumerate(photos)
    ]
    difference = (ours.int() - as_batch(expected).int()).abs().float().mean(dim=(1, 2, 3))
    assert difference.median() <= 0.01
    # One level before equalize or solarize may become many, of few pixels.
    assert difference.mean() < 0.25
    assert (ours.int() - as_batch(photos).int()).abs().float().mean() > 10


@pytest.mark.parametrize("radius", [0.1, 0.4, 0.9, 1.3, 1.5, 2.0])
def test_a_blur_is_pillows_to_one_level(radius: float) -> None:
    from PIL import ImageFilter

    noise = np.random.default_rng(0).integers(0, 256, (40, 52, 3), dtype=np.uint8)
    ours = gaussian_blur(as_batch([noise, noise]), torch.tensor([radius, 1.1]))
    theirs = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(radius))
    difference = (ours[0].int() - as_batch([np.asarray(theirs)])[0].int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 0.001
    # A pixel depends on no other that is farther away than the operation says.
    reach = GAUSSIAN_BLUR.neighbors
    part = gaussian_blur(as_batch([noise[:, 20:]]), torch.tensor([radius]))
    assert torch.equal(part[0, :, :, reach:], ours[0, :, :, 20 + reach :])


def test_three_augment_ends_with_color_jitter() -> None:
    drawn = draw_operations(0, 0, np.arange(300), Data(aa="3a", color_jitter=0.3))
    assert drawn.kinds.shape == (300, 4)
    assert set(drawn.kinds[:, 0]) == {int(ops.SOLARIZE), int(ops.COLOR), int(GAUSSIAN_BLUR)}
    jitter = draw_operations(0, 0, np.arange(300), Data(aa="", color_jitter=0.3))
    assert (drawn.kinds[:, 1:] == jitter.kinds).all()
    assert (drawn.arguments[:, 1:] == jitter.arguments).all()


def timms_mixture(photo: NDArray[np.uint8], drawn: Operations, monkeypatch: Any) -> NDArray[np.uint8]:
    """Return what timm's AugMix makes of a photograph, given what it would draw."""
    from timm.data.auto_augment import AugMixAugment

    assert drawn.mixing is not None
    chains = [
        [lambda image, _chain=chain: apply_operations(image, _chain)] for chain in drawn.chains()
    ]  # a chain of operations as one
    monkeypatch.setattr(np.random, "choice", lambda *_, **__: chains.pop(0))
    mix = AugMixAugment(None, depth=1)
    weights, share = drawn.mixing.weights[0], drawn.mixing.shares[0]
    return np.asarray(mix._apply_basic(Image.fromarray(photo), weights, share))


def test_mixtures_equal_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_posterize_to_no_bits()
    images = 24
    photos = [photograph(seed) for seed in range(images)]
    drawn = draw_operations(2, 1, np.arange(images), Data(aa=AUGMIX))
    ours = as_batch(photos)
    augment_(ours, drawn)
    expected = [
        timms_mixture(photo, drawn.of(slice(row, row + 1)), monkeypatch) for row, photo in enumerate(photos)
    ]
    difference = (ours.int() - as_batch(expected).int()).abs()
    assert difference.float().mean() < 0.1  # roundings before the mixture, and in it
    assert (ours.int() - as_batch(photos).int()).abs().float().mean() > 5
    alone = as_batch(photos[3:4])
    augment_(alone, drawn.of(slice(3, 4)))
    assert torch.equal(alone[0], ours[3])


def test_mixing_is_drawn_as_timms() -> None:
    for alpha in (1.0, 0.4):
        mixing = draw_operations(2, 1, np.arange(DRAWS), Data(aa=f"augmix-w3-a{alpha}")).mixing
        assert mixing is not None
        assert np.abs(mixing.weights.sum(axis=1) - 1).max() < 1e-6
        source = np.random.default_rng(0)
        limit = 1.95 * np.sqrt(2 / DRAWS)
        assert distance(mixing.shares, source.beta(alpha, alpha, DRAWS)) < limit
        expected = source.dirichlet([alpha] * 3, DRAWS)
        for chain in range(3):
            assert distance(mixing.weights[:, chain], expected[:, chain]) < limit
        assert abs(np.corrcoef(mixing.weights[:, 0], mixing.shares)[0, 1]) < 0.06


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "v0", "3a", AUGMIX, "augmix"])
def test_a_draw_does_not_depend_on_the_rest_of_its_batch(policy: str) -> None:
    settings = Data(aa=policy)
    whole = draw_operations(7, 3, np.arange(50), settings).of(slice(31, 32))
    alone = draw_operations(7, 3, np.array([31]), settings)
    assert (whole.kinds == alone.kinds).all()
    assert (whole.arguments == alone.arguments).all()
    if whole.mixing is not None and alone.mixing is not None:
        assert (whole.mixing.weights == alone.mixing.weights).all()
        assert (whole.mixing.shares == alone.mixing.shares).all()
    assert (
        draw_operations(7, 4, np.arange(50), settings).kinds
        != draw_operations(7, 3, np.arange(50), settings).kinds
    ).any()


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ("v1", ("v1", "v0", "rand", "augmix")),
        ("original-m5", ("m5", "mstd")),
        ("augmix-x3", ("x3", "m, w, d, a, mstd")),
        ("augmix-w0", ("w0",)),
        ("augmix-w2.5", ("w2.5",)),
        ("augmix-b1", ("b1",)),
        ("rand-m9-tweights", ("tweights", "inc")),
        ("rand-9", ("9",)),
        ("rand-m", ("m",)),
        ("rand-n2.5", ("n2.5",)),
    ],
)
def test_wrong_spellings_say_what_is_known(policy: str, named: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as raised:
        parse_policy(policy)
    assert all(word in str(raised.value) for word in ("--aa", *named))

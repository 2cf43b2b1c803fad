"""Mixup and CutMix: the mixed images and targets, and timm's distributions of weights and boxes."""

from __future__ import annotations

import numpy as np
import torch

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.models import timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.objective.loss import build_loss
from horovod_volo.objective.mixing import NO_BOX, ImageMix, draw_image_mix

SIDE, DRAWS = 32, 3000


def drawn(**settings: float) -> list[ImageMix]:
    objective = Objective(mix_token=False, **settings)  # type: ignore[arg-type]
    return [draw_image_mix(objective, 1, step, 0, 0, SIDE) for step in range(DRAWS)]


def test_mixup_blends_images() -> None:
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    mixed = ImageMix(lam=0.25).images(images)
    assert torch.allclose(mixed[0], 0.25 * images[0] + 0.75 * images[2])
    assert torch.allclose(mixed[1], images[1])


def test_cutmix_pastes_boxes() -> None:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    mixed = ImageMix(lam=1 - 12 / 64, box=(1, 2, 3, 4)).images(images)
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[1:4, 2:6] = True
    assert torch.equal(mixed[0][:, inside], images[1][:, inside])
    assert torch.equal(mixed[0][:, ~inside], images[0][:, ~inside])


def test_images_without_mixing_are_returned_as_they_are() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert ImageMix(lam=1.0).images(images) is images
    assert NO_BOX.images(images) is images
    tokens = torch.randn(2, 4, 4, 3)
    assert ImageMix(lam=0.5).swap_tokens(tokens) is tokens
    assert torch.equal(NO_BOX.swap_tokens(tokens), tokens)
    assert NO_BOX.lam == 1.0


def test_weights_and_choices_are_distributed_as_timms() -> None:
    from timm.data.mixup import Mixup

    np.random.seed(0)
    theirs = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, prob=0.8, switch_prob=0.3)
    expected = np.array(
        [theirs._params_per_batch() for _ in range(DRAWS)]
    )  # (draws, 2): lambda, whether a box is pasted
    ours = drawn(mixup=0.2, cutmix=1.0, mixup_prob=0.8, mixup_switch_prob=0.3)
    pasted = np.array([mix.box is not None for mix in ours])
    blended = np.array([mix.lam for mix in ours if mix.box is None and mix.lam < 1])
    assert abs(pasted.mean() - expected[:, 1].mean()) < 0.04
    of_theirs = np.sort(expected[(expected[:, 1] == 0) & (expected[:, 0] < 1), 0])
    points = np.linspace(0, 1, 50)
    cumulative = [np.searchsorted(np.sort(sample), points) / len(sample) for sample in (blended, of_theirs)]
    assert np.abs(cumulative[0] - cumulative[1]).max() < 1.95 * np.sqrt(1 / len(blended) + 1 / len(of_theirs))


def test_boxes_are_distributed_as_timms() -> None:
    from timm.data.mixup import cutmix_bbox_and_lam

    np.random.seed(0)
    expected = []
    for _ in range(DRAWS):
        _, lam = cutmix_bbox_and_lam((1, 3, SIDE, SIDE), np.random.beta(1.0, 1.0))
        expected.append(lam)
    ours = [mix.lam for mix in drawn(cutmix=1.0)]
    points = np.linspace(0, 1, 50)
    cumulative = [np.searchsorted(np.sort(sample), points) / DRAWS for sample in (ours, expected)]
    assert np.abs(cumulative[0] - cumulative[1]).max() < 1.95 * np.sqrt(2 / DRAWS)
    for mix in drawn(cutmix=1.0)[:200]:
        assert mix.box is not None
        assert mix.lam == 1 - mix.box[2] * mix.box[3] / SIDE**2


def test_mixing_depends_on_seed_step_rank_and_micro_batch_alone() -> None:
    objective = Objective(mix_token=False, mixup=0.8, cutmix=1.0)
    assert draw_image_mix(objective, 1, 2, 3, 0, SIDE) == draw_image_mix(objective, 1, 2, 3, 0, SIDE)
    others = [draw_image_mix(objective, *other, SIDE) for other in ((1, 2, 4, 0), (1, 3, 3, 0), (2, 2, 3, 0))]
    assert draw_image_mix(objective, 1, 2, 3, 0, SIDE) not in others


def test_the_class_target_is_mixed_with_the_same_weight() -> None:
    loss = build_loss(Objective(mix_token=False, mixup=0.8, smoothing=0.1), 5, 2)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(3))
    classes = torch.tensor([1, 4])
    target = torch.full((2, 5), 0.02)
    target[range(2), classes] = 0.92
    target = 0.3 * target + 0.7 * target.flip(0)
    expected = -(target * logits.log_softmax(dim=1)).sum(dim=1).mean()
    total = loss(logits, torch.zeros(2, 4, 5), Labels(classes), ImageMix(lam=0.3)).total
    assert torch.allclose(total, expected, atol=1e-6)

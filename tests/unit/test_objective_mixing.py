"""MixToken, Mixup and CutMix: what is mixed, and the published distributions of boxes and weights."""

from itertools import product

import numpy as np
import pytest
import torch
from box_samples import kolmogorov

from horovod_volo.config.task_settings import Objective
from horovod_volo.models import timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.objective.mixing import NO_BOX, Box, ImageMix, draw_box, draw_image_mix


def test_on_a_finer_grid_blocks_of_tokens_are_swapped() -> None:
    box = Box(top=1, left=2, height=2, width=1, grid=4)
    coarse = torch.randn(2, 4, 4, 3, generator=torch.Generator().manual_seed(1))
    fine = coarse.repeat_interleave(2, dim=1).repeat_interleave(3, dim=2)  # (2, 8, 12, 3)
    expected = box.swap_tokens(coarse).repeat_interleave(2, dim=1).repeat_interleave(3, dim=2)
    assert torch.equal(box.swap_tokens(fine), expected)


def expected_kept_fraction(grid: int) -> tuple[float, float]:
    """Return the mean kept fraction and the probability of no mixing, summed over all sides and centres."""
    mean, unmixed = 1.0, 0.0
    for side in range(grid):  # int(grid x sqrt(u)) == side for u in [(side / grid)^2, ((side + 1) / grid)^2)
        probability = ((side + 1) ** 2 - side**2) / grid**2
        half = side // 2
        extents = [min(centre + half, grid) - max(centre - half, 0) for centre in range(grid)]
        mean -= probability * (sum(extents) / grid / grid) ** 2
        unmixed += probability * (half == 0)
    return mean, unmixed


def test_boxes_have_the_published_distribution() -> None:
    mean, unmixed = expected_kept_fraction(14)
    assert mean == pytest.approx(0.729, abs=1e-3)
    assert unmixed == pytest.approx(0.02, abs=1e-3)
    boxes = [draw_box(42, step, rank, 0, 14) for step in range(1000) for rank in range(8)]
    fractions = torch.tensor([box.lam for box in boxes])
    # Four standard errors of 8,000 draws.
    assert fractions.mean().item() == pytest.approx(mean, abs=4 * fractions.std().item() / 8000**0.5)
    found = (fractions == 1).float().mean().item()
    assert found == pytest.approx(unmixed, abs=4 * (0.02 * 0.98 / 8000) ** 0.5)
    centres = torch.tensor([[b.top + b.height / 2, b.left + b.width / 2] for b in boxes])
    assert centres.mean(dim=0).tolist() == pytest.approx([7 - 0.5, 7 - 0.5], abs=0.25)  # centres are 0 to 13


def test_the_kept_fraction_counts_the_clipped_area() -> None:
    for step in range(200):
        box = draw_box(1, step, 0, 0, 6)
        assert 0 <= box.top <= box.top + box.height <= 6
        assert 0 <= box.left <= box.left + box.width <= 6
        tokens = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 6, 6, 1)
        assert box.swap_tokens(tokens)[0].mean().item() == pytest.approx(1 - box.lam, abs=1e-6)


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


def test_what_is_not_mixed_is_returned_as_it_is() -> None:
    images, tokens = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 4, 3)
    assert ImageMix(lam=1.0).images(images) is images is NO_BOX.images(images)
    assert ImageMix(lam=0.5).swap_tokens(tokens) is tokens is NO_BOX.swap_tokens(tokens)


def test_weights_and_choices_are_distributed_as_timms() -> None:
    from timm.data.mixup import Mixup

    np.random.seed(0)
    theirs = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, prob=0.8, switch_prob=0.3)
    # (draws, 2): lambda, whether a box is pasted
    expected = np.array([theirs._params_per_batch() for _ in range(DRAWS)])
    ours = drawn(mixup=0.2, cutmix=1.0, mixup_prob=0.8, mixup_switch_prob=0.3)
    pasted = np.array([mix.box is not None for mix in ours])
    blended = np.array([mix.lam for mix in ours if mix.box is None and mix.lam < 1])
    assert abs(pasted.mean() - expected[:, 1].mean()) < 0.04
    of_theirs = expected[(expected[:, 1] == 0) & (expected[:, 0] < 1), 0]
    assert kolmogorov(blended, of_theirs) < 1.95 * np.sqrt(1 / len(blended) + 1 / len(of_theirs))


def test_boxes_are_distributed_as_timms() -> None:
    from timm.data.mixup import cutmix_bbox_and_lam

    np.random.seed(0)
    drawn_weights = np.random.beta(1.0, 1.0, DRAWS)
    expected = [cutmix_bbox_and_lam((1, 3, SIDE, SIDE), weight)[1] for weight in drawn_weights]
    ours = np.array([mix.lam for mix in drawn(cutmix=1.0)])
    assert kolmogorov(ours, np.array(expected)) < 1.95 * np.sqrt(2 / DRAWS)
    for mix in drawn(cutmix=1.0)[:200]:
        assert mix.lam == 1 - mix.box[2] * mix.box[3] / SIDE**2


BOTH = Objective(mix_token=False, mixup=0.8, cutmix=1.0)


@pytest.mark.parametrize(
    "draw", [lambda *place: draw_box(*place, 1000), lambda *place: draw_image_mix(BOTH, *place, SIDE)]
)
def test_mixing_depends_on_seed_step_rank_and_micro_batch_alone(draw) -> None:
    places = list(product((0, 42), (0, 1, 2**33), (0, 1), (0, 1)))
    draws = [draw(*place) for place in places]
    assert draws == [draw(*place) for place in places]
    assert len(set(draws)) == len(places)

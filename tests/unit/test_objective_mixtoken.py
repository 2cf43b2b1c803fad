"""MixToken boxes: swapped tokens, reproducibility, and the published distribution."""

from __future__ import annotations

import pytest
import torch

from horovod_volo.objective.mixing import Box, draw_box


def test_tokens_in_the_box_come_from_the_reversed_batch() -> None:
    tokens = torch.arange(3 * 4 * 4 * 2).reshape(3, 4, 4, 2)
    mixed = Box(top=1, left=0, height=1, width=2, grid=4).swap_tokens(tokens)
    for image in range(3):
        for row in range(4):
            for column in range(4):
                source = 2 - image if row == 1 and column < 2 else image
                assert torch.equal(mixed[image, row, column], tokens[source, row, column])
    assert torch.equal(mixed[1], tokens[1])  # the middle image of an odd batch is its own partner


def test_on_a_finer_grid_blocks_of_tokens_are_swapped() -> None:
    box = Box(top=1, left=2, height=2, width=1, grid=4)
    coarse = torch.randn(2, 4, 4, 3, generator=torch.Generator().manual_seed(1))
    fine = coarse.repeat_interleave(2, dim=1).repeat_interleave(3, dim=2)  # (2, 8, 12, 3)
    expected = box.swap_tokens(coarse).repeat_interleave(2, dim=1).repeat_interleave(3, dim=2)
    assert torch.equal(box.swap_tokens(fine), expected)


@pytest.mark.parametrize("batch", [1, 4, 5])
def test_swapping_twice_restores_the_tokens(batch: int) -> None:
    tokens = torch.randn(batch, 6, 6, 2, generator=torch.Generator().manual_seed(2))
    original = tokens.clone()
    box = Box(top=2, left=0, height=3, width=6, grid=6)
    once = box.swap_tokens(tokens)
    assert batch == 1 or not torch.equal(once, tokens)
    assert torch.equal(box.swap_tokens(once), tokens)
    assert torch.equal(tokens, original)


def test_a_grid_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="14 x 15 tokens"):
        Box(top=0, left=0, height=2, width=2, grid=14).swap_tokens(torch.zeros(2, 14, 15, 1))


def test_a_box_is_a_function_of_its_four_coordinates() -> None:
    assert draw_box(42, 7, 3, 1, 14) == draw_box(42, 7, 3, 1, 14)
    draws = {
        draw_box(seed, step, rank, micro_batch, 1000)
        for seed in (0, 42)
        for step in (0, 1, 2**33)
        for rank in (0, 1)
        for micro_batch in (0, 1)
    }
    assert len(draws) == 24


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
    assert (fractions == 1).float().mean().item() == pytest.approx(
        unmixed, abs=4 * (0.02 * 0.98 / 8000) ** 0.5
    )
    centres = torch.tensor([[b.top + b.height / 2, b.left + b.width / 2] for b in boxes])
    assert centres.mean(dim=0).tolist() == pytest.approx([7 - 0.5, 7 - 0.5], abs=0.25)  # centres are 0 to 13


def test_the_kept_fraction_counts_the_clipped_area() -> None:
    for step in range(200):
        box = draw_box(1, step, 0, 0, 6)
        assert 0 <= box.top <= box.top + box.height <= 6
        assert 0 <= box.left <= box.left + box.width <= 6
        tokens = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 6, 6, 1)
        assert box.swap_tokens(tokens)[0].mean().item() == pytest.approx(1 - box.lam, abs=1e-6)

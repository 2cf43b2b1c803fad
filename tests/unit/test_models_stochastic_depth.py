"""Dropped branches are not computed, and the result equals that of multiplying them by zero."""

from __future__ import annotations

from itertools import count, pairwise

import numpy as np
import pytest
import torch
from network_samples import random_images, unchanged
from torch import Tensor, nn

from horovod_volo.models.blocks import ALL, DropPathSample, sample_drop_path
from horovod_volo.models.build import build_model, training_forward


def rows_of(sample: DropPathSample, batch: int) -> list[int]:
    return list(range(batch)) if sample.rows is None else sample.rows.tolist()


@pytest.mark.parametrize("rows", [[0, 2, 3], [4], [3, 1, 4, 0, 2], []])
def test_results_and_gradients_equal_the_masked_form(rows: list[int]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    tokens = torch.randn(5, 3, 6, requires_grad=True)
    grad_output = torch.randn(5, 3, 6)
    mask = torch.zeros(5, 1, 1).index_fill_(0, torch.tensor(rows, dtype=torch.int64), 1.0)
    usual = tokens + layer(tokens) * mask * 4.0
    ours = DropPathSample(torch.tensor(rows, dtype=torch.int64), 4.0).added(tokens, layer)
    torch.testing.assert_close(ours, usual)
    expected = torch.autograd.grad((usual * grad_output).sum(), [tokens, *layer.parameters()])
    found = torch.autograd.grad(
        (ours * grad_output).sum(), [tokens, *layer.parameters()], allow_unused=not rows
    )
    for grad, expected_grad in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.zeros_like(expected_grad) if grad is None else grad, expected_grad)


def test_each_image_keeps_a_branch_with_the_set_probability() -> None:
    batch, rates, draws = 6, [0.0, 0.1, 0.45, 0.9], 4000
    times = np.zeros((len(rates), batch))
    for seed in range(draws):
        for number, sample in enumerate(sample_drop_path(rates, torch.empty(batch), seed)):
            times[number, rows_of(sample, batch)] += 1
    for rate, of_images in zip(rates, times / draws, strict=True):
        spread = np.sqrt(rate * (1 - rate) / draws)
        assert np.abs(of_images - (1 - rate)).max() <= 4.5 * spread


def test_ranks_drop_nearly_equal_numbers_of_branches() -> None:
    counts = [
        [len(rows_of(sample, 7)) for sample in sample_drop_path([0.3] * 5, torch.empty(7), seed)]
        for seed in range(200)
    ]
    assert {count for row in counts for count in row} == {4, 5}  # 4.9 on average


def test_samples_depend_on_the_seed_alone() -> None:
    other_seed = count()

    def drawn(seed: int) -> list[list[int]]:
        torch.manual_seed(next(other_seed))
        return [rows_of(sample, 16) for sample in sample_drop_path([0.5] * 8, torch.empty(16), seed)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert all(first != second for first, second in pairwise(drawn(3)))


def test_kept_branches_are_scaled_up() -> None:
    (sample,) = sample_drop_path([0.75], torch.empty(8), 0)
    assert sample.scale == pytest.approx(4.0)
    assert len(rows_of(sample, 8)) == 2
    assert sample_drop_path([0.0, 0.0], torch.empty(8), None) == [ALL, ALL]
    with pytest.raises(ValueError, match="drop path needs a seed"):
        sample_drop_path([0.75], torch.empty(8), None)


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
def test_a_network_drops_branches_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, img_size=64, num_classes=10, drop_path=0.6)
    pictures = random_images(4, 64)

    def logits(seed: int) -> Tensor:
        return model.training_logits(pictures, unchanged, seed)[0]

    model.train()
    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))


def test_drop_path_of_timms_networks_depends_on_the_seed_too() -> None:
    model = build_model("resnet18", img_size=64, num_classes=10, drop_path=0.6).train()
    for parameter in model.parameters():  # timm initializes residual branches to zero
        parameter.data.add_(0.01)

    def logits(seed: int) -> Tensor:
        return training_forward(model)(random_images(4, 64), unchanged, seed)[0]

    assert torch.equal(logits(2**63 + 1), logits(2**63 + 1))
    assert not torch.equal(logits(2**63 + 1), logits(2))

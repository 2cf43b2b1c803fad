"""What stochastic depth leaves out is not computed, and the result is that of the form that computes it."""

from __future__ import annotations

from itertools import count, pairwise

import numpy as np
import pytest
import torch
from network_samples import random_images, unchanged
from torch import Tensor, nn

from horovod_volo.models.build import build_model, training_forward
from horovod_volo.models.drop_path import ALL, DropPathSample, sample_drop_path


def rows_of(kept: DropPathSample, batch: int) -> list[int]:
    return list(range(batch)) if kept.rows is None else kept.rows.tolist()


@pytest.mark.parametrize("rows", [[0, 2, 3], [4], [3, 1, 4, 0, 2], []])
def test_it_is_the_masked_form(rows: list[int]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    tokens = torch.randn(5, 3, 6, requires_grad=True)
    sent = torch.randn(5, 3, 6)
    mask = torch.zeros(5, 1, 1).index_fill_(0, torch.tensor(rows, dtype=torch.int64), 1.0)
    usual = tokens + layer(tokens) * mask * 4.0
    ours = DropPathSample(torch.tensor(rows, dtype=torch.int64), 4.0).added(tokens, layer)
    torch.testing.assert_close(ours, usual)
    wanted = torch.autograd.grad((usual * sent).sum(), [tokens, *layer.parameters()])
    found = torch.autograd.grad((ours * sent).sum(), [tokens, *layer.parameters()], allow_unused=not rows)
    for ours_of, wanted_of in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.zeros_like(wanted_of) if ours_of is None else ours_of, wanted_of)


def test_the_left_out_are_not_computed() -> None:
    seen: list[int] = []

    def branch(tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        return tokens

    DropPathSample(torch.tensor([1, 3]), 2.0).added(torch.ones(5, 2), branch)
    DropPathSample(torch.tensor([], dtype=torch.int64), 2.0).added(torch.ones(5, 2), branch)
    ALL.added(torch.ones(5, 2), branch)
    assert seen == [2, 5]


def test_each_image_keeps_a_branch_as_often_as_asked() -> None:
    batch, rates, draws = 6, [0.0, 0.1, 0.45, 0.9], 4000
    times = np.zeros((len(rates), batch))
    for seed in range(draws):
        for number, kept in enumerate(sample_drop_path(rates, torch.empty(batch), seed)):
            times[number, rows_of(kept, batch)] += 1
    for rate, of_images in zip(rates, times / draws, strict=True):
        spread = np.sqrt(rate * (1 - rate) / draws)
        assert np.abs(of_images - (1 - rate)).max() <= 4.5 * spread


def test_ranks_leave_out_nearly_as_many() -> None:
    counts = [
        [len(rows_of(kept, 7)) for kept in sample_drop_path([0.3] * 5, torch.empty(7), seed)]
        for seed in range(200)
    ]
    assert {count for row in counts for count in row} == {4, 5}  # 4.9 on average


def test_draws_are_a_function_of_the_seed_alone() -> None:
    unrelated = count()

    def drawn(seed: int) -> list[list[int]]:
        torch.manual_seed(next(unrelated))
        return [rows_of(kept, 16) for kept in sample_drop_path([0.5] * 8, torch.empty(16), seed)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert all(first != second for first, second in pairwise(drawn(3)))


def test_what_is_kept_is_scaled_up() -> None:
    (kept,) = sample_drop_path([0.75], torch.empty(8), 0)
    assert kept.scale == pytest.approx(4.0)
    assert len(rows_of(kept, 8)) == 2
    assert sample_drop_path([0.0, 0.0], torch.empty(8), None) == [ALL, ALL]
    with pytest.raises(ValueError, match="drop path needs a seed"):
        sample_drop_path([0.75], torch.empty(8), None)


def test_the_network_leaves_out_in_training_alone() -> None:
    torch.manual_seed(0)
    model = build_model("volo_demo", img_size=64, num_classes=10, drop_path=0.6)
    pictures = random_images(4, 64)

    def logits(seed: int) -> Tensor:
        return model.training_logits(pictures, unchanged, seed)[0]

    model.train()
    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))


def test_timms_networks_take_the_seed_too() -> None:
    model = build_model("resnet18", img_size=64, num_classes=10, drop_path=0.6).train()
    for parameter in model.parameters():  # timm's residual branches begin as zeros
        parameter.data.add_(0.01)

    def logits(seed: int) -> Tensor:
        return training_forward(model)(random_images(4, 64), unchanged, seed)[0]

    assert torch.equal(logits(2**63 + 1), logits(2**63 + 1))
    assert not torch.equal(logits(2**63 + 1), logits(2))

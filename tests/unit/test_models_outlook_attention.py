"""The attention that positions receive, against a loop over windows, heads, targets and sources."""

from __future__ import annotations

import torch

from horovod_volo.models.build import build_model
from horovod_volo.models.volo import received_attention


def test_it_agrees_with_a_loop() -> None:
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=64, num_classes=3, drop_path=0.1)
    images = torch.randn(2, 3, 64, 64)
    found = received_attention(network, images)
    assert found is not None
    assert network.training
    network.eval()
    block = network.network[0][-1]
    with torch.no_grad():
        tokens = block.norm1(network.stem(images))
        attention = block.attn
        pooled = attention.pool(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        logits = attention.attn(pooled) * attention.scale
    side, heads = tokens.shape[1], attention.num_heads
    received = torch.zeros(2, side, side)
    windows = torch.zeros(side, side)
    for row in range(logits.shape[1]):
        for column in range(logits.shape[2]):
            weights = logits[:, row, column].view(2, heads, 9, 9).softmax(dim=-1)
            for source in range(9):
                y, x = 2 * row - 1 + source // 3, 2 * column - 1 + source % 3
                if 0 <= y < side and 0 <= x < side:
                    received[:, y, x] += weights[..., source].sum(dim=(1, 2)) / heads
                    windows[y, x] += 1
    torch.testing.assert_close(found, received / windows)


def test_other_networks_have_none() -> None:
    assert received_attention(torch.nn.Linear(2, 2), torch.zeros(1, 2)) is None

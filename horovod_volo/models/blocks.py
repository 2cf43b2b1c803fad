"""VOLO's blocks in a form for training, made of timm's modules under timm's names.

Evaluation computes what timm's blocks compute. What differs: stochastic depth spares its work, outlook
attention neither unfolds nor folds, and attention takes the device's fastest form.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models.drop_path import ALL, DropPathSample
from horovod_volo.models.outlook import Outlook


class Attention(nn.Module):
    """timm's self-attention of a grid of tokens."""

    def __init__(self, trained: Any) -> None:
        super().__init__()
        self.num_heads = trained.num_heads
        self.qkv, self.proj = trained.qkv, trained.proj

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape (batch, rows, columns, channels)."""
        joint = self.qkv(tokens).flatten(1, 2).unflatten(2, (3, self.num_heads, -1))
        queries, keys, values = joint.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, width)
        heads = attend(queries, keys, values)
        attended: Tensor = self.proj(heads.transpose(1, 2).reshape(tokens.shape))
        return attended


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the values (batch, heads, tokens, width) that queries find by keys."""
    if queries.device.type == "cpu" and queries.dtype != torch.float32:
        # torch's fused kernel for half precision on CPUs takes about three times as long as the products.
        shares = (queries * queries.shape[-1] ** -0.5 @ keys.mT).softmax(dim=-1)
        products: Tensor = shares @ values
        return products
    found: Tensor = F.scaled_dot_product_attention(queries, keys, values)
    return found


class TwoBranches(nn.Module):
    """A block of attention and a perceptron, each added to its input after a norm."""

    branches = ("attended", "refined")  # what --compile compiles
    weight = 1.0  # of what is added
    norm1: nn.Module
    attn: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def forward(self, tokens: Tensor, first: DropPathSample = ALL, second: DropPathSample = ALL) -> Tensor:
        """Return tokens of the same shape (batch, ..., channels)."""
        tokens = first.added(tokens, self.attended, self.weight)
        return second.added(tokens, self.refined, self.weight)

    def attended(self, tokens: Tensor) -> Tensor:
        """Return the first branch."""
        result: Tensor = self.attn(self.norm1(tokens))
        return result

    def refined(self, tokens: Tensor) -> Tensor:
        """Return the second branch, of each token alone."""
        result: Tensor = self.mlp(self.norm2(tokens))
        return result


class Block(TwoBranches):
    """timm's Outlooker or Transformer."""

    def __init__(self, trained: Any, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn = trained.norm1, attention
        self.norm2, self.mlp = trained.norm2, trained.mlp
        # No modules of the forward any more: they tell the rates.
        self.drop_path1, self.drop_path2 = trained.drop_path1, trained.drop_path2

    @property
    def rates(self) -> tuple[float, float]:
        """Return how often each of the two branches is left out in training."""
        return _rate(self.drop_path1), _rate(self.drop_path2)


def outlooker(trained: Any) -> Block:
    """Remake timm's Outlooker."""
    return Block(trained, Outlook(trained.attn))


def transformer(trained: Any) -> Block:
    """Remake timm's Transformer."""
    return Block(trained, Attention(trained.attn))


def _rate(drop_path: nn.Module) -> float:
    return float(getattr(drop_path, "drop_prob", 0.0))

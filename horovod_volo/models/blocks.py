"""VOLO's blocks for training, built from timm's modules under timm's parameter names.

Evaluation computes the same as timm's blocks. In training, drop path skips the computation of dropped
branches, outlook attention has neither unfold nor fold, and self-attention uses the fastest kernel of the
device.
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
    """Return scaled dot-product attention (batch, heads, tokens, width)."""
    if queries.device.type == "cpu" and queries.dtype != torch.float32:
        # torch's fused CPU kernel for half precision takes about three times as long as the two products.
        weights = (queries * queries.shape[-1] ** -0.5 @ keys.mT).softmax(dim=-1)
        product: Tensor = weights @ values
        return product
    attended: Tensor = F.scaled_dot_product_attention(queries, keys, values)
    return attended


class TwoBranches(nn.Module):
    """A pre-norm block of two residual branches: attention and an MLP."""

    branches = ("attended", "refined")  # the methods that --compile compiles
    weight = 1.0  # of both branches
    norm1: nn.Module
    attn: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def forward(self, tokens: Tensor, first: DropPathSample = ALL, second: DropPathSample = ALL) -> Tensor:
        """Return tokens of the same shape (batch, ..., channels)."""
        tokens = first.added(tokens, self.attended, self.weight)
        return second.added(tokens, self.refined, self.weight)

    def attended(self, tokens: Tensor) -> Tensor:
        """Return the attention branch."""
        result: Tensor = self.attn(self.norm1(tokens))
        return result

    def refined(self, tokens: Tensor) -> Tensor:
        """Return the MLP branch."""
        result: Tensor = self.mlp(self.norm2(tokens))
        return result


class Block(TwoBranches):
    """timm's Outlooker or Transformer."""

    def __init__(self, trained: Any, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn = trained.norm1, attention
        self.norm2, self.mlp = trained.norm2, trained.mlp
        # Not used in forward, only for their drop rates.
        self.drop_path1, self.drop_path2 = trained.drop_path1, trained.drop_path2

    @property
    def rates(self) -> tuple[float, float]:
        """Return the drop path rates of the two branches."""
        return _rate(self.drop_path1), _rate(self.drop_path2)


def outlooker(trained: Any) -> Block:
    """Remake timm's Outlooker."""
    return Block(trained, Outlook(trained.attn))


def transformer(trained: Any) -> Block:
    """Remake timm's Transformer."""
    return Block(trained, Attention(trained.attn))


def _rate(drop_path: nn.Module) -> float:
    return float(getattr(drop_path, "drop_prob", 0.0))

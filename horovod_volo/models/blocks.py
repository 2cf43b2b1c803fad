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

from horovod_volo.kernels import runs_kernels
from horovod_volo.kernels.residual import add_branch, normalized_branch
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
        # Split along this dimension, the three gradients are joined in the order in which qkv reads them.
        queries, keys, values = (part.transpose(1, 2) for part in joint.unbind(2))
        heads = attend(queries, keys, values)  # each (batch, heads, tokens, width)
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
    compiled = False  # by --compile, which fuses these itself
    weight = 1.0  # of both branches
    norm1: nn.Module
    attn: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def forward(self, tokens: Tensor, first: DropPathSample = ALL, second: DropPathSample = ALL) -> Tensor:
        """Return tokens of the same shape (batch, ..., channels)."""
        if self.training and not self.compiled and runs_kernels(tokens):
            tokens = self._fused(tokens, first, self.norm1, self.attn)
            return self._fused(tokens, second, self.norm2, self.mlp)
        tokens = first.added(tokens, self.attended, self.weight)
        return second.added(tokens, self.refined, self.weight)

    def _fused(self, tokens: Tensor, kept: DropPathSample, norm: nn.Module, branch: nn.Module) -> Tensor:
        if kept.rows is not None and not len(kept.rows):
            return tokens
        tokens, normed = normalized_branch(tokens, norm, kept.rows, kept.position)
        return add_branch(tokens, branch(normed), kept.rows, kept.position, self.weight * kept.scale)

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

"""VOLO's blocks for training, built from timm's blocks, whose parameters they share under the same names.

In evaluation they compute what timm's blocks compute. In training, dropped branches are not computed (drop
path), outlook attention uses neither unfold nor fold, and self-attention uses the device's fastest kernel.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models.drop_path import ALL, DropPathSample
from horovod_volo.models.outlook import Outlook


class Attention(nn.Module):
    """timm's self-attention over a grid of tokens."""

    def __init__(self, timm_attention: Any) -> None:
        super().__init__()
        self.num_heads = timm_attention.num_heads
        self.qkv, self.proj = timm_attention.qkv, timm_attention.proj

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape (batch, rows, columns, channels)."""
        joint = self.qkv(tokens).flatten(1, 2).unflatten(2, (3, self.num_heads, -1))
        # Split along this dimension: backward stacks the three gradients in the memory order of qkv's output.
        queries, keys, values = (part.transpose(1, 2) for part in joint.unbind(2))
        heads = attend(queries, keys, values)  # each (batch, heads, tokens, width)
        result: Tensor = self.proj(heads.transpose(1, 2).reshape(tokens.shape))
        return result


class Mlp(nn.Module):
    """The MLP of a block: two linear layers with a GELU between them."""

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear) -> None:
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        mapped: Tensor = self.fc2(F.gelu(self.fc1(tokens)))
        return mapped


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

    # The methods that --compile compiles, and whether the number of their images varies.
    compiled_methods: ClassVar = {"with_both": False, "attended": True, "refined": True}
    weight = 1.0  # factor of both branches; that of the skip connection is 1
    norm1: nn.Module
    attn: nn.Module
    norm2: nn.Module
    mlp: Mlp

    def forward(self, tokens: Tensor, first: DropPathSample = ALL, second: DropPathSample = ALL) -> Tensor:
        """Return tokens of the same shape (batch, ..., channels)."""
        if all(sample is ALL or sample.mask is not None for sample in (first, second)):
            return self.with_both(tokens, first, second)
        return TwoBranches.with_both(self, tokens, first, second)  # of which --compile compiles the branches

    def with_both(self, tokens: Tensor, first: DropPathSample, second: DropPathSample) -> Tensor:
        """Return what `forward` returns. With --compile, both branches must be computed for all images."""
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

    def __init__(self, timm_block: Any, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn = timm_block.norm1, attention
        self.norm2, self.mlp = timm_block.norm2, Mlp(timm_block.mlp.fc1, timm_block.mlp.fc2)
        # Forward does not use these; they only hold the drop rates.
        self.drop_path1, self.drop_path2 = timm_block.drop_path1, timm_block.drop_path2

    @property
    def rates(self) -> tuple[float, float]:
        """Return the drop path rates of the two branches."""
        return _rate(self.drop_path1), _rate(self.drop_path2)


def outlooker(timm_block: Any) -> Block:
    """Build the block from timm's Outlooker, sharing its parameters."""
    return Block(timm_block, Outlook(timm_block.attn))


def transformer(timm_block: Any) -> Block:
    """Build the block from timm's Transformer, sharing its parameters."""
    return Block(timm_block, Attention(timm_block.attn))


def _rate(drop_path: nn.Module) -> float:
    return float(getattr(drop_path, "drop_prob", 0.0))


def stem_input(images: Tensor, *, training: bool) -> Tensor:
    """Return the images in channels-last memory in training on a GPU, and under autocast in its dtype.

    Convolutions on tensor cores are channels-last: they would transpose others. On a CPU, batch norm in that
    memory sums in fp32 one by one, which costs three digits of its gradients.
    """
    if not training or images.device.type == "cpu":
        return images
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else images.dtype
    return images.to(dtype, memory_format=torch.channels_last)

"""VOLO's blocks for training, built from timm's blocks, whose parameters they share under the same names.

In evaluation they compute what timm's blocks compute. In training, outlook attention uses neither unfold nor
fold, self-attention uses the device's fastest kernel, and drop path (stochastic depth) computes a residual
branch only for the images that keep it. As in the usual form, which computes every branch and multiplies
dropped ones by zero, each image keeps a branch with probability 1 - rate, and a kept branch is divided by
this probability. The number of images that keep it is the expected one, rounded up or down at random, so that
all ranks have equal work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.core.batch import copy_async
from horovod_volo.core.rng import generator
from horovod_volo.models.outlook import Outlook

Branch = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class DropPathSample:
    """The images of a batch that keep a branch, and the scale of the branch.

    The branch is computed for the images in `rows`, or for all and masked.
    """

    rows: Tensor | None = None  # (kept,) int64; None: all images
    scale: float = 1.0
    mask: Tensor | None = None  # (batch,) float32: 1 for images that keep the branch, else 0
    factors: Tensor | None = None  # (batch,) float32: the mask times the scale

    def added(self, tokens: Tensor, branch: Branch, weight: float = 1.0) -> Tensor:
        """Return tokens (batch, ..., channels) with the weighted branch added for the images that keep it."""
        if self.rows is None:
            return self._added_to_all(tokens, branch(tokens), weight)
        if not len(self.rows):
            return tokens
        result = branch(tokens.index_select(0, self.rows))
        return tokens.index_add(0, self.rows, result.to(tokens.dtype), alpha=weight * self.scale)

    def _added_to_all(self, tokens: Tensor, result: Tensor, weight: float) -> Tensor:
        if self.mask is None or self.factors is None:
            return torch.add(tokens, result, alpha=weight * self.scale)
        of_images = (-1, *[1] * (tokens.ndim - 1))
        if torch.compiler.is_compiling():  # the scale of each block would be a constant of its own graph
            factors = self.factors.view(of_images)  # bf16 would round them
            return torch.addcmul(tokens, result, factors, value=weight).to(tokens.dtype)
        mask = self.mask.to(tokens.dtype).view(of_images)
        return torch.addcmul(tokens, result, mask, value=weight * self.scale)


ALL = DropPathSample()


def sample_drop_path(rates: Sequence[float], tokens: Tensor, seed: int | None) -> list[DropPathSample]:
    """Sample the images of a batch that keep each branch; `rates` are the drop rates of the branches.

    `seed` is 64 random bits for this micro-batch; it may be None if all rates are 0. Sampling is on the host:
    the result is the same for every device, and the host knows the shapes without waiting for the device.
    """
    if not any(rates):
        return [ALL] * len(rates)
    if seed is None:
        raise ValueError("drop path needs a seed in training")
    batch, device = len(tokens), tokens.device
    random = generator(seed)
    keep_rates = 1.0 - np.asarray(rates)
    # On average batch x keep rate.
    counts = np.floor(batch * keep_rates + random.random(len(rates))).astype(np.int64)
    orders = random.permuted(np.tile(np.arange(batch), (len(rates), 1)), axis=1)  # (branches, batch)
    scales = 1.0 / keep_rates
    is_masked = np.asarray(rates) < _masked_below(device)
    masks = np.argsort(orders[is_masked], axis=1) < counts[is_masked, None]  # (masked branches, batch)
    factors = np.stack([masks, scales[is_masked, None] * masks], axis=1).astype(np.float32)
    of_masked = iter(copy_async(factors, device))
    return [
        DropPathSample(None, scale, *next(of_masked))
        if masked
        else DropPathSample(None if count == batch else row[:count], scale)
        for masked, count, scale, row in zip(
            is_masked.tolist(), counts.tolist(), scales.tolist(), copy_async(orders, device), strict=True
        )
    ]


def _masked_below(device: torch.device) -> float:
    """Return the rate below which branches are computed for all images.

    On a GPU, gathering the images that keep them would cost more, and shapes stay the same
    from step to step.
    """
    return 0.0 if device.type == "cpu" else 0.25


class Attention(nn.Module):
    """Multi-head self-attention over a sequence or a grid of tokens."""

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = qkv, proj

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens of the same shape (batch, ..., channels)."""
        joint = self.qkv(tokens).flatten(1, -2).unflatten(2, (3, self.num_heads, -1))
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
    """timm's Outlooker or Transformer, whose parameters it shares."""

    def __init__(self, timm_block: Any, *, is_outlooker: bool) -> None:
        super().__init__()
        own = timm_block.attn
        self.norm1 = timm_block.norm1
        self.attn = Outlook(own) if is_outlooker else Attention(own.qkv, own.proj, own.num_heads)
        self.norm2, self.mlp = timm_block.norm2, Mlp(timm_block.mlp.fc1, timm_block.mlp.fc2)
        drop_paths = timm_block.drop_path1, timm_block.drop_path2
        self.rates = [float(getattr(each, "drop_prob", 0.0)) for each in drop_paths]  # of the two branches


def stem_input(images: Tensor, *, training: bool) -> Tensor:
    """Return the images in channels-last memory in training on a GPU, and under autocast in its dtype.

    Convolutions on tensor cores are channels-last: they would transpose others. On a CPU, batch norm in that
    memory sums in fp32 one by one, which costs three digits of its gradients.
    """
    if not training or images.device.type == "cpu":
        return images
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else images.dtype
    return images.to(dtype, memory_format=torch.channels_last)

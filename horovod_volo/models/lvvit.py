"""LV-ViT, the vision transformer of the token labeling paper, with the same training forward as VOLO.

Residual branches are divided by a constant. Modules and parameters have the published names, so that
published checkpoints load.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.models.blocks import Attention, Mlp, TwoBranches, sample_drop_path, stem_input
from horovod_volo.models.registry import ModelSpec, register_model
from horovod_volo.models.volo import TwoHeads, embedding_for, fit_position_embedding, run_blocks

LVVIT_SIZES: dict[str, dict[str, Any]] = {
    "lvvit_t": {"layers": 12, "embed_dim": 240, "num_heads": 4, "stem_width": 64, "residual_divisor": 1.0},
    "lvvit_s": {"layers": 16, "embed_dim": 384, "num_heads": 6, "stem_width": 64, "residual_divisor": 2.0},
    "lvvit_m": {"layers": 20, "embed_dim": 512, "num_heads": 8, "stem_width": 64, "residual_divisor": 2.0},
    "lvvit_l": {"layers": 24, "embed_dim": 768, "num_heads": 12, "stem_width": 128, "residual_divisor": 3.0},
}

_PATCH = 16  # side of a patch, pixels


class Stem(nn.Module):
    """Three convolutions at half the resolution, then one token per 8 x 8 cells."""

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.proj = nn.Conv2d(width, embed_dim, _PATCH // 2, stride=_PATCH // 2)

    def forward(self, images: Tensor) -> Tensor:
        """Return tokens (batch, rows, columns, channels)."""
        cells = F.relu(self.bn1(self.conv1(stem_input(images, training=self.training))), inplace=True)
        cells = F.relu(self.bn2(self.conv2(cells)), inplace=True)
        cells = F.relu(self.bn3(self.conv3(cells)), inplace=True)
        tokens: Tensor = self.proj(cells)
        return tokens.permute(0, 2, 3, 1)


class LvVitBlock(TwoBranches):
    """A pre-norm transformer block whose residual branches are divided by a constant."""

    def __init__(self, embed_dim: int, num_heads: int, mlp_ratio: float, divisor: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim)
        qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.attn = Attention(qkv, nn.Linear(embed_dim, embed_dim), num_heads)
        self.norm2 = nn.LayerNorm(embed_dim)
        hidden = int(embed_dim * mlp_ratio)
        self.mlp = Mlp(nn.Linear(embed_dim, hidden), nn.Linear(hidden, embed_dim))
        self.weight = 1.0 / divisor


class LvVit(TwoHeads, nn.Module):
    """LV-ViT."""

    def __init__(
        self,
        *,
        img_size: int,
        num_classes: int,
        drop_path: float,
        layers: int,
        embed_dim: int,
        num_heads: int,
        stem_width: int,
        residual_divisor: float,
        mlp_ratio: float = 3.0,
        aux_head: bool = True,
    ) -> None:
        super().__init__()
        side = img_size // _PATCH
        self.num_classes, self.num_features = num_classes, embed_dim
        self.grid = (side, side)  # tokens
        self.grad_checkpointing = False
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + side * side, embed_dim))
        self.patch_embed = Stem(stem_width, embed_dim)
        # On the CPU, as the model may be built on the meta device.
        self.rates: list[float] = torch.linspace(0, drop_path, layers, device="cpu").tolist()
        self.blocks = nn.ModuleList(
            LvVitBlock(embed_dim, num_heads, mlp_ratio, residual_divisor) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)
        self.aux_head = nn.Linear(embed_dim, num_classes)
        self._draw_weights()
        if not aux_head:
            # Removed after the weights are drawn: the other weights are the same with and without it.
            self.aux_head = None

    def _draw_weights(self) -> None:
        """Initialize weights; convolutions and norms keep torch's initialization."""
        for parameter in (self.pos_embed, self.cls_token):
            nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits for evaluation, (batch, classes).

        With an auxiliary head, half of the highest token logit is added to each class logit.
        """
        features = self.forward_features(images)
        logits: Tensor = self.head(features[:, 0])
        if self.aux_head is None:
            return logits
        token_logits: Tensor = self.aux_head(features[:, 1:])  # (batch, tokens, classes)
        return logits + 0.5 * token_logits.amax(dim=1)

    def stem(self, images: Tensor) -> Tensor:
        """Return a grid of tokens (batch, rows, columns, channels)."""
        tokens: Tensor = self.patch_embed(images)
        return tokens

    def body(self, tokens: Tensor, drop_path_seed: int | None = None) -> Tensor:
        """Return normalized features (batch, 1 + tokens, channels) of a grid, the class token first."""
        first = self.cls_token.expand(tokens.shape[0], -1, -1)
        embedding = embedding_for(self.pos_embed, (tokens.shape[1], tokens.shape[2]), self.grid)
        tokens = torch.cat([first, tokens.flatten(1, 2)], dim=1) + embedding
        rates = [rate if self.training else 0.0 for rate in self.rates for _ in range(2)]
        samples = iter(sample_drop_path(rates, tokens, drop_path_seed))
        features: Tensor = self.norm(run_blocks(self, self.blocks, tokens, samples))
        return features

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay."""
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:  # noqa: ARG002  # timm's signature
        """Return the parameters of each layer as timm's patterns: stem, blocks, heads."""
        with_the_last_block = (99999,)  # timm's constant
        blocks = [(r"^blocks\.(\d+)", None), (r"^norm", with_the_last_block)]
        return {"stem": r"^cls_token|pos_embed|patch_embed", "blocks": blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn activation checkpointing of blocks on or off."""
        self.grad_checkpointing = enable


for _name, _settings in LVVIT_SIZES.items():
    register_model(
        ModelSpec(
            name=_name,
            build=LvVit,
            stride=_PATCH,
            heads=("head", "aux_head"),
            crop_pct=0.9 if _name in ("lvvit_t", "lvvit_s") else 1.0,
            adapt_weights=fit_position_embedding,
            arguments=_settings,
        )
    )

"""VOLO with a forward pass for training: class logits and token logits, with MixToken after the stem.

Parameter names and the results of evaluation are timm's, so checkpoints are interchangeable. The blocks are
those of models/blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horovod_volo.models.blocks import Block, outlooker, transformer
from horovod_volo.models.drop_path import DropPathSample, sample_drop_path
from horovod_volo.models.position_embedding import fit_position_embedding
from horovod_volo.models.registry import ModelSpec, TimmExport, register_model
from horovod_volo.models.timm_api import VOLO

TokenSwap = Callable[[Tensor], Tensor]  # of a (batch, rows, columns, channels) grid; its own inverse

BlockRunner = Callable[..., Tensor]  # run(block, tokens, *further arguments of the block)

# layers and widths of the outlooker stage and the three transformer stages that follow it
SIZES: dict[str, dict[str, Any]] = {
    "volo_demo": {
        "layers": (1, 1, 1, 1),
        "embed_dims": (48, 96, 96, 96),
        "num_heads": (2, 4, 4, 4),
        "stem_hidden_dim": 16,
    },
    "volo_d1": {"layers": (4, 4, 8, 2), "embed_dims": (192, 384, 384, 384), "num_heads": (6, 12, 12, 12)},
    "volo_d2": {"layers": (6, 4, 10, 4), "embed_dims": (256, 512, 512, 512), "num_heads": (8, 16, 16, 16)},
    "volo_d3": {"layers": (8, 8, 16, 4), "embed_dims": (256, 512, 512, 512), "num_heads": (8, 16, 16, 16)},
    "volo_d4": {"layers": (8, 8, 16, 4), "embed_dims": (384, 768, 768, 768), "num_heads": (12, 16, 16, 16)},
    "volo_d5": {
        "layers": (12, 12, 20, 4),
        "embed_dims": (384, 768, 768, 768),
        "num_heads": (12, 16, 16, 16),
        "mlp_ratio": 4.0,
        "stem_hidden_dim": 128,
    },
}


def runner_of_blocks(model: Any) -> BlockRunner:
    """Return how the model runs its blocks: plainly, or with activation checkpointing."""
    return _recomputed if model.grad_checkpointing and model.training else _plain


def _plain(block: nn.Module, tokens: Tensor, *kept: DropPathSample) -> Tensor:
    result: Tensor = block(tokens, *kept)
    return result


def _recomputed(block: nn.Module, tokens: Tensor, *kept: DropPathSample) -> Tensor:
    # Blocks draw no random numbers: recomputation drops the same branches.
    result: Tensor = checkpoint(block, tokens, *kept, use_reentrant=False, preserve_rng_state=False)
    return result


class Volo(VOLO):  # type: ignore[misc]  # timm ships no types
    """timm's VOLO with a training forward; token labels need the auxiliary head."""

    aux_head: nn.Linear | None

    def __init__(self, *, use_aux_head: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        if not use_aux_head:
            # Removed after all weights were drawn, so that the others do not depend on it.
            self.aux_head = None
        for number, stage in enumerate(self.network):
            if isinstance(stage, nn.Sequential):
                remake = outlooker if number == 0 else transformer
                self.network[number] = nn.Sequential(*map(remake, stage))
        # Listed once: finding them among hundreds of modules takes longer than drawing.
        self._rates = [rate for block in self.modules() if isinstance(block, Block) for rate in block.rates]

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of the tokens."""
        return self.pos_embed.shape[1], self.pos_embed.shape[2]

    def training_logits(
        self, images: Tensor, swap_tokens: TokenSwap, drop_path_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return class and token logits; tokens are swapped after the stem and back before the head."""
        features = self.body(swap_tokens(self.stem(images)), drop_path_seed)
        class_logits = self.head(self.head_drop(features[:, 0]))  # (batch, classes)
        grid = swap_tokens(features[:, 1:].reshape(-1, *self.pos_embed.shape[1:]))
        assert self.aux_head is not None, "without it there are class logits alone"
        return class_logits, self.aux_head(grid).flatten(1, 2)  # the latter (batch, tokens, classes)

    def class_logits(
        self, images: Tensor, swap_tokens: TokenSwap, drop_path_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return class logits, of swapped tokens, and empty token logits."""
        features = self.body(swap_tokens(self.stem(images)), drop_path_seed)
        logits: Tensor = self.head(self.head_drop(features[:, 0]))
        return logits, logits.new_empty(len(logits), 0, logits.shape[-1])

    def forward_features(self, images: Tensor) -> Tensor:
        """Return normalized features (batch, 1 + tokens, channels), the class token first."""
        return self.body(self.stem(images))

    def stem(self, images: Tensor) -> Tensor:
        """Return tokens (batch, rows, columns, channels)."""
        tokens: Tensor = self.patch_embed(images).permute(0, 2, 3, 1)
        # Otherwise all blocks would get the memory format of the convolution.
        return tokens.contiguous()

    def body(self, tokens: Tensor, drop_path_seed: int | None = None) -> Tensor:
        """Return normalized features (batch, 1 + tokens, channels) of the stem's tokens (4 x tokens)."""
        features: Tensor = self.norm(self.forward_cls(self.forward_tokens(tokens, drop_path_seed)))
        return features

    def forward_tokens(self, tokens: Tensor, drop_path_seed: int | None = None) -> Tensor:
        """Return (batch, tokens, channels) of the stem's (batch, rows, columns, channels)."""
        run = runner_of_blocks(self)
        kept = self._sample_drop_path(tokens, drop_path_seed)
        for index, stage in enumerate(self.network):
            if index == 2:  # after the outlookers and the downsampling
                tokens = self.pos_drop(tokens + self.pos_embed)
            if isinstance(stage, nn.Sequential):
                for block in stage:
                    tokens = run(block, tokens, next(kept), next(kept))
            else:
                tokens = stage(tokens)
        return tokens.flatten(1, 2)

    def _sample_drop_path(self, tokens: Tensor, seed: int | None) -> Iterator[DropPathSample]:
        """Yield the drop path sample of each residual branch, in order."""
        rates = self._rates if self.training else [0.0] * len(self._rates)
        yield from sample_drop_path(rates, tokens, seed)

    def forward_cls(self, tokens: Tensor) -> Tensor:
        """Return (batch, 1 + tokens, channels): the class token, after class attention, comes first."""
        run = runner_of_blocks(self)
        features = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        for block in self.post_network:
            features = run(block, features)
        return features


def _build(
    settings: dict[str, Any], *, img_size: int, num_classes: int, drop_path: float, aux_head: bool
) -> Volo:
    return Volo(
        img_size=img_size,
        num_classes=num_classes,
        drop_path_rate=drop_path,
        use_aux_head=aux_head,
        **settings,
    )


# Above 1 the evaluation crop is larger than the resized image, and its margin is black.
_CROP_PCT = {"volo_d4": 1.15, "volo_d5": 1.15, "volo_demo": 1.0}

for _name, _settings in SIZES.items():
    register_model(
        ModelSpec(
            name=_name,
            build=partial(_build, _settings),
            stride=16,  # the stem divides by 8, the downsampling by 2
            heads=("head", "aux_head"),
            crop_pct=_CROP_PCT.get(_name, 0.96),
            adapt_weights=fit_position_embedding,
            export=TimmExport(f"{_name}_224", _settings, "patch_embed.conv.0", constructor=VOLO),
        )
    )

"""VOLO with a forward pass for training: class logits and token logits, tokens mixed after the stem.

Modules and parameter names are timm's, so checkpoints of either load in the other. Evaluation
is timm's own forward, and so is each block; only which blocks are recomputed in backward differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horovod_volo.models.timm_door import VOLO

TokenExchange = Callable[[Tensor], Tensor]  # of a (batch, rows, columns, channels) grid; its own inverse

BlockRunner = Callable[[nn.Module, Tensor], Tensor]

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
    """Return how the model runs each block: plainly, or recomputed in backward from its input alone."""
    return _recomputed if model.grad_checkpointing and model.training else _plain


def _plain(block: nn.Module, tokens: Tensor) -> Tensor:
    result: Tensor = block(tokens)
    return result


def _recomputed(block: nn.Module, tokens: Tensor) -> Tensor:
    # The random state is set back, so that stochastic depth leaves out the same branches again.
    result: Tensor = checkpoint(block, tokens, use_reentrant=False, preserve_rng_state=True)
    return result


class Volo(VOLO):  # type: ignore[misc]  # timm ships no types
    """timm's VOLO, trained with token labels."""

    def training_logits(self, images: Tensor, exchange: TokenExchange) -> tuple[Tensor, Tensor]:
        """Return class and token logits; what `exchange` does to the tokens is undone on the logits."""
        tokens = self.patch_embed(images).permute(0, 2, 3, 1)  # (batch, rows, columns, channels)
        tokens = self.forward_tokens(exchange(tokens))  # (batch, tokens, channels), a quarter as many
        features = self.norm(self.forward_cls(tokens))  # (batch, 1 + tokens, channels)
        class_logits = self.head(self.head_drop(features[:, 0]))  # (batch, classes)
        token_logits = self.aux_head(features[:, 1:])  # (batch, tokens, classes)
        _, rows, columns, _ = self.pos_embed.shape
        grid = token_logits.unflatten(1, (rows, columns))
        return class_logits, exchange(grid).flatten(1, 2)

    def forward_tokens(self, tokens: Tensor) -> Tensor:
        """Return (batch, tokens, channels) of the stem's (batch, rows, columns, channels)."""
        run = runner_of_blocks(self)
        for index, stage in enumerate(self.network):
            if index == 2:  # behind the outlookers and the downsampling
                tokens = self.pos_drop(tokens + self.pos_embed)
            if isinstance(stage, nn.Sequential):
                for block in stage:
                    tokens = run(block, tokens)
            else:
                tokens = stage(tokens)
        return tokens.flatten(1, 2)

    def forward_cls(self, tokens: Tensor) -> Tensor:
        """Return (batch, 1 + tokens, channels): a class token that has looked at the others comes first."""
        run = runner_of_blocks(self)
        features = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        for block in self.post_network:
            features = run(block, features)
        return features

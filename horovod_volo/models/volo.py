"""VOLO for training. Given images (batch, 3, height, width), MixToken's swap and a seed for drop path, it
returns class logits (batch, classes) and token logits (batch, tokens, classes). Backward leaves a gradient on
each parameter.

Tokens are swapped between the stem and the blocks of models/blocks.py, and swapped back before the token
head. Parameter names and the results of evaluation are timm's, so checkpoints are interchangeable.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horovod_volo.models.blocks import Block, DropPathSample, sample_drop_path, stem_input
from horovod_volo.models.registry import ModelSpec, State, register_model
from horovod_volo.models.timm_api import VOLO, resample_abs_pos_embed, resample_abs_pos_embed_nhwc

# Of timm's class. Others would have no effect in training, such as dropout, or change what tokens are.
_ARGUMENTS = ("img_size", "num_classes", "layers", "embed_dims", "num_heads", "stem_hidden_dim", "mlp_ratio")
TokenSwap = Callable[[Tensor], Tensor]  # of a grid (batch, rows, columns, channels); its own inverse

# Layers, widths and heads of the outlooker stage and of the three transformer stages that follow it.
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


def run_block(model: Any, block: nn.Module, tokens: Tensor, *samples: DropPathSample) -> Tensor:
    """Run a block, with activation checkpointing if that is on."""
    if not (model.grad_checkpointing and model.training):
        plain: Tensor = block(tokens, *samples)
        return plain
    # Blocks draw no random numbers, so recomputation needs no saved generator state.
    result: Tensor = checkpoint(block, tokens, *samples, use_reentrant=False, preserve_rng_state=False)
    return result


def run_blocks(
    model: Any, blocks: Iterable[nn.Module], tokens: Tensor, samples: Iterator[DropPathSample]
) -> Tensor:
    """Run blocks of two branches one after the other."""
    for block in blocks:
        tokens = run_block(model, block, tokens, next(samples), next(samples))
    return tokens


class TwoHeads:
    """The training forward of a network of a stem, a body, a class head and a token head."""

    head: nn.Module
    aux_head: nn.Linear | None  # gives token logits, which token labels need
    grid: tuple[int, int]  # rows and columns of the position embedding; those of tokens follow the images
    reduction = 1  # side of the stem's grid over that of the tokens
    stem: Callable[[Tensor], Tensor]  # images -> a grid of tokens (batch, rows, columns, channels)
    # (grid, drop path seed) -> normalized features (batch, 1 + tokens, channels), the class token first
    body: Callable[..., Tensor]

    def training_logits(
        self, images: Tensor, swap_tokens: TokenSwap, drop_path_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return class and token logits; tokens are swapped after the stem and back before the token head."""
        grid = self.stem(images)
        features = self.body(swap_tokens(grid), drop_path_seed)
        assert self.aux_head is not None, "without it there are class logits alone"
        shape = (grid.shape[1] // self.reduction, grid.shape[2] // self.reduction)
        own = swap_tokens(torch.unflatten(features[:, 1:], 1, shape))
        return self.head(features[:, 0]), self.aux_head(own).flatten(1, 2)  # (batch, tokens, classes)

    def class_logits(
        self, images: Tensor, swap_tokens: TokenSwap, drop_path_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return class logits and empty token logits; tokens are swapped after the stem."""
        features = self.body(swap_tokens(self.stem(images)), drop_path_seed)
        logits: Tensor = self.head(features[:, 0])
        return logits, logits.new_empty(len(logits), 0, logits.shape[-1])

    def forward_features(self, images: Tensor) -> Tensor:
        """Return normalized features (batch, 1 + tokens, channels), the class token first."""
        return self.body(self.stem(images))


class Volo(TwoHeads, VOLO):  # type: ignore[misc]  # timm ships no types
    """timm's VOLO with a training forward; it also takes images of other sizes than it was built for."""

    reduction = 2

    def __init__(self, *, drop_path: float = 0.0, aux_head: bool = True, **settings: Any) -> None:
        if others := settings.keys() - _ARGUMENTS:
            raise TypeError(f"it takes {', '.join(_ARGUMENTS)}, not {', '.join(others)}")
        super().__init__(drop_path_rate=drop_path, **settings)
        if not aux_head:
            # Removed after the weights are drawn: the other weights are the same with and without it.
            self.aux_head = None
        for number, stage in enumerate(self.network):
            if isinstance(stage, nn.Sequential):
                blocks = (Block(block, is_outlooker=number == 0) for block in stage)
                self.network[number] = nn.Sequential(*blocks)
        self.grid = (self.pos_embed.shape[1], self.pos_embed.shape[2])
        # Listed once: finding them among hundreds of modules takes longer than sampling drop path.
        self._rates = [rate for block in self.modules() if isinstance(block, Block) for rate in block.rates]

    def stem(self, images: Tensor) -> Tensor:
        """Return a grid of tokens (batch, rows, columns, channels)."""
        images = stem_input(images, training=self.training)
        tokens: Tensor = self.patch_embed(images).permute(0, 2, 3, 1)
        # Otherwise all blocks would compute on the strides of the convolution's output.
        return tokens.contiguous()

    def body(self, tokens: Tensor, drop_path_seed: int | None = None) -> Tensor:
        """Return normalized features (batch, 1 + tokens, channels), the class token first.

        They are computed from the stem's grid (batch, rows, columns, channels), which has 4 x tokens.
        """
        features: Tensor = self.norm(self.forward_cls(self.forward_tokens(tokens, drop_path_seed)))
        return features

    def forward_tokens(self, tokens: Tensor, drop_path_seed: int | None = None) -> Tensor:
        """Run all stages but class attention on the stem's grid; return (batch, tokens, channels)."""
        samples = self._sample_drop_path(tokens, drop_path_seed)
        outlookers, downsampling, *transformers = self.network
        tokens = downsampling(run_blocks(self, outlookers, tokens, samples))
        tokens = self.pos_drop(tokens + embedding_for(self.pos_embed, (tokens.shape[1], tokens.shape[2])))
        for stage in transformers:
            tokens = run_blocks(self, stage, tokens, samples)
        return tokens.flatten(1, 2)

    def _sample_drop_path(self, tokens: Tensor, seed: int | None) -> Iterator[DropPathSample]:
        """Yield the drop path sample of each residual branch, in order."""
        rates = self._rates if self.training else [0.0] * len(self._rates)
        yield from sample_drop_path(rates, tokens, seed)

    def forward_cls(self, tokens: Tensor) -> Tensor:
        """Return (batch, 1 + tokens, channels): the class token, after class attention, comes first."""
        features = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        for block in self.post_network:
            features = run_block(self, block, features)
        return features


def fit_position_embedding(model: nn.Module, state: State) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights with `pos_embed` reshaped or resized to the model's if possible, and messages."""
    given, messages = dict(state), list[str]()
    old, new = given.get("pos_embed"), model.state_dict()["pos_embed"]
    if old is None or old.shape == new.shape or old.shape[:1] != (1,) or not old.numel():
        return given, []
    if old.ndim == 3 and new.ndim == 4 and (side := math.isqrt(old.shape[1])) ** 2 == old.shape[1]:
        # Without a class token, as in published weights.
        old = given["pos_embed"] = old.reshape(1, side, side, -1)
        messages.append(f"position embedding laid out as {side} x {side} tokens")
    if old.shape != new.shape and old.ndim == new.ndim and old.shape[-1] == new.shape[-1]:
        old_grid, grid = _grid(old), _grid(new)
        if old_grid and grid:
            given["pos_embed"] = resize_position_embedding(old, old_grid, grid)
            sizes = (f"{rows} x {columns}" for rows, columns in (old_grid, grid))
            messages.append(f"position embedding resized from {' to '.join(sizes)}")
    return given, messages


def _grid(embedding: Tensor) -> tuple[int, int] | None:
    """Return the rows and columns of a position embedding; None where it has no grid."""
    if embedding.ndim == 4:
        return embedding.shape[1], embedding.shape[2]
    side = math.isqrt(embedding.shape[1] - 1)  # the first one is the class token's
    return (side, side) if side * side == embedding.shape[1] - 1 else None


def embedding_for(embedding: Tensor, grid: tuple[int, int], old: tuple[int, int] | None = None) -> Tensor:
    """Return a position embedding for a grid; resized, with gradients, if it has another one.

    `old` is the grid of an embedding (1, 1 + tokens, channels), which does not show it.
    """
    own = old or (embedding.shape[1], embedding.shape[2])
    return embedding if own == grid else resize_position_embedding(embedding, own, grid)


def resize_position_embedding(embedding: Tensor, old: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Resize the grid of an embedding bicubically, as the published fine-tuning does.

    It is (1, rows, columns, channels), or (1, 1 + rows * columns, channels), whose first token stays.
    """
    if embedding.ndim == 4:
        resized: Tensor = resample_abs_pos_embed_nhwc(embedding, list(grid), antialias=False)
    else:
        resized = resample_abs_pos_embed(embedding, list(grid), list(old), antialias=False)
    return resized


# Above 1 the evaluation crop is larger than the resized image, and its margin is black.
_CROP_PCT = {"volo_d4": 1.15, "volo_d5": 1.15}

for _name, _settings in SIZES.items():
    register_model(
        ModelSpec(
            name=_name,
            build=Volo,
            stride=16,  # the stem divides by 8, the downsampling by 2
            heads=("head", "aux_head"),
            crop_pct=_CROP_PCT.get(_name, 0.96),
            adapt_weights=fit_position_embedding,
            timm_name=f"{_name}_224",
            timm_class=VOLO,
            arguments=_settings,
        )
    )

"""Backbones: VOLO and LV-ViT without their heads, which return maps of several strides.

VOLO gives the outlookers' map (stride 8) and those of the three transformer stages (16); LV-ViT four of its
blocks (16). Parameter names are those of the classification networks. Sides must be multiples of 16; position
embeddings are resized to the images' grid.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.config.schema import Model
from horovod_volo.core.errors import UserError
from horovod_volo.models.blocks import sample_drop_path
from horovod_volo.models.build import build_model, our_name
from horovod_volo.models.lvvit import LvVit
from horovod_volo.models.volo import Volo, embedding_for, fit_position_embedding, run_blocks

_STRIDE = 16
_THEIR_NECK, _OUR_NECK = "backbone.side_layer", "neck.side_layer"  # in LV-ViT's repository and here


class VoloBackbone(Volo):
    """VOLO up to its last transformer stage."""

    unused = ("post_network", "norm", "cls_token", "head", "aux_head")

    def describe_maps(self) -> None:
        widths = [self.network[0][-1].norm1, *(self.network[stage][-1].norm1 for stage in (2, 3, 4))]
        self.channels = tuple(norm.normalized_shape[0] for norm in widths)
        self.strides = (8, _STRIDE, _STRIDE, _STRIDE)

    def forward(self, images: Tensor, drop_path_seed: int | None = None) -> list[Tensor]:
        tokens = self.stem(images)
        samples = self._sample_drop_path(tokens, drop_path_seed)
        outlookers, downsampling, *transformers = self.network
        tokens = run_blocks(self, outlookers, tokens, samples)
        maps = [tokens]
        tokens = downsampling(tokens)
        tokens = self.pos_drop(tokens + embedding_for(self.pos_embed, (tokens.shape[1], tokens.shape[2])))
        for stage in transformers:
            tokens = run_blocks(self, stage, tokens, samples)
            maps.append(tokens)
        return [each.permute(0, 3, 1, 2) for each in maps]


class LvVitBackbone(LvVit):
    """LV-ViT; the maps are those of the last block and of three before it."""

    unused = ("norm", "head", "aux_head")
    # Published for S, M and L: the blocks after which the last third of the network is cut in four.
    _LAST_BLOCKS = (9, 6, 3, 0)  # from the end

    def describe_maps(self) -> None:
        self.channels = (self.num_features,) * 4
        self.strides = (_STRIDE,) * 4

    def forward(self, images: Tensor, drop_path_seed: int | None = None) -> list[Tensor]:  # type: ignore[override]
        """Return the maps after four blocks, without the class token."""
        grid = self.patch_embed(images)  # (batch, rows, columns, channels)
        shape = (grid.shape[1], grid.shape[2])
        first = self.cls_token.expand(grid.shape[0], -1, -1)  # len() would fix the batch in an export
        tokens = torch.cat([first, grid.flatten(1, 2)], dim=1)
        tokens = tokens + embedding_for(self.pos_embed, shape, self.grid)
        rates = [rate if self.training else 0.0 for rate in self.rates for _ in range(2)]
        samples = iter(sample_drop_path(rates, tokens, drop_path_seed))
        maps, begin = [], 0
        for end in (len(self.blocks) - last for last in self._LAST_BLOCKS):
            tokens = run_blocks(self, self.blocks[begin:end], tokens, samples)
            maps.append(tokens[:, 1:].reshape(grid.shape).permute(0, 3, 1, 2))
            begin = end
        return maps


def build_backbone(settings: Model) -> Any:
    """Build the backbone of a model of classification, with fresh weights."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {Volo: VoloBackbone, LvVit: LvVitBackbone}
    name = our_name(settings.model)
    if not name.startswith(("volo", "lvvit")):
        raise UserError(f"{name} gives no maps for --task segmentation. Use a --model of VOLO or LV-ViT.")
    network = build_model(
        name,
        img_size=settings.img_size,
        num_classes=1,
        drop_path=settings.drop_path,
        grad_checkpoint=settings.grad_checkpoint,
        model_kwargs=settings.model_kwargs,
    )
    network.__class__ = kinds[type(network)]
    for part in network.unused:  # type: ignore[union-attr]
        delattr(network, part)
    network.describe_maps()  # type: ignore[operator]
    return network


def fitted_weights(
    network: Any, heads: tuple[str, ...], given: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return weights under our names, tensors of the network that stay fresh, and messages.

    The weights are of such a network, from here or mmsegmentation, or, without `heads`, of a network of
    classification alone.
    """
    weights = {name.replace(_THEIR_NECK, _OUR_NECK): tensor for name, tensor in given.items()}
    is_whole = any(name.startswith(heads) for name in weights)
    prefix, fresh, messages = "backbone." if is_whole else "", list[str](), list[str]()
    body = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    others = {name: tensor for name, tensor in weights.items() if is_whole and not name.startswith(prefix)}
    if not is_whole:
        fresh = [name for name in network.state_dict() if not name.startswith("backbone.")]
        messages.append("all but the backbone begins with fresh weights: these are of the backbone alone")
    unused = tuple(f"{name}{end}" for name in network.backbone.unused for end in (".", ""))
    kept = {name: tensor for name, tensor in body.items() if not name.startswith(unused)}
    left_out = len(body) - len(kept)
    if hasattr(network.backbone, "pos_embed"):
        kept, resized = fit_position_embedding(network.backbone, kept)
        messages += resized
    if left_out:
        messages.append(f"{left_out} tensors of classification alone are left out")
    return others | {f"backbone.{name}": tensor for name, tensor in kept.items()}, fresh, messages

"""UperNet: a backbone, a neck, UPerHead and, in training, the auxiliary FCN head.

Given images (batch, 3, height, width) of any size, it returns logits at a quarter of the height and width
and, in training, auxiliary logits at a sixteenth. Parameters have mmsegmentation's names under `decode_head.`
and `auxiliary_head.`, those of the classification network under `backbone.`, and LV-ViT's under `neck.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from horovod_volo.core.errors import UserError
from horovod_volo.dense.backbones import build_backbone, fit_backbone
from horovod_volo.dense.necks import build_neck, pad_to_multiple
from horovod_volo.dense.uperhead import FCNHead, UPerHead
from horovod_volo.models.build import seed_torch
from horovod_volo.models.sync_batch_norm import run_together

HEADS = ("decode_head.conv_seg", "auxiliary_head.conv_seg")
# The same modules in other projects: (theirs, ours).
_HUGGING_FACE = ((".batch_norm.", ".bn."), (".classifier.", ".conv_seg."))
_OTHER_PLACES = (("backbone.side_layer", "neck.side_layer"),)
_STRIDE = 16


class UperNet(nn.Module):
    """A network that classifies pixels."""

    def __init__(
        self,
        name: str,
        *,
        img_size: int,
        num_classes: int,
        drop_path: float,
        neck: str,
        width: int,
        auxiliary_width: int,
        grad_checkpoint: bool = False,
        stages: str = "all",
    ) -> None:
        """Build it with fresh weights from torch's random state."""
        super().__init__()
        self.backbone = build_backbone(
            name, img_size=img_size, drop_path=drop_path, grad_checkpoint=grad_checkpoint, stages=stages
        )
        self.neck = build_neck(neck, self.backbone.channels, self.backbone.strides)
        self.decode_head = UPerHead(self.neck.channels, width, num_classes)
        self.auxiliary_head = FCNHead(self.neck.channels[2], auxiliary_width, num_classes)

    def training_logits(self, images: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return logits and auxiliary logits; `seed` has 64 bits, for drop path and dropout."""
        maps = self.neck(self.backbone(pad_to_multiple(images, _STRIDE), seed))
        seed_torch(images.device, seed >> 1)  # dropout draws from torch's generator, which takes 63 bits
        logits, auxiliary = run_together([self.decode_head.steps(maps), self.auxiliary_head.steps(maps)])
        return logits, auxiliary

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for evaluation, at a quarter of the padded height and width."""
        padded = pad_to_multiple(images, _STRIDE)
        logits: Tensor = self.decode_head(self.neck(self.backbone(padded)))
        return logits

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay."""
        exempt = getattr(self.backbone, "no_weight_decay", set)
        return {f"backbone.{name}" for name in exempt()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameters of each layer as timm's patterns: those of the backbone, then all others."""
        if not hasattr(self.backbone, "group_matcher"):
            raise UserError("--layer-decay needs VOLO or LV-ViT. Drop it, or use another --model.")
        groups = {
            name: _prefixed(patterns) for name, patterns in self.backbone.group_matcher(coarse=coarse).items()
        }
        return groups | {"heads": [(r"^(neck|decode_head|auxiliary_head)\.", (99999,))]}


def _prefixed(patterns: Any) -> Any:
    if isinstance(patterns, str):
        return patterns.replace("^", r"^backbone\.")
    return [(pattern.replace("^", r"^backbone\."), order) for pattern, order in patterns]


def fitted_weights(
    network: UperNet, given: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Return weights under our names, tensors of the network that stay fresh, and messages.

    The weights are of such a network, from here, mmsegmentation or Hugging Face, or of a backbone alone.
    """
    weights, messages = _renamed(given), list[str]()
    is_whole = any(name.startswith("decode_head.") for name in weights)
    prefix = "backbone." if is_whole else ""
    body = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    others = {name: tensor for name, tensor in weights.items() if is_whole and not name.startswith(prefix)}
    fresh = [] if is_whole else [name for name in network.state_dict() if not name.startswith("backbone.")]
    if fresh:
        messages.append("neck and heads begin with fresh weights: these are of the backbone alone")
    kept, of_backbone = fit_backbone(network.backbone, body, whole=not is_whole)
    messages += of_backbone
    return others | {f"backbone.{name}": tensor for name, tensor in kept.items()}, fresh, messages


def _renamed(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for key, tensor in given.items():
        name = key
        for theirs, ours in (*_HUGGING_FACE, *_OTHER_PLACES):
            if name.startswith(("decode_head.", "auxiliary_head.", "backbone.side_layer")):
                name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed

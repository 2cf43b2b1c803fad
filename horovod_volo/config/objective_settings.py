"""Settings of the loss, token labels and mixing: a part of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_volo.config.setting import setting


@dataclass(frozen=True)
class Objective:
    """loss, token labels and mixing"""

    loss: str = setting(
        "soft-target", "loss: soft-target (cross-entropy), bce (binary cross-entropy), or a plugin's"
    )
    bce_target_threshold: float = setting(
        0.0,
        "--loss bce: mixed and smoothed targets above this become 1, the others 0; 0: they stay",
        aliases=("--bce-target-thresh",),
        at_least=0.0,
        below=1.0,
    )
    token_label: bool = setting(False, "train a label for every token besides the class of the image")
    token_label_data: str = setting(
        "", "packed label maps, or a folder of CLASS/IMAGE.pt; empty: the image's class for every token"
    )
    token_label_size: int = setting(0, "token labels per side; 0: --img-size / 16", at_least=0)
    label_geometry: Literal["corrected", "reference"] = setting(
        "corrected", "crop of label maps; reference: with x and y swapped, as in the published code"
    )
    map_geometry: str = setting(
        "",
        "part of its image that a label map covers: whole, or centre-crop:RESIZE:SIZE; empty: as recorded "
        "with the maps, else as of the published ones",
    )
    ground_truth: bool = setting(False, "blend the true class into the class target of the label map")
    cls_weight: float = setting(1.0, "weight of the class loss", at_least=0.0)
    dense_weight: float = setting(0.5, "weight of the token loss", at_least=0.0)
    class_weights: str = setting(
        "",
        "weights of classes in the loss: balanced, inverse to their numbers of images, or a file with lines "
        "CLASS WEIGHT; empty: all 1",
    )
    smoothing: float = setting(0.1, "label smoothing", at_least=0.0, below=1.0)
    mix_token: bool = setting(True, "MixToken: swap a box of tokens between pairs of images")
    mixup: float = setting(0.0, "Mixup: alpha of the Beta distribution; 0: off", at_least=0.0)
    cutmix: float = setting(0.0, "CutMix: alpha of the Beta distribution; 0: off", at_least=0.0)
    mixup_prob: float = setting(
        1.0, "probability that --mixup or --cutmix is applied to a batch", at_least=0.0
    )
    mixup_switch_prob: float = setting(
        0.5, "probability of --cutmix instead of --mixup, if both are on", at_least=0.0
    )

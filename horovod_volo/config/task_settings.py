"""Settings of what is learned, of classification and of the dense tasks: a part of the schema."""

from dataclasses import dataclass
from typing import Literal

from horovod_volo.config.setting import BelowOne, Count, CountOrZero, Fraction, NonNegative, Range, setting

_OTHER_MIXES = {
    "--mix-token": "{flag} and MixToken both mix images. Add --no-mix-token, or drop {flag}.",
    "--token-label": "{flag} cannot mix token labels. Drop it, or drop --token-label.",
}


@dataclass(frozen=True)
class Objective:
    """loss, token labels and mixing"""

    loss: str = setting(
        "soft-target",
        "loss: soft-target (cross-entropy), bce (binary cross-entropy), or a plugin's",
        also=("--bce-loss=bce",),
    )
    bce_target_threshold: BelowOne = setting(
        0.0,
        "--loss bce: mixed and smoothed targets above this become 1, the others 0; 0: they stay",
        aliases=("--bce-target-thresh",),
        idle=("without --loss bce",),
        excludes={
            "--token-label-data": "{flag} is for the targets of mixed images, and label maps are no such "
            "targets. Drop it, or --token-label-data."
        },
    )
    token_label: bool = setting(False, "train a label for every token besides the class of the image")
    token_label_data: str = setting(
        "",
        "packed label maps, or a folder of CLASS/IMAGE.pt; empty: the image's class for every token",
        needs="--token-label",
    )
    token_label_size: CountOrZero = setting(
        0, "token labels per side; 0: --img-size / 16", idle=("without --token-label",)
    )
    label_geometry: Literal["corrected", "reference"] = setting(
        "corrected",
        "crop of label maps; reference: with x and y swapped, as in the published code",
        idle=("without --token-label-data",),
    )
    map_geometry: str = setting(
        "",
        "part of its image that a label map covers: whole, or centre-crop:RESIZE:SIZE; empty: as recorded "
        "with the maps, else as of the published ones",
        needs="--token-label-data",
        idle=("with --label-geometry reference",),
    )
    ground_truth: bool = setting(
        False, "blend the true class into the class target of the label map", needs="--token-label-data"
    )
    cls_weight: NonNegative = setting(1.0, "weight of the class loss")
    dense_weight: NonNegative = setting(0.5, "weight of the token loss", idle=("without --token-label",))
    smoothing: BelowOne = setting(0.1, "label smoothing")
    mix_token: bool = setting(True, "MixToken: swap a box of tokens between pairs of images")
    mixup: NonNegative = setting(0.0, "Mixup: alpha of the Beta distribution; 0: off", excludes=_OTHER_MIXES)
    cutmix: NonNegative = setting(
        0.0, "CutMix: alpha of the Beta distribution; 0: off", excludes=_OTHER_MIXES
    )
    mixup_prob: Fraction = setting(
        1.0, "probability that a batch has --mixup or --cutmix", idle=("without --mixup or --cutmix",)
    )
    mixup_switch_prob: Fraction = setting(
        0.5, "probability of --cutmix instead of --mixup", idle=("without --mixup", "without --cutmix")
    )


@dataclass(frozen=True)
class Segmentation:
    """segmentation: --task segmentation"""

    head_width: int = setting(512, "channels of UPerHead", at_least=8)
    auxiliary_width: int = setting(256, "channels of the auxiliary head", at_least=8)
    scene_size: tuple[float, float] = setting(
        (2048.0, 512.0), "longer and shorter side that an image is scaled to fit into, pixels"
    )
    resize_range: Range = setting((0.5, 2.0), "range of the random factor of --scene-size in training")
    class_share: float = setting(
        0.75, "largest share of a class in a training crop, else ten others are tried; 1: any", at_least=0.01
    )
    photometric: bool = setting(True, "distort brightness, contrast, saturation and hue in training")
    test_mode: Literal["whole", "slide"] = setting("whole", "evaluate whole images, or windows of --img-size")
    test_stride: Count = setting(
        341, "pixels between the windows of --test-mode slide", idle=("with --test-mode whole",)
    )


@dataclass(frozen=True)
class Detection:
    """detection: --task detection"""

    hue: NonNegative = setting(18.0, "largest turn of the hue in training, degrees")

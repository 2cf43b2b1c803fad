"""Settings of the tasks that predict pixels and boxes: a part of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_volo.config.setting import BelowOne, Count, NonNegative, Range, setting


@dataclass(frozen=True)
class Segmentation:
    """segmentation: --task segmentation"""

    neck: Literal["lvvit", "pyramid"] = setting(
        "lvvit",
        "maps for the head: lvvit, of strides 4, 8, 16, 16, as published; pyramid, of strides 4, 8, 16, 32",
    )
    head_width: int = setting(512, "channels of UPerHead", at_least=8)
    auxiliary_width: int = setting(256, "channels of the auxiliary head", at_least=8)
    auxiliary_weight: NonNegative = setting(0.4, "weight of the auxiliary head's loss")
    scene_size: tuple[float, float] = setting(
        (2048.0, 512.0), "longer and shorter side that an image is scaled to fit into, pixels"
    )
    resize_range: Range = setting((0.5, 2.0), "range of the random factor of --scene-size in training")
    class_share: float = setting(
        0.75,
        "largest share of one class in a training crop, for which ten others are tried; 1: any",
        at_least=0.01,
    )
    photometric: bool = setting(True, "distort brightness, contrast, saturation and hue in training")
    mask_resize: Literal["centre", "opencv"] = setting(
        "centre", "nearest pixel of a scaled mask: at the pixel's centre, as of the image; or as OpenCV"
    )
    test_mode: Literal["whole", "slide"] = setting("whole", "evaluate whole images, or windows of --img-size")
    test_stride: Count = setting(
        341, "pixels between the windows of --test-mode slide", idle=("with --test-mode whole",)
    )


@dataclass(frozen=True)
class Detection:
    """detection: --task detection"""

    keep_empty: bool = setting(False, "train also on images without boxes")
    crop_sides: Range = setting(
        (0.3, 1.0), "range of the sides of a training crop, as fractions of the image's", at_most=1.0
    )
    hue: NonNegative = setting(18.0, "largest turn of the hue in training, degrees")
    saturation_range: Range = setting((0.5, 1.5), "range of the factor of the saturation in training")
    contrast_range: Range = setting((0.5, 1.5), "range of the factor of the contrast in training")
    brightness_range: Range = setting((0.875, 1.125), "range of the factor of the brightness in training")
    min_score: BelowOne = setting(0.05, "score above which a box is found")
    max_overlap: NonNegative = setting(
        0.5, "IoU of two found boxes of a class above which the weaker one is dropped"
    )
    most_boxes: Count = setting(200, "boxes that are found in an image, at most")

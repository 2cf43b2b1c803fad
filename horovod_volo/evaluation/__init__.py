"""Accuracy and predictions of trained networks, and the flags by which commands choose a network."""

from typing import Literal

from horovod_volo.config.schema import setting_of_training
from horovod_volo.config.setting import Setting

_STATISTIC = (
    "{} of red, green and blue in training, for pixels from 0 to 1, if the weights do not record it; "
    "empty: as recorded, else the model's"
)


def flags_of_trained_network() -> tuple[Setting, ...]:
    """Return the flags that choose a trained network, which of its weights, and its heads."""
    return (
        setting_of_training("plugin"),
        setting_of_training("model", default="", help="the model; empty: the one of SOURCE's run"),
        setting_of_training(
            "use_ema", aliases=("--averaged",), help="load the EMA weights instead of the raw ones"
        ),
        Setting(
            name="aux_head",
            kind=Literal["auto", "on", "off"],
            default="auto",
            help="VOLO and LV-ViT: on adds half of the highest token logit to the class logit, off does not; "
            "auto: on if the auxiliary head was trained",
        ),
        setting_of_training(
            "img_size", default=0, help="side of the square images, pixels; 0: as in training"
        ),
        setting_of_training("mean", help=_STATISTIC.format("mean")),
        setting_of_training("std", help=_STATISTIC.format("standard deviation")),
    )

"""Checks of the settings of images: contradictions are errors."""

from __future__ import annotations

from urllib.parse import urlsplit

from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError


def check_data(settings: Data) -> None:
    """Raise UserError at the first setting of images that cannot be right."""
    check_address(settings.data_dir)
    for name, (low, high) in (("scale", settings.scale), ("ratio", settings.ratio)):
        if not 0 < low <= high:
            raise UserError(f"--{name} takes two numbers above 0 in ascending order, not {low:g} {high:g}.")
    if settings.val_share >= 1:
        raise UserError(f"--val-share is a share of the images, below 1, not {settings.val_share:g}.")
    if settings.scale[1] > 1:
        raise UserError(f"--scale is a fraction of the image's area, at most 1, not {settings.scale[1]:g}.")
    for name, probability in (
        ("hflip", settings.hflip),
        ("vflip", settings.vflip),
        ("reprob", settings.reprob),
    ):
        if probability > 1:
            raise UserError(f"--{name} is a probability, at most 1, not {probability:g}.")
    if settings.balance > 1:
        raise UserError(f"--balance is at most 1, all classes equally often, not {settings.balance:g}.")
    if settings.balance and settings.block_shuffle:
        raise UserError(
            "--balance draws images of rare classes several times, and --block-shuffle reads each once. Drop "
            "one of them."
        )
    if settings.aa.startswith("augmix") and settings.randaugment_on == "image":
        raise UserError("AugMix works on crops. Drop --randaugment-on image, or use another --aa.")
    check_statistics(settings.mean, settings.std)


def check_address(data_dir: str) -> None:
    """Raise UserError if the address of a data folder holds a password: runs print and record it."""
    address = urlsplit(data_dir)
    _, given, host = address.netloc.rpartition("@")
    if given:
        raise UserError(
            "The address of the data folder holds a password, which would be printed and recorded. Give "
            f"{address.scheme}://{host}{address.path}, and write `machine {address.hostname} login USER "
            "password PASSWORD` into ~/.netrc (for s3://, use the settings of AWS tools)."
        )


def check_statistics(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Raise UserError if the mean or the standard deviation of pixels from 0 to 1 cannot be right."""
    for flag, values, fit in (
        ("--mean", mean, all(0 <= value <= 1 for value in mean)),
        ("--std", std, all(0 < value <= 1 for value in std)),
    ):
        if not fit:
            given = " ".join(f"{value:g}" for value in values)
            lowest = "0" if flag == "--mean" else "above 0"
            raise UserError(
                f"{flag} is for pixels from 0 to 1, so its numbers are from {lowest} to 1, not {given}. "
                "Divide those of pixels from 0 to 255 by 255."
            )

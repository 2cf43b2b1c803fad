"""Which library decodes images: DALI, or Pillow where DALI is not installed.

Invariant: the choice is a function of the setting and of what is installed. A DALI that is installed and does
not load is an error; no rank falls back to Pillow at run time.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

from horovod_volo.core.errors import UserError
from horovod_volo.data import pillow_pipeline, pipeline

DecoderName = Literal["auto", "dali", "pillow"]
INSTALL_DALI = "pip install 'horovod_volo[dali]'"


def image_decoder(setting: DecoderName = "auto") -> Any:
    """Return the module with the pipelines of `--image-decoder`; raise UserError if it is not installed."""
    if setting != "pillow" and dali_is_installed():
        return pipeline
    if setting == "dali":
        raise UserError(
            f"--image-decoder dali: DALI is not installed. Install it ({INSTALL_DALI}), or give "
            "--image-decoder pillow."
        )
    return pillow_pipeline


def describe_decoder(setting: DecoderName = "auto") -> str:
    """Return who reads the images, and why, for people."""
    if image_decoder(setting).name == "dali":
        return "images read by DALI"
    reason = "--image-decoder pillow" if setting == "pillow" else "DALI is not installed"
    return f"images read by Pillow ({reason})"


def decoder_messages(setting: DecoderName = "auto") -> list[str]:
    """Return what a result says about its decoder: nothing for DALI."""
    return [] if image_decoder(setting).name == "dali" else [describe_decoder(setting)]


def dali_is_installed() -> bool:
    """Return whether DALI can be found, without importing it."""
    try:
        return find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # there is no package of NVIDIA
        return False

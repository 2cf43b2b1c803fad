"""Decodes images: the DALI pipelines, and the choice between DALI and Pillow.

The pipelines decode and crop for training; for evaluation they decode, resize, crop and normalise. Where DALI
is not installed, pillow_pipeline.py does the same. DALI's decoder has the device "cpu", which needs no GPU
driver, or "mixed", which decodes on the GPU.

Invariants: a decoder draws no random numbers and has no position. Boxes, flips and sizes are inputs beside
the encoded images, so a batch depends on its inputs alone. The choice is a function of the setting and of
what is installed: a DALI that is installed and does not load is an error; no rank falls back to Pillow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.core.center_crop import is_mirrored
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry

name = "dali"
DecoderName = Literal["auto", "dali", "pillow"]
INSTALL_DALI = "pip install 'horovod_volo[dali]'"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
BATCHES_DECODED_AHEAD = 2


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel, for pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET_NORMALIZATION = Normalization(IMAGENET_MEAN, IMAGENET_STD)

Input = list[NDArray[Any]] | NDArray[Any]  # one array for each image, or one for the batch
Source = Callable[[], tuple[Input, ...]]  # raises StopIteration after the last batch

# Modules with a `name`, a `build_..._pipeline` for each use, and `undecodable`.
DECODERS: Registry[Any] = Registry("image decoder", "--image-decoder")
DECODERS.register("dali", sys.modules[__name__])


def image_decoder(setting: DecoderName = "auto") -> Any:
    """Return the module with the pipelines of `--image-decoder`; raise UserError if it is not installed."""
    if setting != "pillow" and dali_is_installed():
        return DECODERS.find("dali")
    if setting == "dali":
        raise UserError(
            f"--image-decoder dali: DALI is not installed. Install it ({INSTALL_DALI}), or give "
            "--image-decoder pillow."
        )
    return DECODERS.find("pillow")


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


def _dali() -> Any:
    """Import DALI when a pipeline is built: training on synthetic images works without it."""
    import nvidia.dali.fn
    import nvidia.dali.types

    return nvidia.dali


def build_train_pipeline(
    source: Source, *, image_size: int, batch: int, device: torch.device, threads: int, resize: bool
) -> Any:
    """Build the pipeline that decodes and crops training images, to uint8 (height, width, 3).

    Inputs: encoded images, crop corners, crop shapes. With `resize` it also resizes and flips;
    further inputs: (horizontal, vertical) flips and interpolations.
    """
    dali = _dali()
    pipeline = _empty_pipeline(batch, device, threads)
    with pipeline:
        inputs = 5 if resize else 3
        encoded, corners, shapes, *rest = dali.fn.external_source(
            source=source,
            num_outputs=inputs,
            dtype=[dali.types.UINT8, *[dali.types.INT32] * (inputs - 1)],
            ndim=[1, 1, 1, 1, 0][:inputs],
        )
        images = dali.fn.decoders.image_slice(
            encoded,
            start=corners,
            shape=shapes,
            axis_names="HW",
            device=_decoder(device),
            output_type=dali.types.RGB,
            adjust_orientation=False,  # boxes and label maps refer to the stored image, as PIL reads it
        )
        if resize:
            flips, filters = rest
            filtering = dali.fn.cast(filters, dtype=dali.types.INTERP_TYPE)
            images = dali.fn.resize(images, size=[image_size] * 2, interp_type=filtering, antialias=True)
            images = dali.fn.flip(images, horizontal=flips[0], vertical=flips[1])
        pipeline.set_outputs(images)
    pipeline.build()
    return pipeline


def build_scene_pipeline(source: Source, *, batch: int, device: torch.device, threads: int) -> Any:
    """Build the pipeline that decodes images and resamples a window of each, to uint8 (height, width, 3).

    Inputs: encoded images, window corners (begin, end) in pixels of the image, sizes, flips.
    """
    dali = _dali()
    pipeline = _empty_pipeline(batch, device, threads)
    with pipeline:
        encoded, begins, ends, sizes, flips = dali.fn.external_source(
            source=source,
            num_outputs=5,
            dtype=[dali.types.UINT8, *[dali.types.FLOAT] * 3, dali.types.INT32],
            ndim=[1, 1, 1, 1, 0],
        )
        images = dali.fn.decoders.image(
            encoded, device=_decoder(device), output_type=dali.types.RGB, adjust_orientation=False
        )
        images = dali.fn.resize(
            images,
            size=sizes,
            roi_start=begins,
            roi_end=ends,
            interp_type=dali.types.INTERP_LINEAR,
            antialias=False,
        )
        pipeline.set_outputs(dali.fn.flip(images, horizontal=flips))
    pipeline.build()
    return pipeline


def build_eval_pipeline(
    source: Source,
    *,
    image_size: int,
    batch: int,
    device: torch.device,
    threads: int,
    normalization: Normalization = IMAGENET_NORMALIZATION,
    interpolation: str = "bicubic",
    crops: int = 1,
) -> Any:
    """Build the evaluation pipeline; inputs: encoded images, shapes after resizing, crop corners.

    Its images are (3, image_size, image_size), or with several crops (crops, 3, image_size, image_size).
    """
    dali = _dali()
    pipeline = _empty_pipeline(batch, device, threads)
    with pipeline:
        encoded, sizes, corners = dali.fn.external_source(
            source=source, num_outputs=3, dtype=[dali.types.UINT8, dali.types.FLOAT, dali.types.INT32], ndim=1
        )
        images = dali.fn.decoders.image(
            encoded,
            device=_decoder(device),
            output_type=dali.types.RGB,
            adjust_orientation=False,
            jpeg_fancy_upsampling=True,  # the GPU decoder's default is faster, but differs from PIL
        )
        # With antialiasing, as PIL's filters have it.
        filtering = {"bicubic": dali.types.INTERP_CUBIC, "bilinear": dali.types.INTERP_LINEAR}[interpolation]
        resized = dali.fn.resize(images, size=sizes, interp_type=filtering, antialias=True)
        views = [
            _normalised(
                dali.fn.slice(
                    resized,
                    start=corners[2 * crop : 2 * crop + 2] if crops > 1 else corners,
                    shape=[image_size, image_size],
                    axis_names="HW",
                    out_of_bounds_policy="pad",
                    fill_values=0,  # black before normalisation, as torchvision pads
                ),
                normalization,
                mirrored=is_mirrored(crop),
            )
            for crop in range(crops)
        ]
        pipeline.set_outputs(dali.fn.stack(*views) if crops > 1 else views[0])
    pipeline.build()
    return pipeline


def resizing_inputs(
    horizontal: NDArray[np.bool_], vertical: NDArray[np.bool_], bicubic: NDArray[np.bool_]
) -> tuple[list[NDArray[Any]], ...]:
    """Return the further inputs of a training pipeline that resizes: flips and interpolations, (batch,)."""
    dali = _dali()
    flips = np.stack([horizontal, vertical], axis=1).astype(np.int32)  # (batch, 2)
    filters = np.where(bicubic, int(dali.types.INTERP_CUBIC), int(dali.types.INTERP_LINEAR))
    return list(flips), [np.array(number) for number in filters.astype(np.int32)]


def to_torch(images: Any) -> torch.Tensor:
    """Copy a batch into memory that torch owns, which outlives the pipeline and follows torch's streams."""
    if isinstance(images, torch.Tensor):  # of Pillow
        return images
    return torch.utils.dlpack.from_dlpack(images.as_tensor()).clone()


def undecodable(images: Input) -> list[int]:
    """Return the positions of the encoded images that DALI cannot decode."""
    dali = _dali()
    positions = []
    for position, image in enumerate(images):
        pipeline = dali.Pipeline(
            batch_size=1, num_threads=1, device_id=None, exec_pipelined=False, exec_async=False
        )
        with pipeline:
            encoded = dali.fn.external_source(name="encoded", dtype=dali.types.UINT8, ndim=1)
            decoded = dali.fn.decoders.image(
                encoded, device="cpu", output_type=dali.types.RGB, adjust_orientation=False
            )
            pipeline.set_outputs(decoded)
        pipeline.feed_input("encoded", [image])
        try:
            pipeline.run()
        except RuntimeError:  # the pipeline is invalid afterwards
            positions.append(position)
    return positions


def _empty_pipeline(batch: int, device: torch.device, threads: int) -> Any:
    dali = _dali()
    return dali.Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=device.index if device.type == "cuda" else None,
        prefetch_queue_depth=BATCHES_DECODED_AHEAD,
    )


def _decoder(device: torch.device) -> str:
    return "mixed" if device.type == "cuda" else "cpu"


def _normalised(images: Any, normalization: Normalization, *, mirrored: bool) -> Any:
    dali = _dali()
    return dali.fn.crop_mirror_normalize(
        images,
        dtype=dali.types.FLOAT,
        output_layout="CHW",
        mirror=int(mirrored),
        mean=[255 * value for value in normalization.mean],
        std=[255 * value for value in normalization.std],
    )

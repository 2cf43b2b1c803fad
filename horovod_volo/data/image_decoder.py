"""Decodes images: the DALI pipelines, and the choice between DALI and Pillow.

The pipelines decode and crop for training; for evaluation they decode, resize, crop and normalise. Where DALI
is not installed, pillow_pipeline.py does the same. DALI's decoder has the device "cpu", which needs no GPU
driver, or "mixed", which decodes on the GPU.

Invariants: a decoder draws no random numbers and has no position. Boxes, flips and sizes are inputs beside
the encoded images, so a batch depends on its inputs alone. The choice is a function of the setting and of
what is installed: a DALI that is installed and does not load is an error; no rank falls back to Pillow.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry

name = "dali"
DecoderName = Literal["auto", "dali", "pillow"]
INSTALL_DALI = "pip install 'horovod_volo[dali]', with torch for CUDA 13 'horovod_volo[dali-cuda13]'"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
BATCHES_DECODED_AHEAD = 2


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel, for pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def levels(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation (3, 1, 1) of levels 0 to 255."""
        mean, std = (255 * torch.tensor(values, device=device).view(3, 1, 1) for values in self)
        return mean, std


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


def build_train_pipeline(source: Source, *, image_size: int, resize: bool, **common: Any) -> Any:
    """Build the pipeline that decodes and crops training images, to uint8 (height, width, 3).

    Inputs: encoded images, crop corners, crop shapes. With `resize` it also resizes and flips;
    further inputs: (horizontal, vertical) flips and interpolations. `common` are arguments of `_build`.
    """
    fn, types = _dali().fn, _dali().types

    def graph(decoder: str, encoded: Any, corners: Any, shapes: Any, *further: Any) -> Any:
        images = fn.decoders.image_slice(
            encoded,
            start=corners,
            shape=shapes,
            axis_names="HW",
            device=decoder,
            output_type=types.RGB,
            adjust_orientation=False,  # boxes and label maps refer to the stored image, as PIL reads it
        )
        if not further:
            return images
        flips, filters = further
        filtering = fn.cast(filters, dtype=types.INTERP_TYPE)
        images = fn.resize(images, size=[image_size] * 2, interp_type=filtering, antialias=True)
        return fn.flip(images, horizontal=flips[0], vertical=flips[1])

    inputs = [(types.UINT8, 1), *[(types.INT32, 1)] * 2, *[(types.INT32, 1), (types.INT32, 0)] * resize]
    return _build(graph, source, inputs, **common)


def build_scene_pipeline(source: Source, **common: Any) -> Any:
    """Build the pipeline that decodes images and resamples a window of each, to uint8 (height, width, 3).

    Inputs: encoded images, window corners (begin, end) in pixels of the image, sizes, flips.
    """
    fn, types = _dali().fn, _dali().types

    def graph(decoder: str, encoded: Any, begins: Any, ends: Any, sizes: Any, flips: Any) -> Any:
        images = fn.decoders.image(encoded, device=decoder, output_type=types.RGB, adjust_orientation=False)
        window = {"roi_start": begins, "roi_end": ends, "size": sizes}
        images = fn.resize(images, interp_type=types.INTERP_LINEAR, antialias=False, **window)
        return fn.flip(images, horizontal=flips)

    return _build(graph, source, [(types.UINT8, 1), *[(types.FLOAT, 1)] * 3, (types.INT32, 0)], **common)


def build_eval_pipeline(
    source: Source,
    *,
    image_size: int,
    normalization: Normalization,
    interpolation: str,
    **common: Any,
) -> Any:
    """Build the pipeline of evaluation images (3, side, side); inputs: encoded images, shapes, corners."""
    fn, types = _dali().fn, _dali().types
    filtering = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}[interpolation]

    def graph(decoder: str, encoded: Any, sizes: Any, corners: Any) -> Any:
        images = fn.decoders.image(
            encoded,
            device=decoder,
            output_type=types.RGB,
            adjust_orientation=False,
            jpeg_fancy_upsampling=True,  # the GPU decoder's default is faster, but differs from PIL
        )
        # With antialiasing, as PIL's filters have it.
        resized = fn.resize(images, size=sizes, interp_type=filtering, antialias=True)
        return fn.crop_mirror_normalize(
            fn.slice(
                resized,
                start=corners,
                shape=[image_size, image_size],
                axis_names="HW",
                out_of_bounds_policy="pad",
                fill_values=0,  # black before normalisation, as torchvision pads
            ),
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * value for value in normalization.mean],
            std=[255 * value for value in normalization.std],
        )

    return _build(graph, source, [(types.UINT8, 1), (types.FLOAT, 1), (types.INT32, 1)], **common)


def _build(
    graph: Callable[..., Any],
    source: Source,
    inputs: list[tuple[Any, int]],
    *,
    batch: int,
    device: torch.device,
    threads: int,
) -> Any:
    """Build what `graph` makes of a decoder's device and of inputs of these types and dimensions."""
    dali, on_gpu = _dali(), device.type == "cuda"
    pipeline = dali.Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=BATCHES_DECODED_AHEAD,
    )
    kinds, dimensions = map(list, zip(*inputs, strict=True))
    with pipeline:
        fed = dali.fn.external_source(source=source, num_outputs=len(inputs), dtype=kinds, ndim=dimensions)
        pipeline.set_outputs(graph("mixed" if on_gpu else "cpu", *fed))
    pipeline.build()
    return pipeline


def resizing_inputs(
    horizontal: NDArray[np.bool_], vertical: NDArray[np.bool_], bicubic: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], ...]:
    """Return the further inputs of a training pipeline that resizes: flips and interpolations of a batch."""
    types = _dali().types
    filters = np.where(bicubic, int(types.INTERP_CUBIC), int(types.INTERP_LINEAR)).astype(np.int32)
    return np.stack([horizontal, vertical], axis=1).astype(np.int32), filters  # (batch, 2) and (batch,)


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

"""The two DALI graphs: from encoded bytes to normalised batches.

Where a graph decodes is one word, the decoder's device: "cpu" needs no driver, "mixed" decodes on
the GPU and leaves the batch there. DALI draws no random number and keeps no position here: every
box, flip and size comes in with the bytes, so a batch depends on nothing but its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types

from horovod_volo.data.augmentation.plan import Plan

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
BATCHES_DECODED_AHEAD = 2


class Colours(NamedTuple):
    """What a network's images are normalised with: mean and spread of colours from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET_COLOURS = Colours(IMAGENET_MEAN, IMAGENET_STD)

# Returns one list of arrays for each input of the graph; raises StopIteration where a run of batches ends.
Source = Callable[[], tuple[list[NDArray[Any]], ...]]


def build_train_pipeline(
    source: Source, *, image_size: int, batch: int, device: torch.device, threads: int, resize: bool
) -> Pipeline:
    """Build decode and cut, and with `resize` also resize and flip; uint8, height x width x 3.

    Inputs: bytes, corners, shapes; with `resize` also (left-right, upside-down) flips and interpolations.
    """
    pipeline = _empty_pipeline(batch, device, threads)
    with pipeline:
        inputs = 5 if resize else 3
        encoded, corners, shapes, *rest = fn.external_source(
            source=source,
            num_outputs=inputs,
            dtype=[types.UINT8, types.INT32, types.INT32, types.INT32, types.INT32][:inputs],
            ndim=[1, 1, 1, 1, 0][:inputs],
        )
        images = fn.decoders.image_slice(
            encoded,
            start=corners,
            shape=shapes,
            axis_names="HW",
            device=_decoder(device),
            output_type=types.RGB,
            adjust_orientation=False,  # boxes and label maps are those of the stored image, as PIL reads it
        )
        if resize:
            flips, filters = rest
            filtering = fn.cast(filters, dtype=types.INTERP_TYPE)
            images = fn.resize(images, size=[image_size] * 2, interp_type=filtering, antialias=True)
            images = fn.flip(images, horizontal=flips[0], vertical=flips[1])
        pipeline.set_outputs(images)
    pipeline.build()
    return pipeline


def build_eval_pipeline(
    source: Source,
    *,
    image_size: int,
    batch: int,
    device: torch.device,
    threads: int,
    colours: Colours = IMAGENET_COLOURS,
    interpolation: str = "bicubic",
) -> Pipeline:
    """Build resize, window, normalise; inputs: bytes, resized sizes, window corners."""
    pipeline = _empty_pipeline(batch, device, threads)
    with pipeline:
        encoded, sizes, corners = fn.external_source(
            source=source, num_outputs=3, dtype=[types.UINT8, types.FLOAT, types.INT32], ndim=1
        )
        images = fn.decoders.image(
            encoded,
            device=_decoder(device),
            output_type=types.RGB,
            adjust_orientation=False,
            jpeg_fancy_upsampling=True,  # the GPU decoder's faster default gives other pixels than PIL
        )
        images = fn.slice(
            _resized(images, sizes, interpolation),
            start=corners,
            shape=[image_size, image_size],
            axis_names="HW",
            out_of_bounds_policy="pad",
            fill_values=0,  # black before the normalisation, as torchvision pads
        )
        pipeline.set_outputs(_normalised(images, colours))
    pipeline.build()
    return pipeline


def resizing_inputs(plan: Plan) -> tuple[list[NDArray[Any]], ...]:
    """Return the training graph's last two inputs for the resizing of a batch."""
    flips = np.stack([plan.flip_horizontal, plan.flip_vertical], axis=1).astype(np.int32)  # (batch, 2)
    filters = np.where(plan.bicubic, int(types.INTERP_CUBIC), int(types.INTERP_LINEAR)).astype(np.int32)
    return list(flips), [np.array(number) for number in filters]


def to_torch(images: Any) -> torch.Tensor:
    """Copy a batch into memory that torch owns: it outlives the pipeline and obeys torch's streams."""
    return torch.utils.dlpack.from_dlpack(images.as_tensor()).clone()


def undecodable(images: list[NDArray[np.uint8]]) -> list[int]:
    """Return the places of the encoded images that DALI refuses."""
    places = []
    for place, image in enumerate(images):
        pipeline = Pipeline(
            batch_size=1, num_threads=1, device_id=None, exec_pipelined=False, exec_async=False
        )
        with pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            decoded = fn.decoders.image(
                encoded, device="cpu", output_type=types.RGB, adjust_orientation=False
            )
            pipeline.set_outputs(decoded)
        pipeline.feed_input("encoded", [image])
        try:
            pipeline.run()
        except RuntimeError:  # it leaves the pipeline of no further use
            places.append(place)
    return places


def _empty_pipeline(batch: int, device: torch.device, threads: int) -> Pipeline:
    return Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=device.index if device.type == "cuda" else None,
        prefetch_queue_depth=BATCHES_DECODED_AHEAD,
    )


def _decoder(device: torch.device) -> str:
    return "mixed" if device.type == "cuda" else "cpu"


def _resized(images: Any, size: Any, interpolation: str) -> Any:
    # PIL's filters: they widen when the image shrinks.
    filtering = {"bicubic": types.INTERP_CUBIC, "bilinear": types.INTERP_LINEAR}[interpolation]
    return fn.resize(images, size=size, interp_type=filtering, antialias=True)


def _normalised(images: Any, colours: Colours) -> Any:
    return fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255 * value for value in colours.mean],
        std=[255 * value for value in colours.std],
    )

"""SSD's reference pipeline with DALI's own operators: its reader, its random crop, its colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_volo.data.pipeline import IMAGENET_MEAN, IMAGENET_STD


def reference_pipeline(images: Path, annotations: Path, *, batch: int, threads: int) -> Any:
    """Build the pipeline on the CPU; it draws windows, flips and colours by itself, in an order of its own.

    It returns images (batch, 3, 300, 300), and boxes and classes of each.
    """
    import nvidia.dali.fn
    from nvidia.dali import Pipeline, types

    fn: Any = nvidia.dali.fn
    pipeline = Pipeline(batch_size=batch, num_threads=threads, device_id=None, seed=0)
    with pipeline:
        encoded, boxes, labels = fn.readers.coco(
            file_root=str(images),
            annotations_file=str(annotations),
            ratio=True,
            ltrb=True,
            shuffle_after_epoch=True,
            skip_empty=True,
        )
        corner, shape, boxes, labels = fn.random_bbox_crop(
            boxes,
            labels,
            aspect_ratio=[0.5, 2.0],
            thresholds=[0, 0.1, 0.3, 0.5, 0.7, 0.9],
            scaling=[0.3, 1.0],
            bbox_layout="xyXY",
            allow_no_crop=True,
            num_attempts=1,
        )
        pixels = fn.decoders.image_slice(encoded, corner, shape, device="cpu", output_type=types.RGB)
        flip = fn.random.coin_flip(probability=0.5)
        boxes = fn.bb_flip(boxes, ltrb=True, horizontal=flip)
        pixels = fn.resize(fn.flip(pixels, horizontal=flip), size=[300, 300])
        pixels = fn.hsv(
            pixels,
            saturation=fn.random.uniform(range=[0.5, 1.5]),
            hue=fn.random.uniform(range=[-0.5, 0.5]),
        )
        pixels = fn.brightness_contrast(
            pixels,
            contrast_center=128.0,
            contrast=fn.random.uniform(range=[0.5, 1.5]),
            brightness=fn.random.uniform(range=[0.875, 1.125]),
        )
        mean, std = ([255 * value for value in values] for values in (IMAGENET_MEAN, IMAGENET_STD))
        pixels = fn.crop_mirror_normalize(pixels, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std)
        pipeline.set_outputs(pixels, boxes, labels)
    pipeline.build()
    return pipeline

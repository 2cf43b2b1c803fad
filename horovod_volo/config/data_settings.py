"""Settings of images and augmentation: a part of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_volo.config.setting import setting


@dataclass(frozen=True)
class Data:
    """images and augmentation"""

    data_dir: str = setting(
        "",
        "folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or with shards, also at https:// or s3://; for "
        "segmentation with images/ and masks/, or of ADE20K or Cityscapes; for detection with images/ and "
        "boxes/, or of COCO",
        positional=True,
    )
    val_split: str = setting(
        "", "folder of DATA_DIR with the held-out images; empty: val, validation, valid or test"
    )
    val_share: float = setting(
        0.1,
        "share of each class to hold out if there is no such folder; 0: none, which is an error",
        at_least=0.0,
    )
    batch_size: int = setting(
        128, "images per rank and micro-batch; with --global-batch: at most", aliases=("-b",), at_least=1
    )
    global_batch: int = setting(
        0,
        "images per step over all ranks; sets a rank's batch size and --accumulation; 0: ranks x "
        "--batch-size x --accumulation",
        at_least=0,
    )
    eval_batch_size: int = setting(0, "images per rank in evaluation; 0: --batch-size", at_least=0)
    workers: int = setting(
        0, "data threads per rank; 0: one per core of the rank", aliases=("-j",), at_least=0
    )
    prefetch: int = setting(3, "number of batches to prefetch", at_least=1)
    image_decoder: Literal["auto", "dali", "pillow"] = setting(
        "auto", "library that decodes images; auto: DALI where it is installed, else Pillow"
    )
    scale: tuple[float, float] = setting((0.08, 1.0), "area of the random crop, as a fraction of the image")
    ratio: tuple[float, float] = setting((3 / 4, 4 / 3), "aspect ratio of the random crop, width over height")
    hflip: float = setting(0.5, "probability of a horizontal flip", at_least=0.0)
    vflip: float = setting(0.0, "probability of a vertical flip", at_least=0.0)
    train_interpolation: Literal["random", "bilinear", "bicubic"] = setting(
        "random", "interpolation of training crops; random: drawn for each image"
    )
    aa: str = setting(
        "rand-m9-mstd0.5-inc1",
        "augmentation in timm's notation: RandAugment (m magnitude, n operations, p probability, mstd and "
        "mmax deviation and maximum of m, inc1 severity increases with m), AutoAugment (original, v0), "
        "3-Augment (3a), AugMix (augmix-m3); empty: none",
    )
    randaugment_on: Literal["crop", "image"] = setting(
        "crop",
        "apply --aa or --color-jitter to the crop, as timm does, or to the image before the crop, "
        "as published for token labels",
    )
    color_jitter: float = setting(
        0.4,
        "strength of brightness, contrast and saturation jitter, with --aa 3a or without --aa",
        at_least=0.0,
    )
    reprob: float = setting(0.25, "probability of random erasing", at_least=0.0)
    remode: Literal["pixel", "rand", "const"] = setting(
        "pixel", "fill of erased boxes: noise per pixel, one random color, or the mean color"
    )
    recount: int = setting(1, "maximum number of erased boxes per image", at_least=1)
    mean: tuple[float, ...] = setting(
        (),
        "mean of red, green and blue, which is subtracted from pixels from 0 to 1; empty: the model's",
    )
    std: tuple[float, ...] = setting(
        (), "standard deviation of red, green and blue, by which pixels are divided; empty: the model's"
    )
    crop_pct: float = setting(
        0.0, "evaluation crop: side of the crop over side of the resized image; 0: the model's", at_least=0.0
    )
    block_shuffle: int = setting(
        0,
        "shuffle blocks of this many neighbouring images, then images within --shuffle-window blocks, for "
        "storage that needs long reads; 0: shuffle all images",
        at_least=0,
    )
    balance: float = setting(
        0.0,
        "draw images of rare classes more often: a class of n images gets a part of the epoch in proportion "
        "to n ** (1 - balance); 0: as many draws as images; 1: as many as every other class",
        at_least=0.0,
    )
    shuffle_window: int = setting(64, "number of blocks whose images are shuffled together", at_least=1)
    bad_samples: Literal["skip", "fail"] = setting(
        "skip", "replace a damaged image or label map by another sample, or stop the run"
    )
    bad_samples_limit: int = setting(
        100, "number of damaged samples on one rank after which the run stops", at_least=0
    )
    catalog_dir: str = setting(
        "", "folder for the list of images, on storage that all hosts share; empty: inside --output"
    )
    cache_dir: str = setting(
        "",
        "folder on a local disk for blocks of shards at https:// or s3://; empty: each image is one request",
    )
    cache_gib: float = setting(
        50.0, "most GiB of blocks in --cache-dir, of all ranks of a host", at_least=0.1
    )

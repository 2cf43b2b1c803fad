"""Settings of images and augmentation: a part of the schema."""

from dataclasses import dataclass
from typing import Any, Literal

from horovod_volo.config.setting import BelowOne, Count, CountOrZero, Fraction, NonNegative, Range, setting


def _classification(default: Any, help: str, *idle: str, **declared: Any) -> Any:
    """Declare a setting that only --task classification reads; `idle` are further conditions."""
    return setting(default, help, idle=("without --task classification", *idle), **declared)


@dataclass(frozen=True)
class Data:
    """images and augmentation"""

    data_dir: str = setting(
        "",
        "folder with train/CLASS/IMAGE and val/CLASS/IMAGE, or with shards, also at https:// or s3://; for "
        "segmentation with images/ and masks/, or of ADE20K or Cityscapes; for detection with images/ and "
        "boxes/, or of COCO",
        positional=True,
        also=("--data-dir", "--data", "--data-path"),
    )
    val_split: str = _classification("", "held-out folder of DATA_DIR; empty: val, validation, valid or test")
    val_share: BelowOne = _classification(
        0.1, "share of each class to hold out if there is no such folder; 0: none, which is an error"
    )
    batch_size: Count = setting(
        128, "images per rank and micro-batch; with --global-batch: at most", aliases=("-b", "--micro-batch")
    )
    global_batch: CountOrZero = setting(
        0,
        "images per step over all ranks; sets a rank's batch size and --accumulation; 0: ranks x "
        "--batch-size x --accumulation",
    )
    reproducible: bool = setting(
        False,
        "the same weights, bit for bit, on any number of ranks, which share micro-batches of --micro-batch",
        needs="--global-batch",
        excludes={
            "--sync-bn all": "{flag} keeps batch norm inside a micro-batch. Add --sync-bn none.",
            "--sync-bn heads": "{flag} keeps batch norm inside a micro-batch. Add --sync-bn none.",
            "--compile": "{flag} needs PyTorch's own operators. Drop --compile, or {flag}.",
            "--early-stop": "Evaluations depend on the number of ranks. Drop --early-stop, or {flag}.",
            "--fit-head": "--fit-head sums features over ranks in their order. Drop it, or {flag}.",
        },
    )
    eval_batch_size: CountOrZero = setting(
        0,
        "images per rank in evaluation; 0: --batch-size",
        also=("-vb", "--validation-batch-size"),
    )
    workers: CountOrZero = setting(
        0, "data threads per rank; 0: one per core of the rank", aliases=("-j",), also=("--num-workers",)
    )
    prefetch: Count = setting(3, "number of batches to prefetch")
    image_decoder: Literal["auto", "dali", "pillow"] = setting(
        "auto", "library that decodes images; auto: DALI where it is installed, else Pillow"
    )
    scale: Range = _classification((0.08, 1.0), "area of the random crop over that of the image", at_most=1.0)
    ratio: Range = _classification((3 / 4, 4 / 3), "aspect ratio of the random crop, width over height")
    hflip: Fraction = _classification(0.5, "probability of a horizontal flip")
    vflip: Fraction = _classification(0.0, "probability of a vertical flip")
    train_interpolation: Literal["random", "bilinear", "bicubic"] = _classification(
        "random", "interpolation of training crops; random: drawn for each image"
    )
    aa: str = _classification(
        "rand-m9-mstd0.5-inc1",
        "augmentation in timm's notation: RandAugment (m magnitude, n operations, p probability, mstd and "
        "mmax deviation and maximum of m, inc1 severity increases with m); empty: none",
    )
    randaugment_on: Literal["crop", "image"] = _classification(
        "crop",
        "apply --aa or --color-jitter to the crop, as timm does, or to the image before the crop, "
        "as published for token labels",
        "without --aa or --color-jitter",
    )
    color_jitter: NonNegative = _classification(
        0.4,
        "strength of brightness, contrast and saturation jitter, without --aa",
        "with --aa",
    )
    aug_repeats: CountOrZero = _classification(
        0,
        "draw each image this many times in a row, each augmented differently, and only as many images as an "
        "epoch then has draws; 0: once",
        excludes={"--balance": "{flag} and --balance both draw images several times. Drop one of them."},
    )
    reprob: Fraction = _classification(0.25, "probability of random erasing")
    remode: Literal["pixel", "rand", "const"] = _classification(
        "pixel", "fill of erased boxes: noise per pixel, a random color, or the mean color", "with --reprob 0"
    )
    recount: Count = _classification(1, "maximum number of erased boxes per image", "with --reprob 0")
    mean: tuple[float, ...] = setting(
        (), "mean of red, green and blue, which is subtracted from pixels from 0 to 1; empty: the model's"
    )
    std: tuple[float, ...] = setting(
        (), "standard deviation of red, green and blue, by which pixels are divided; empty: the model's"
    )
    crop_pct: NonNegative = _classification(
        0.0, "evaluation crop: side of the crop over side of the resized image; 0: the model's"
    )
    block_shuffle: CountOrZero = setting(
        0,
        "shuffle blocks of this many neighbouring images, then images within --shuffle-window blocks, for "
        "storage that needs long reads; 0: shuffle all images",
    )
    balance: Fraction = _classification(
        0.0,
        "draw images of rare classes more often: a class of n images gets a part of the epoch in proportion "
        "to n ** (1 - balance); 0: as many draws as images; 1: as many as every other class",
        excludes={
            "--block-shuffle": "{flag} draws images of rare classes several times, and --block-shuffle reads "
            "each once. Drop one of them."
        },
    )
    shuffle_window: Count = setting(
        64, "number of blocks whose images are shuffled together", idle=("without --block-shuffle",)
    )
    bad_samples: Literal["skip", "fail"] = setting(
        "skip", "replace a damaged image or label map by another sample, or stop the run"
    )
    bad_samples_limit: CountOrZero = setting(
        100, "damaged samples on one rank after which the run stops", idle=("with --bad-samples fail",)
    )
    catalog_dir: str = _classification(
        "", "folder for the list of images, on storage that all hosts share; empty: inside --output"
    )
    cache_dir: str = setting(
        "",
        "folder on a local disk for blocks of shards at https:// or s3://; empty: each image is one request",
        idle=("without shards on a server",),
    )
    cache_gib: float = setting(
        50.0,
        "most GiB of blocks in --cache-dir, of all ranks of a host",
        at_least=0.1,
        idle=("without shards on a server", "without --cache-dir"),
    )

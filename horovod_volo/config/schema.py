"""Every setting: its type, default, flags and help line, declared once.

A field's name is its key in a recipe and, with dashes, its flag on the command line.
Names are unique over all groups, so flags need no prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from horovod_volo.config.dense_settings import Detection, Segmentation
from horovod_volo.config.run_settings import Launch, Run
from horovod_volo.config.setting import setting


@dataclass(frozen=True)
class Model:
    """task, model and its arithmetic"""

    task: Literal["classification", "segmentation", "detection"] = setting(
        "classification", "what is learned: the class of an image, that of each pixel, or boxes and classes"
    )
    sync_bn: Literal["none", "heads", "all"] = setting(
        "none",
        "batch norm over the images of all ranks: behind the backbone of a dense task, or everywhere",
    )
    model: str = setting(
        "volo_d1",
        "volo_d1 to volo_d5, lvvit_t, lvvit_s, lvvit_m, lvvit_l, volo_demo, a classification model of timm, "
        "or a plugin's",
    )
    img_size: int = setting(224, "side of the square training and evaluation images, pixels", at_least=32)
    num_classes: int = setting(0, "number of classes; 0: the class folders of the training set", at_least=0)
    drop_path: float = setting(
        0.0, "drop path rate (stochastic depth) of the last block", at_least=0.0, below=1.0
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = setting(
        "fp32",
        "arithmetic of forward and backward; weights stay fp32; tf32: fp32 with products in TF32, on a GPU",
        shorthands={"--apex-amp": "fp16", "--native-amp": "fp16", "--amp": "fp16"},
    )
    grad_checkpoint: bool = setting(False, "recompute activations inside blocks: far less memory, slower")
    grad_checkpoint_stages: Literal["all", "outlookers", "transformers"] = setting(
        "all", "the blocks of VOLO that --grad-checkpoint recomputes"
    )
    compile: bool = setting(
        False, "compile each block with torch.compile: faster steps, several minutes at the first step"
    )
    kernels: Literal["fused", "plain"] = setting(
        "fused", "on a GPU: fused Triton kernels, or PyTorch's own operators, to compare with"
    )
    finetune: str = setting(
        "", "start from these weights: a run folder, a checkpoint, a file, or timm:NAME for timm's own"
    )
    allow_mismatch: str = setting(
        "",
        "prefixes of parameter names, separated by commas, that may be missing from --finetune or differ in "
        "shape; heads of another number of classes are always replaced",
    )
    use_ema: bool = setting(False, "fine-tune from the EMA weights of --finetune instead of the raw ones")


@dataclass(frozen=True)
class Data:
    """images and augmentation"""

    data_dir: str = setting(
        "",
        "folder with train/CLASS/IMAGE and val/CLASS/IMAGE; for segmentation with images/ and masks/, or of "
        "ADE20K or Cityscapes; for detection with images/ and boxes/, or of COCO",
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
    scale: tuple[float, float] = setting((0.08, 1.0), "area of the random crop, as a fraction of the image")
    ratio: tuple[float, float] = setting((3 / 4, 4 / 3), "aspect ratio of the random crop, width over height")
    hflip: float = setting(0.5, "probability of a horizontal flip", at_least=0.0)
    vflip: float = setting(0.0, "probability of a vertical flip", at_least=0.0)
    train_interpolation: Literal["random", "bilinear", "bicubic"] = setting(
        "random", "interpolation of training crops; random: drawn for each image"
    )
    aa: str = setting(
        "rand-m9-mstd0.5-inc1",
        "RandAugment in timm's notation: m magnitude, n operations, p probability, mstd and mmax standard "
        "deviation and maximum of the magnitude, inc1 severity increases with it; empty: none",
    )
    randaugment_on: Literal["crop", "image"] = setting(
        "crop",
        "apply RandAugment or --color-jitter to the crop, as timm does, or to the image before the crop, "
        "as published for token labels",
    )
    color_jitter: float = setting(
        0.4, "strength of brightness, contrast and saturation jitter; without RandAugment only", at_least=0.0
    )
    reprob: float = setting(0.25, "probability of random erasing", at_least=0.0)
    remode: Literal["pixel", "rand", "const"] = setting(
        "pixel", "fill of erased boxes: noise per pixel, one random color, or the mean color"
    )
    recount: int = setting(1, "maximum number of erased boxes per image", at_least=1)
    crop_pct: float = setting(
        0.0, "evaluation crop: side of the crop over side of the resized image; 0: the model's", at_least=0.0
    )
    block_shuffle: int = setting(
        0,
        "shuffle blocks of this many neighbouring images, then images within --shuffle-window blocks, for "
        "storage that needs long reads; 0: shuffle all images",
        at_least=0,
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


@dataclass(frozen=True)
class Objective:
    """loss, token labels and mixing"""

    loss: str = setting("soft-target", "loss: soft-target (cross-entropy), or a plugin's")
    token_label: bool = setting(False, "train a label for every token besides the class of the image")
    token_label_data: str = setting(
        "", "packed label maps, or a folder of CLASS/IMAGE.pt; empty: the image's class for every token"
    )
    token_label_size: int = setting(0, "token labels per side; 0: --img-size / 16", at_least=0)
    label_geometry: Literal["corrected", "reference"] = setting(
        "corrected", "crop of label maps; reference: with x and y swapped, as in the published code"
    )
    map_geometry: str = setting(
        "",
        "part of its image that a label map covers: whole, or centre-crop:RESIZE:SIZE; empty: as recorded "
        "with the maps, else as of the published ones",
    )
    ground_truth: bool = setting(False, "blend the true class into the class target of the label map")
    cls_weight: float = setting(1.0, "weight of the class loss", at_least=0.0)
    dense_weight: float = setting(0.5, "weight of the token loss", at_least=0.0)
    smoothing: float = setting(0.1, "label smoothing", at_least=0.0, below=1.0)
    mix_token: bool = setting(True, "MixToken: swap a box of tokens between pairs of images")
    mixup: float = setting(0.0, "Mixup: alpha of the Beta distribution; 0: off", at_least=0.0)
    cutmix: float = setting(0.0, "CutMix: alpha of the Beta distribution; 0: off", at_least=0.0)
    mixup_prob: float = setting(
        1.0, "probability that --mixup or --cutmix is applied to a batch", at_least=0.0
    )
    mixup_switch_prob: float = setting(
        0.5, "probability of --cutmix instead of --mixup, if both are on", at_least=0.0
    )


@dataclass(frozen=True)
class Update:
    """optimizer and schedule"""

    opt: str = setting(
        "adamw", "optimizer: adamw, lamb, lars, sgd, NVIDIA Apex's fusedadam or fusedlamb, or a plugin's"
    )
    momentum: float = setting(0.9, "momentum of lars and sgd", at_least=0.0, below=1.0)
    layer_decay: float = setting(
        1.0, "learning rate of each layer relative to the layer above it; 1: all alike", at_least=0.001
    )
    shard_optimizer: bool = setting(
        False, "shard the optimizer state over ranks (ZeRO stage 1), which divides its memory by the ranks"
    )
    lr: float = setting(
        0.0,
        "peak learning rate, not scaled, nor are --min-lr and --warmup-lr; 0: --lr-base and these two are "
        "scaled by global batch / --lr-base-size",
        aliases=("--learning-rate",),
        at_least=0.0,
    )
    lr_base: float = setting(1.6e-3, "peak learning rate at a global batch of --lr-base-size", at_least=0.0)
    lr_base_size: int = setting(
        1024,
        "global batch that --lr-base, --min-lr and --warmup-lr are stated for; 0: --lr-base is for 1024, the "
        "other two are not scaled",
        at_least=0,
    )
    min_lr: float = setting(1e-5, "learning rate at the end of the decay and in the cool-down", at_least=0.0)
    sched: str = setting(
        "cosine",
        "decay of the learning rate: cosine, linear, step (a tenth at 66 and 83 %), constant, or a plugin's",
    )
    warmup_lr: float = setting(1e-6, "learning rate at the first step of the warm-up", at_least=0.0)
    epochs: int = setting(300, "epochs of warm-up and decay", at_least=1)
    warmup_epochs: int = setting(20, "epochs of linear warm-up, counted among --epochs", at_least=0)
    warmup_prefix: bool = setting(False, "add the warm-up epochs before --epochs instead of counting them in")
    lr_changes: Literal["step", "epoch"] = setting(
        "step", "change the learning rate at every step, or, as published, only at the start of an epoch"
    )
    cooldown_epochs: int = setting(10, "epochs at --min-lr after --epochs", at_least=0)
    weight_decay: float = setting(
        0.05, "weight decay of matrices and filters; biases, norms and embeddings have none", at_least=0.0
    )
    clip_grad: float = setting(0.0, "bound of --clip-mode on the averaged gradient; 0: off", at_least=0.0)
    clip_mode: Literal["norm", "value", "agc"] = setting(
        "norm",
        "clip the global norm, each value, or each unit's norm relative to its weights' norm (AGC)",
    )
    accumulation: int = setting(
        1,
        "micro-batches per step, accumulated on the rank before the allreduce",
        aliases=("--local-accumulation",),
        at_least=1,
    )
    ema_decay: float = setting(
        0.0,
        "decay per step of the EMA weights, which are evaluated beside the raw ones; 0: no EMA",
        shorthands={"--model-ema": 0.99992},
        at_least=0.0,
        below=1.0,
    )
    ema_warmup: bool = setting(
        False,
        "EMA decay rises as (1 + step) / (10 + step) up to --ema-decay; off: constant, as published",
        aliases=("--model-ema-warmup",),
    )


@dataclass(frozen=True)
class Exchange:
    """gradient allreduce"""

    compression: Literal["none", "fp16"] = setting("fp16", "compression of gradients for the allreduce")
    bucket_mib: float = setting(25.0, "size of a gradient bucket, MiB", at_least=0.001)
    last_bucket_mib: float = setting(
        1.0, "size of the last bucket, which cannot overlap with backward, MiB", at_least=0.001
    )


@dataclass(frozen=True)
class Published:
    """The published result of a recipe: a table of recipes without flags."""

    top1: float = 0.0  # per cent; 0: none
    # Settings of the published run that are paths, so that a recipe cannot set them.
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Config:
    """All settings of one run."""

    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    objective: Objective = field(default_factory=Objective)
    segmentation: Segmentation = field(default_factory=Segmentation)
    detection: Detection = field(default_factory=Detection)
    update: Update = field(default_factory=Update)
    exchange: Exchange = field(default_factory=Exchange)
    published: Published = field(default_factory=Published)
    # Not part of a recipe: warnings to print at the start, and the names of the settings that a flag or the
    # recipe set to another value than their default.
    warnings: tuple[str, ...] = field(default=(), compare=False)
    stated: frozenset[str] = field(default=frozenset(), compare=False)

"""Every setting: its type, default, flags and help line, declared once.

A field's name is its key in a recipe and, with dashes, its flag on the command line.
Names are unique over all groups, so flags need no prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from horovod_volo.config.setting import setting


@dataclass(frozen=True)
class Run:
    """the run: where results go, how it continues"""

    output: str = setting("runs", "folder that holds run folders")
    name: str = setting("", "run folder inside --output; empty: the recipe's name, else the model's")
    resume: str = setting(
        "",
        "continue from this checkpoint or run folder; 'auto': go on with the run folder if it has a "
        "checkpoint, else begin",
    )
    seed: int = setting(42, "sample order, augmentation and initial weights follow from it", at_least=0)
    log_every: int = setting(50, "steps between log lines", at_least=1)
    eval_every: int = setting(1, "epochs between evaluations; the last epoch is always evaluated", at_least=1)
    checkpoint_every: int = setting(
        0, "steps between checkpoints inside an epoch; 0: at epoch ends only", at_least=0
    )
    keep_checkpoints: int = setting(3, "checkpoints kept besides the best", at_least=1)
    stop_at_step: int = setting(
        0, "save and exit with status 75 after this step, as if pre-empted; 0: run to the end", at_least=0
    )


@dataclass(frozen=True)
class Launch:
    """the hosts: how ranks use them"""

    binding: Literal["numa", "core", "none"] = setting(
        "numa",
        "each rank runs on its share of the cores of the NUMA node next to its GPU, and takes memory there; "
        "core: on one hardware thread of each of these cores; none: anywhere",
    )
    horovod_autotune: str = setting("", "let Horovod tune itself while it trains; file for what it tried")
    horovod_timeline: str = setting("", "file for Horovod's timeline of all messages; slows training")


@dataclass(frozen=True)
class Model:
    """the network"""

    model: str = setting(
        "volo_d1",
        "volo_d1 to volo_d5, lvvit_t, lvvit_s, lvvit_m, lvvit_l, volo_demo, or a classification model of "
        "timm",
    )
    img_size: int = setting(224, "side of the square training and evaluation images, pixels", at_least=32)
    num_classes: int = setting(0, "classes; 0: as many as the training set has folders", at_least=0)
    drop_path: float = setting(0.0, "stochastic depth rate of the last block", at_least=0.0, below=1.0)
    precision: Literal["fp32", "bf16", "fp16"] = setting(
        "fp32",
        "arithmetic of forward and backward; weights stay fp32",
        shorthands={"--apex-amp": "fp16", "--native-amp": "fp16", "--amp": "fp16"},
    )
    grad_checkpoint: bool = setting(
        False, "keep no activations inside blocks, compute them again in backward: slower, far less memory"
    )
    compile: bool = setting(
        False, "have torch.compile make one kernel of many inside blocks: a start of minutes, faster steps"
    )
    finetune: str = setting(
        "", "start from these weights: a run folder, a checkpoint, a file, or timm:NAME for timm's own"
    )
    allow_mismatch: str = setting(
        "",
        "parameters that --finetune may leave fresh or drop, by the beginnings of their names, with commas "
        "between; heads of another number of classes need no leave",
    )
    use_ema: bool = setting(
        False, "of --finetune, take the averaged weights where raw and averaged ones lie together"
    )


@dataclass(frozen=True)
class Data:
    """images in"""

    data_dir: str = setting("", "folder with train/CLASS/IMAGE and val/CLASS/IMAGE", positional=True)
    batch_size: int = setting(
        128, "images per rank and pass; with --global-batch: at most", flags=("-b",), at_least=1
    )
    global_batch: int = setting(
        0,
        "images per step of all ranks, from which batch size and --accumulation of a rank follow; "
        "0: ranks x --batch-size x --accumulation",
        at_least=0,
    )
    eval_batch_size: int = setting(0, "images per rank in evaluation; 0: as --batch-size", at_least=0)
    workers: int = setting(
        0, "data threads per rank; 0: the rank's share of the cores", flags=("-j",), at_least=0
    )
    prefetch: int = setting(3, "batches prepared ahead", at_least=1)
    scale: tuple[float, float] = setting((0.08, 1.0), "area of the random crop, as a share of the image")
    ratio: tuple[float, float] = setting((3 / 4, 4 / 3), "aspect of the random crop, width over height")
    hflip: float = setting(0.5, "probability of a left-right flip", at_least=0.0)
    vflip: float = setting(0.0, "probability of an upside-down flip", at_least=0.0)
    train_interpolation: Literal["random", "bilinear", "bicubic"] = setting(
        "random", "how training crops are resized; random: either, drawn for each image"
    )
    aa: str = setting(
        "rand-m9-mstd0.5-inc1",
        "RandAugment in timm's spelling: m magnitude, n operations, p probability, mstd and mmax spread "
        "and bound of the magnitude, inc1 ever stronger with it; empty: none",
    )
    randaugment_on: Literal["crop", "image"] = setting(
        "crop",
        "what RandAugment or --color-jitter acts on: the crop, as in timm, or the whole image before it is "
        "cut, as published for token labels",
    )
    color_jitter: float = setting(
        0.4,
        "largest change of brightness, contrast and saturation; without RandAugment only",
        at_least=0.0,
    )
    reprob: float = setting(0.25, "probability that boxes of an image are erased", at_least=0.0)
    remode: Literal["pixel", "rand", "const"] = setting(
        "pixel", "an erased box holds noise, one random colour, or the mean colour"
    )
    recount: int = setting(1, "most boxes erased in an image", at_least=1)
    crop_pct: float = setting(
        0.0, "evaluation crop: image side over resized side; 0: the model's own", at_least=0.0
    )
    block_shuffle: int = setting(
        0,
        "for storage that wants long reads: shuffle blocks of so many neighbouring images, then images "
        "within --shuffle-window blocks; 0: shuffle all images",
        at_least=0,
    )
    shuffle_window: int = setting(64, "blocks whose images are shuffled among each other", at_least=1)
    bad_samples: Literal["skip", "fail"] = setting(
        "skip", "a damaged image or label map is replaced by another, or ends the run"
    )
    bad_samples_limit: int = setting(
        100, "damaged samples on one rank that end the run all the same", at_least=0
    )
    catalog_dir: str = setting(
        "", "where the list of images is kept, seen by all hosts; empty: inside --output"
    )


@dataclass(frozen=True)
class Objective:
    """what is minimised"""

    token_label: bool = setting(False, "learn a label for every token besides the image's class")
    token_label_data: str = setting(
        "", "packed label maps, or a folder of CLASS/IMAGE.pt; empty: the image's class on every token"
    )
    token_label_size: int = setting(0, "token labels per side; 0: image side / 16", at_least=0)
    label_geometry: Literal["corrected", "reference"] = setting(
        "corrected", "'reference' repeats the published code's exchange of x and y in label crops"
    )
    map_geometry: str = setting(
        "",
        "what a label map covers of its image: whole, or centre-crop:RESIZE:SIZE; empty: as recorded with "
        "the maps, else as assumed of published ones",
    )
    ground_truth: bool = setting(False, "mix the true class into the label map's class target")
    cls_weight: float = setting(1.0, "weight of the class loss", at_least=0.0)
    dense_weight: float = setting(0.5, "weight of the token loss", at_least=0.0)
    smoothing: float = setting(0.1, "label smoothing", at_least=0.0, below=1.0)
    mix_token: bool = setting(True, "exchange a box of tokens between pairs of images")
    mixup: float = setting(0.0, "blend pairs of images: parameter of the Beta distribution", at_least=0.0)
    cutmix: float = setting(
        0.0, "paste a box of one image into another: parameter of the Beta distribution", at_least=0.0
    )
    mixup_prob: float = setting(1.0, "probability that a batch is mixed by --mixup or --cutmix", at_least=0.0)
    mixup_switch_prob: float = setting(0.5, "share of --cutmix where both are asked for", at_least=0.0)


@dataclass(frozen=True)
class Update:
    """optimizer and schedule"""

    opt: Literal["adamw", "lamb", "lars", "sgd", "fusedadam", "fusedlamb"] = setting(
        "adamw", "optimizer; fusedadam and fusedlamb are NVIDIA Apex's"
    )
    momentum: float = setting(0.9, "momentum of lars and sgd", at_least=0.0, below=1.0)
    layer_decay: float = setting(
        1.0, "rate of each layer as a share of that of the layer above it; 1: all alike", at_least=0.001
    )
    shard_optimizer: bool = setting(
        False, "each rank keeps and updates its share of the optimizer's state: memory divided by the ranks"
    )
    lr: float = setting(
        0.0,
        "peak learning rate as it is, and --min-lr and --warmup-lr too; 0: --lr-base and these two times "
        "global batch / --lr-base-size",
        flags=("--learning-rate",),
        at_least=0.0,
    )
    lr_base: float = setting(1.6e-3, "peak learning rate for a global batch of --lr-base-size", at_least=0.0)
    lr_base_size: int = setting(
        1024,
        "global batch that --lr-base, --min-lr and --warmup-lr are stated for; 0: --lr-base for 1024, the "
        "other two as they are",
        at_least=0,
    )
    min_lr: float = setting(1e-5, "learning rate at the end of the cosine and in the cool-down", at_least=0.0)
    warmup_lr: float = setting(1e-6, "learning rate at the first step of the warm-up", at_least=0.0)
    epochs: int = setting(300, "epochs of warm-up and cosine", at_least=1)
    warmup_epochs: int = setting(20, "epochs of linear warm-up, inside --epochs", at_least=0)
    warmup_prefix: bool = setting(False, "warm up before --epochs, which are longer by it, instead of inside")
    lr_changes: Literal["step", "epoch"] = setting(
        "step", "the learning rate moves with every step, or, as published, at each epoch's begin only"
    )
    cooldown_epochs: int = setting(10, "further epochs at --min-lr", at_least=0)
    weight_decay: float = setting(
        0.05, "decay of matrices and filters; biases, norms, tokens are exempt", at_least=0.0
    )
    clip_grad: float = setting(
        0.0, "bound of the averaged gradient, of what --clip-mode says; 0: no clipping", at_least=0.0
    )
    clip_mode: Literal["norm", "value", "agc"] = setting(
        "norm",
        "bound the whole gradient's norm, each value, or each unit's norm as a share of its weights' norm",
    )
    accumulation: int = setting(
        1,
        "passes averaged into one step, on the rank, before anything travels",
        flags=("--local-accumulation",),
        at_least=1,
    )
    ema_decay: float = setting(
        0.0,
        "decay per step of averaged weights, evaluated beside the raw ones; 0: none",
        shorthands={"--model-ema": 0.99992},
        at_least=0.0,
        below=1.0,
    )
    ema_warmup: bool = setting(
        False,
        "raise the decay of averaged weights from 0.1 to --ema-decay by (1 + step) / (10 + step), so that "
        "the initial weights fade soon; off: the same decay from the first step, as published",
        flags=("--model-ema-warmup",),
    )


@dataclass(frozen=True)
class Exchange:
    """gradient exchange"""

    compression: Literal["none", "fp16"] = setting("fp16", "form of gradients on the wire")
    bucket_mib: float = setting(25.0, "size of a gradient bucket, MiB", at_least=0.001)
    last_bucket_mib: float = setting(
        1.0, "size of the bucket that leaves last, when backward is over, MiB", at_least=0.001
    )


@dataclass(frozen=True)
class Published:
    """What a recipe's result was published with; no group of settings: a recipe has it, no flag does."""

    top1: float = 0.0  # per cent; 0: none
    needs: tuple[str, ...] = ()  # settings of the published run that the recipe cannot give: they are places


@dataclass(frozen=True)
class Config:
    """All settings of one run."""

    run: Run = field(default_factory=Run)
    launch: Launch = field(default_factory=Launch)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    objective: Objective = field(default_factory=Objective)
    update: Update = field(default_factory=Update)
    exchange: Exchange = field(default_factory=Exchange)
    published: Published = field(default_factory=Published)
    warnings: tuple[str, ...] = field(default=(), compare=False)  # shown at the start; not part of a recipe


def group_types() -> dict[str, type]:
    """The groups of settings by name, in the order they are shown."""
    groups = [group.name for group in fields(Config) if group.name not in ("published", "warnings")]
    return {name: type(getattr(Config(), name)) for name in groups}

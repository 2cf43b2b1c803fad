"""Every setting: its type, default, flags and help line, declared once.

A field's name is its key in a recipe and, with dashes, its flag on the command line.
Names are unique over all groups, so flags need no prefix.
"""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from horovod_volo.config.data_settings import Data
from horovod_volo.config.setting import BelowOne, Count, CountOrZero, NonNegative, Setting, setting
from horovod_volo.config.task_settings import Detection, Objective, Segmentation
from horovod_volo.config.update_settings import Exchange, Update

ONE_RANK, ON_CPU, RESUMED = "with one rank", "on a CPU", "in a run that resumes from a checkpoint"
FACTS = (ONE_RANK, ON_CPU, RESUMED)  # conditions of settings that are known at the start of a run
# When all settings of a group have no effect.
_IDLE_GROUPS = {
    "objective": "without --task classification",
    "segmentation": "without --task segmentation",
    "detection": "without --task detection",
    "exchange": ONE_RANK,
}


@dataclass(frozen=True)
class Run:
    """run folder, checkpoints and logging"""

    output: str = setting("runs", "folder of the run folders")
    name: str = setting(
        "", "run folder in --output; empty: as the recipe, model or data folder", also=("--experiment",)
    )
    resume: str = setting(
        "",
        "resume from a checkpoint or run folder; auto, or no value: this run's latest, if any",
        bare="auto",
    )
    seed: CountOrZero = setting(42, "seed of sample order, augmentation and initial weights")
    log_every: Count = setting(50, "steps between log lines", also=("--log-interval",))
    eval_every: Count = setting(1, "epochs between evaluations; also at the end", also=("--val-interval",))
    early_stop: CountOrZero = setting(
        0, "end the run after this many evaluations in a row that are no better than the best one; 0: never"
    )
    checkpoint_every: CountOrZero = setting(
        0, "steps between checkpoints inside an epoch; 0: only at its end", also=("--recovery-interval",)
    )
    keep_checkpoints: Count = setting(3, "checkpoints to keep, besides the best", also=("--checkpoint-hist",))
    hang_timeout: NonNegative = setting(
        0.0,
        "seconds without the end of a step after which a run that hangs is ended; 0: 50 of its steps, but at "
        "least 600",
    )
    profile: str = setting(
        "", "record steps, steps=FIRST:LAST: traces and a summary of where the time went, in the run folder"
    )
    stop_at_step: CountOrZero = setting(
        0, "save and exit with status 75 after this step, as on preemption; 0: run to the end"
    )
    plugin: str = setting(
        "",
        "Python module to import, which registers models, losses, optimizers, schedules, augmentation or "
        "callbacks; may be repeated",
        repeatable=True,
    )


@dataclass(frozen=True)
class Launch:
    """ranks on their hosts"""

    binding: Literal["numa", "core", "none"] = setting(
        "numa",
        "bind each rank to its part of the cores of the NUMA node next to its GPU; core: to one hardware "
        "thread of each of these cores; none: do not bind",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "where ranks compute; auto: GPUs or, where torch sees none, the CPU, if that takes under 12 hours",
    )
    elastic: bool = setting(False, "go on as hosts are lost and added: horovodrun --host-discovery-script")


@dataclass(frozen=True)
class Model:
    """task, model and its arithmetic"""

    task: Literal["classification", "segmentation", "detection"] = setting(
        "classification", "what is learned: the class of an image, that of each pixel, or boxes and classes"
    )
    sync_bn: Literal["none", "heads", "all"] = setting(
        "none",
        "batch norm over the images of all ranks: in the heads of a dense task; all, or no value: everywhere",
        bare="all",
    )
    model: str = setting(
        "volo_d1",
        "volo_d1 to volo_d5, lvvit_t, lvvit_s, lvvit_m, lvvit_l, volo_demo, a classification model of timm, "
        "or a plugin's; without --model and --recipe, one for the device and the number of images",
    )
    model_kwargs: str = setting(
        "",
        "arguments of the model's constructor, such as drop_rate=0.1 of timm's or mlp_ratio=4 of VOLO",
        joined=" ",
        also=(
            *("--drop=drop_rate={}", "--drop-block=drop_block_rate={}", "--gp=global_pool={}"),
            *("--bn-momentum=bn_momentum={}", "--bn-eps=bn_eps={}"),
        ),
    )
    head_init_scale: NonNegative = setting(
        1.0, "factor of the initial weights of the heads", idle=("without --task classification",)
    )
    img_size: int = setting(
        224, "side of the square training and evaluation images, pixels", at_least=32, also=("--input-size",)
    )
    first_size: CountOrZero = setting(
        0,
        "side of training images at first, which grows in equal steps to --img-size; 0: --img-size",
        excludes={
            "--task [sd]*": "{flag} is for --task classification. Drop one, or give {flag} 0.",
            "--compile": "{flag} would have the blocks compiled at each size. Drop one, or give {flag} 0.",
            "--early-stop": "Accuracy rises late while images grow. Drop --early-stop, or give {flag} 0.",
            "--reproducible": "{flag} resizes position embeddings, on a GPU not reproducibly. Give {flag} 0.",
        },
    )
    full_size_after: BelowOne = setting(
        0.5, "part of all steps in which training images grow", idle=("without --first-size",)
    )
    num_classes: CountOrZero = setting(0, "number of classes; 0: the class folders of the training set")
    drop_path: BelowOne = setting(0.0, "stochastic depth rate of the last block", also=("--drop-connect",))
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = setting(
        "fp32",
        "arithmetic of forward and backward; weights stay fp32; tf32: fp32 with products in TF32, on a GPU",
        also=("--amp-dtype", "--amp=fp16", "--apex-amp=fp16", "--native-amp=fp16", "--bf16=bf16"),
    )
    grad_checkpoint: bool = setting(
        False, "recompute activations inside blocks: far less memory, slower", also=("--grad-checkpointing",)
    )
    compile: bool = setting(
        False,
        "compile the blocks with torch.compile: faster steps, after a longer first one",
        also=("--torchcompile",),
    )
    kernels: Literal["auto", "plain"] = setting(
        "auto",
        "on a GPU: Triton kernels where a check at the start finds them right, or PyTorch's operators",
        idle=(ON_CPU,),
    )
    finetune: str = setting(
        "",
        "start from these weights: a run folder, a checkpoint, a file, or timm:NAME for timm's own; without "
        "--model and --recipe, published ones for the device",
        aliases=("--weights",),
        also=("--initial-checkpoint", "--pretrained-path"),
        idle=(RESUMED,),
    )
    allow_mismatch: str = setting(
        "",
        "prefixes of parameter names, separated by commas, that may be missing from --finetune or differ in "
        "shape; heads of another number of classes are always replaced",
        needs="--finetune",
        idle=(RESUMED,),
    )
    freeze: str = setting(
        "",
        "parts whose weights stay as they are, separated by commas: backbone (all but the heads), or "
        "prefixes of parameter names; empty: none",
    )
    fit_head: bool = setting(
        False,
        "before the first step, fit the classifier to the features of the training images (logistic "
        "regression); with --epochs 0 the run ends with it",
        idle=(RESUMED,),
        excludes={"--task [sd]*": "{flag} is for --task classification. Drop one of them."},
    )
    use_ema: bool = setting(
        False, "fine-tune from the EMA weights of --finetune", needs="--finetune", idle=(RESUMED,)
    )


@dataclass(frozen=True)
class Logging:
    """pictures"""

    images_every: CountOrZero = setting(
        10,
        "epochs between pictures of training images in TensorBoard, from the start on; 0: none",
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
    logging: Logging = field(default_factory=Logging)
    published: Published = field(default_factory=Published)
    # Not part of a recipe: warnings to print at the start, the names of the settings that a flag or the
    # recipe set, and of those that they set to another value than their default; whether the model and what
    # goes with it are to be chosen for the images and the device, and what was chosen.
    warnings: tuple[str, ...] = field(default=(), compare=False)
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    non_default: frozenset[str] = field(default=frozenset(), compare=False)
    chooses_model: bool = field(default=False, compare=False)
    chosen: str = field(default="", compare=False)


def group_types() -> dict[str, type]:
    """Return the groups of settings by name, in the order of --help."""
    tables = {name: type(value) for name, value in vars(Config()).items() if is_dataclass(value)}
    del tables["published"]
    return tables


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return every setting of the schema, in its order."""
    found = []
    for group, table in group_types().items():
        hints = get_type_hints(table, include_extras=True)
        idle = [_IDLE_GROUPS[group]] if group in _IDLE_GROUPS else []
        for entry in fields(table):
            kind, bounds = hints[entry.name], {}
            if get_origin(kind) is Annotated:
                (bounds,), kind = kind.__metadata__, kind.__origin__
            item = replace(entry.metadata["setting"], name=entry.name, kind=kind, group=group, **bounds)
            found.append(replace(item, idle=(*idle, *item.idle)))
    return tuple(found)


def setting_of_training(name: str, **changes: Any) -> Setting:
    """Return a setting of the schema, for another command; `changes` replace fields of Setting."""
    return next(replace(setting, **changes) for setting in all_settings() if setting.name == name)


def by_flag(config: Config) -> dict[str, Any]:
    """Return the value of every setting by its flag."""
    return {setting.flag: setting.value_in(config) for setting in all_settings()}

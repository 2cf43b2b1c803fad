"""Every setting: its type, default, flags and help line, declared once.

A field's name is its key in a recipe and, with dashes, its flag on the command line.
Names are unique over all groups, so flags need no prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from horovod_volo.config.data_settings import Data
from horovod_volo.config.dense_settings import Detection, Segmentation
from horovod_volo.config.logging_settings import Logging
from horovod_volo.config.objective_settings import Objective
from horovod_volo.config.run_settings import Launch, Run
from horovod_volo.config.setting import setting
from horovod_volo.config.update_settings import Exchange, Update


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
        "or a plugin's; without --model and --recipe, one for the device and the number of images",
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
        False, "compile the blocks with torch.compile: faster steps, after a longer first one"
    )
    kernels: Literal["auto", "plain"] = setting(
        "auto",
        "on a GPU: Triton kernels where a check at the start finds them right, or PyTorch's operators",
    )
    finetune: str = setting(
        "", "start from these weights: a run folder, a checkpoint, a file, or timm:NAME for timm's own"
    )
    allow_mismatch: str = setting(
        "",
        "prefixes of parameter names, separated by commas, that may be missing from --finetune or differ in "
        "shape; heads of another number of classes are always replaced",
    )
    freeze: str = setting(
        "",
        "parts whose weights stay as they are, separated by commas: backbone (all but the heads), stem, "
        "blocks:N (the stem and the N layers behind it), or prefixes of parameter names; empty: none",
    )
    use_ema: bool = setting(False, "fine-tune from the EMA weights of --finetune instead of the raw ones")


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
    given: frozenset[str] = field(default=frozenset(), compare=False)
    stated: frozenset[str] = field(default=frozenset(), compare=False)
    is_open: bool = field(default=False, compare=False)
    chosen: str = field(default="", compare=False)

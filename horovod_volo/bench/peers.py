"""Our training step against the training loops in use today, on the same random images and weights.

A plain loop around timm's network learns the images' classes: eager, in channels-last memory, or compiled.
Ours learns from the same labels. Invariant: no line of our step, network or update takes part in a peer, so
that no mistake is on both sides; what is shared is sizes, images and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.bench.comparison import assert_agree, compare
from horovod_volo.bench.results import BatchSize, DropPath, Figure, Flag, ImgSize, ModelName, Pairs, Result
from horovod_volo.bench.synthetic import SyntheticRun, bench_config, learner_of
from horovod_volo.config.data_settings import Data
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import TrainBatch
from horovod_volo.core.errors import UserError
from horovod_volo.models.timm_api import VOLO, allow_posterize_to_no_bits
from horovod_volo.models.volo import SIZES
from horovod_volo.objective.mixing import NO_BOX

# isort: split
# After timm_api, which makes torchvision importable for timm.
from timm.data import create_dataset, create_loader

_COMPARED_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # relative to the largest loss


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Annotated[Literal["fp32", "bf16"], Flag("arithmetic of forward and backward")] = "fp32",
    drop_path: DropPath = 0.1,
    against: Annotated[Sequence[LoopName], Flag("training loops to compare with")] = (
        "eager",
        "channels-last",
    ),
    pairs: Pairs = 7,
) -> Result:
    """Compare one rank's step with that of each training loop."""
    figures: list[Figure] = []
    for form in against:
        config = bench_config(
            model=model, img_size=img_size, batch_size=batch_size, precision=precision,
            token_label=False, lr=1e-4, warmup_epochs=0,
        )  # fmt: skip
        ours, peer = _sides(form, config)  # without drop path, whose random numbers differ
        with closing(ours):
            losses = ours.losses(_COMPARED_STEPS)
        expected = torch.tensor([float(peer()) for _ in range(_COMPARED_STEPS)])
        what = f"the losses of {_COMPARED_STEPS} steps ({form})"
        assert_agree(what, losses, expected, _TOLERANCES[precision])
        ours, peer = _sides(form, replace(config, model=replace(config.model, drop_path=drop_path)))
        with closing(ours):
            found = compare(ours.step, peer, ours.device, pairs)
        figures += [
            Figure.of(f"beside {form}: images a second", batch_size / found.ours, "images/s"),
            Figure.of(form, batch_size / found.peer, "images/s"),
            Figure.of(f"faster than {form}", found.ratios, "x"),
        ]
    title = f"step of one rank, {img_size} px, {precision}, batch {batch_size}, drop path {drop_path}"
    return Result(f"peers {model} {precision} {' '.join(against)}", title, figures)


def _sides(form: LoopName, config: Config) -> tuple[SyntheticRun, Callable[[], Tensor]]:
    """Build our run, and the peer with the same weights and batch."""
    run = SyntheticRun(config)
    learner_of(run.context).mix = lambda step, number: NO_BOX  # noqa: ARG005
    network, step = training_loop(form, config, run.batch, run.device)
    network.load_state_dict(run.context.state.model.state_dict())
    return run, step


LoopName = Literal["eager", "channels-last", "compile"]


def training_loop(
    form: LoopName, config: Config, batch: TrainBatch, device: torch.device
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build timm's network and its plain training step, which returns the loss, with timm's AdamW."""
    settings = config.model
    if settings.model not in SIZES:
        raise UserError(
            f"Only VOLO is compared with loops around timm's network: --model {', '.join(SIZES)}. Measure "
            f"{settings.model} with `bench step`."
        )
    model = VOLO(
        img_size=settings.img_size,
        num_classes=settings.num_classes,
        drop_path_rate=settings.drop_path,
        use_aux_head=False,
        **SIZES[settings.model],
    )
    model.to(device).train()
    loss = _class_loss(form, model, config, batch)
    # Norms and biases have no weight decay.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.update.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.update.lr)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.precision == "bf16")

    def step() -> Tensor:
        optimizer.zero_grad()
        with autocast:
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value.detach()

    return model, step


def _class_loss(form: LoopName, model: Any, config: Config, batch: TrainBatch) -> Callable[[], Tensor]:
    images, features = batch.images, model.forward_features
    if form == "channels-last":
        model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    if form == "compile":
        features = torch.compile(features)

    def loss() -> Tensor:
        # timm's forward adds the best token's logits to the class token's; here the class token learns alone.
        logits = model.head(features(images)[:, 0])
        return F.cross_entropy(logits, batch.labels.classes, label_smoothing=config.objective.smoothing)

    return loss


def training_loader(folder: str, settings: Data, img_size: int, workers: int) -> Any:
    """Build timm's loader of the training images of a folder, with the same augmentation as ours."""
    allow_posterize_to_no_bits()
    return create_loader(
        create_dataset("", root=f"{folder}/train", is_training=True),
        input_size=(3, img_size, img_size),
        batch_size=settings.batch_size,
        is_training=True,
        use_prefetcher=False,  # made for GPUs; without one, workers that normalise are faster
        auto_augment=settings.aa,
        interpolation=settings.train_interpolation,
        scale=settings.scale,
        ratio=settings.ratio,
        hflip=settings.hflip,
        re_prob=settings.reprob,
        re_mode=settings.remode,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=False,
        device=torch.device("cpu"),
    )

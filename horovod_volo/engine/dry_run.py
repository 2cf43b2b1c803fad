"""What would run: settings, numbers that follow from them, and estimates, without a GPU or another rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from horovod_volo.config.derived import derive
from horovod_volo.config.recipe import dump
from horovod_volo.config.rules import notes
from horovod_volo.config.schema import Config
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.engine.banner import (
    batch_line,
    bucket_count,
    exchange_line,
    fact_lines,
    length_line,
    rate_line,
)
from horovod_volo.models.build import build_model

_IMAGENET_IMAGES, _IMAGENET_CLASSES = 1_281_167, 1_000
_STATE_BYTES = 16  # a parameter, its gradient and AdamW's two averages, fp32
_PROBE_BATCH = 2  # batch norm wants more than one value
_GIB, _MIB = 2**30, 2**20


def dry_run(config: Config, ranks: int) -> str:
    """Word what a run on so many ranks would be."""
    images, classes, remarks = _images(config)
    derived = derive(config, ranks=ranks, images=images)
    with torch.device("meta"):
        model = build_model(
            config.model.model,
            img_size=config.model.img_size,
            num_classes=config.model.num_classes or classes,
            drop_path=config.model.drop_path,
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    activations = _activation_bytes(model, config) * config.data.batch_size
    averages = 4 * parameters if config.update.ema_decay else 0
    wire_bytes = parameters * (2 if config.exchange.compression == "fp16" else 4)
    facts = {
        "ranks": f"{ranks}",
        "model": f"{config.model.model}, {parameters:,} parameters, {config.model.img_size} px",
        "images": f"{images:,} of {classes:,} classes",
        "batch": batch_line(config, derived),
        "rate": rate_line(config, derived),
        "length": length_line(derived),
        "precision": exchange_line(config, bucket_count(parameters, config)),
        "memory": f"about {(_STATE_BYTES * parameters + averages) / _GIB:.1f} GiB of state and "
        f"{activations / _GIB:.1f} GiB of activations a rank",
        "exchange": f"{wire_bytes / _MIB:.0f} MiB of gradients a step; "
        f"{2 * (ranks - 1) / ranks * wire_bytes / _MIB:.0f} MiB through each rank's link",
    }
    return f"{dump(config)}\n{fact_lines(facts, [*notes(config), *remarks])}"


def _images(config: Config) -> tuple[int, int, list[str]]:
    """Count the images, or take ImageNet-1K's numbers where the data is on another machine."""
    given = [config.data.data_dir, config.objective.token_label_data, config.model.finetune]
    remarks = [f"{path} is not on this machine" for path in given if path and not Path(path).exists()]
    if Path(config.data.data_dir or "/nowhere").exists():
        train = build_catalog(config.data.data_dir, "train", folder=None)
        return len(train), len(train.classes), remarks
    return _IMAGENET_IMAGES, _IMAGENET_CLASSES, [*remarks, "counted with the images of ImageNet-1K"]


def _activation_bytes(model: torch.nn.Module, config: Config) -> float:
    """Estimate what backward keeps of one image: the tensors a forward without data would save."""
    side = config.model.img_size
    images = torch.zeros(_PROBE_BATCH, 3, side, side, device="meta")
    with _saved_bytes(list(model.parameters())) as saved:
        model.training_logits(images, lambda tokens: tokens)  # type: ignore[operator]
    width = 1.0 if config.exchange.precision == "fp32" else 0.5
    return width * saved[0] / _PROBE_BATCH


@contextmanager
def _saved_bytes(parameters: list[torch.nn.Parameter]) -> Iterator[list[int]]:
    """Add up the tensors that autograd saves inside, each storage once, weights left out."""
    counted = {parameter.untyped_storage()._cdata for parameter in parameters}
    total = [0]
    kept: list[Tensor] = []  # keeps storages alive, so that none is counted under another's address

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total[0] += storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield total

"""What would run: settings, numbers that follow from them, and estimates, without a GPU or another rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from horovod_volo.cluster.buckets import Bucket
from horovod_volo.cluster.reducer import lay_out
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import notes, trains_aux_head
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.engine.banner import (
    batch_line,
    batch_notes,
    exchange_line,
    fact_lines,
    length_line,
    rate_line,
    token_size_warnings,
)
from horovod_volo.models.build import build_model, training_forward
from horovod_volo.models.weights import TIMM
from horovod_volo.optim.build import optimizer_spec
from horovod_volo.plugins import check_names, load_plugins

# Taken where the data is on another machine: name, images, classes.
_IMAGENET_1K = ("ImageNet-1K", 1_281_167, 1_000)
_IMAGENET_22K = ("ImageNet-22K", 14_197_122, 21_841)

_FP32 = 4  # bytes of a weight, of its gradient and of each of the optimizer's averages
_LEAST_BATCH = 2  # batch norm wants more than one value
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Need:
    """What a run needs whatever the number of ranks."""

    images: int
    classes: int
    weights: Mapping[str, Parameter]  # on the meta device, by name
    activation_bytes: float  # of one image
    remarks: list[str]

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(weight.numel() for weight in self.weights.values())


def dry_run(config: Config, ranks: int) -> str:
    """Word what a run on so many ranks would be."""
    return describe(config, ranks, need_of(config))


def need_of(config: Config) -> Need:
    """Count the images and measure the network, which is built without memory for its weights."""
    load_plugins(config.run.plugin)
    settings = config.model
    check_names(config)
    images, classes, remarks = _images(config)
    with torch.device("meta"):
        model = build_model(
            settings.model,
            img_size=settings.img_size,
            num_classes=settings.num_classes or classes,
            drop_path=settings.drop_path,
            grad_checkpoint=settings.grad_checkpoint,
            aux_head=trains_aux_head(config),
        )
    return Need(
        images=images,
        classes=classes,
        weights=dict(model.named_parameters()),
        activation_bytes=_activation_bytes(model, config),
        remarks=remarks,
    )


def describe(config: Config, ranks: int, need: Need) -> str:
    """Word settings, numbers and estimates of a run on so many ranks."""
    config = resolve(config, ranks)
    derived = derive(config, ranks=ranks, images=need.images)
    state = state_bytes(config, ranks) * need.parameters
    activations = need.activation_bytes * config.data.batch_size
    buckets = lay_out(need.weights, config.exchange, ranks=ranks, parts=1)
    wire_bytes = sum(_wire_bytes(bucket, config) for bucket in buckets)
    # What comes back is the summed gradients, or, of a shared-out optimizer, the new weights.
    back_bytes = need.parameters * _FP32 if config.update.shard_optimizer else wire_bytes
    facts = {
        "ranks": f"{ranks}",
        "model": f"{config.model.model}, {need.parameters:,} parameters, {config.model.img_size} px",
        "images": f"{need.images:,} of {need.classes:,} classes",
        "batch": batch_line(config, derived),
        "rate": rate_line(config, derived),
        "length": length_line(derived),
        "precision": exchange_line(config, len(buckets)),
        "memory": f"about {state / _GIB:.1f} GiB of state and "
        f"{activations / _GIB:.1f} GiB of activations a rank",
        "exchange": f"{wire_bytes / _MIB:.0f} MiB of gradients a step; "
        f"{(ranks - 1) / ranks * (wire_bytes + back_bytes) / _MIB:.0f} MiB through each rank's link",
    }
    remarks = [
        *notes(config),
        *token_size_warnings(config),
        *batch_notes(config, derived, need.images),
        *need.remarks,
    ]
    return f"{dump(config)}\n{fact_lines(facts, remarks)}"


def _wire_bytes(bucket: Bucket, config: Config) -> int:
    compressed = config.exchange.compression == "fp16" and bucket.compressible
    return sum(weight.numel() for weight in bucket.parameters.values()) * (2 if compressed else _FP32)


def state_bytes(config: Config, ranks: int) -> float:
    """Return what one rank holds for each parameter: weight, gradient, optimizer's state, averaged weight."""
    update = config.update
    averages = [key for key in optimizer_spec(update.opt).state_keys if key != "step"]  # which is one number
    state = float(len(averages) * _FP32)
    if update.shard_optimizer:
        state = (state + _FP32) / ranks  # and a copy of the gradients of its share
    averaged = _FP32 if update.ema_decay else 0
    return _FP32 + _FP32 + state + averaged


def _images(config: Config) -> tuple[int, int, list[str]]:
    """Count the images, or take ImageNet's numbers where the data is on another machine."""
    given = [config.data.data_dir, config.objective.token_label_data, config.model.finetune]
    places = [path for path in given if path and not path.startswith(TIMM)]
    remarks = [f"{path} is not on this machine" for path in places if not Path(path).exists()]
    if Path(config.data.data_dir or "/nowhere").exists():
        train = build_catalog(config.data.data_dir, "train", folder=None)
        return len(train), len(train.classes), remarks
    assumed = _IMAGENET_22K if config.model.num_classes == _IMAGENET_22K[2] else _IMAGENET_1K
    name, images, classes = assumed
    return images, classes, [*remarks, f"counted with the images of {name}"]


def _activation_bytes(model: torch.nn.Module, config: Config) -> float:
    """Estimate what backward keeps of one image: the tensors a forward without data would save.

    Drop path computes branches for a random number of images. In a whole batch that is near the expected
    number, and drawn from the run's seed it is the same every time.
    """
    side, batch = config.model.img_size, max(_LEAST_BATCH, config.data.batch_size)
    images = torch.zeros(batch, 3, side, side, device="meta")
    with torch.random.fork_rng(devices=[]), _saved_bytes(list(model.parameters())) as saved:
        torch.manual_seed(config.run.seed)
        training_forward(model)(images, lambda tokens: tokens)
    width = 1.0 if config.model.precision == "fp32" else 0.5
    return width * saved[0] / batch


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

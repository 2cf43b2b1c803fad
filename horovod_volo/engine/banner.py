"""The first lines of a run's log, and the lines that a dry run shares with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from horovod_volo.cluster.buckets import Bucket, message_bytes
from horovod_volo.config.derived import REFERENCE_BATCH, Derived, nearest_batches
from horovod_volo.config.schema import Config, Published
from horovod_volo.core.operators import describe_kernels
from horovod_volo.data.image_decoder import describe_decoder
from horovod_volo.engine.context import TrainContext


def banner(context: TrainContext, hosts: list[str]) -> dict[str, str]:
    """Return the properties of a run that its log begins with, given each rank's host name."""
    world, config, derived, state = context.world, context.config, context.derived, context.state
    parameters, buckets = list(state.model.parameters()), state.reducer.buckets
    host_count = f"{len(set(hosts))} host{'s' if len(set(hosts)) > 1 else ''}"
    properties = {
        "world": f"{world.size} ranks on {host_count}, launcher {world.launcher}, "
        f"{world.controller} controller",
        "binding": f"rank 0: {context.resources}" if world.size > 1 else str(context.resources),
        "model": model_line(config, parameters),
        "chosen": config.chosen,
        "training": training_line(config, parameters, buckets, world.size),
        "data": context.data.describe(config),
        "decoder": describe_decoder(config.data.image_decoder),
        "batch": batch_line(config, derived),
        "lr": lr_line(config, derived),
        "length": length_line(derived),
        "kernels": "" if context.resources.device.type == "cpu" else describe_kernels(),
        "precision": precision_line(config, len(buckets), world.size),
        "results": f"{context.folder}  (watch: tensorboard --logdir {context.folder.parent})",
    }
    if state.step:
        epoch = f"epoch {state.step / derived.steps_per_epoch:.4g} of {derived.epochs}"
        properties["resumed"] = f"at step {state.step:,}: {epoch}"
    return {name: text for name, text in properties.items() if text}


def model_line(config: Config, parameters: Iterable[Tensor]) -> str:
    """Describe the model and its size."""
    count = sum(parameter.numel() for parameter in parameters)
    return f"{config.model.model}, {count:,} parameters, {config.model.img_size} px"


def training_line(config: Config, parameters: Iterable[Tensor], buckets: Iterable[Bucket], ranks: int) -> str:
    """Describe how many parameters train, and what ranks send of them, if some are frozen; else nothing."""
    if not config.model.freeze:
        return ""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    trained = sum(count for count, trains in counts if trains)
    of_all = f"{trained:,} of {sum(count for count, _ in counts):,} parameters; frozen: {config.model.freeze}"
    sent = sum(message_bytes(bucket, config.exchange) for bucket in buckets) / 2**20
    return of_all + (f"; each rank sends {sent:.2f} MiB of gradients per step" if ranks > 1 else "")


def format_lines(properties: Mapping[str, str], warnings: Iterable[str]) -> list[str]:
    """Return a line for each property that has a text and each warning, names right-aligned in a column."""
    named = [*properties.items(), *(("warning", warning) for warning in warnings)]
    return [f"{name:>10}  {value}" for name, value in named if value]


def batch_line(config: Config, derived: Derived) -> str:
    """Describe the global batch as a product."""
    batch, accumulation = config.data.batch_size, config.update.accumulation
    up_to = "" if derived.global_batch == derived.ranks * batch * accumulation else "up to "
    return (
        f"{derived.global_batch:,} images per step = {derived.ranks} ranks x {up_to}{batch} images "
        f"x {accumulation} micro-batches"
    )


def lr_line(config: Config, derived: Derived) -> str:
    """Describe the peak learning rate, and --warmup-lr and --min-lr where they are scaled with it."""
    update, batch = config.update, derived.global_batch
    if update.lr:
        return f"peak {derived.peak_lr:.3g}, as given by --lr"
    base_batch = update.lr_base_size or REFERENCE_BATCH
    warmup = f"warm-up from {derived.warmup_lr:.3g}, " if derived.warmup_steps else ""
    ends = f"; {warmup}decay to {derived.min_lr:.3g}, scaled likewise"
    peak = f"peak {derived.peak_lr:.3g} = {update.lr_base:.3g} x {batch} / {base_batch}"
    return peak + ends if update.lr_base_size and batch != base_batch else peak


def batch_warnings(config: Config, derived: Derived, images: int) -> list[str]:
    """Return a warning if the global batch is not the one that the learning rates are stated for."""
    update, batch = config.update, derived.global_batch
    base_batch = update.lr_base_size or REFERENCE_BATCH
    has_published_recipe = config.published != Published()
    if batch == base_batch or (update.lr and not has_published_recipe):
        return []
    # The published code scales nothing: a command line of theirs without a recipe may rely on that.
    unscaled = "" if has_published_recipe else f" (--lr {update.lr_base:g}: not scaled)"
    peak = f"peak learning rate {derived.peak_lr:.3g} instead of {update.lr_base:.3g}{unscaled}"
    changes = [] if update.lr else [peak]
    if images >= base_batch:
        changes.append(f"{derived.steps_per_epoch:,} steps per epoch instead of {images // base_batch:,}")
    nearest = nearest_batches(base_batch, derived.ranks)
    advice = f"; nearest on {derived.ranks} ranks: --global-batch {' or '.join(map(str, nearest))}"
    source = "published with" if has_published_recipe else "learning rates are stated for"
    warning = f"{batch:,} images per step, {source} {base_batch:,}: {', '.join(changes)}"
    return [warning if batch in nearest else warning + advice]


def length_line(derived: Derived) -> str:
    """Describe the length of training in epochs and steps."""
    return (
        f"{derived.epochs} epochs x {derived.steps_per_epoch:,} steps = {derived.total_steps:,} steps "
        f"({derived.warmup_steps:,} of warm-up)"
    )


def precision_line(config: Config, buckets: int, ranks: int) -> str:
    """Describe the precision of the forward pass and of the gradients that are sent."""
    if ranks == 1:
        return config.model.precision
    compression = {"none": "uncompressed", "fp16": "in fp16"}[config.exchange.compression]
    return f"{config.model.precision}; gradients exchanged {compression} in {buckets} buckets"

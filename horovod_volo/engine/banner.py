"""What a run says of itself before it begins."""

from __future__ import annotations

from horovod_volo.config.derived import REFERENCE_BATCH, Derived, nearest_batches
from horovod_volo.config.schema import Config, Published
from horovod_volo.data.labels.source import LabelSource
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.build import tokens_per_side


def banner(context: TrainContext, hosts: list[str], remarks: list[str]) -> str:
    """Word the start of a run, one fact a line."""
    world, images = context.world, context.images
    model = context.config.model
    parameters = sum(parameter.numel() for parameter in context.state.model.parameters())
    places = f"{len(set(hosts))} host{'s' if len(set(hosts)) > 1 else ''}"
    epoch, step_in_epoch = context.derived.epoch_of(context.state.step)
    facts = {
        "world": f"{world.size} ranks on {places}, launcher {world.launcher}, {world.controller} controller",
        "binding": f"rank 0: {context.resources}" if world.size > 1 else str(context.resources),
        "model": f"{model.model}, {parameters:,} parameters, {model.img_size} px",
        "data": f"{len(images.train):,} training and {len(images.held_out):,} held-out images, "
        f"{len(images.train.classes):,} classes; {labels_line(context.config, images.label_maps)}",
        "batch": batch_line(context.config, context.derived),
        "rate": rate_line(context.config, context.derived),
        "length": length_line(context.derived),
        "precision": exchange_line(context.config, len(context.state.reducer.buckets)),
        "results": f"{context.folder}  (watch: tensorboard --logdir {context.folder.parent})",
    }
    if context.state.step:
        facts["resumed"] = f"at step {context.state.step:,}: epoch {epoch}, step {step_in_epoch} of it"
    return fact_lines(facts, remarks)


def fact_lines(facts: dict[str, str], remarks: list[str]) -> str:
    """Set facts and remarks below each other, their names in one column."""
    named = [*facts.items(), *(("note", remark) for remark in remarks)]
    return "\n".join(f"{name:>10}  {fact}" for name, fact in named)


def labels_line(config: Config, maps: LabelSource | None) -> str:
    """Tell what is learned, and whether MixToken mixes plain class labels."""
    if not config.objective.token_label:
        mixed = ", of pairs of images by MixToken (not with --no-mix-token)"
        return "class labels" + mixed * config.objective.mix_token
    side = tokens_per_side(config.model.model, config.model.img_size)
    if maps is None:
        return f"{side} x {side} token labels, the image's class on every token"
    geometry = f"{config.objective.label_geometry} geometry, maps of {maps.geometry.described}"
    return f"{side} x {side} token labels from {config.objective.token_label_data} ({geometry})"


def batch_line(config: Config, derived: Derived) -> str:
    """Tell how the global batch comes about."""
    return (
        f"{derived.global_batch:,} images a step = {derived.ranks} ranks x {config.data.batch_size} "
        f"x {config.update.accumulation} passes"
    )


def rate_line(config: Config, derived: Derived) -> str:
    """Tell the learning rate's peak and where it comes from, and its ends where they are not as typed."""
    update, batch = config.update, derived.global_batch
    if update.lr:
        return f"peak {derived.peak_lr:.3g}, as given by --lr"
    stated = update.lr_base_size or REFERENCE_BATCH
    ends = f"; from {derived.warmup_lr:.3g} and down to {derived.min_lr:.3g}, scaled alike"
    scaled = update.lr_base_size and batch != stated
    return f"peak {derived.peak_lr:.3g} = {update.lr_base:.3g} x {batch} / {stated}{ends if scaled else ''}"


def batch_notes(config: Config, derived: Derived, images: int) -> list[str]:
    """Say what another global batch than the stated one changes: one note, or none."""
    update, batch = config.update, derived.global_batch
    stated = update.lr_base_size or REFERENCE_BATCH
    of_published = config.published != Published()
    if batch == stated or (update.lr and not of_published):
        return []
    # The published code itself scales nothing: its command without a recipe may be meant so.
    unscaled = "" if of_published else f" (--lr {update.lr_base:g}: not scaled)"
    peak = f"peak learning rate {derived.peak_lr:.3g} for {update.lr_base:.3g}{unscaled}"
    changes = [] if update.lr else [peak]
    if images >= stated:
        changes.append(f"{derived.steps_per_epoch:,} steps an epoch for {images // stated:,}")
    near = nearest_batches(stated, derived.ranks)
    nearer = f"; nearest on {derived.ranks} ranks: --global-batch {' or '.join(map(str, near))}"
    source = "published with" if of_published else "learning rates are stated for"
    return [
        f"{batch:,} images a step, {source} {stated:,}: {', '.join(changes)}{'' if batch in near else nearer}"
    ]


def token_size_warnings(config: Config) -> list[str]:
    """Return a warning if --token-label-size is not the number of tokens per side, which is used instead."""
    asked, side = (
        config.objective.token_label_size,
        tokens_per_side(config.model.model, config.model.img_size),
    )
    if not config.objective.token_label or asked in (0, side):
        return []
    return [
        f"--token-label-size {asked} does not fit --img-size {config.model.img_size}: "
        f"the network has {side} x {side} tokens, so {side} is used"
    ]


def length_line(derived: Derived) -> str:
    """Tell epochs and steps."""
    return (
        f"{derived.epochs} epochs x {derived.steps_per_epoch:,} steps = {derived.total_steps:,} steps "
        f"({derived.warmup_steps:,} of warm-up)"
    )


def exchange_line(config: Config, buckets: int) -> str:
    """Tell the arithmetic and the form of gradients on the wire."""
    wire = {"none": "as they are", "fp16": "in fp16"}[config.exchange.compression]
    return f"{config.model.precision}; gradients travel {wire} in {buckets} buckets"

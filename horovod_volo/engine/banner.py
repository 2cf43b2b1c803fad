"""A run in words: the first lines of its log, some of them also those of a dry run, and what TensorBoard says
of its recipe and its hyperparameters.
"""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent

from torch import Tensor

from horovod_volo.cluster.buckets import Bucket, message_bytes
from horovod_volo.cluster.launch_env import OWN
from horovod_volo.cluster.pinning import count_gpus
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import REFERENCE_BATCH, Derived, nearest_batches
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config, Published, all_settings
from horovod_volo.core.errors import counted
from horovod_volo.core.operators import describe_kernels
from horovod_volo.data.image_decoder import describe_decoder
from horovod_volo.engine.context import TrainContext
from horovod_volo.monitor.logger import RunDescription

# Settings by which runs are compared, the same of all runs: TensorBoard takes its columns from one of them.
_COMPARED = (
    *("model", "img_size", "first_size", "finetune", "drop_path", "precision", "batch_size"),
    *("epochs", "warmup_epochs"),
    *("opt", "weight_decay", "ema_decay", "sched", "aa", "reprob", "mixup"),
    *("token_label", "mix_token", "smoothing", "seed"),
)


def banner(context: TrainContext, hosts: Sequence[str]) -> dict[str, str]:
    """Return the properties of a run that its log begins with, given each rank's host name."""
    world, config, derived, state = context.world, context.config, context.derived, context.state
    properties = {
        "world": f"{world.size} ranks on {counted(len(set(hosts)), 'host')}, launcher {world.launcher}, "
        f"{world.controller} controller",
        "gpus": unused_gpus(world) if context.resources.device.type == "cuda" else "",
        "binding": f"rank 0: {context.resources}" if world.size > 1 else str(context.resources),
        "data": context.data.describe(config),
        "decoder": describe_decoder(config.data.image_decoder),
        **settings_lines(config, derived, list(state.model.parameters()), state.reducer.buckets),
        "kernels": "" if context.resources.device.type == "cpu" else describe_kernels(),
        "results": f"{context.folder}  (watch: tensorboard --logdir {context.folder.parent})",
    }
    if state.step:
        epoch = f"epoch {state.step / derived.steps_per_epoch:.4g} of {derived.epochs}"
        properties["resumed"] = f"at step {state.step:,}: {epoch}"
    return {name: text for name, text in properties.items() if text}


def unused_gpus(world: World) -> str:
    """Say how many of the visible GPUs a run uses that no other launcher has started."""
    gpus, is_own = count_gpus(), world.launcher in ("none", OWN)
    return f"{world.size} of {gpus} GPUs: --ranks auto uses all" if is_own and world.size < gpus else ""


def settings_lines(
    config: Config, derived: Derived, parameters: Sequence[Tensor], buckets: Sequence[Bucket]
) -> dict[str, str]:
    """Describe the network and the settings of its training, with what follows from them."""
    count, ranks = sum(parameter.numel() for parameter in parameters), derived.ranks
    batch, accumulation = config.data.batch_size, config.update.accumulation
    up_to = "" if derived.global_batch == ranks * batch * accumulation else "up to "
    training, precision = "", str(config.model.precision)
    size = f"{config.model.img_size} px"
    if config.model.first_size:
        size = f"{config.model.first_size} px, which grow to {size}"
    if config.model.freeze:
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        training = f"{trained:,} of {count:,} parameters; frozen: {config.model.freeze}"
        if ranks > 1:
            sent = sum(message_bytes(bucket, config.exchange) for bucket in buckets) / 2**20
            training += f"; each rank sends {sent:.2f} MiB of gradients per step"
    if ranks > 1:
        kind = "integers" if config.data.reproducible else config.exchange.compression
        compression = {"none": "uncompressed", "fp16": "in fp16", "integers": "as integers"}[kind]
        precision += f"; gradients exchanged {compression} in {len(buckets)} buckets"
    return {
        "model": f"{config.model.model}, {count:,} parameters, {size}",
        "chosen": config.chosen,
        "training": training,
        "batch": f"{derived.global_batch:,} images per step = {ranks} ranks x {up_to}{batch} images "
        f"x {accumulation} micro-batches",
        "optimizer": f"{config.update.opt}, weight decay {config.update.weight_decay:g}",
        "lr": _lr_line(config, derived),
        "length": f"{derived.epochs} epochs x {derived.steps_per_epoch:,} steps = "
        f"{derived.total_steps:,} steps ({derived.warmup_steps:,} of warm-up)",
        "precision": precision,
    }


def format_lines(properties: Mapping[str, str], warnings: Iterable[str]) -> list[str]:
    """Return a line for each property that has a text and each warning, names right-aligned in a column."""
    named = [*properties.items(), *(("warning", warning) for warning in warnings)]
    return [f"{name:>10}  {value}" for name, value in named if value]


def _lr_line(config: Config, derived: Derived) -> str:
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


def describe_run(context: TrainContext) -> RunDescription:
    """Describe the run to TensorBoard: its recipe, its hyperparameters, and the scores of an evaluation."""
    config, derived = context.config, context.derived
    prefixes = ("", "ema_") if config.update.ema_decay else ("",)
    # An indented block of Markdown: in a fenced one, a setting could end the fence.
    recipe = indent(dump(config).rstrip("\n"), "    ", lambda _: True)
    return RunDescription(
        texts={"recipe": f"#### resolved.toml\n\n{recipe}"},
        hparams={
            **{item.name: item.value_in(config) for item in all_settings() if item.name in _COMPARED},
            "ranks": context.world.size,
            "global_batch": derived.global_batch,
            "peak_lr": derived.peak_lr,
            "parameters": sum(parameter.numel() for parameter in context.model.parameters()),
        },
        scores=[prefix + score for score in context.task.scores for prefix in prefixes],
    )

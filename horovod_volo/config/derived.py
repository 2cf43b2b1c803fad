"""Batches, steps and learning rates that follow from settings, ranks and images; none of them is stored."""

from dataclasses import dataclass, replace

from horovod_volo.config.schema import Config
from horovod_volo.config.update_settings import Update, all_epochs
from horovod_volo.core.errors import UserError

# The global batch of `lr_base` in recipes that do not state `lr_base_size`.
REFERENCE_BATCH = 1024


@dataclass(frozen=True)
class Derived:
    """Batch, steps and learning rates of a run."""

    ranks: int
    global_batch: int
    steps_per_epoch: int
    epochs: int  # including the cool-down and a --warmup-prefix
    total_steps: int
    decay_steps: int  # including a warm-up that is counted among --epochs
    warmup_steps: int
    prefix_steps: int  # of a warm-up before the decay (--warmup-prefix)
    peak_lr: float
    min_lr: float
    warmup_lr: float
    micro_batch: int = 0  # with --reproducible, whose averages are over the micro-batches of all ranks

    @property
    def images_per_rank(self) -> float:
        """Return the mean over ranks of their images in a step."""
        return self.global_batch / self.ranks

    @property
    def images_per_part(self) -> float:
        """Return the mean number of images of the parts of a step, over which the exchange averages."""
        return self.micro_batch or self.images_per_rank

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch, and the step inside it, of a step counted from the start of the run."""
        return divmod(step, self.steps_per_epoch)


def resolve(config: Config, ranks: int) -> Config:
    """Return the settings for this number of ranks, --global-batch split into batch size and accumulation.

    Both are read from the result only; micro-batches of elastic ranks may have an image less. Raise UserError
    if the learning rates contradict each other.
    """
    if config.data.global_batch:
        config = _divided(config, ranks)
    elif config.launch.elastic:
        raise UserError(
            "--elastic needs --global-batch: the number of ranks changes, and the global batch must not. "
            "Give the number of images per step."
        )
    _learning_rates(config.update, _global_batch(config, ranks))
    return config


def derive(config: Config, *, ranks: int, images: int) -> Derived:
    """Derive steps and learning rates; the incomplete last batch of an epoch is dropped."""
    update = config.update
    global_batch = _global_batch(config, ranks)
    if global_batch > images:
        raise UserError(
            f"One step takes {ranks} ranks x {config.data.batch_size} images x {update.accumulation} "
            f"micro-batches = {global_batch} images, but there are {images}. "
            + _smaller(images, ranks, config)
        )
    steps_per_epoch = images // global_batch
    epochs, warmup_steps = all_epochs(update), steps_per_epoch * update.warmup_epochs
    return Derived(
        ranks,
        global_batch,
        steps_per_epoch,
        epochs,
        total_steps=steps_per_epoch * epochs,
        decay_steps=steps_per_epoch * update.epochs,
        warmup_steps=warmup_steps,
        prefix_steps=warmup_steps if update.warmup_prefix else 0,
        micro_batch=config.data.batch_size if config.data.reproducible else 0,
        **_learning_rates(update, global_batch),
    )


def micro_batches(config: Config, rank: int, ranks: int) -> range:
    """Return the numbers of a rank's micro-batches in a step: its own, or with --reproducible the step's."""
    if not config.data.reproducible:
        return range(config.update.accumulation)
    return range(rank, config.data.global_batch // config.data.batch_size, ranks)


def drawing_rank(config: Config, rank: int) -> int:
    """Return the rank that a micro-batch's random numbers depend on: with --reproducible, none."""
    return 0 if config.data.reproducible else rank


def nearest_batches(global_batch: int, ranks: int) -> list[int]:
    """Return the nearest global batches that the ranks divide: this one, or those below and above it."""
    below = global_batch - global_batch % ranks
    return [batch for batch in dict.fromkeys((below, -(-global_batch // ranks) * ranks)) if batch]


def _peak_lr(update: Update, global_batch: int) -> float:
    return update.lr or update.lr_base * (global_batch / (update.lr_base_size or REFERENCE_BATCH))


def _learning_rates(update: Update, global_batch: int) -> dict[str, float]:
    """Return the learning rates at a global batch; at --lr-base-size they are exactly as stated."""
    peak = _peak_lr(update, global_batch)
    ends = 1.0 if update.lr or not update.lr_base_size else global_batch / update.lr_base_size
    rates = {"peak_lr": peak, "min_lr": update.min_lr * ends, "warmup_lr": update.warmup_lr * ends}
    # The limit in the message is in the units that the user types, before scaling.
    limit = peak if update.lr or not update.lr_base_size else update.lr_base
    for name in ("min_lr", "warmup_lr") if update.warmup_epochs else ("min_lr",):
        if rates[name] > peak:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"At a global batch of {global_batch:,} the peak learning rate is {peak:.3g}, below {flag}, "
                f"which is {rates[name]:.3g}. Use {flag} {limit!r} or less, or increase "
                f"{'--lr' if update.lr else '--lr-base'}."
            )
    return rates


def _global_batch(config: Config, ranks: int) -> int:
    return config.data.global_batch or ranks * config.data.batch_size * config.update.accumulation


def _divided(config: Config, ranks: int) -> Config:
    wanted, largest = config.data.global_batch, config.data.batch_size
    if config.data.reproducible:
        batch, accumulation = largest, -(-_all_micro_batches(wanted, largest, ranks) // ranks)
        config = replace(config, exchange=replace(config.exchange, compression="none"))
    elif config.launch.elastic:
        batch, accumulation = _split_unevenly(wanted, ranks, largest)
    elif wanted % ranks:
        offers = [_offer(config, ranks, batch) for batch in nearest_batches(wanted, ranks)]
        raise UserError(
            f"--global-batch {wanted} is not a multiple of {ranks} ranks. The nearest multiples: "
            f"{', or '.join(offers)}."
        )
    else:
        batch, accumulation = _split(wanted // ranks, largest)
    return replace(
        config,
        data=replace(config.data, batch_size=batch),
        update=replace(config.update, accumulation=accumulation),
    )


def _split(images: int, largest: int) -> tuple[int, int]:
    """Split a rank's images of a step into the fewest equal micro-batches of at most `largest` images."""
    accumulation = next(count for count in range(-(-images // largest), images + 1) if images % count == 0)
    return images // accumulation, accumulation


def _split_unevenly(images: int, ranks: int, largest: int) -> tuple[int, int]:
    """Split a step's images over ranks and the fewest micro-batches; return the largest, and their number."""
    of_rank = -(-images // ranks)
    accumulation = -(-of_rank // largest)
    if images // ranks < accumulation:
        raise UserError(
            f"--global-batch {images} leaves a rank of {ranks} without an image in a micro-batch of "
            f"--batch-size {largest}. Use a larger --global-batch or --batch-size, or fewer ranks (--max-np)."
        )
    return -(-of_rank // accumulation), accumulation


def _all_micro_batches(images: int, micro_batch: int, ranks: int) -> int:
    """Return the number of a step's micro-batches over all ranks, with --reproducible."""
    count, over = divmod(images, micro_batch)
    if over:
        raise UserError(f"--global-batch {images} is not a multiple of --micro-batch {micro_batch}. Use one.")
    if count < ranks:
        raise UserError(
            f"--global-batch {images} has {count} micro-batches of --micro-batch {micro_batch}, too few for "
            f"{ranks} ranks. Start at most {count}; another --micro-batch gives other weights."
        )
    return count


def _offer(config: Config, ranks: int, global_batch: int) -> str:
    batch, accumulation = _split(global_batch // ranks, config.data.batch_size)
    product = f"--global-batch {global_batch} = {ranks} x {batch} x {accumulation} micro-batches"
    return f"{product}, peak learning rate {_peak_lr(config.update, global_batch):.3g}"


def _smaller(images: int, ranks: int, config: Config) -> str:
    if config.data.global_batch and images >= ranks:
        return f"Use --global-batch {images - images % ranks} or less."
    accumulation = config.update.accumulation
    batch = images // (ranks * accumulation)
    if batch:
        return f"Use --batch-size {batch} or less."
    return f"Start at most {images} ranks with --accumulation 1, or give more images."

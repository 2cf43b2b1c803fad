"""Numbers that follow from settings, ranks and images, and are stored nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Config

REFERENCE_BATCH = 1024  # the global batch for which recipes state their learning rate


@dataclass(frozen=True)
class Derived:
    """The shape of a run: batches, steps and the learning rate's peak."""

    ranks: int
    global_batch: int
    steps_per_epoch: int
    epochs: int  # with the cool-down, and with a warm-up that comes before
    total_steps: int
    cosine_steps: int  # of the cosine; a warm-up inside counts among them
    warmup_steps: int
    prefix_steps: int  # of a warm-up that comes before the cosine
    peak_lr: float

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return the epoch, and the step inside it, of a step counted from the run's begin."""
        return divmod(step, self.steps_per_epoch)


def derive(config: Config, *, ranks: int, images: int) -> Derived:
    """Work out the run's shape. A last batch that would not be full is left out of its epoch."""
    update = config.update
    global_batch = ranks * config.data.batch_size * update.accumulation
    if global_batch > images:
        raise UserError(
            f"One step takes {ranks} ranks x {config.data.batch_size} images x {update.accumulation} passes "
            f"= {global_batch} images, but there are {images}. {_smaller(images, ranks, update.accumulation)}"
        )
    steps_per_epoch = images // global_batch
    prefix_epochs = update.warmup_epochs if update.warmup_prefix else 0
    epochs = prefix_epochs + update.epochs + update.cooldown_epochs
    return Derived(
        ranks=ranks,
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        total_steps=steps_per_epoch * epochs,
        cosine_steps=steps_per_epoch * update.epochs,
        warmup_steps=steps_per_epoch * update.warmup_epochs,
        prefix_steps=steps_per_epoch * prefix_epochs,
        peak_lr=update.lr or update.lr_base * global_batch / REFERENCE_BATCH,
    )


def _smaller(images: int, ranks: int, accumulation: int) -> str:
    batch = images // (ranks * accumulation)
    if batch:
        return f"Use --batch-size {batch} or less."
    return f"Start at most {images} ranks with --accumulation 1, or give more images."

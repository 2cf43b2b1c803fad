"""The run: epochs of steps, log points, evaluations and checkpoints, until the end or a request to stop.

Every rank goes through the same lines. An evaluation belongs to a checkpoint: it is made after
the checkpoint is on disk, and a run that was killed between the two makes up for it.
"""

from __future__ import annotations

import gc

from horovod_volo.engine.checkpoint.saving import (
    check_losses,
    save_checkpoint,
    save_evaluation,
    was_evaluated,
)
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.damage import log_bad_samples
from horovod_volo.engine.evaluation import evaluate
from horovod_volo.engine.garbage import collected_by_hand
from horovod_volo.engine.step import train_step


def fit(context: TrainContext) -> bool:
    """Train to the end, or return False where the run was asked to stop and is saved. Collective."""
    with collected_by_hand():
        while True:
            if evaluation_due(context):
                save_evaluation(context, evaluate(context))
            if context.state.step == context.derived.total_steps:
                return True
            finished = train_epoch(context)
            save_checkpoint(context)
            if not finished:
                return False


def train_epoch(context: TrainContext) -> bool:
    """Train to the end of the epoch the state stands in, or return False to stop before it. Collective."""
    run, state = context.config.run, context.state
    epoch, first_step = context.derived.epoch_of(state.step)
    passes = context.train_loader.batches(epoch, first_step)
    context.window.open()
    for _ in range(first_step, context.derived.steps_per_epoch):
        train_step(context, passes)
        if state.step % run.log_every == 0 and log_point(context, epoch):
            return False
        if state.step == run.stop_at_step:
            return False
        if run.checkpoint_every and state.step % run.checkpoint_every == 0:
            save_checkpoint(context)
    return not (context.window.passes and log_point(context, epoch))


def log_point(context: TrainContext, epoch: int) -> bool:
    """Tell how training goes; return True where any rank was asked to stop. Collective."""
    window, world, step = context.window, context.world, context.state.step
    sums = window.sums()
    seconds = window.seconds
    skipped = context.train_loader.bad_samples.skipped
    totals = world.sum_over_ranks(
        *sums.values(), window.passes, seconds, window.waited, skipped, context.stop.received
    )
    *losses, passes, all_seconds, waited, all_skipped, stops = totals
    log_bad_samples(context, context.train_loader.bad_samples)
    means = {name: value / passes for name, value in zip(sums, losses, strict=True)}
    check_losses(context, losses)
    context.logger.log_training(
        step,
        {
            "epoch": epoch,
            "images_seen": step * context.derived.global_batch,
            "loss": means["total"],
            "class_loss": means["class_loss"],
            "token_loss": means["token_loss"],
            "lr": context.lr(step - 1),
            "images_per_second": passes * context.config.data.batch_size * world.size / all_seconds,
            "data_wait": waited / all_seconds,
            "bad_samples": int(all_skipped),
        },
    )
    gc.collect()  # here all ranks have just met, and do it at once
    window.open()
    return stops > 0


def evaluation_due(context: TrainContext) -> bool:
    """Say whether an epoch has just ended that is to be evaluated and has not been. Collective."""
    epochs_done, steps_over = context.derived.epoch_of(context.state.step)
    if steps_over or epochs_done == 0:
        return False
    chosen = epochs_done % context.config.run.eval_every == 0 or epochs_done == context.derived.epochs
    return chosen and not was_evaluated(context)

"""The run: epochs of steps, log points, evaluations and checkpoints, until the end or a request to stop.

Every rank goes through the same lines. An evaluation belongs to a checkpoint: it is made after
the checkpoint is on disk, and a run that was killed between the two makes up for it.
"""

from __future__ import annotations

import gc

from horovod_volo.engine.damage import tell_damage
from horovod_volo.engine.evaluation import evaluate
from horovod_volo.engine.garbage import collected_by_hand
from horovod_volo.engine.job import Job
from horovod_volo.engine.keeping import check_losses, keep, keep_evaluation, was_evaluated
from horovod_volo.engine.step import train_step


def fit(job: Job) -> bool:
    """Train to the end, or return False where the run was asked to stop and is saved. Collective."""
    with collected_by_hand():
        while True:
            if evaluation_due(job):
                keep_evaluation(job, evaluate(job))
            if job.state.step == job.derived.total_steps:
                return True
            finished = train_epoch(job)
            keep(job)
            if not finished:
                return False


def train_epoch(job: Job) -> bool:
    """Train to the end of the epoch the state stands in, or return False to stop before it. Collective."""
    run, state = job.config.run, job.state
    epoch, first_step = job.derived.epoch_of(state.step)
    passes = job.train_stream.passes(epoch, first_step)
    job.window.open()
    for _ in range(first_step, job.derived.steps_per_epoch):
        train_step(job, passes)
        if state.step % run.log_every == 0 and log_point(job, epoch):
            return False
        if state.step == run.stop_at_step:
            return False
        if run.checkpoint_every and state.step % run.checkpoint_every == 0:
            keep(job)
    return not (job.window.passes and log_point(job, epoch))


def log_point(job: Job, epoch: int) -> bool:
    """Tell how training goes; return True where any rank was asked to stop. Collective."""
    window, world, step = job.window, job.world, job.state.step
    sums = window.sums()
    seconds = window.seconds
    skipped = job.train_stream.damage.skipped
    totals = world.total(*sums.values(), window.passes, seconds, window.waited, skipped, job.stop.received)
    *losses, passes, all_seconds, waited, all_skipped, stops = totals
    tell_damage(job, job.train_stream.damage)
    means = {name: value / passes for name, value in zip(sums, losses, strict=True)}
    check_losses(job, losses)
    job.tracker.train(
        step,
        {
            "epoch": epoch,
            "images_seen": step * job.derived.global_batch,
            "loss": means["total"],
            "class_loss": means["class_loss"],
            "token_loss": means["token_loss"],
            "lr": job.lr(step - 1),
            "images_per_second": passes * job.config.data.batch_size * world.size / all_seconds,
            "data_wait": waited / all_seconds,
            "bad_samples": int(all_skipped),
        },
    )
    gc.collect()  # here all ranks have just met, and do it at once
    window.open()
    return stops > 0


def evaluation_due(job: Job) -> bool:
    """Say whether an epoch has just ended that is to be evaluated and has not been. Collective."""
    epochs_done, steps_over = job.derived.epoch_of(job.state.step)
    if steps_over or epochs_done == 0:
        return False
    chosen = epochs_done % job.config.run.eval_every == 0 or epochs_done == job.derived.epochs
    return chosen and not was_evaluated(job)

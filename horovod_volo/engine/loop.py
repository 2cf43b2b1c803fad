"""The training loop: epochs of steps, log points, evaluations and checkpoints.

Every rank executes the same lines. An epoch's evaluation is saved after its checkpoint is on disk; a run that
was killed between the two evaluates when it resumes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from horovod_volo.cluster.elastic import HostsChangedError
from horovod_volo.cluster.watchdog import learned_limit
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.engine.checkpoint.saving import (
    CorruptedError,
    finish_checkpoint,
    has_evaluation,
    save_checkpoint,
    save_evaluation,
)
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.divergence import go_back, note_step, note_value, train_again
from horovod_volo.engine.step import train_step
from horovod_volo.monitor.stragglers import OwnTime
from horovod_volo.tasks.task import Metrics


def fit(context: TrainContext) -> bool:
    """Train to the last step and return True; after a stop request return False. Collective.

    In either case the state is saved in a checkpoint.
    """
    with garbage_collected_at_log_points():
        while True:
            try:
                return train_epochs(context)
            except CorruptedError as error:
                train_again(context, error.ranks)


def train_epochs(context: TrainContext) -> bool:
    """Do what `fit` does, until the state of a rank is corrupted. Collective."""
    while True:
        evaluated = evaluation_due(context)
        if evaluated:
            save_checkpoint(context)  # if ranks were formed again, or another run's checkpoint was resumed
            metrics = evaluate(context)
            log_bad_samples(context, context.parts.bad_held_out)
            save_evaluation(context, metrics)
            context.callbacks.evaluated(context, metrics)
            for name, picture in context.parts.pictures().items():
                context.logger.log_picture(context.state.step, name, picture.png, picture[1:])
            for name, content in context.parts.files(context.state.step).items():
                context.logger.write_file(name, content)
        if context.state.step == context.derived.total_steps:
            finish_checkpoint(context)
            return True
        if evaluated and asked_to_stop(context):
            return False
        finished = train_epoch(context)
        save_checkpoint(context)
        if not finished:
            finish_checkpoint(context)
            return False


def train_epoch(context: TrainContext) -> bool:
    """Train to the end of the epoch and return True; after a stop request return False. Collective."""
    run, state = context.config.run, context.state
    epoch, first_step = context.derived.epoch_of(state.step)
    batches = context.parts.train_loader.batches(epoch, first_step)
    context.meter.reset()
    context.timer.reset()
    for _ in range(first_step, context.derived.steps_per_epoch):
        note_step(context, train_step(context, batches))
        context.logger.step_done(state.step)
        context.callbacks.step_done(context)
        if state.step % run.log_every == 0:
            log_point(context)
        if state.reducer.statistics.hosts_changed:
            raise HostsChangedError
        if state.step == run.stop_at_step or state.reducer.statistics.stop_agreed:
            return False
        due = run.checkpoint_every and state.step % run.checkpoint_every == 0
        if due and not (context.skipped_in_a_row or context.returns_in_vain):
            save_checkpoint(context)
    if context.meter.micro_batches:
        log_point(context)
    return True


def evaluate(context: TrainContext) -> Metrics:
    """Evaluate the raw weights and, with an EMA, the averaged ones. Collective: every rank calls this."""
    averaged = context.state.average.models()
    done, total = 0, (1 + len(averaged)) * -(-len(context.data.held_out) // context.world.size)

    def beat(images: int) -> None:
        nonlocal done
        done += images
        context.heartbeat.beat(context.state.step)
        context.logger.evaluating(min(done, total - 1), total)

    context.logger.evaluating(0, total)
    metrics = context.parts.evaluate(context.state.model.eval(), beat)
    for name, model in averaged.items():
        metrics |= {
            f"{name}_{key}": value
            for key, value in context.parts.evaluate(model.eval(), beat).items()
            if key not in ("images", "bad_samples")
        }
    context.state.model.train()
    context.logger.evaluating(total, total)
    return metrics


def asked_to_stop(context: TrainContext) -> bool:
    """Return whether any rank was asked to stop. Collective: every rank calls this."""
    (asked,) = context.world.sum_over_ranks(context.stop.received)
    return asked > 0


def log_point(context: TrainContext) -> None:
    """Log losses and speed since the last log point. Collective: every rank calls this."""
    meter, world, step = context.meter, context.world, context.state.step
    sums = meter.sums()
    seconds = meter.seconds
    skipped = context.parts.train_loader.bad_samples.skipped
    waited_seconds, failed = meter.data_wait_seconds, context.checkpoints.failed
    steps = meter.micro_batches / context.config.update.accumulation
    own_time = OwnTime(context.timer.seconds_per_step(), waited_seconds / steps)
    counted = (*sums.values(), seconds, waited_seconds, skipped, failed)
    by_rank = world.allgather_object((counted, own_time))
    totals = [sum(values) for values in zip(*(of_rank for of_rank, _ in by_rank), strict=True)]
    *losses, all_seconds, waited, all_skipped, failures = totals
    if failures:
        finish_checkpoint(context)
    log_bad_samples(context, context.parts.train_loader.bad_samples)
    finite = losses[-1]  # micro-batches
    if not finite and not context.state.reducer.statistics.looks:
        go_back(context)
    means = {name: value / max(finite, 1) for name, value in zip(sums, losses, strict=True)}
    values = {
        "epoch": round(step / context.derived.steps_per_epoch, 4),
        "images_seen": step * context.derived.global_batch,
        "loss": means.pop("total"),
        **{name: mean for name, mean in means.items() if name != "finite"},
        "lr": context.lr(step - 1),
        "images_per_second": steps * context.derived.global_batch * world.size / all_seconds,
        "data_wait": waited / all_seconds,
        "bad_samples": int(all_skipped),
    }
    norm, context.logged_norm = context.logged_norm, None  # none at an epoch's end between log points
    if norm is not None and norm.isfinite():
        values["gradient_norm"] = float(norm)
        note_value(context, "gradient norm", float(norm))
    if finite:
        context.logger.log_training(step, values)
        note_value(context, "loss", values["loss"])
        context.callbacks.logged(context, values)
    if context.stragglers is not None:
        log_own_times(context, [own for _, own in by_rank])
    if not context.config.run.hang_timeout:
        context.heartbeat.watch(learned_limit(all_seconds / world.size / steps))
    context.ledger.write()
    gc.collect()  # on all ranks at once: they have just synchronised in sum_over_ranks
    meter.reset()
    context.timer.reset()


def log_own_times(context: TrainContext, times: Sequence[OwnTime]) -> None:
    """Log the time of each rank's own part of a step, and name a rank that the others wait for."""
    assert context.stragglers is not None
    for rank, (own, host) in enumerate(zip(times, context.stragglers.hosts, strict=True)):
        context.logger.log_rank(context.state.step, rank, host, own._asdict())
    if message := context.stragglers.find(times):
        context.logger.log(message)


def log_bad_samples(context: TrainContext, tracker: BadSampleTracker) -> None:
    """Log the samples that any rank has skipped since the last call. Collective: every rank calls this."""
    skipped = tracker.new_messages()
    (on_all_ranks,) = context.world.sum_over_ranks(len(skipped))
    if not on_all_ranks:
        return
    for messages in context.world.allgather_object(skipped):
        for message in messages:
            # Another rank may have read, and logged, this sample in an earlier epoch.
            if message not in context.logged_bad_samples:
                context.logged_bad_samples.add(message)
                context.logger.log(f"left out: {message}")


def evaluation_due(context: TrainContext) -> bool:
    """Return whether the current step ends an epoch that must be evaluated and has not been. Collective."""
    epochs_done, steps_over = context.derived.epoch_of(context.state.step)
    if steps_over or epochs_done == 0:
        return False
    selected = epochs_done % context.config.run.eval_every == 0 or epochs_done == context.derived.epochs
    return selected and not has_evaluation(context)


@contextmanager
def garbage_collected_at_log_points() -> Iterator[None]:
    """Disable Python's automatic garbage collection; `log_point` collects on all ranks at the same time.

    Automatic collections would pause each rank at a different time, and in an allreduce all ranks wait for
    the slowest one. Little garbage accumulates between log points: reference counts free a step's tensors.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # models, catalogs and modules live to the end of the run: exempt them from later collections
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()

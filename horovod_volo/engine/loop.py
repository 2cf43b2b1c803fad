"""The training loop: epochs of steps, log points, evaluations and checkpoints.

Every rank executes the same lines. An epoch's evaluation is saved after its checkpoint is on disk; a run that
was killed between the two evaluates when it resumes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from horovod_volo.cluster.collectives import HostsChangedError
from horovod_volo.engine.checkpoint import saving
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.divergence import note_outcome, train_again
from horovod_volo.engine.head_fit import fit_head
from horovod_volo.engine.log_point import log_bad_samples, log_point
from horovod_volo.engine.step import train_step
from horovod_volo.engine.step_record import with_pictures
from horovod_volo.engine.task import Metrics
from horovod_volo.models.build import start_training


def fit(context: TrainContext) -> bool:
    """Train to the last step and return True; after a stop request return False. Collective.

    An early stop counts as the last step. In any case the state is saved in a checkpoint.
    """
    with garbage_collected_at_log_points():
        is_new = context.state.step == 0 and context.checkpoints.step != 0
        if context.config.model.fit_head and is_new and not fit_head(context):
            return False
        while True:
            try:
                return train_epochs(context)
            except saving.CorruptedError as error:
                train_again(context, error.ranks)


def train_epochs(context: TrainContext) -> bool:
    """Do what `fit` does, until the state of a rank is corrupted. Collective."""
    while True:
        evaluated = evaluation_due(context)
        if evaluated:
            # It saves if ranks were formed again, or another run's checkpoint was resumed.
            saving.save_checkpoint(context)
            metrics = evaluate(context)
            log_bad_samples(context, context.learner.bad_held_out)
            context.logger.log_pictures(context.state.step, "evaluation", context.learner.pictures)
            for name, content in context.learner.files(context.state.step).items():
                context.logger.write_file(name, content)
            saving.save_evaluation(context, metrics)  # last: a run that is killed before evaluates again
            context.callbacks.evaluated(context, metrics)
        if context.state.step >= context.derived.total_steps or saving.stops_early(context):
            saving.finish_checkpoint(context)
            return True
        if evaluated and context.world.sum_over_ranks(context.stop.received) != [0]:  # of any rank
            return False
        finished = train_epoch(context)
        saving.save_checkpoint(context)
        if not finished:
            saving.finish_checkpoint(context)
            return False


def train_epoch(context: TrainContext) -> bool:
    """Train to the end of the epoch and return True; after a stop request return False. Collective."""
    run, state = context.config.run, context.state
    if run.stop_at_step and state.step == run.stop_at_step:  # it was reached before ranks were formed again
        return False
    epoch, first_step = context.derived.epoch_of(state.step)
    batches = with_pictures(context, context.learner.train_loader.batches(epoch, first_step))
    context.progress.meter.reset()
    context.progress.timer.reset()
    context.progress.clock.begin_epoch()
    for _ in range(first_step, context.derived.steps_per_epoch):
        train_step(context, batches)
        last = state.step == run.stop_at_step or state.step % context.derived.steps_per_epoch == 0
        logs, saves = (every and state.step % every == 0 for every in (run.log_every, run.checkpoint_every))
        # After a skipped step at once: the third in a row goes back, and no step may be taken before it does.
        at_once = bool(last or logs or saves or context.progress.skipped_in_a_row)
        stop, hosts_changed = note_outcomes(context, of_all=at_once)
        if stop or hosts_changed:
            note_outcomes(context, of_all=True)
        context.logger.step_done(state.step)
        context.callbacks.step_done(context)
        if logs:
            log_point(context)
        if hosts_changed:
            raise HostsChangedError
        if stop or state.step == run.stop_at_step:
            # Else nobody knows whether the last return has helped, and the last step would not be saved.
            if context.progress.awaits_log_point and context.progress.meter.micro_batches:
                log_point(context)
            return False
        if saves and not (context.progress.skipped_in_a_row or context.progress.futile_returns):
            saving.save_checkpoint(context)
    if context.progress.meter.micro_batches:
        log_point(context)
    return True


def note_outcomes(context: TrainContext, *, of_all: bool) -> tuple[bool, bool]:
    """Note what all ranks agreed on in the last steps; return whether to stop, and whether hosts changed."""
    stop = hosts_changed = False
    for outcome in context.state.reducer.statistics.outcomes(of_all=of_all):
        note_outcome(context, outcome)
        stop, hosts_changed = stop or outcome.stop, hosts_changed or outcome.hosts_changed
    return stop, hosts_changed


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
    metrics = context.learner.evaluate(context.state.model.eval(), beat)
    for name, model in averaged.items():
        metrics |= {
            f"{name}_{key}": value
            for key, value in context.learner.evaluate(model.eval(), beat).items()
            if key not in ("images", "bad_samples")
        }
    start_training(context.state.model)
    context.logger.evaluating(total, total)
    return metrics


def evaluation_due(context: TrainContext) -> bool:
    """Return whether the current step ends an epoch that must be evaluated and has not been. Collective."""
    epochs_done, steps_over = context.derived.epoch_of(context.state.step)
    if steps_over or (epochs_done == 0 and not context.config.model.fit_head):
        return False
    selected = epochs_done % context.config.run.eval_every == 0 or epochs_done == context.derived.epochs
    return selected and not saving.has_evaluation(context)


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

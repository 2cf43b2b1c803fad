"""Save checkpoints, and evaluations beside the checkpoint that they evaluate. Only rank 0 writes.

A checkpoint is written while training goes on; `finish_checkpoint` waits for it.
Invariant: only a state that is finite, and equal on all ranks to the last bit, is saved. A checkpoint from
which training cannot continue must not replace one from which it can.
"""

import json
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from horovod_volo.cluster.world import AllRanksError
from horovod_volo.core.atomic_file import atomic_write, flush
from horovod_volo.core.errors import UserError
from horovod_volo.engine.checkpoint import files
from horovod_volo.engine.checkpoint.resuming import run_metadata
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.task import Metrics, better_value
from horovod_volo.models.build import spec_of
from horovod_volo.models.weights_header import header_of, statistics_of_run
from horovod_volo.monitor.logger import METRICS

_EVALUATION = "evaluation.json"
LONGEST_WRITE_SECONDS = 3600.0  # of a checkpoint, on a slow disk
_BEAT_SECONDS = 5.0
_AFTER_DIVERGENCE = "Lower --lr or lengthen --warmup-epochs, and resume from the last checkpoint."


class CorruptedError(Exception):
    """The state of some ranks differs from that of the others, on all ranks at the same step."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        self.ranks = ranks


def save_checkpoint(context: TrainContext) -> None:
    """Begin to save a checkpoint of the current step, if there is none. Collective: every rank calls this.

    Raise CorruptedError if the state of a rank differs from that of the others.
    """
    if context.checkpoints.step == context.state.step:
        return
    if context.progress.futile_returns:
        if context.state.step >= context.derived.total_steps:
            raise divergence(context, context.state.step)
        context.progress.futile_returns += 1  # the next return passes over it: its weights are the last one's
    with context.progress.clock.saving():
        if different := context.world.different_ranks(context.state.replicated_tensors()):
            raise CorruptedError(different)
        context.callbacks.flush(context)  # what they write is never behind a checkpoint
        tensors = context.state.full_state_dict()
        finish_checkpoint(context)
        if context.world.is_rank_zero:
            context.checkpoints.begin(tensors, _checkpoint_writer(context))
    context.checkpoints.step = context.state.step


def finish_checkpoint(context: TrainContext) -> None:
    """Wait until the checkpoint is on disk; raise if it cannot be written. Collective."""
    # A slow disk is no hang, unless it takes very long.
    limit = time.monotonic() + LONGEST_WRITE_SECONDS
    with context.progress.clock.saving():
        while context.world.broadcast_object(not context.checkpoints.done_within(_BEAT_SECONDS)):
            if time.monotonic() < limit:
                context.heartbeat.beat(context.state.step)
        for warning in context.world.run_on_rank_zero(context.checkpoints.wait):
            context.logger.log(f"warning: {warning}")


def divergence(context: TrainContext, last: int) -> AllRanksError:
    """Return the error of a run whose loss or gradients are no longer finite, up to the `last` step."""
    count = context.progress.skipped_in_a_row
    steps = f"steps {last - count + 1} to {last}" if count else f"the steps up to {last}"
    since = f", after {context.progress.returns} returns to a checkpoint" if context.progress.returns else ""
    return AllRanksError(f"The loss or its gradients are not finite in {steps}{since}. {_AFTER_DIVERGENCE}")


def _checkpoint_writer(context: TrainContext) -> Callable[[files.StateDicts], list[str]]:
    """Return the function that writes the current step's checkpoint; later steps do not change it."""
    folder, step, config = context.checkpoint_folder, context.state.step, context.config
    keep = config.run.keep_checkpoints + context.progress.futile_returns  # which go_back may need
    metadata = run_metadata(config, context.derived, context.task, context.data.train)
    metadata["scaler"] = context.state.scaler.state_dict()
    statistics = statistics_of_run(config.data, config.model.model)
    crop_pct = config.data.crop_pct or spec_of(config.model.model).crop_at(config.model.img_size)
    header = header_of(context.data.train.classes, statistics, crop_pct=crop_pct)

    def write(tensors: files.StateDicts) -> list[str]:
        for name, tensor in chain(*(named.items() for named in tensors.values())):
            if not tensor.isfinite().all():  # gradients that are not finite have reached the weights by now
                raise UserError(f"{name} is not finite at step {step}, and is not saved. {_AFTER_DIVERGENCE}")
        saved = files.write_checkpoint(folder, step, tensors, metadata, context.may_write, header=header)
        context.may_write()  # the next owner of the folder may have later checkpoints
        return files.delete_old_checkpoints(saved, keep)

    return write


def save_evaluation(context: TrainContext, metrics: Metrics) -> None:
    """Log the metrics, save them in the current step's checkpoint, and update the link `best`. Collective."""
    finish_checkpoint(context)
    step = context.state.step
    epochs_done, _ = context.derived.epoch_of(step)
    reached = {
        "epoch": epochs_done,
        "images_seen": step * context.derived.global_batch,
        "hours": round(context.progress.clock.hours, 6),
    }
    context.logger.log_evaluation(step, reached | metrics)
    after = f"after epoch {epochs_done} of {context.derived.epochs}"
    context.logger.log(f"{after}: {context.task.summary(metrics)}")
    context.world.run_on_rank_zero(lambda: _write_evaluation(context, metrics))


def _write_evaluation(context: TrainContext, metrics: Metrics) -> None:
    checkpoint, best = _current_checkpoint(context), context.checkpoint_folder / "best"
    try:
        flush(context.folder / METRICS)  # the evaluation counts as logged from here on
        with atomic_write(checkpoint / _EVALUATION, context.may_write) as file:
            file.write(json.dumps(metrics).encode())
        if not best.exists() or _score(checkpoint, context) > _score(best, context):
            files.update_link(best, checkpoint, context.may_write)
    except OSError as error:
        raise UserError(
            f"The evaluation of {checkpoint} could not be written: {error.strerror}. Checkpoints are intact: "
            "free disk space or fix the folder, then restart with --resume auto."
        ) from None


def has_evaluation(context: TrainContext) -> bool:
    """Return whether the current step was evaluated and `best` updated. Collective: every rank calls this."""
    current, best = _current_checkpoint(context), context.checkpoint_folder / "best"
    # While a checkpoint is written, one of the same step may exist that this run has replaced.
    is_saved = not context.checkpoints.is_writing
    return context.world.run_on_rank_zero(
        lambda: is_saved and -1 < _score(current, context) <= _score(best, context)
    )


def stops_early(context: TrainContext) -> bool:
    """Return whether --early-stop evaluations in a row were no better than the best. Collective.

    It follows from the step of `best` and the current one, so a run that resumes stops where it would have.
    """
    run, best = context.config.run, context.checkpoint_folder / "best"

    def evaluations_since_best() -> int:
        if not best.exists():  # the checkpoint of another run was resumed, and none has been evaluated since
            return 0
        best_step = int(best.resolve().name.removeprefix("step_"))
        (first, _), (last, _) = map(context.derived.epoch_of, (best_step, context.state.step))
        return sum(epoch % run.eval_every == 0 for epoch in range(first + 1, last + 1))

    if not run.early_stop or context.progress.futile_returns:
        return False
    return context.world.run_on_rank_zero(evaluations_since_best) >= run.early_stop


def _score(checkpoint: Path, context: TrainContext) -> float:
    """Return the better score of raw and averaged weights; -1 if there is no intact evaluation."""
    file = checkpoint / _EVALUATION
    try:
        return better_value(json.loads(file.read_bytes()), context.task.scores[0])
    except FileNotFoundError:  # `best` was saved again, after a resume from an earlier checkpoint
        return -1.0
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        context.logger.log(f"{file.resolve()} is damaged, and counts for nothing")
        return -1.0


def _current_checkpoint(context: TrainContext) -> Path:
    return files.checkpoint_path(context.checkpoint_folder, context.state.step)

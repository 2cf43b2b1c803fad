"""Steps whose loss or gradients are not finite on some rank, which all ranks have skipped.

After several skipped steps in a row the run goes back to its last checkpoint, and passes over the steps since
then: the next step is the one that would have come next. If that does not help, it goes back to the
checkpoint before. After several returns it ends.

Also a state that differs between ranks, as a flipped bit in the memory of one makes it: the run goes back to
the last checkpoint, and trains the steps since then again.
"""

from collections.abc import Sequence
from itertools import islice

from horovod_volo.cluster.step_statistics import Outcome
from horovod_volo.cluster.world import AllRanksError
from horovod_volo.engine.checkpoint.files import intact_checkpoints
from horovod_volo.engine.checkpoint.resuming import restore_state
from horovod_volo.engine.checkpoint.saving import divergence, finish_checkpoint
from horovod_volo.engine.context import TrainContext

_IN_A_ROW, _RETURNS = 3, 3


def note_outcome(context: TrainContext, outcome: Outcome) -> None:
    """Count a step if it was skipped, and say on which samples; go back after several. Collective."""
    step, samples, _ = outcome.own
    context.callbacks.step_agreed(context, outcome)
    if outcome.finite:
        context.progress.skipped_in_a_row = 0
        if not context.progress.awaits_log_point:
            context.progress.futile_returns = 0
        return
    context.progress.skipped_in_a_row += 1
    context.progress.skipped.add_not_finite()
    own = outcome.fault()
    for rank, (fault, of_rank) in enumerate(context.world.allgather_object((own, samples if own else ()))):
        if fault:
            where = f"on rank {rank}, samples {', '.join(map(str, of_rank))}"
            context.logger.log(f"warning: step {step} is skipped: {fault} {where}")
    if context.progress.skipped_in_a_row == _IN_A_ROW:
        go_back(context, step)


def go_back(context: TrainContext, skipped: int) -> None:
    """Restore a checkpoint, but not its step, after step `skipped`; raise if that is in vain. Collective."""
    state, step = context.state, context.state.step
    finish_checkpoint(context)
    # The newest intact checkpoint, or an older one if the newest has not helped.
    older = context.progress.futile_returns
    candidates = context.world.run_on_rank_zero(
        lambda: list(islice(intact_checkpoints(context.folder), older + 1))
    )
    checkpoint = candidates[-1] if candidates else None
    if checkpoint is None or context.progress.returns == _RETURNS:
        raise divergence(context, skipped)
    restore_state(state, checkpoint, context.world, step)
    context.progress.skipped.restart()
    context.progress.skipped_in_a_row, context.progress.awaits_log_point = 0, False
    context.progress.returns += 1
    context.progress.futile_returns += 1
    context.logger.log(
        f"warning: back to the weights of {checkpoint.name}; training goes on after step {step}"
    )


def train_again(context: TrainContext, different: Sequence[int]) -> None:
    """Restore the last checkpoint and its step, after the state of some ranks was corrupted. Collective."""
    state, step, hosts = context.state, context.state.step, context.hosts
    finish_checkpoint(context)
    checkpoint = context.world.run_on_rank_zero(lambda: next(intact_checkpoints(context.folder), None))
    names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in different)
    found = f"At step {step} the weights or the optimizer state of {names} differ from those of other ranks"
    if checkpoint is None or context.progress.repairs == _RETURNS:
        advice = "The memory of a host may be faulty: leave it out, and start again with --resume auto."
        repaired = f", after {context.progress.repairs} repairs" if context.progress.repairs else ""
        raise AllRanksError(f"{found}{repaired}. {advice}")
    context.progress.repairs += 1
    restore_state(state, checkpoint, context.world)
    context.progress.skipped.restart()
    context.checkpoints.step = state.step
    context.progress.skipped_in_a_row = context.progress.futile_returns = 0
    context.logger.go_back(state.step)
    context.callbacks.went_back(context)
    advice = f"Back to {checkpoint.name}: the steps since then are trained again"
    context.logger.log(f"warning: {found}. The memory of a host may be faulty. {advice}")

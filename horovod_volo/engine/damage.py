"""What the ranks met of damaged samples, told once by the main rank."""

from __future__ import annotations

from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.engine.context import TrainContext


def log_bad_samples(context: TrainContext, damage: BadSampleTracker) -> None:
    """Name the samples that any rank has left out since the last call. Collective: every rank calls this."""
    untold = damage.new_messages()
    (anywhere,) = context.world.sum_over_ranks(len(untold))
    if not anywhere:
        return
    for texts in context.world.allgather_object(untold):
        for text in texts:
            if text not in context.told:  # another rank may have met the same sample in another epoch
                context.told.add(text)
                context.logger.log(f"left out: {text}")

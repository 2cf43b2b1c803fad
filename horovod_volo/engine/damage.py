"""What the ranks met of damaged samples, told once by the main rank."""

from __future__ import annotations

from horovod_volo.data.damage import Damage
from horovod_volo.engine.job import Job


def tell_damage(job: Job, damage: Damage) -> None:
    """Name the samples that any rank has left out since the last call. Collective: every rank calls this."""
    untold = damage.untold()
    (anywhere,) = job.world.total(len(untold))
    if not anywhere:
        return
    for texts in job.world.gather(untold):
        for text in texts:
            if text not in job.told:  # another rank may have met the same sample in another epoch
                job.told.add(text)
                job.tracker.say(f"left out: {text}")

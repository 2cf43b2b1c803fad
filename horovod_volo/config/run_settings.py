"""Settings of the run folder, and of the ranks on their hosts: a part of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_volo.config.setting import setting


@dataclass(frozen=True)
class Run:
    """run folder, checkpoints and logging"""

    output: str = setting("runs", "folder of the run folders")
    name: str = setting(
        "",
        "run folder inside --output; empty: named after the recipe, else the model, else the data folder",
    )
    resume: str = setting(
        "", "resume from this checkpoint or run folder; auto: from this run's latest, if there is one"
    )
    seed: int = setting(42, "seed of sample order, augmentation and initial weights", at_least=0)
    log_every: int = setting(50, "steps between log lines", at_least=1)
    eval_every: int = setting(1, "epochs between evaluations; the last epoch is always evaluated", at_least=1)
    early_stop: int = setting(
        0,
        "end the run after this many evaluations in a row that are no better than the best one; 0: never",
        at_least=0,
    )
    checkpoint_every: int = setting(
        0, "steps between checkpoints inside an epoch; 0: at the end of epochs only", at_least=0
    )
    keep_checkpoints: int = setting(3, "number of checkpoints to keep, besides the best", at_least=1)
    hang_timeout: float = setting(
        0.0,
        "seconds without the end of a step after which a run that hangs is ended; 0: 50 of its steps, but at "
        "least 600",
        at_least=0.0,
    )
    profile: str = setting(
        "",
        "record steps, steps=FIRST:LAST: traces and a summary of where the time went, in the run folder",
    )
    stop_at_step: int = setting(
        0, "save and exit with status 75 after this step, as on preemption; 0: run to the end", at_least=0
    )
    plugin: str = setting(
        "",
        "Python module to import, which registers models, losses, optimizers, schedules, augmentation or "
        "callbacks; may be repeated",
        repeatable=True,
    )


@dataclass(frozen=True)
class Launch:
    """ranks on their hosts"""

    binding: Literal["numa", "core", "none"] = setting(
        "numa",
        "bind each rank to its part of the cores, and to the memory, of the NUMA node next to its GPU; core: "
        "to one hardware thread of each of these cores; none: do not bind",
    )
    elastic: bool = setting(False, "go on as hosts are lost and added: horovodrun --host-discovery-script")
    horovod_autotune: str = setting("", "tune Horovod while training, and log what was tried to this file")
    horovod_timeline: str = setting("", "write Horovod's timeline to this file; slows training")

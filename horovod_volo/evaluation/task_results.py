"""What the commands `evaluate` and `export` ask of a task, which registers its evaluation and its export."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

from horovod_volo.cluster.world import World
from horovod_volo.core.names import Registry
from horovod_volo.engine.task import Metrics


class Evaluated(NamedTuple):
    """The result of an evaluation, the same on every rank."""

    metrics: Metrics
    lines: list[str]  # to print
    record: dict[str, Any]  # to write as JSON
    bad_samples: list[str]  # one message for each damaged image


Progress = Callable[[int, int], object]  # given this rank's images that are done, and all of its images
# Evaluates on every image once, given the flags of the command `evaluate`. Whatever can be wrong with them is
# checked before the first image is read. Collective: every rank calls it.
Evaluate = Callable[[Namespace, World, Progress], Evaluated]
EVALUATIONS: Registry[Evaluate] = Registry("evaluation", "--weights of")


# Load a network to export of a task that is an extra: (source, image side or 0, whether averaged weights).
EXPORTS: Registry[Callable[[str, int, bool], Any]] = Registry("export", "the export of")

"""The tasks by name."""

from __future__ import annotations

from horovod_volo.dense.detection import DetectionTask
from horovod_volo.dense.segmentation import SegmentationTask
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.task import Task

_TASKS: dict[str, Task] = {
    "classification": Classification(),
    "segmentation": SegmentationTask(),
    "detection": DetectionTask(),
}


def find_task(name: str) -> Task:
    """Return the task that --task names."""
    return _TASKS[name]

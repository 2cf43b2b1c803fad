"""The tasks by name."""

from __future__ import annotations

from horovod_volo.tasks.classification import Classification
from horovod_volo.tasks.detection import DetectionTask
from horovod_volo.tasks.segmentation import SegmentationTask
from horovod_volo.tasks.task import Task

_TASKS: dict[str, Task] = {
    "classification": Classification(),
    "segmentation": SegmentationTask(),
    "detection": DetectionTask(),
}


def find_task(name: str) -> Task:
    """Return the task that --task names."""
    return _TASKS[name]

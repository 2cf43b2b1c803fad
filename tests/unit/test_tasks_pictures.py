"""Pictures of an evaluation stay small, whatever the shape of its images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from box_samples import annotation, image, write_coco

from horovod_volo.dense.average_precision import BoxPredictions
from horovod_volo.dense.box_list import list_boxes
from horovod_volo.dense.pictures import EvaluationPictures


@pytest.mark.parametrize(("width", "height"), [(3000, 1), (1, 3000)])
def test_pictures_of_lines(tmp_path: Path, width: int, height: int) -> None:
    write_coco(tmp_path, [image(7, width, height)], [annotation(7, (0, 0, width, height))])
    boxes = EvaluationPictures(1)
    images = list_boxes(tmp_path, "train")
    boxes.add_boxes(images, 0, BoxPredictions(*(np.zeros(0),) * 4))
    masks = EvaluationPictures(1)
    mask = torch.zeros(height, width, dtype=torch.uint8)
    masks.add_masks(0, mask.expand(3, -1, -1), mask, mask)
    for picture in (*boxes.latest().values(), *masks.latest().values()):
        assert picture.height <= 256
        assert picture.width <= 3 * 3000

"""Pictures of training batches show the pixels that the network was given."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from horovod_volo.config.command_line import build_config
from horovod_volo.core.batch import Labels, TrainBatch
from horovod_volo.data.image_decoder import IMAGENET_NORMALIZATION
from horovod_volo.objective.loss import build_loss
from horovod_volo.objective.mixing import NO_BOX
from horovod_volo.pictures.classification import draw_batch


@pytest.mark.parametrize("statistics", [{}, {"mean": (0.2, 0.3, 0.4), "std": (0.5, 0.4, 0.3)}])
def test_colors_are_those_of_the_images_whatever_the_statistics(
    statistics: dict[str, tuple[float, ...]],
) -> None:
    config = build_config("", {"token_label": False, "mix_token": False, **statistics})
    mean, std = (
        torch.tensor(statistics.get(name, own)).view(3, 1, 1)
        for name, own in IMAGENET_NORMALIZATION._asdict().items()
    )
    color = (200, 120, 40)
    pixels = torch.tensor(color).view(3, 1, 1).expand(2, 3, 32, 32) / 255
    indices = np.arange(2)
    batch = TrainBatch((pixels - mean) / std, Labels(torch.tensor([0, 1])), indices, indices)
    loss = build_loss(config.objective, 2, 4)
    (picture,) = draw_batch(batch, NO_BOX, loss, ("ant", "bee"), config).values()
    sheet = Image.open(io.BytesIO(picture.png)).convert("RGB")
    assert np.abs(np.array(sheet.getpixel((60, 60))) - color).max() <= 2

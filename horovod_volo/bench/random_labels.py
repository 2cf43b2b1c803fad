"""Random label maps in the form of the published ones, and crops to go with them.

Neighbouring cells have other classes, which real ones seldom do: nothing is gained from entries
that could be merged.
"""

from __future__ import annotations

import torch

from horovod_volo.core.labels import LabelMaps, Labels

MAP_SIDE, TOP = 18, 5  # of the published label maps


def random_labels(batch: int, num_classes: int, device: torch.device, seed: int) -> Labels:
    """Draw classes, label maps with distinct classes in each cell, and crops inside the image."""
    random = torch.Generator().manual_seed(seed)
    cells = (batch, TOP, MAP_SIDE, MAP_SIDE)
    scores = torch.rand(cells, generator=random).mul_(12).sort(dim=1, descending=True).values
    # Steps of at most a fifth of the classes, five in all, never come round to where they began.
    steps = torch.randint(1, num_classes // TOP + 1, cells, generator=random)
    extents = torch.rand(batch, 2, generator=random) * 0.8 + 0.2
    corners = torch.rand(batch, 2, generator=random) * (1 - extents)
    maps = LabelMaps(
        scores=scores.half(),
        ids=(steps.cumsum(dim=1) % num_classes).int(),
        boxes=torch.cat([corners, extents], dim=1),
    )
    return Labels(torch.randint(num_classes, (batch,), generator=random), maps).to(device)

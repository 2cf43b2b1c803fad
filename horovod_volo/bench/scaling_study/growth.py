"""Cost of a step as resolution, classes and batch grow, relative to the growth of the arithmetic.

Every case is a run of the real engine on random images. The cases alternate, so that other load on the
machine affects all of them; the figures are medians over the rounds of each case's time divided by the base
case's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from horovod_volo.bench.cli import Flag, Model, Precision
from horovod_volo.bench.comparison import Block, timed
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import (
    RANDOM_LABELS,
    checked_config,
    random_batch,
    step_of,
    synthetic_context,
)
from horovod_volo.cluster.world import World
from horovod_volo.models.timm_api import VOLO
from horovod_volo.models.volo import SIZES


class Case(NamedTuple):
    """Size of the work; the defaults are the base case."""

    side: int = 224
    classes: int = 1000
    batch: int = 4  # in a smaller one the update, which does not grow, is a large part of a step


BASE = Case()


def measure(
    *,
    model: Model = "volo_d1",
    precision: Precision = "fp32",
    sides: Annotated[Sequence[int], Flag("sides of the input images, in pixels")] = (128, 160, 192, 288),
    classes: Annotated[Sequence[int], Flag("numbers of classes")] = (21841,),
    batches: Annotated[Sequence[int], Flag("batch sizes")] = (1, 2),
    rounds: Annotated[int, Flag("rounds of all cases")] = 5,
) -> Result:
    """Measure one rank's step in each case."""
    cases = [BASE, *(Case(side=side) for side in sides), *(Case(classes=number) for number in classes)]
    cases += [Case(batch=batch) for batch in batches]
    blocks = [_block(model, precision, case) for case in cases]
    seconds = [[block() for block in blocks] for _ in range(rounds)]
    figures = [Figure.of_seconds("224 px, 1,000 classes, batch 4", [row[0] for row in seconds])]
    for place, case in enumerate(cases[1:], start=1):
        times = [row[place] / row[0] for row in seconds]
        if case.side != BASE.side:
            arithmetic = multiplications(model, case) / multiplications(model, BASE)
            label = f"{case.side} px: time beside 224 px, over that of the arithmetic"
            times = [ratio / arithmetic for ratio in times]
        elif case.classes != BASE.classes:
            label = f"{case.classes:,} classes: time beside 1,000"
        else:
            label = f"batch {case.batch}: images a second beside batch 4"
            times = [case.batch / BASE.batch / ratio for ratio in times]
        figures.append(Figure.of(label, times, "x"))
    return Result(f"growth {model}", f"a step's cost as it grows, {precision}", figures)


def multiplications(model: str, case: Case) -> int:
    """Count the multiplications of timm's forward of one image, token logits included."""
    with torch.device("meta"):
        network = VOLO(img_size=case.side, num_classes=case.classes, **SIZES[model]).eval()
        image = torch.empty(1, 3, case.side, case.side)
    with FlopCounterMode(display=False) as counter:
        network(image)
    return int(counter.get_total_flops()) // 2


def _block(model: str, precision: str, case: Case) -> Block:
    """Make a block of one step, after a first step, which includes one-time work."""
    settings = {"model": model, "img_size": case.side, "batch_size": case.batch, "precision": precision}
    config = checked_config(settings | RANDOM_LABELS)
    context = synthetic_context(config, World.single(), case.classes)
    step = step_of(context, random_batch(config, case.classes, context.resources.device, seed=0))
    step()
    return timed(step, 1, context.resources.device)

"""How a step's cost grows with resolution, classes and batch, beside what the arithmetic alone would cost.

Every case is a run of the real engine on random images. The cases take turns, so that a slow moment of the
machine hits all of them; what is told is the median over the rounds of each case's time beside the base's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from horovod_volo.bench.pairs import Block, timed
from horovod_volo.bench.peers_step import PublishedVolo, volo_arguments
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import checked_config, random_batch, step_of, synthetic_job
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.objective.mixtoken import NO_BOX

CLASSES, SIDE = 1000, 224


@dataclass(frozen=True)
class Case:
    """What is changed of the base: four images of 224 px, 1,000 classes."""

    side: int = SIDE
    classes: int = CLASSES
    batch: int = 4  # with fewer the update, which does not grow, is a good part of a step


def measure(
    *, model: str, precision: str, sides: list[int], classes: list[int], batches: list[int], rounds: int
) -> Result:
    """Measure one rank's step in so many rounds."""
    base = Case()
    cases = [base, *(Case(side=side) for side in sides), *(Case(classes=number) for number in classes)]
    cases += [Case(batch=batch) for batch in batches]
    blocks = [_block(_config(model, precision, case), case.classes) for case in cases]
    seconds = [[block() for block in blocks] for _ in range(rounds)]
    figures = [Figure.of("224 px, 1,000 classes, batch 4", [row[0] * 1e3 for row in seconds], "ms")]
    base_arithmetic = multiplications(_config(model, precision, base), base.classes)
    for place, case in enumerate(cases[1:], start=1):
        times = [row[place] / row[0] for row in seconds]
        if case.side != base.side:
            arithmetic = multiplications(_config(model, precision, case), case.classes)
            wanted = arithmetic / base_arithmetic
            label = f"{case.side} px: time beside 224 px, over that of the arithmetic"
            figures.append(Figure.of(label, [ratio / wanted for ratio in times], "x"))
        elif case.classes != base.classes:
            figures.append(Figure.of(f"{case.classes:,} classes: time beside 1,000", times, "x"))
        else:
            label = f"batch {case.batch}: images a second beside batch 4"
            figures.append(Figure.of(label, [case.batch / base.batch / ratio for ratio in times], "x"))
    return Result(f"growth {model}", f"a step's cost as it grows, {precision}", figures)


def multiplications(config: Config, classes: int) -> int:
    """Count the multiplications of a forward pass of one image, token logits included."""
    sized = replace(config, model=replace(config.model, num_classes=classes))
    with torch.device("meta"):
        network = PublishedVolo(volo_arguments(sized)).eval()
        image = torch.empty(1, 3, config.model.img_size, config.model.img_size)
    with FlopCounterMode(display=False) as counter:
        network(image, NO_BOX)
    return int(counter.get_total_flops()) // 2


def _config(model: str, precision: str, case: Case) -> Config:
    settings = {
        "model": model,
        "img_size": case.side,
        "batch_size": case.batch,
        "precision": precision,
        "token_label": True,
        "token_label_data": "random",
    }
    return checked_config(settings)


def _block(config: Config, classes: int) -> Block:
    """Make a block of one step, after a first that pays for what is built once."""
    context = synthetic_job(config, World.single(), classes)
    step = step_of(context, random_batch(config, classes, context.resources.device, seed=0))
    step()
    return timed(step, 1, context.resources.device)

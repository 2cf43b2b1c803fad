"""Cost of a step as resolution, classes and batch grow, relative to the growth of the arithmetic.

The cases alternate, so that other load on the machine affects all of them; the figures are medians over the
rounds of each case's time divided by the base case's.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from horovod_volo.bench.cli import Flag, ModelName
from horovod_volo.bench.comparison import timed
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import SyntheticRun, bench_config, forward_flops

_SIDE, _BATCH = 224, 4  # of the base case; in a smaller batch the update, which does not grow, counts much


def measure(
    *, model: ModelName = "volo_d1", rounds: Annotated[int, Flag("rounds of all cases")] = 5
) -> Result:
    """Measure one rank's step in each case."""
    base = {"img_size": _SIDE, "num_classes": 1000, "batch_size": _BATCH}
    cases: list[dict[str, int]] = [{}, *({"img_size": side} for side in (128, 160, 192, 288))]
    cases += [{"num_classes": 21841}, {"batch_size": 1}, {"batch_size": 2}]
    blocks = []
    for case in cases:
        run = SyntheticRun(bench_config(model=model, **base | case))
        run.step()  # the first includes one-time work
        blocks.append(timed(run.step, 1, run.device))
    seconds = np.array([[block() for block in blocks] for _ in range(rounds)]).T  # (cases, rounds)
    figures = [Figure.of_seconds("224 px, 1,000 classes, batch 4", seconds[0])]
    for case, times in zip(cases[1:], seconds[1:] / seconds[0], strict=True):
        if side := case.get("img_size"):
            arithmetic = forward_flops(model, side) / forward_flops(model, _SIDE)
            label = f"{side} px: time beside 224 px, over that of the arithmetic"
            figures.append(Figure.of(label, times / arithmetic, "x"))
        elif batch := case.get("batch_size"):
            label = f"batch {batch}: images a second beside batch 4"
            figures.append(Figure.of(label, batch / _BATCH / times, "x"))
        else:
            figures.append(Figure.of("21,841 classes: time beside 1,000", times, "x"))
    return Result(f"growth {model}", "a step's cost as it grows, fp32", figures)

"""The time of a training step on a GPU, counted on the CPU: bytes, products, instructions and kernels.

Nothing is computed: the step runs on the meta device. The result is a range, and not measured.

`fused` counts what a compiler can at best make of the same operators: neighbours without matrix products
become one kernel, and what only this kernel needs is neither written nor read. Unfold is then reading at
other places, and fold is one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, Kernels, ModelName
from horovod_volo.bench.machine.cuda_autocast import CudaAutocast
from horovod_volo.bench.machine.peers_timm import LoopName, training_loop
from horovod_volo.bench.machine.step_cost import CostMode, GpuRates, Operator, StepCost
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import CLASSES, bench_config, learner_of, random_labels, synthetic_context
from horovod_volo.cluster.resources import RankResources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import TrainBatch
from horovod_volo.core.operators import estimated_with_kernels
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.augmentation.random_erasing import Eraser, draw_erasures
from horovod_volo.engine.step import train_step
from horovod_volo.models.build import tokens_per_side
from horovod_volo.objective.mixing import Box

META = torch.device("meta")
# At best. H200: products of 8192 x 8192 matrices and a copy were measured. The others: what this fraction of
# the data sheets' rates amounts to. One instruction of a warp in each cycle of a scheduler.
GPUS = {
    "a100": GpuRates(250, 120, 1.83, 0.61),
    "h100": GpuRates(600, 300, 2.7, 0.90),
    "h200": GpuRates(790, 300, 4.3, 0.90),
}


def usual(best: GpuRates) -> GpuRates:
    """Return what matrices of VOLO's shapes, copies and small kernels usually reach of it: an assumption."""
    tflops, of_attention, terabytes, instructions, _ = best
    return GpuRates(0.72 * tflops, 0.5 * of_attention, 0.94 * terabytes, 0.5 * instructions, gap=1.5)


CountedLoop = Literal["eager", "compile", "published"]


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 256,
    drop_path: DropPath = 0.1,
    kernels: Kernels = "auto",
    gpu: Annotated[Literal["a100", "h100", "h200"], Flag("rates to price with")] = "h100",
    against: Annotated[
        Sequence[CountedLoop], Flag("steps around timm's network to count as well", may_be_empty=True)
    ] = ("eager", "compile", "published"),
) -> Result:
    """Count our step, plain and fused as a compiler would at best, and those of others."""
    config = bench_config(
        model=model,
        img_size=img_size,
        batch_size=batch_size,
        drop_path=drop_path,
        kernels=kernels,
        precision="bf16",
    )
    rates = GPUS[gpu]
    cost = count_step(config)
    figures = list(_figures("", cost, rates, batch_size))
    figures += list(_parts(cost.operators, rates))
    figures += list(_figures("compiled: ", replace(cost, operators=fused(cost.operators)), rates, batch_size))
    for name in against:
        other = count_loop(name, config)
        figures += list(_figures(f"{name}: ", other, rates, batch_size))
    title = f"a step, {img_size} px, bf16, batch {batch_size}, drop path {drop_path}, {gpu}, not measured"
    return Result(f"roofline {model}{' plain' if kernels == 'plain' else ''}", title, figures)


def count_step(config: Config) -> StepCost:
    """Count the engine's step, and the augmentation of its batch."""
    with META:
        context = synthetic_context(config, World.single(), RankResources(META, 1, ""))
    counter = CostMode(context.state.model)

    def in_part(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any, **named: Any) -> Any:
            counter.part = part
            result = function(*values, **named)
            counter.label(part, result)
            return result

        return run

    learner = learner_of(context)
    learner.network_forward = in_part("network", learner.network_forward)
    learner.criterion = in_part("loss", learner.criterion)
    learner.autocast = CudaAutocast()  # type: ignore[assignment]
    context.clip = in_part("update", context.clip)
    batch = _batch(config)
    with counter.counting() as cost, estimated_with_kernels(config.model.kernels):
        _augment(config)
        train_step(context, iter([batch]))
    context.close()
    return cost


def count_loop(name: CountedLoop, config: Config) -> StepCost:
    """Count a training loop around timm's network; `compile` is the eager one, fused."""
    batch, autocast = _batch(config), CudaAutocast()
    side = tokens_per_side(config.model.model, config.model.img_size)
    form: LoopName = "published" if name == "published" else "eager"
    with META:
        loop = training_loop(form, config, batch, META, Box(0, 0, side // 2, side // 2, side), autocast)
    counter = CostMode(loop.network)
    counter.part = "loss and update"
    with counter.counting() as cost:
        loop.step()
    if name != "compile":
        return cost
    # Unfold and fold for all images at once.
    once = [operator._replace(kernels=min(operator.kernels, 3)) for operator in cost.operators]
    return replace(cost, operators=fused(once))


def _batch(config: Config) -> TrainBatch:
    batch, side = config.data.batch_size, config.model.img_size
    labels = random_labels(batch, CLASSES, META, seed=0)
    return TrainBatch(
        torch.empty(batch, 3, side, side, device=META), labels, np.arange(batch), np.arange(batch)
    )


def _augment(config: Config) -> None:
    """Run the operations of a batch's augmentation on crops that DALI has resized."""
    batch, side = config.data.batch_size, config.model.img_size
    indices = np.arange(batch)
    pixels = torch.empty(batch, 3, side, side, device=META, dtype=torch.uint8)
    augment_(pixels, draw_operations(0, 0, indices, config.data))
    values = torch.empty(3, 1, 1, device=META)
    erasures = draw_erasures(0, 0, indices, config.data, side)
    Eraser(0, config.data, side, META).normalize(pixels, values, values, erasures)


def _figures(prefix: str, cost: StepCost, gpu: GpuRates, batch: int) -> list[Figure]:
    least, most = cost.seconds(gpu), cost.seconds(usual(gpu))
    return [
        Figure(f"{prefix}at best", 1e3 * least, "ms"),
        Figure(f"{prefix}usually", 1e3 * most, "ms"),
        Figure(f"{prefix}images a second, usually", batch / most, "images/s"),
        Figure(f"{prefix}kernels", cost.kernels, ""),
        Figure(f"{prefix}kept for backward", cost.saved_bytes / 2**30, "GiB"),
    ]


def _parts(operators: Sequence[Operator], gpu: GpuRates) -> list[Figure]:
    parts: dict[str, list[Operator]] = {}
    for operator in operators:
        parts.setdefault(operator.part, []).append(operator)
    figures = []
    for part, own in parts.items():
        seconds = sum(operator.seconds(usual(gpu)) for operator in own)
        kernels = sum(operator.kernels for operator in own)
        figures += [Figure(f"{part}: usually", 1e3 * seconds, "ms"), Figure(f"{part}: kernels", kernels, "")]
    return figures


def fused(operators: Sequence[Operator]) -> list[Operator]:
    """Return the operators as a compiler would fuse them at best."""
    last_use: dict[int, int] = {}
    for number, operator in enumerate(operators):
        last_use.update(dict.fromkeys(operator.inputs, number))
    result: list[Operator] = []
    group: list[Operator] = []
    start = 0
    for number, operator in enumerate(operators):
        joins = not group or operator.backward == group[-1].backward
        if operator.fusible and joins and not operator.begins_kernel:
            group.append(operator)
            continue
        result += _merged(group, range(start, number), last_use)
        start = number
        group = [operator] if operator.fusible else []
        if not operator.fusible:
            result.append(operator)
            start = number + 1
    return result + _merged(group, range(start, len(operators)), last_use)


def _merged(group: list[Operator], numbers: range, last_use: dict[int, int]) -> list[Operator]:
    """Return one operator for a group of neighbours."""
    if not group:
        return []
    inputs: dict[int, int] = {}
    written: dict[int, int] = {}
    for operator in group:
        inputs |= {key: size for key, size in operator.inputs.items() if key not in written}
        written |= operator.outputs
    outputs = {key: size for key, size in written.items() if last_use.get(key, math.inf) >= numbers.stop}
    return [Operator("fused", group[0].part, group[0].backward, 0, inputs, outputs, 1)]

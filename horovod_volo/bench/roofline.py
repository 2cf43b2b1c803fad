"""The time of a training step on a GPU, counted on the CPU: bytes, products, instructions and kernels.

Nothing is computed: the step runs on the meta device. The result is a range, and not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from horovod_volo.bench.peers import LoopName, training_loop
from horovod_volo.bench.results import BatchSize, DropPath, Figure, Flag, ImgSize, Kernels, ModelName, Result
from horovod_volo.bench.step_cost import CostMode, GpuRates, Operator, StepCost, fused
from horovod_volo.bench.synthetic import bench_config, learner_of, random_batch, synthetic_context
from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.schema import Config
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
# What CUDA's autocast casts, of the functions that these networks call.
_TO_BF16 = {F.linear, F.conv2d, F.scaled_dot_product_attention, torch.einsum}
_TO_BF16 |= {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_TO_FP32 = {F.layer_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, F.cross_entropy}


def usual(best: GpuRates) -> GpuRates:
    """Return what matrices of VOLO's shapes, copies and small kernels usually reach of it: an assumption."""
    tflops, of_attention, terabytes, instructions, _ = best
    return GpuRates(0.72 * tflops, 0.5 * of_attention, 0.94 * terabytes, 0.5 * instructions, gap=1.5)


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 256,
    drop_path: DropPath = 0.1,
    kernels: Kernels = "auto",
    gpu: Annotated[Literal["a100", "h100", "h200"], Flag("rates to price with")] = "h100",
    against: Annotated[
        Sequence[LoopName], Flag("steps around timm's network to count as well", may_be_empty=True)
    ] = ("eager", "compile", "published"),
) -> Result:
    """Count our step, plain and fused as a compiler would at best, and those of others."""
    config = bench_config(
        model=model, img_size=img_size, batch_size=batch_size, drop_path=drop_path, kernels=kernels,
        precision="bf16",
    )  # fmt: skip
    rates = GPUS[gpu]
    cost = count_step(config)
    figures = _figures("", cost, rates, batch_size)
    figures += _kinds(cost.operators, rates)
    figures += _figures("compiled: ", replace(cost, operators=fused(cost.operators)), rates, batch_size)
    for name in against:
        figures += _figures(f"{name}: ", count_loop(name, config), rates, batch_size)
    title = f"a step, {img_size} px, bf16, batch {batch_size}, drop path {drop_path}, {gpu}, not measured"
    return Result(f"roofline {model}{' plain' if kernels == 'plain' else ''}", title, figures)


def count_step(config: Config) -> StepCost:
    """Count the engine's step, and the augmentation of its batch."""
    with META:
        context = synthetic_context(config, World.single(), RankResources(META, 1, ""))
    learner_of(context).autocast = CudaAutocast()  # type: ignore[assignment]
    counter = CostMode(context.state.model)
    batch = random_batch(config, META, seed=0)
    with counter.counting() as cost, estimated_with_kernels(config.model.kernels):
        _augment(config)
        train_step(context, iter([batch]))
    context.close()
    return cost


def count_loop(name: LoopName, config: Config) -> StepCost:
    """Count a training loop around timm's network; `compile` is the eager one, fused."""
    batch, autocast = random_batch(config, META, seed=0), CudaAutocast()
    side = tokens_per_side(config.model.model, config.model.img_size)
    form: LoopName = "eager" if name == "compile" else name
    with META:
        loop = training_loop(form, config, batch, META, Box(0, 0, side // 2, side // 2, side), autocast)
    counter = CostMode(loop.network)
    with counter.counting() as cost:
        loop.step()
    if name != "compile":
        return cost
    # Unfold and fold for all images at once.
    once = [operator._replace(kernels=min(operator.kernels, 3)) for operator in cost.operators]
    return replace(cost, operators=fused(once))


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


def _kinds(operators: Sequence[Operator], gpu: GpuRates) -> list[Figure]:
    """Return the usual time of each kind of operators, and their kernels."""
    kinds: dict[str, list[Operator]] = {}
    for operator in operators:
        kinds.setdefault(operator.kind, []).append(operator)
    figures = []
    for kind, own in kinds.items():
        seconds = sum(operator.seconds(usual(gpu)) for operator in own)
        kernels = sum(operator.kernels for operator in own)
        figures += [Figure(f"{kind}: usually", 1e3 * seconds, "ms"), Figure(f"{kind}: kernels", kernels, "")]
    return figures


class CudaAutocast(TorchFunctionMode):
    """Casts to bf16 and back as CUDA's autocast does, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # autocast casts each weight once

    def __enter__(self) -> CudaAutocast:
        self._cast.clear()
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)  # for code that asks; on meta it casts nothing
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_autocast_enabled("cuda", False)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TO_BF16:
            args = tuple(map(self._to_bf16, args))
            kwargs = {key: self._to_bf16(value) for key, value in kwargs.items()}
        elif func in _TO_FP32:
            args = tuple(map(_to_fp32, args))
        if func is F.scaled_dot_product_attention and args[0].dtype == torch.bfloat16:
            # The flash kernel, which meta would not choose.
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]
        return func(*args, **kwargs)

    def _to_bf16(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(torch.bfloat16)
        if id(value) not in self._cast:
            self._cast[id(value)] = (value, value.to(torch.bfloat16))
        return self._cast[id(value)][1]


def _to_fp32(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if half else value

"""Outlook attention without unfolded windows against timm's: the core operation, and the whole module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from horovod_volo.bench.cli import BatchSize, Flag, Pairs
from horovod_volo.bench.comparison import assert_agree, compare, default_device, peak_extra_bytes
from horovod_volo.bench.machine.peers_timm import OutlookAttention, outlook_core
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.errors import UserError
from horovod_volo.models.outlook import Outlook, outlook

_HEAD_WIDTH = 32  # of every published VOLO
_SIDE, _WINDOWS = 28, 14  # of the stem's feature map of a 224 px image, in pixels; windows of stride 2
_TYPES = {"fp32": (torch.float32, 1e-4), "bf16": (torch.bfloat16, 3e-2)}  # with their tolerances


def measure(
    *,
    batch_size: BatchSize = 4,
    channels: Annotated[Sequence[int], Flag("channels, each measured in turn; multiples of 32")] = (192, 384),
    precision: Annotated[Literal["fp32", "bf16"], Flag("type of all tensors")] = "fp32",
    pairs: Pairs = 7,
) -> Result:
    """Compare forward, and forward with backward, for each number of channels."""
    if wrong := [number for number in channels if number % _HEAD_WIDTH]:
        raise UserError(f"--channels takes multiples of {_HEAD_WIDTH}, the width of a head, not {wrong[0]}.")
    device, (dtype, tolerance) = default_device(), _TYPES[precision]
    figures = []
    for number in channels:
        heads, scale = number // _HEAD_WIDTH, _HEAD_WIDTH**-0.5
        random = torch.Generator().manual_seed(0)
        values, scores = (
            torch.randn(batch_size, rows, rows, width, generator=random).to(device, dtype).requires_grad_()
            for rows, width in ((_SIDE, number), (_WINDOWS, heads * 81))
        )
        core = partial(outlook, heads=heads, kernel=3, padding=1, stride=2, scale=scale)
        peer_core = partial(outlook_core, heads=heads, scale=scale)
        module = OutlookAttention(number, heads, kernel_size=3, padding=1, stride=2).to(device, dtype)
        for case, ours, peer, inputs in (
            (f"{number} channels, core", core, peer_core, [values, scores]),
            (f"{number} channels, module", Outlook(copy.deepcopy(module)), module, [values]),
        ):
            figures += _compare(case, ours, peer, inputs, tolerance, pairs)
    title = f"outlook attention at {_SIDE} x {_SIDE} pixels, batch {batch_size}, {precision}, against timm's"
    return Result("outlook", title, figures)


def _compare(
    case: str,
    ours: Callable[..., Tensor],
    peer: Callable[..., Tensor],
    inputs: list[Tensor],
    tolerance: float,
    pairs: int,
) -> list[Figure]:
    device, gradient = inputs[0].device, torch.randn_like(inputs[0])  # of the output
    steps = [partial(_forward_backward, side, inputs, gradient) for side in (ours, peer)]
    for number, (our_value, peer_value) in enumerate(zip(*(step() for step in steps), strict=True)):
        what = f"gradient {number}" if number else "the value"
        assert_agree(f"{what} at {case}", our_value, peer_value, tolerance)
    forwards = [torch.no_grad()(partial(side, *inputs)) for side in (ours, peer)]
    figures = []
    for part, (one, other) in (("forward", forwards), ("forward and backward", steps)):
        found = compare(one, other, device, pairs)
        figures.append(Figure.of_seconds(f"{case} {part}: time", found.ours))
        figures.append(Figure.of(f"{case} {part}: faster than timm", found.ratios, "x"))
    our_bytes, peer_bytes = (peak_extra_bytes(step, device) for step in steps)
    return [*figures, Figure(f"{case}: less memory than timm", peer_bytes / our_bytes, "x")]


def _forward_backward(
    function: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor
) -> tuple[Tensor, ...]:
    """Return the value and the gradients of the inputs and of a module's weights."""
    weights = list(function.parameters()) if isinstance(function, nn.Module) else []
    value = function(*inputs)
    return value, *torch.autograd.grad(value, [*inputs, *weights], gradient)

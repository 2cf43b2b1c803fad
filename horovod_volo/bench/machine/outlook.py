"""Outlook attention without unfolded windows against timm's: the core operation, and the whole module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from horovod_volo.bench.cli import BatchSize, Flag, Pairs
from horovod_volo.bench.comparison import Action, alternate, assert_agree, block_of, default_device
from horovod_volo.bench.machine.peers_timm import outlook_core, outlook_module
from horovod_volo.bench.memory import peak_extra_bytes
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.errors import UserError
from horovod_volo.models.outlook import Outlook, outlook

_HEAD_WIDTH = 32  # of every published VOLO
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

Operation = Callable[..., Tensor]


def measure(
    *,
    batch_size: BatchSize = 4,
    channels: Annotated[Sequence[int], Flag("channels, each measured in turn; multiples of 32")] = (192, 384),
    side: Annotated[int, Flag("side of the stem's feature map, in pixels; 28 is a 224 px image")] = 28,
    precision: Annotated[Literal["fp32", "bf16"], Flag("type of all tensors")] = "fp32",
    pairs: Pairs = 7,
) -> Result:
    """Compare forward, and forward with backward, for each number of channels."""
    if wrong := [number for number in channels if number % _HEAD_WIDTH]:
        raise UserError(f"--channels takes multiples of {_HEAD_WIDTH}, the width of a head, not {wrong[0]}.")
    device, dtype = default_device(), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    figures = []
    for number in channels:
        heads, scale, windows = number // _HEAD_WIDTH, _HEAD_WIDTH**-0.5, -(-side // 2)
        random = torch.Generator().manual_seed(0)
        values = (
            torch.randn(batch_size, side, side, number, generator=random).to(device, dtype).requires_grad_()
        )
        scores = torch.randn(batch_size, windows, windows, heads * 81, generator=random)
        inputs = [values, scores.to(device, dtype).requires_grad_()]
        core = partial(outlook, heads=heads, kernel=3, padding=1, stride=2, scale=scale)
        peer_core = partial(outlook_core, heads=heads, scale=scale)
        figures += _compare(f"{number} channels, core", core, peer_core, inputs, pairs)
        peer = outlook_module(number, heads).to(device, dtype)
        ours = Outlook(copy.deepcopy(peer))
        figures += _compare(f"{number} channels, module", ours, peer, [values], pairs)
    title = f"outlook attention at {side} x {side} pixels, batch {batch_size}, {precision}, against timm's"
    return Result("outlook", title, figures)


def _compare(case: str, ours: Operation, peer: Operation, inputs: list[Tensor], pairs: int) -> list[Figure]:
    device, tolerance = inputs[0].device, _TOLERANCES[inputs[0].dtype]
    above = torch.randn_like(inputs[0])  # the gradient of the output
    our_step, peer_step = (partial(_forward_backward, side, inputs, above) for side in (ours, peer))
    for number, (our_value, peer_value) in enumerate(zip(our_step(), peer_step(), strict=True)):
        what = f"gradient {number}" if number else "the value"
        assert_agree(f"{what} at {case}", our_value, peer_value, tolerance)
    less_memory = peak_extra_bytes(peer_step, device) / peak_extra_bytes(our_step, device)
    our_forward, peer_forward = (partial(_forward, side, inputs) for side in (ours, peer))
    return [
        *_timed(f"{case} forward", our_forward, peer_forward, pairs, device),
        *_timed(f"{case} forward and backward", our_step, peer_step, pairs, device),
        Figure(f"{case}: less memory than timm", less_memory, "x"),
    ]


def _timed(case: str, ours: Action, peer: Action, pairs: int, device: torch.device) -> list[Figure]:
    found = alternate(block_of(ours, device), block_of(peer, device), pairs)
    return [
        Figure.of_seconds(f"{case}: time", found.ours),
        Figure.of_estimate(f"{case}: faster than timm", found.times_faster, "x"),
    ]


def _forward(operation: Operation, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return operation(*inputs)


def _forward_backward(operation: Operation, inputs: list[Tensor], above: Tensor) -> tuple[Tensor, ...]:
    """Return the value and the gradients of the inputs and of a module's weights."""
    weights = list(operation.parameters()) if isinstance(operation, nn.Module) else []
    value = operation(*inputs)
    return value, *torch.autograd.grad(value, [*inputs, *weights], above)

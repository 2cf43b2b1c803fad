"""Outlook attention without unfolded windows against timm's: its core alone, and the whole module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.memory import peak_extra_bytes
from horovod_volo.bench.pairs import Action, alternate, repeats_for, timed
from horovod_volo.bench.peers_outlook import timm_attention, timm_core
from horovod_volo.bench.results import Figure, Result
from horovod_volo.core.errors import UserError
from horovod_volo.models.outlook import Outlook, outlook

_HEAD_WIDTH = 32  # of every published VOLO
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_MILLISECONDS = 1e3

Operation = Callable[..., Tensor]


def measure(*, batch_size: int, channels: list[int], side: int, precision: str, pairs: int) -> Result:
    """Compare forward, and forward with backward, for each number of channels."""
    if wrong := [number for number in channels if number % _HEAD_WIDTH]:
        raise UserError(f"--channels takes multiples of {_HEAD_WIDTH}, the width of a head, not {wrong[0]}.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    figures = []
    for number in channels:
        figures += _compare_cores(batch_size, number, side, pairs, device, dtype)
        figures += _compare_modules(batch_size, number, side, pairs, device, dtype)
    title = f"outlook attention at {side} x {side} pixels, batch {batch_size}, {precision}, against timm's"
    return Result("outlook", title, figures)


def _compare_cores(
    batch_size: int, channels: int, side: int, pairs: int, device: torch.device, dtype: torch.dtype
) -> list[Figure]:
    heads, scale, windows = channels // _HEAD_WIDTH, _HEAD_WIDTH**-0.5, -(-side // 2)
    random = torch.Generator().manual_seed(0)
    values = torch.randn(batch_size, side, side, channels, generator=random)
    scores = torch.randn(batch_size, windows, windows, heads * 81, generator=random)
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (values, scores)]
    ours = partial(outlook, heads=heads, kernel=3, padding=1, stride=2, scale=scale)
    peer = partial(timm_core, heads=heads, scale=scale)
    return _compare(f"{channels} channels, core", ours, peer, inputs, pairs)


def _compare_modules(
    batch_size: int, channels: int, side: int, pairs: int, device: torch.device, dtype: torch.dtype
) -> list[Figure]:
    peer = timm_attention(channels, channels // _HEAD_WIDTH).to(device, dtype)
    ours = Outlook(copy.deepcopy(peer))
    random = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch_size, side, side, channels, generator=random).to(device, dtype)
    pixels.requires_grad_()

    def passed(module: torch.nn.Module, pixels: Tensor) -> Tensor:
        result: Tensor = module(pixels)
        return result

    return _compare(
        f"{channels} channels, module",
        partial(passed, ours),
        partial(passed, peer),
        [pixels],
        pairs,
        (list(ours.parameters()), list(peer.parameters())),
    )


def _compare(
    case: str,
    ours: Operation,
    peer: Operation,
    inputs: list[Tensor],
    pairs: int,
    weights: tuple[list[Tensor], list[Tensor]] = ([], []),
) -> list[Figure]:
    device, tolerance = inputs[0].device, _TOLERANCES[inputs[0].dtype]
    above = torch.randn_like(inputs[0])
    our_forward, peer_forward = partial(_forward, ours, inputs), partial(_forward, peer, inputs)
    our_pass = partial(_forward_backward, ours, inputs, weights[0], above)
    peer_pass = partial(_forward_backward, peer, inputs, weights[1], above)
    for number, (our_value, peer_value) in enumerate(zip(our_pass(), peer_pass(), strict=True)):
        what = f"gradient {number}" if number else "the value"
        assert_agree(f"{what} at {case}", our_value, peer_value, tolerance)
    less_memory = peak_extra_bytes(peer_pass, device) / peak_extra_bytes(our_pass, device)
    return [
        *_pair(f"{case} forward", our_forward, peer_forward, pairs, device),
        *_pair(f"{case} forward and backward", our_pass, peer_pass, pairs, device),
        Figure(f"{case}: less memory than timm", less_memory, "x"),
    ]


def _pair(case: str, ours: Action, peer: Action, pairs: int, device: torch.device) -> list[Figure]:
    our_block = timed(ours, repeats_for(ours, device), device)
    result = alternate(our_block, timed(peer, repeats_for(peer, device), device), pairs)
    return [
        Figure.of(f"{case}: time", [_MILLISECONDS * seconds for seconds in result.ours], "ms"),
        Figure.of_estimate(f"{case}: faster than timm", result.times_faster, "x"),
    ]


def _forward(operation: Operation, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return operation(*inputs)


def _forward_backward(
    operation: Operation, inputs: list[Tensor], weights: list[Tensor], above: Tensor
) -> tuple[Tensor, ...]:
    result = operation(*inputs)
    return result, *torch.autograd.grad(result, [*inputs, *weights], above)

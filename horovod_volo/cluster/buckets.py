"""Gradient buckets: the parameters of a network and their gradients in a few flat tensors.

Each parameter becomes a view of its bucket's weights, and its gradient has the same position in the bucket's
gradients, so that collectives, clipping and weight averages work on whole buckets.

Invariant: once buckets are built, nobody may replace a parameter's `data`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

_ALIGNMENT = 64  # elements, so that kernels can load each tensor in whole cache lines


class Bucket:
    """Some parameters and their gradients, each in one flat tensor."""

    def __init__(
        self, parameters: Mapping[str, Parameter], shards: int, *, compressible: bool = True
    ) -> None:
        """Copy the parameters into a flat tensor whose length is a multiple of `shards`."""
        self.compressible = compressible
        first = next(iter(parameters.values()))
        self.offsets: dict[str, int] = {}
        end = 0
        for name, parameter in parameters.items():
            self.offsets[name] = end
            end += _round_up(parameter.numel(), _ALIGNMENT)
        length = _round_up(end, shards * _ALIGNMENT)
        self.parameters = dict(parameters)
        self.weights = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        for name, parameter in parameters.items():
            view = self.view(self.weights, name)
            view.copy_(parameter.detach())
            parameter.data = view

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's view in a flat tensor of this bucket's layout."""
        parameter = self.parameters[name]
        # The parameter's own strides: channels-last weights keep channels-last gradients.
        return flat.as_strided(parameter.size(), parameter.stride(), self.offsets[name])

    def register_grad_ready_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with each parameter whose gradient has been accumulated, in every backward."""
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def build_buckets(
    parameters: Mapping[str, Parameter],
    bucket_bytes: int,
    shards: int,
    last_bytes: int,
    in_fp32: Collection[str] = (),
) -> list[Bucket]:
    """Assign trained parameters to buckets, in the order in which backward computes their gradients.

    Parameters in `in_fp32`, whose gradients must not be compressed, have separate buckets, which come last.
    """
    buckets = []
    for compressible in (True, False):
        chosen = {name: each for name, each in parameters.items() if (name in in_fp32) != compressible}
        groups = _group(chosen, bucket_bytes, last_bytes)
        buckets += [
            Bucket(dict(reversed(group.items())), shards, compressible=compressible)
            for group in reversed(groups)
        ]
    return buckets


def _group(
    parameters: Mapping[str, Parameter], bucket_bytes: int, last_bytes: int
) -> list[dict[str, Parameter]]:
    """Return the parameters of each bucket, from the bucket that is launched last to the first.

    The last bucket cannot overlap with backward, so it is small. Each bucket is at most four times as large
    as the one launched after it, so that none delays the next for long.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    groups: list[dict[str, Parameter]] = []
    free_bytes, next_bucket_bytes = 0, min(last_bytes, bucket_bytes)
    for name, parameter in trained.items():  # the first parameter in forward has its gradient last
        size = parameter.numel() * parameter.element_size()
        if not groups or size > free_bytes:  # a single parameter may be larger than a bucket
            groups.append({})
            free_bytes, next_bucket_bytes = next_bucket_bytes, min(4 * next_bucket_bytes, bucket_bytes)
        groups[-1][name] = parameter
        free_bytes -= size
    return groups


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

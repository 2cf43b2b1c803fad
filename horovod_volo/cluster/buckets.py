"""A network's weights and gradients in a few flat tensors of the same layout.

Each parameter becomes a view of a bucket's weights, and its gradient has its place in another flat tensor:
exchanges and averages run over whole buckets. From then on nobody may replace a parameter's data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

_ALIGNED = 64  # elements: each tensor begins where a kernel can load whole lines


class Bucket:
    """Some parameters and their gradients."""

    def __init__(self, parameters: Mapping[str, Parameter], parts: int, *, compressible: bool = True) -> None:
        """Lay the parameters out, in a length that can be cut into so many equal parts."""
        self.compressible = compressible
        first = next(iter(parameters.values()))
        self.offsets: dict[str, int] = {}
        end = 0
        for name, parameter in parameters.items():
            self.offsets[name] = end
            end += _rounded_up(parameter.numel(), _ALIGNED)
        length = _rounded_up(end, parts * _ALIGNED)
        self.parameters = dict(parameters)
        self.weights = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        for name, parameter in parameters.items():
            view = self.view(self.weights, name)
            view.copy_(parameter.detach())
            parameter.data = view

    def view(self, flat: Tensor, name: str) -> Tensor:
        """Return a parameter's place in a flat tensor of this bucket's layout, shaped like the parameter."""
        parameter = self.parameters[name]
        # The parameter's own strides: channels-last weights keep channels-last gradients.
        return flat.as_strided(parameter.size(), parameter.stride(), self.offsets[name])

    def register_grad_ready_hook(self, call: Callable[[Tensor], None]) -> None:
        """Call with each parameter whose gradient is there, after every backward pass."""
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def build_buckets(
    parameters: Mapping[str, Parameter],
    bucket_bytes: int,
    parts: int,
    last_bytes: int,
    in_fp32: Collection[str] = (),
) -> list[Bucket]:
    """Lay parameters out in buckets, in the order in which backward is done with them.

    Those whose gradients must be summed in fp32 have buckets of their own, which come last.
    """
    buckets = []
    for compressible in (True, False):
        chosen = {name: each for name, each in parameters.items() if (name in in_fp32) != compressible}
        groups = _grouped(chosen, bucket_bytes, last_bytes)
        buckets += [
            Bucket(dict(reversed(group.items())), parts, compressible=compressible)
            for group in reversed(groups)
        ]
    return buckets


def _grouped(
    parameters: Mapping[str, Parameter], bucket_bytes: int, last_bytes: int
) -> list[dict[str, Parameter]]:
    """Choose what shares a bucket, from the bucket that leaves last to the one that leaves first.

    What backward is done with last travels while nothing is left to compute: the last bucket is small, and
    each may be four times as large as the one after it, so that none holds up the next.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    groups: list[dict[str, Parameter]] = []
    room, size_of_next = 0, min(last_bytes, bucket_bytes)
    for name, parameter in trained.items():  # the first one used has its gradient last
        size = parameter.numel() * parameter.element_size()
        if not groups or size > room:  # one parameter may be larger than a bucket
            groups.append({})
            room, size_of_next = size_of_next, min(4 * size_of_next, bucket_bytes)
        groups[-1][name] = parameter
        room -= size
    return groups


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

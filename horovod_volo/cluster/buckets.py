"""Gradient buckets. Given the parameters of a network, `build_gradient_buckets` returns buckets: flat tensors
in which each weight and each gradient is a view.

A gradient has the same offset in the flat gradients as its parameter in the flat weights. Collectives,
clipping and weight averages can therefore work on whole buckets.

Invariant: once buckets are built, a parameter's `data` must not be replaced.
"""

from collections.abc import Callable, Collection, Mapping
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter

from horovod_volo.config.update_settings import Exchange

_ALIGNMENT = 64  # elements, so that kernels can load each tensor in whole cache lines


class Bucket:
    """Some of the parameters in one flat tensor, and their gradients in another."""

    def __init__(
        self, parameters: Mapping[str, Parameter], shards: int, *, compressible: bool = True
    ) -> None:
        """Make the parameters views of one flat tensor, whose length is a multiple of `shards`."""
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
        """Return the view for a parameter in a flat tensor with this bucket's layout."""
        parameter = self.parameters[name]
        # With the parameter's strides: channels-last weights keep channels-last gradients.
        return flat[self.offsets[name] :].as_strided(parameter.size(), parameter.stride())

    def register_grad_ready_hook(self, hook: Callable[[Tensor], None]) -> None:
        """Call a method with a parameter whenever backward has accumulated the parameter's gradient.

        The parameters do not keep the method's object: garbage collection does not see hooks, and could free
        neither.
        """
        weak = WeakMethod(hook)

        def call(parameter: Tensor) -> None:
            if method := weak():
                method(parameter)

        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def build_gradient_buckets(
    parameters: Mapping[str, Parameter],
    settings: Exchange,
    *,
    heads: Collection[str] = (),
    ranks: int = 1,
    shards: int = 1,
) -> list[Bucket]:
    """Assign trained parameters to buckets, in the order in which backward computes their gradients.

    `heads` are the names of the modules that compute logits. Gradients that must not be compressed have
    separate buckets, which come last.
    """
    compressed = settings.compression == "fp16" and ranks > 1
    in_fp32 = summed_in_fp32(parameters, heads) if compressed else ()
    bucket_bytes, last_bytes = round(settings.bucket_mib * 2**20), round(settings.last_bucket_mib * 2**20)
    buckets = []
    for compressible in (True, False):
        chosen = {name: each for name, each in parameters.items() if (name in in_fp32) != compressible}
        groups = _group(chosen, bucket_bytes, last_bytes)
        buckets += [
            Bucket(dict(reversed(group.items())), shards, compressible=compressible)
            for group in reversed(groups)
        ]
    return buckets


def summed_in_fp32(parameters: Mapping[str, Tensor], heads: Collection[str]) -> set[str]:
    """Return the names of parameters whose gradients an fp16 sum rounds more than bf16 arithmetic does.

    Gradients of biases, norms and `heads`, which compute logits, are nearly equal on all ranks. Each addition
    of nearly equal numbers rounds in the same direction, so the error of their sum grows with the ranks.
    These parameters are a few per cent of a network.
    """
    prefixes = tuple(f"{head}." for head in heads)
    of_heads = {name for name in parameters if name.startswith(prefixes)}
    if prefixes and not of_heads:
        raise ValueError(
            f"no parameter belongs to the heads {', '.join(heads)}: are the names those of the model?"
        )
    return of_heads | {name for name, parameter in parameters.items() if parameter.dim() <= 1}


def message_bytes(bucket: Bucket, settings: Exchange) -> int:
    """Return the bytes of a bucket that each rank sends into its reduction, if there are several ranks."""
    compressed = settings.compression == "fp16" and bucket.compressible
    return bucket.gradients.numel() * (2 if compressed else bucket.gradients.itemsize)


def _group(
    parameters: Mapping[str, Parameter], bucket_bytes: int, last_bytes: int
) -> list[dict[str, Parameter]]:
    """Return the parameters of each bucket; the bucket that is launched last comes first.

    The last bucket cannot overlap with backward, so it is small. Each bucket is at most four times as large
    as the one launched after it, so that none delays the next for long.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    groups: list[dict[str, Parameter]] = []
    free_bytes, next_bucket_bytes = 0, min(last_bytes, bucket_bytes)
    for name, parameter in trained.items():  # the first parameter in forward gets its gradient last
        size = parameter.numel() * parameter.element_size()
        if not groups or size > free_bytes:  # a single parameter may be larger than a bucket
            groups.append({})
            free_bytes, next_bucket_bytes = next_bucket_bytes, min(4 * next_bucket_bytes, bucket_bytes)
        groups[-1][name] = parameter
        free_bytes -= size
    return groups


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

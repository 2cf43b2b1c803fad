"""Batch norm over the images of all ranks. Given maps on every rank, it normalises them by the mean and the
variance of all; backward leaves the gradients that one rank with all the images would compute.

Layers whose inputs are there at the same time share one exchange in each direction (`normalize_together`).
Forward gathers each rank's [count, mean, sum of squared deviations], which are merged without cancellation;
backward sums [sum dy, sum dy * normalised]. Ranks may have different numbers of images. Statistics are fp32.

Invariant: all ranks run the same layers in the same order. A forward that is repeated during backward, by
activation checkpointing, takes the statistics of the first one: it exchanges nothing and moves no averages.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.core.errors import UserError
from horovod_volo.models.registry import NORMS_OVER_RANKS, NormsOverRanks


class Moments(NamedTuple):
    """The statistics of one layer's inputs on all ranks, fp32."""

    pixels: Tensor  # of all images, a scalar
    mean: Tensor  # (channels,)
    squares: Tensor  # (channels,) sums of squared deviations from the mean


class SyncBatchNorm(nn.BatchNorm2d):
    """Batch norm over ranks once `ranks` is set and has more than one; until then torch's own."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float
    ranks: Any = None  # a cluster.world.World
    name = ""  # of its exchanges, the same on all ranks
    moments: Moments | None = None  # of the last forward

    def forward(self, maps: Tensor) -> Tensor:
        """Return maps of the same shape (batch, channels, height, width)."""
        return normalize_together([self], [maps])[0]


# A part of a network that stops where it needs norms: it yields them and their inputs, and is sent the maps.
Steps = Generator[tuple[list[SyncBatchNorm], list[Tensor]], list[Tensor], Any]


def run_together(parts: Sequence[Steps]) -> list[Any]:
    """Run parts of a network side by side; return their results. Norms that stand level share an exchange."""
    results: list[Any] = [None] * len(parts)
    normalized: dict[int, list[Tensor]] = {}
    under_way = dict(enumerate(parts))
    while under_way:
        waiting: dict[int, tuple[list[SyncBatchNorm], list[Tensor]]] = {}
        for number, part in list(under_way.items()):
            try:
                waiting[number] = part.send(normalized[number]) if number in normalized else next(part)
            except StopIteration as end:
                results[number] = end.value
                del under_way[number]
        layers = [layer for own, _ in waiting.values() for layer in own]
        outputs = iter(normalize_together(layers, [maps for _, own in waiting.values() for maps in own]))
        normalized = {number: [next(outputs) for _ in own] for number, (own, _) in waiting.items()}
    return results


def normalize_together(layers: Sequence[SyncBatchNorm], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the normalised inputs, one for each layer. In training on several ranks: collective."""
    ranks = layers[0].ranks if layers else None
    if ranks is None or ranks.size == 1 or not layers[0].training:
        return [_normalize_alone(layer, maps) for layer, maps in zip(layers, inputs, strict=True)]
    moments = _moments(layers, inputs, ranks)
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    return list(_NormalizeOverRanks.apply(layers, moments, *inputs, *parameters))


def _normalize_alone(layer: SyncBatchNorm, maps: Tensor) -> Tensor:
    if layer.training and layer.track_running_stats and _is_repeated():
        # Copies, as a repeated forward saves as many tensors as the first, and moves no averages.
        mean, variance = layer.running_mean.clone(), layer.running_var.clone()
        return F.batch_norm(maps, mean, variance, layer.weight, layer.bias, training=True, eps=layer.eps)
    return nn.BatchNorm2d.forward(layer, maps)


def _is_repeated() -> bool:
    """Return whether this forward is part of a backward."""
    return torch._C._current_graph_task_id() != -1


def _moments(layers: Sequence[SyncBatchNorm], inputs: Sequence[Tensor], ranks: Any) -> list[Moments]:
    if _is_repeated() and all(layer.moments is not None for layer in layers):
        return [layer.moments for layer in layers if layer.moments is not None]
    with torch.no_grad():
        own = [part for maps in inputs for part in _own_moments(maps)]
        gathered = ranks.gather(torch.cat(own), f"{layers[0].name}.forward")  # (ranks, length)
        parts = iter(torch.split(gathered, [len(part) for part in own], dim=1))
        for layer, counts, means, squares in zip(layers, parts, parts, parts, strict=True):
            count = counts.sum()
            mean = (counts / count * means).sum(dim=0)
            total_squares = squares.sum(dim=0) + (counts * (means - mean).square()).sum(dim=0)
            layer.moments = Moments(count, mean, total_squares)
            if layer.track_running_stats:
                layer.num_batches_tracked.add_(1)
                layer.running_mean.lerp_(mean, layer.momentum)
                layer.running_var.lerp_(total_squares / (count - 1), layer.momentum)
    return [layer.moments for layer in layers if layer.moments is not None]


def _own_moments(maps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    pixels = maps.numel() // maps.shape[1]
    variance, mean = torch.var_mean(_wide(maps), dim=(0, 2, 3), correction=0)
    return mean.new_full((1,), pixels), mean, variance * pixels


class _NormalizeOverRanks(torch.autograd.Function):
    """Normalises the inputs of several layers by their moments; backward is collective."""

    @staticmethod
    def forward(
        context: Any, layers: Sequence[SyncBatchNorm], moments: Sequence[Moments], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tensors[: len(layers)]
        context.layers = layers
        context.counts = [each.pixels for each in moments]
        variances = [each.squares / each.pixels for each in moments]
        deviations = [
            (variance + layer.eps).rsqrt() for layer, variance in zip(layers, variances, strict=True)
        ]
        context.save_for_backward(*inputs, *(each.mean for each in moments), *deviations)
        return tuple(
            F.batch_norm(maps, each.mean, variance, layer.weight, layer.bias, eps=layer.eps)
            for layer, maps, each, variance in zip(layers, inputs, moments, variances, strict=True)
        )

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        layers, count = context.layers, len(context.layers)
        saved = context.saved_tensors
        inputs, means, inverses = saved[:count], saved[count : 2 * count], saved[2 * count :]
        normalized, own = [], []
        for maps, mean, inverse, gradient in zip(inputs, means, inverses, gradients, strict=True):
            normalized.append((_wide(maps) - _per_channel(mean)) * _per_channel(inverse))
            own += [_wide(gradient).sum(dim=(0, 2, 3)), (gradient * normalized[-1]).sum(dim=(0, 2, 3))]
        total = layers[0].ranks.sum(torch.cat(own), f"{layers[0].name}.backward")
        sums = total.split([len(each) for each in own])
        of_inputs, of_parameters = [], []
        for number, (layer, gradient) in enumerate(zip(layers, gradients, strict=True)):
            of_mean, of_deviation = (each / context.counts[number] for each in sums[2 * number :][:2])
            centred = gradient - _per_channel(of_mean) - normalized[number] * _per_channel(of_deviation)
            scaled = centred * _per_channel(layer.weight * inverses[number])
            of_inputs.append(scaled.to(gradient.dtype))
            # The reducer averages over ranks: these are of this rank's images alone.
            of_parameters += [own[2 * number + 1], own[2 * number]]
        return None, None, *of_inputs, *of_parameters


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def connect_norms(network: nn.Module, ranks: Any) -> int:
    """Let the norms of a network exchange with other ranks; return how many there are."""
    norms = [(name, each) for name, each in network.named_modules() if isinstance(each, SyncBatchNorm)]
    for name, norm in norms:
        norm.ranks, norm.name = ranks, f"norm.{name}"
    return len(norms)


def synchronize_norms(network: nn.Module) -> None:
    """Make a network's batch norms such layers, with the same names; raise UserError for unknown ones."""
    for name, norm in network.named_modules():
        if type(norm) is nn.BatchNorm2d:
            norm.__class__ = SyncBatchNorm
        elif isinstance(norm, nn.modules.batchnorm._BatchNorm) and not isinstance(norm, SyncBatchNorm):
            raise UserError(f"--sync-bn all: {name} is a {type(norm).__name__}. Use --sync-bn heads.")


NORMS_OVER_RANKS.register("all", NormsOverRanks(synchronize_norms, connect_norms))

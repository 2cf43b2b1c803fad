"""Which hand-written kernels a run uses: those that its own GPU computes right.

Each is checked at the start, forward and backward at the run's shapes, against PyTorch's operators. Where it
does not compile or differs, on any rank, all ranks use these operators. Times are reported, but decide
nothing: a resumed run must compute the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.augmentation.random_erasing import Eraser, draw_erasures
from horovod_volo.kernels import KERNELS, Kernel, use_kernels
from horovod_volo.models.outlook import Outlook, outlook
from horovod_volo.models.precision import autocast
from horovod_volo.objective.soft_target import SoftTarget, cross_entropy

_RUNS = 5
_LEVEL = 1.01 / 255  # interpolated pixels may be rounded otherwise
_ENTRIES = 24  # of a token's target


class Check(NamedTuple):
    """A computation that uses a kernel, or PyTorch's operators, as was chosen."""

    kernel: Kernel
    inputs: Sequence[Tensor]
    compute: Callable[..., list[Tensor]]  # results and gradients
    tolerance: float  # largest difference, relative to the largest value


def choose_kernels(config: Config, model: nn.Module, device: torch.device, world: World) -> list[str]:
    """Choose the kernels; return a warning about each that is not used. Collective on a GPU."""
    wanted = config.model.kernels == "auto" and device.type != "cpu"
    use_kernels(dict.fromkeys(KERNELS if wanted else (), 1.0))
    if not wanted or device.type == "meta":
        return []
    checks = list(kernel_checks(config, model, device))
    found: list[list[tuple[float, str]]] = world.allgather_object([outcome(check) for check in checks])
    # Of the ranks, the one on which it fails, or is slowest, decides.
    decisive = {check.kernel: min(of_ranks) for check, *of_ranks in zip(checks, *found, strict=True)}
    use_kernels({kernel: speed for kernel, (speed, problem) in decisive.items() if not problem})
    slow = "{}: PyTorch's operators are {:.2f} times as fast as its kernel; --kernels plain uses these"
    return [
        f"{kernel} is computed by PyTorch's operators: its kernel {problem}"
        if problem
        else slow.format(kernel, 1 / speed)
        for kernel, (speed, problem) in decisive.items()
        if problem or speed < 1
    ]


def outcome(check: Check) -> tuple[float, str]:
    """Return how many times as fast as PyTorch's operators the kernel is, and why it must not be used."""
    use_kernels({})
    exact = [each.detach().float().requires_grad_() if each.requires_grad else each for each in check.inputs]
    expected, plain_seconds = check.compute(*exact), _seconds(check)
    use_kernels({check.kernel: 1.0})
    try:
        found, seconds = check.compute(*check.inputs), _seconds(check)
    except Exception as error:  # compilers raise anything
        return 0.0, f"fails: {type(error).__name__}: {error}".splitlines()[0]
    for ours, right in zip(found, expected, strict=True):
        wanted = right.detach().double()
        difference = float((ours.detach().double() - wanted).abs().max() / wanted.abs().max())
        if not difference <= check.tolerance:
            return 0.0, f"gives results that differ by {difference:.2g} of the largest"
    return plain_seconds / seconds, ""


def _seconds(check: Check) -> float:
    """Return the median time of a computation, which has run before."""
    device, seconds = check.inputs[0].device, []
    for _ in range(_RUNS):
        _wait(device)
        began = time.perf_counter()
        check.compute(*check.inputs)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_checks(config: Config, model: nn.Module, device: torch.device) -> Iterator[Check]:
    """Yield the checks of the kernels that a run would use, at its shapes and in its arithmetic."""
    batch, side = config.data.batch_size, config.model.img_size
    random = torch.Generator(device).manual_seed(0)
    with autocast(config.model.precision, device):
        dtype = nn.functional.linear(*torch.ones(2, 1, 1, device=device)).dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype).requires_grad_()

    layer = next((module for module in model.modules() if isinstance(module, Outlook)), None)
    if layer is not None:
        pixels, windows = side // 8, -(-(side // 8) // layer.stride)
        values = drawn(batch, pixels, pixels, layer.v.in_features)
        logits = drawn(batch, windows, windows, layer.attn.out_features)
        yield Check("outlook attention", [values, logits], _outlook_of(layer), tolerance)
    classes = config.model.num_classes
    rows = batch * (side // 16) ** 2 if config.objective.token_label else batch
    ids = torch.randint(classes, (rows, _ENTRIES), generator=random, device=device)
    weights = torch.rand(ids.shape, generator=random, device=device)
    target = SoftTarget(torch.full((rows,), 0.1 / classes, device=device), ids, weights)
    yield Check("loss", [drawn(rows, classes)], _loss_of(target), tolerance)
    images = torch.randint(256, (batch, 3, side, side), generator=random, device=device, dtype=torch.uint8)
    yield Check("augmentation", [images], _augmentation_of(config, device), _LEVEL)


def _outlook_of(layer: Outlook) -> Callable[[Tensor, Tensor], list[Tensor]]:
    def compute(values: Tensor, logits: Tensor) -> list[Tensor]:
        mixed = outlook(
            values, logits, heads=layer.num_heads, kernel=layer.kernel_size, padding=layer.padding,
            stride=layer.stride, scale=layer.scale,
        )  # fmt: skip
        return [mixed, *torch.autograd.grad(mixed.sum() + mixed.square().sum(), [values, logits])]

    return compute


def _loss_of(target: SoftTarget) -> Callable[[Tensor], list[Tensor]]:
    def compute(logits: Tensor) -> list[Tensor]:
        loss = cross_entropy(logits, target)
        return [loss, *torch.autograd.grad(loss.sum(), [logits])]

    return compute


def _augmentation_of(config: Config, device: torch.device) -> Callable[[Tensor], list[Tensor]]:
    side, indices = config.model.img_size, np.arange(config.data.batch_size)
    operations = draw_operations(0, 0, indices, config.data)
    erasures = draw_erasures(0, 0, indices, config.data, side)
    eraser, std = Eraser(0, config.data, side, device), torch.ones(3, 1, 1, device=device)

    def compute(images: Tensor) -> list[Tensor]:
        augmented = images.clone()
        augment_(augmented, operations)
        return [eraser.normalize(augmented, 0 * std, std, erasures)]

    return compute

"""Which hand-written kernels a run uses: those that its own GPU computes right.

Each is checked at the start, forward and backward at the run's shapes, against PyTorch's operators. Where it
does not compile or differs, on any rank, all ranks use these operators.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.core.operators import CHOICES, Operator, use_kernels
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.augmentation.random_erasing import Eraser, draw_erasures
from horovod_volo.kernels import augment, network  # noqa: F401  they register themselves
from horovod_volo.models.outlook import Outlook, outlook
from horovod_volo.models.precision import autocast
from horovod_volo.objective.soft_target import SoftTarget, cross_entropy

_ROWS, _ENTRIES = 4096, 24  # of the loss: tokens at most, and classes in a token's target
# Relative to the norm. Of pixels, some are rounded otherwise by one operation, and changed more by the next.
_OF_PIXELS, _OF_HALF, _OF_TF32, _OF_FULL = 2e-2, 2e-2, 2e-3, 1e-4


class Check(NamedTuple):
    """A computation that uses a kernel, or PyTorch's operators, as was chosen."""

    kernel: Operator
    inputs: Sequence[Tensor]
    compute: Callable[..., list[Tensor]]  # results and gradients
    tolerance: float  # norm of the difference, relative to that of the results


def choose_by_check(
    device: torch.device, config: Config, model: nn.Module, num_classes: int, world: World
) -> list[str]:
    """Choose the kernels; return a warning about each that is not used. Collective on a GPU."""
    problems: list[dict[Operator, str]] = world.allgather_object(
        {check.kernel: find_problem(check) for check in kernel_checks(config, model, num_classes, device)}
    )
    torch.cuda.reset_peak_memory_stats(device)  # which the log reports
    worst = {name: max(found[name] for found in problems) for name in problems[0]}
    use_kernels(name for name, problem in worst.items() if not problem)
    return [
        f"{name} is computed by PyTorch's operators: its kernel {problem}"
        for name, problem in worst.items()
        if problem
    ]


def find_problem(check: Check) -> str:
    """Return why a kernel must not be used, or an empty string."""
    try:
        use_kernels(())
        expected = check.compute(
            *(x.detach().float().requires_grad_() if x.requires_grad else x for x in check.inputs)
        )
        use_kernels([check.kernel])
        found = check.compute(*check.inputs)
        for ours, right in zip(found, expected, strict=True):
            wanted = right.detach().float()
            difference = float((ours.detach().float() - wanted).norm() / wanted.norm())
            if not difference <= check.tolerance:
                return f"gives results that differ by {difference:.2g} of their norm"
    except Exception as error:  # compilers raise anything
        return f"fails: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def kernel_checks(
    config: Config, model: nn.Module, num_classes: int, device: torch.device
) -> Iterator[Check]:
    """Yield the checks of the kernels that a run would use, at its shapes and in its arithmetic."""
    batch, side = config.data.batch_size, config.model.img_size
    random = torch.Generator(device).manual_seed(0)
    with autocast(config.model.precision, device):
        dtype = nn.functional.linear(*torch.ones(2, 1, 1, device=device)).dtype
    of_fp32 = _OF_TF32 if config.model.precision == "tf32" else _OF_FULL
    tolerance = of_fp32 if dtype == torch.float32 else _OF_HALF

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device).to(dtype).requires_grad_()

    def mix(values: Tensor, logits: Tensor) -> list[Tensor]:
        assert layer is not None
        mixed = outlook(values, logits, layer.geometry(logits), layer.scale)
        return [mixed, *torch.autograd.grad(mixed.sum() + mixed.square().sum(), [values, logits])]

    layer = next((module for module in model.modules() if isinstance(module, Outlook)), None)
    if layer is not None:
        pixels, windows = side // 8, -(-(side // 8) // layer.stride)
        values = drawn(batch, pixels, pixels, layer.v.in_features)
        logits = drawn(batch, windows, windows, layer.attn.out_features)
        yield Check("outlook attention", [values, logits], mix, tolerance)
    rows = min(_ROWS, batch * (side // 16) ** 2 if config.objective.token_label else batch)
    ids = torch.randint(num_classes, (rows, _ENTRIES), generator=random, device=device)
    weights = torch.rand(ids.shape, generator=random, device=device)
    target = SoftTarget(torch.full((rows,), 0.1 / num_classes, device=device), ids, weights)

    def lose(logits: Tensor) -> list[Tensor]:
        loss = cross_entropy(logits, target)
        return [loss, *torch.autograd.grad(loss.sum(), [logits])]

    yield Check("loss", [drawn(rows, num_classes)], lose, tolerance)
    operations = draw_operations(0, 0, indices := np.arange(batch), config.data)
    erasures = draw_erasures(0, 0, indices, config.data, side)
    eraser, std = Eraser(0, config.data, side, device), torch.ones(3, 1, 1, device=device)

    def augment_and_normalize(images: Tensor) -> list[Tensor]:
        augmented = images.clone()
        augment_(augmented, operations)
        return [eraser.normalize(augmented, 0 * std, std, erasures)]

    images = torch.randint(256, (batch, 3, side, side), generator=random, device=device, dtype=torch.uint8)
    yield Check("augmentation", [images], augment_and_normalize, _OF_PIXELS)


CHOICES.register("auto", choose_by_check)

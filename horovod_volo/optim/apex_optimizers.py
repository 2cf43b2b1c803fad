"""NVIDIA Apex's fused optimizers, which update all weights in a few kernels. The only importer of Apex."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from horovod_volo.core.errors import UserError

_INSTALL = "Build NVIDIA's from its repository (docs/training.md), or use --opt {instead}."


def fused_adam(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> Optimizer:
    """Build Apex FusedAdam with decoupled weight decay."""
    build = _apex("FusedAdam", instead="adamw")
    # Gradients are views of buckets, so Apex must not set them to None.
    return _counted(build(groups, lr=0.0, betas=betas, eps=eps, adam_w_mode=True, set_grad_none=False))


def fused_lamb(groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> Optimizer:
    """Build Apex FusedLAMB without its own gradient clipping, which --clip-grad does."""
    build = _apex("FusedLAMB", instead="lamb")
    return _counted(
        build(groups, lr=0.0, betas=betas, eps=eps, max_grad_norm=float("inf"), set_grad_none=False)
    )


def _counted(optimizer: Optimizer) -> Optimizer:
    """Create the step count of each group as a tensor, so that checkpoints can restore it."""
    for group in optimizer.param_groups:
        group["step"] = torch.zeros((), dtype=torch.int64)
    return optimizer


def check_apex(instead: str) -> None:
    """Raise UserError if NVIDIA's Apex cannot be used; `instead` is the equivalent optimizer without it."""
    remedy = _INSTALL.format(instead=instead)
    try:
        import apex.optimizers  # noqa: F401
    except ModuleNotFoundError as error:
        missing = "NVIDIA Apex is not installed"
        other_package = "the installed package called apex is not NVIDIA's. Uninstall it"
        raise UserError(f"{missing if error.name == 'apex' else other_package}. {remedy}") from None
    try:
        import amp_C  # noqa: F401  # its kernels, missing in a build without CUDA
    except ModuleNotFoundError:
        raise UserError(f"Apex is installed without its CUDA kernels. {remedy}") from None


def _apex(name: str, *, instead: str) -> Any:
    try:
        check_apex(instead)
    except UserError as problem:
        raise UserError(f"--opt {name.lower()}: {problem}") from None
    import apex.optimizers

    return getattr(apex.optimizers, name)

"""Optimizers by name, their parameter groups, and their state by parameter name. The only importer of Apex.

The state exists before the first step: ranks hold the same tensors, and a checkpoint is restored into them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry

# (groups, and those of momentum=, betas= and eps= that it has) -> an optimizer, without learning rates yet
BuildOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer by its name."""

    build: BuildOptimizer
    state_keys: tuple[str, ...]  # its state per parameter: a tensor like the parameter; "step" is one number
    shardable: bool = False  # its update treats each element alone, so that --shard-optimizer may cut tensors
    # Likewise of hidden matrices, if it updates these otherwise; its `ranks`, the World, may share the work.
    matrix_state_keys: tuple[str, ...] = ()


MATRICES = "matrices"  # the key that marks a group of hidden matrices
BETAS = (0.9, 0.999)
_MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM_STATE, MOMENTUM_STATE = ("step", *_MOMENTS), ("momentum_buffer",)

OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer", "--opt")


def register_optimizer(
    name: str,
    build: BuildOptimizer,
    *,
    state_keys: tuple[str, ...],
    shardable: bool = False,
    matrix_state_keys: tuple[str, ...] = (),
) -> None:
    """Make an optimizer available as --opt NAME."""
    OPTIMIZERS.register(name, OptimizerSpec(build, state_keys, shardable, matrix_state_keys))


def _apex(name: str, *, instead: str, default_eps: float, **settings: Any) -> BuildOptimizer:
    """Return the constructor of an optimizer of NVIDIA's Apex, which updates all weights in a few kernels."""

    def build(
        groups: list[dict[str, Any]], *, betas: tuple[float, float] = BETAS, eps: float = default_eps
    ) -> Optimizer:
        try:
            check_apex(instead)
        except UserError as problem:
            raise UserError(f"--opt {name.lower()}: {problem}") from None
        import apex.optimizers

        kind = getattr(apex.optimizers, name)
        # Gradients are views of buckets, so Apex must not set them to None.
        optimizer: Optimizer = kind(groups, lr=0.0, betas=betas, eps=eps, set_grad_none=False, **settings)
        for group in optimizer.param_groups:
            group["step"] = torch.zeros((), dtype=torch.int64)  # a tensor, so that checkpoints can restore it
        return optimizer

    return build


def check_apex(instead: str) -> None:
    """Raise UserError if NVIDIA's Apex cannot be used; `instead` is the equivalent optimizer without it."""
    remedy = f"Build NVIDIA's from its repository (docs/training.md), or use --opt {instead}."
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


_ADAMW = partial(AdamW, lr=0.0, betas=BETAS, eps=1e-8, fused=True)
_FUSED_ADAM = _apex("FusedAdam", instead="adamw", default_eps=1e-8, adam_w_mode=True)
# Without its own gradient clipping, which --clip-grad does.
_FUSED_LAMB = _apex("FusedLAMB", instead="lamb", default_eps=1e-6, max_grad_norm=float("inf"))
register_optimizer("adamw", _ADAMW, state_keys=ADAM_STATE, shardable=True)
register_optimizer("sgd", partial(SGD, lr=0.0, fused=True), state_keys=MOMENTUM_STATE, shardable=True)
register_optimizer("fusedadam", _FUSED_ADAM, state_keys=_MOMENTS)
register_optimizer("fusedlamb", _FUSED_LAMB, state_keys=_MOMENTS)


def check_optimizer(name: str, *, sharded: bool, **constants: Any) -> None:
    """Raise UserError if no optimizer has this name and these constants, and this state, sharded or not."""
    _stated(name, **constants)
    if OPTIMIZERS.find(name).shardable or not sharded:
        return
    others = " or ".join(other for other, spec in OPTIMIZERS.items() if spec.shardable)
    raise UserError(
        f"--shard-optimizer cuts tensors between ranks, and --opt {name} needs them whole. Use --opt "
        f"{others}, or drop --shard-optimizer."
    )


def _stated(name: str, **constants: Any) -> dict[str, Any]:
    """Return the constants that are not empty; raise UserError if the optimizer does not have one."""
    stated = {key: value for key, value in constants.items() if value}
    for key in stated.keys() - signature(OPTIMIZERS.find(name).build).parameters.keys():
        raise UserError(f"--opt {name} has no {key}. Drop --opt-{key}, or use --opt adamw.")
    return stated


def build_optimizer(
    name: str, groups: list[dict[str, Any]], *, momentum: float, **constants: Any
) -> Optimizer:
    """Build an optimizer with zero state; `constants` are `betas` and `eps`, empty and 0 for its own."""
    spec, stated = OPTIMIZERS.find(name), _stated(name, **constants)
    if "momentum" in signature(spec.build).parameters:
        stated["momentum"] = momentum
    optimizer = spec.build(groups, **stated)
    for group in optimizer.param_groups:
        keys = spec.matrix_state_keys if MATRICES in group else spec.state_keys
        for parameter in group["params"]:
            step = parameter.new_zeros((), dtype=torch.float32)
            zeros = {key: step if key == "step" else torch.zeros_like(parameter) for key in keys}
            optimizer.state[parameter] = zeros
    return optimizer


def state_tensors(optimizer: Optimizer, local_parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state by PARAMETER/KEY; the tensors are the live ones."""
    of_parameters = {
        f"{name}/{key}": tensor
        for name, parameter in local_parameters.items()
        for key, tensor in optimizer.state[parameter].items()
    }
    # Apex counts steps per group, not per parameter.
    counts = {
        f"group.{number}/step": group["step"]
        for number, group in enumerate(optimizer.param_groups)
        if isinstance(group.get("step"), Tensor)
    }
    return of_parameters | counts


def parameter_groups(
    parameters: Mapping[str, Tensor],
    local_parameters: Mapping[str, Parameter],
    *,
    exempt: Iterable[str],
    weight_decay: float,
    layers: Mapping[str, int],
    layer_decay: float,
    matrices: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Group the parameters that this rank updates by weight decay and by layer, as timm does.

    `exempt` names parameters without decay. A layer's learning rate is `layer_decay` times that of the
    layer above it; without `layers` all are equal. `matrices` are in groups of their own.
    """
    undecayed = set(exempt)
    top = max(layers.values(), default=0)
    groups: dict[tuple[int, float, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        if name not in local_parameters:
            continue
        plain = parameter.ndim <= 1 or name.endswith(".bias") or name in undecayed
        decay, layer = 0.0 if plain else weight_decay, layers.get(name, top)
        key = layer, decay, name in matrices
        if key not in groups:
            scale = layer_decay ** (top - layer)
            mark = {MATRICES: True} if name in matrices else {}
            groups[key] = {"params": [], "weight_decay": decay, "lr_scale": scale, **mark}
        groups[key]["params"].append(local_parameters[name])
    return list(groups.values())


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]

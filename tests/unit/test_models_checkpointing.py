"""Recomputing blocks in backward changes no result, only which tensors are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from horovod_volo.models.lvvit import LvVit
from horovod_volo.models.volo import Volo

Model = Volo | LvVit


def volo(drop_path: float) -> Volo:
    """Build a small network with two blocks in some stages."""
    return Volo(
        layers=(2, 2, 1, 1),
        embed_dims=(48, 96, 96, 96),
        num_heads=(2, 4, 4, 4),
        stem_hidden_dim=8,
        img_size=64,
        num_classes=10,
        drop_path_rate=drop_path,
    )


def lvvit(drop_path: float) -> LvVit:
    """Build a small network."""
    return LvVit(
        layers=5,
        embed_dim=96,
        num_heads=4,
        stem_width=8,
        residual_divisor=2.0,
        img_size=64,
        num_classes=10,
        drop_path_rate=drop_path,
    )


def blocks_of(model: Model) -> list[nn.Module]:
    if isinstance(model, LvVit):
        return list(model.blocks)
    stages = [block for stage in model.network if isinstance(stage, nn.Sequential) for block in stage]
    return [*stages, *model.post_network]


def images() -> Tensor:
    return torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(2))


def flipped(grid: Tensor) -> Tensor:
    return torch.cat([grid[:, :2].flip(0), grid[:, 2:]], dim=1)


def loss_of(model: Model, drop_path_seed: int = 0) -> Tensor:
    class_logits, token_logits = model.training_logits(images(), flipped, drop_path_seed)
    return class_logits.float().square().mean() + token_logits.float().square().mean()


def training_step(
    build: Callable[[float], Model], drop_path: float, checkpointing: bool, seed: int, precision: torch.dtype
) -> list[Tensor]:
    """Return the loss, all gradients, all buffers and the random state after one forward and backward."""
    torch.manual_seed(0)
    model = build(drop_path).train()
    model.set_grad_checkpointing(checkpointing)
    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        loss = loss_of(model, seed)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss, *gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drop_path", [0.0, 0.6])
@pytest.mark.parametrize("build", [volo, lvvit])
def test_nothing_changes_to_the_bit(
    build: Callable[[float], Model], drop_path: float, precision: torch.dtype
) -> None:
    plain = training_step(build, drop_path, False, 1, precision)
    recomputed = training_step(build, drop_path, True, 1, precision)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))
    # Other dropped branches would change the loss by as much as this.
    other_branches = training_step(build, drop_path, True, 5, precision)
    assert torch.equal(plain[0], other_branches[0]) == (drop_path == 0.0)


@contextmanager
def calls(modules: list[nn.Module]) -> Iterator[list[int]]:
    """Count the forward calls of each module inside the context."""
    counts = [0] * len(modules)

    def count(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[index] += 1

        return hook

    hooks = [module.register_forward_pre_hook(count(index)) for index, module in enumerate(modules)]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("build", [volo, lvvit])
def test_only_blocks_are_computed_twice(build: Callable[[float], Model]) -> None:
    model = build(0.0).train()
    blocks = blocks_of(model)
    others = [model.patch_embed, model.norm, model.head, model.aux_head]
    others += [model.network[1]] if isinstance(model, Volo) else []
    model.set_grad_checkpointing()
    with calls(blocks) as of_blocks, calls(others) as of_others:
        loss_of(model).backward()
    assert of_blocks == [2] * len(blocks)
    assert of_others == [1] * len(others)
    model.set_grad_checkpointing(False)
    with calls(blocks) as of_blocks:
        loss_of(model).backward()
    assert of_blocks == [1] * len(blocks)


@pytest.mark.parametrize("build", [volo, lvvit])
def test_evaluation_recomputes_nothing(build: Callable[[float], Model]) -> None:
    model = build(0.6).eval()
    plain = model(images())
    model.set_grad_checkpointing()
    with calls(blocks_of(model)) as of_blocks:
        logits = model(images())
        logits.sum().backward()
    assert of_blocks == [1] * len(of_blocks)
    assert torch.equal(logits, plain)

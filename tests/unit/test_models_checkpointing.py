"""Recomputing blocks in backward changes no number, only what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from horovod_volo.models.lvvit import LvVit
from horovod_volo.models.timm_api import VOLO
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


def learned(
    build: Callable[[float], Model], drop_path: float, checkpointing: bool, seed: int, precision: torch.dtype
) -> list[Tensor]:
    """Return the loss, all gradients, all buffers and the random state after one pass."""
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
    plain = learned(build, drop_path, False, 1, precision)
    recomputed = learned(build, drop_path, True, 1, precision)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))
    # Were the branches left out not the same ones, the losses would be as far apart as these.
    other_branches = learned(build, drop_path, True, 5, precision)
    assert torch.equal(plain[0], other_branches[0]) == (drop_path == 0.0)


@contextmanager
def calls(modules: list[nn.Module]) -> Iterator[list[int]]:
    """Count each module's forward calls inside."""
    counts = [0] * len(modules)

    def count(place: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[place] += 1

        return hook

    hooks = [module.register_forward_pre_hook(count(place)) for place, module in enumerate(modules)]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("build", [volo, lvvit])
def test_each_block_is_computed_twice_and_nothing_else_is(build: Callable[[float], Model]) -> None:
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


def test_without_it_the_stages_are_timms() -> None:
    torch.manual_seed(0)
    model = volo(0.0).train()
    stem = model.patch_embed(images()).permute(0, 2, 3, 1).detach()  # (batch, rows, columns, channels)
    results = []
    for kind in (VOLO, Volo):
        tokens = kind.forward_tokens(model, stem)
        features = kind.forward_cls(model, tokens)
        results.append((tokens, features, torch.autograd.grad(features.square().mean(), model.pos_embed)[0]))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    """Add up the storages that autograd saves inside, each once, weights left out."""
    counted = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    total = [0]
    kept: list[Tensor] = []  # keeps storages alive, so that none is counted under another's address

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            total[0] += storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        yield total


@pytest.mark.parametrize("build", [volo, lvvit])
def test_fewer_bytes_are_kept_for_backward(build: Callable[[float], Model]) -> None:
    model = build(0.0).train()
    inputs: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        for block in blocks_of(model)
    ]
    with saved_bytes(model) as everything:
        loss_of(model)
    for hook in hooks:
        hook.remove()
    of_one_block = []
    for block, tokens in zip(blocks_of(model), inputs, strict=True):
        with saved_bytes(model) as inside:
            block(tokens.detach().requires_grad_())
        of_one_block.append(inside[0])
    model.set_grad_checkpointing()
    with saved_bytes(model) as some:
        loss_of(model)
    # At its peak, backward has the kept tensors and what one recomputed block saves.
    assert some[0] + max(of_one_block) < 0.8 * everything[0]
    assert everything[0] - some[0] > 0.6 * sum(of_one_block)

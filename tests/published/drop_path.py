"""What drop path draws, taken from our networks for the published ones, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import horovod_volo.models.lvvit as our_lvvit
import horovod_volo.models.volo as our_volo
from horovod_volo.models.drop_path import ALL, DropPathSample, sample_drop_path
from tests.published.checkouts import Published

Draw = tuple[float, Tensor]  # a branch's rate, and the images that keep it


@contextmanager
def recorded_published_draws(model: torch.nn.Module) -> Iterator[list[Draw]]:
    """List what the modules of a published network draw, branch by branch."""
    draws: list[Draw] = []

    def record(module: Any, _: Any, kept: Tensor) -> None:
        draws.append((module.drop_prob, kept.flatten(1).any(dim=1).nonzero().flatten()))

    hooks = [m.register_forward_hook(record) for m in model.modules() if hasattr(m, "drop_prob")]
    yield draws
    for hook in hooks:
        hook.remove()


@contextmanager
def ours_draw(draws: list[Draw]) -> Iterator[None]:
    """Let our networks take these draws instead of their own."""

    def given(rates: Sequence[float], tokens: Tensor, seed: int | None) -> list[DropPathSample]:
        branches = iter(draws)
        kept = [take(next(branches), rate) if rate else ALL for rate in rates]
        assert next(branches, None) is None
        return kept

    def take(draw: Draw, rate: float) -> DropPathSample:
        assert draw[0] == pytest.approx(rate, rel=1e-6)
        return DropPathSample(draw[1], 1.0 / (1.0 - rate))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(our_volo, "sample_drop_path", given)
        patch.setattr(our_lvvit, "sample_drop_path", given)
        yield


@contextmanager
def recorded_draws_of_ours() -> Iterator[list[Draw]]:
    """List what a network of ours draws, branch by branch."""
    draws: list[Draw] = []

    def record(rates: Sequence[float], tokens: Tensor, seed: int | None) -> list[DropPathSample]:
        kept = sample_drop_path(rates, tokens, seed)
        everyone = torch.arange(len(tokens))
        draws.extend(
            (rate, everyone if branch.rows is None else branch.rows)
            for rate, branch in zip(rates, kept, strict=True)
            if rate
        )
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(our_volo, "sample_drop_path", record)
        patch.setattr(our_lvvit, "sample_drop_path", record)
        yield draws


@contextmanager
def the_published_draw(published: Published, draws: list[Draw]) -> Iterator[None]:
    """Let published networks take these draws instead of their own."""
    branches = iter(draws)

    def given(module: Any, branch: Tensor) -> Tensor:
        rate, rows = next(branches)
        assert module.drop_prob == pytest.approx(rate, rel=1e-6)
        keeps = torch.zeros(len(branch), *[1] * (branch.ndim - 1)).index_fill(0, rows, 1.0)
        return branch * keeps / (1.0 - module.drop_prob)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published.volo.DropPath, "forward", given)
        yield
    assert next(branches, None) is None

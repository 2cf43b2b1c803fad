"""Random draws of drop path, recorded in our networks and used in the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import horovod_volo.models.lvvit as our_lvvit
import horovod_volo.models.volo as our_volo
from horovod_volo.models.blocks import DropPathSample, sample_drop_path
from tests.published.checkouts import PublishedCode

Draw = tuple[float, Tensor]  # the rate of a branch, and the images that keep it


@contextmanager
def record_draws_of_ours() -> Iterator[list[Draw]]:
    """Record the draws of one of our networks, branch by branch."""
    draws: list[Draw] = []

    def record(rates: Sequence[float], tokens: Tensor, seed: int | None) -> list[DropPathSample]:
        samples = sample_drop_path(rates, tokens, seed)
        all_images = torch.arange(len(tokens))
        draws.extend(
            (rate, all_images if sample.rows is None else sample.rows)
            for rate, sample in zip(rates, samples, strict=True)
            if rate
        )
        return samples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(our_volo, "sample_drop_path", record)
        patch.setattr(our_lvvit, "sample_drop_path", record)
        yield draws


@contextmanager
def use_draws_in_published(published: PublishedCode, draws: list[Draw]) -> Iterator[None]:
    """Replace the draws of published networks by these."""
    branches = iter(draws)

    def forward(module: Any, branch: Tensor) -> Tensor:
        rate, rows = next(branches)
        assert module.drop_prob == pytest.approx(rate, rel=1e-6)
        mask = torch.zeros(len(branch), *[1] * (branch.ndim - 1)).index_fill(0, rows, 1.0)
        return branch * mask / (1.0 - module.drop_prob)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published.volo.DropPath, "forward", forward)
        yield
    assert next(branches, None) is None

"""Training with compiled blocks gives the same losses; gradients are views of the buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from horovod_volo.core.errors import UserError
from horovod_volo.engine.context import TrainContext
from tests.gpu.conftest import losses

OpenContext = Callable[..., TrainContext]
STEPS = 3


def storages(context: TrainContext) -> set[int]:
    """Return the storages of the parameters' gradients."""
    gradients = [parameter.grad for parameter in context.state.model.parameters()]
    return {gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None}


def test_losses_with_compiled_blocks_are_the_same(open_context: OpenContext, device: torch.device) -> None:
    settings = {"img_size": 32, "drop_path": 0.0}
    expected = losses(open_context(**settings), STEPS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    context = open_context(compile=True, **settings)
    used: set[int] = set()
    context.state.optimizer.register_step_pre_hook(lambda *_: used.update(storages(context)))
    found = losses(context, STEPS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4
    assert used == {bucket.gradients.untyped_storage().data_ptr() for bucket in context.state.reducer.buckets}


def test_without_a_compiler_compile_is_an_error_and_nothing_is_written(
    open_context: OpenContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="--compile needs a C\\+\\+ compiler"):
        open_context(compile=True)
    assert not list(tmp_path.iterdir())

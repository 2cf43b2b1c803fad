"""Training in fp16 and bf16: a step that overflows is skipped, and losses stay close to fp32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step import train_step
from horovod_volo.optim.build import state_tensors
from tests.gpu.conftest import losses

OpenContext = Callable[..., TrainContext]


def weights_with_optimizer_state(context: TrainContext) -> dict[str, Tensor]:
    """Copy all tensors that an optimizer step changes."""
    state = context.state
    live = dict(state.model.named_parameters())
    live |= state_tensors(state.optimizer, state.reducer.local_parameters)
    return {name: tensor.detach().clone() for name, tensor in live.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_an_overflow_changes_only_the_loss_scale(open_context: OpenContext) -> None:
    context = open_context(precision="fp16", clip_grad=1.0)
    scaler = context.state.scaler
    # So low that only the hook below overflows.
    scaler.load_state_dict(scaler.state_dict() | {"scale": 256.0})
    batches = context.learner.train_loader.batches(0, 0)
    fresh = weights_with_optimizer_state(context)
    train_step(context, batches)
    trained = weights_with_optimizer_state(context)
    assert changed(fresh, trained) == list(trained)
    assert scaler.get_scale() == 256.0

    first = next(context.state.model.parameters())
    overflow = first.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    train_step(context, batches)
    overflow.remove()
    assert changed(trained, weights_with_optimizer_state(context)) == []
    assert scaler.get_scale() == 128.0

    train_step(context, batches)
    after = weights_with_optimizer_state(context)
    assert changed(trained, after) == list(after)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_in_half_precision_are_close_to_fp32(open_context: OpenContext, precision: str) -> None:
    settings = {"img_size": 32, "accumulation": 2, "clip_grad": 1.0}
    exact = losses(open_context(precision="fp32", **settings), steps=4)
    context = open_context(precision=precision, **settings)
    context.state.scaler.load_state_dict(context.state.scaler.state_dict() | {"scale": 256.0})
    half = losses(context, steps=4)
    assert half == pytest.approx(exact, rel=0.005)
    assert half != exact  # equal losses would mean that half precision was not used
    assert all(parameter.isfinite().all() for parameter in context.state.model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in context.state.model.parameters())

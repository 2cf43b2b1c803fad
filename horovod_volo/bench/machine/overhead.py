"""Time of the engine's step beyond torch's operations: one layer, against a bare loop.

Both sides compute the same loss and update. The engine also draws MixToken's box, seeds the micro-batch, sets
the learning rate, keeps gradients in buckets and updates the meters.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.bench.cli import BatchSize, Pairs
from horovod_volo.bench.comparison import alternate, assert_agree, repeats_for, timed
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import checked_config, random_batch, step_of, synthetic_context
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.core.batch import Labels, TrainBatch
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.volo import TokenSwap
from horovod_volo.optim.build import build_optimizer, parameter_groups

CLASSES = 10
_LR, _WEIGHT_DECAY = 1e-3, 0.05
_COMPARED_STEPS = 20
_BOXES = 100  # drawn in advance for the bare loop
_TOLERANCE = 1e-5  # relative to the largest change of a weight


class OneLayer(nn.Module):
    """A network with negligible arithmetic."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(inputs, CLASSES)

    def forward(
        self,
        images: Tensor,
        exchange: TokenSwap,  # noqa: ARG002
        drop_path_seed: int = 0,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Return class logits, and no token logits."""
        logits: Tensor = self.head(images.flatten(1))
        return logits, logits.new_empty(0)


def measure(*, batch_size: BatchSize = 8, pairs: Pairs = 7) -> Result:
    """Compare steps of one rank."""
    config = checked_config(
        {
            "model": "volo_demo",  # replaced by the one layer
            "img_size": 32,
            "batch_size": batch_size,
            "token_label": False,
            "mix_token": True,
            "compression": "none",
            "weight_decay": _WEIGHT_DECAY,
        }
    )
    context = synthetic_context(config, World.single(), CLASSES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # synchronising several would take longer than either side computes
    try:
        batch = random_batch(config, CLASSES, context.resources.device, seed=0)
        figures = _compare(_with_one_layer(context, batch), batch, pairs)
    finally:
        torch.set_num_threads(threads)
        context.close()
    device = context.resources.device.type
    title = f"a step of one layer beside a bare loop, batch {batch_size}, {device}, one thread"
    return Result("overhead", title, figures)


def _with_one_layer(context: TrainContext, batch: TrainBatch) -> TrainContext:
    """Replace the network by one layer and keep the learning rate constant."""
    torch.manual_seed(0)
    model = OneLayer(batch.images[0].numel()).to(context.resources.device).train()
    reducer = Reducer(model, context.world, context.config.exchange, micro_batches=1)
    optimizer = build_optimizer("adamw", _groups(model, reducer.local_parameters), momentum=0.0)
    state = dataclasses.replace(context.state, model=model, reducer=reducer, optimizer=optimizer)
    return dataclasses.replace(context, state=state, forward=model, lr=lambda step: _LR)  # noqa: ARG005


def _groups(model: nn.Module, owned: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    groups = parameter_groups(
        dict(model.named_parameters()),
        owned,
        exempt=(),
        weight_decay=_WEIGHT_DECAY,
        layers={},
        layer_decay=1.0,
    )
    return [group | {"lr": _LR} for group in groups]


def _compare(context: TrainContext, batch: TrainBatch, pairs: int) -> list[Figure]:
    device, model = context.resources.device, context.state.model
    start, peer_model = _weights(model), copy.deepcopy(model)
    engine_step, bare_step = step_of(context, batch), _bare_step(peer_model, context, batch)
    for _ in range(_COMPARED_STEPS):
        engine_step()
        bare_step()
    what = f"weights after {_COMPARED_STEPS} steps"
    assert_agree(what, _weights(model) - start, _weights(peer_model) - start, _TOLERANCE)
    repeats = repeats_for(engine_step, device)
    found = alternate(timed(engine_step, repeats, device), timed(bare_step, repeats, device), pairs)
    beyond = [ours - peer for ours, peer in zip(found.ours, found.peer, strict=True)]
    return [
        Figure.of_seconds("engine's step", found.ours, "µs"),
        Figure.of_seconds("bare loop", found.peer, "µs"),
        Figure.of_seconds("beyond torch", beyond, "µs"),
    ]


def _bare_step(model: nn.Module, context: TrainContext, batch: TrainBatch) -> Callable[[], None]:
    """Return a plain training step."""
    optimizer = torch.optim.AdamW(_groups(model, dict(model.named_parameters())), fused=True)
    labels = Labels(batch.labels.classes)
    boxes = itertools.cycle([context.mix(step, 0) for step in range(_BOXES)])

    def step() -> None:
        box = next(boxes)
        with context.autocast:
            class_logits, token_logits = model(batch.images, box.swap_tokens)
        context.loss(class_logits, token_logits, labels, box).total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()

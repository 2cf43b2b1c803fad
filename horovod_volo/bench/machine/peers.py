"""Our training step against the training loops in use today, on the same random images and weights.

A plain loop around timm's network learns the images' classes: eager, in channels-last memory, or compiled.
The published training learns token labels from dense targets. Against each, ours learns from the same labels.

`overhead` is the time of our step beyond torch's operations: with a network of one layer, against a bare loop
with the same loss and update. The engine also draws MixToken's box, seeds the micro-batch, sets the learning
rate, keeps gradients in buckets and updates the meters.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, ModelName, Pairs
from horovod_volo.bench.comparison import Action, assert_agree, compare, one_thread
from horovod_volo.bench.machine.peers_timm import LoopName, TrainingLoop, training_loop
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import SyntheticRun, bench_config, flat_weights, learner_of
from horovod_volo.config.schema import Config
from horovod_volo.core.batch import Labels
from horovod_volo.models.build import tokens_per_side, training_forward
from horovod_volo.models.registry import ModelSpec, register_model
from horovod_volo.models.volo import TokenSwap
from horovod_volo.objective.mixing import NO_BOX, Box

_COMPARED_STEPS = 3
_LR, _WEIGHT_DECAY = 1e-3, 0.05  # of the layer
_COMPARED_STEPS_OF_LAYER = 20
_LAYER_TOLERANCE = 1e-5  # relative to the largest change of a weight
_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # relative to the largest loss


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 8,
    precision: Annotated[Literal["fp32", "bf16"], Flag("arithmetic of forward and backward")] = "fp32",
    drop_path: DropPath = 0.1,
    against: Annotated[Sequence[LoopName], Flag("training loops to compare with")] = (
        "eager",
        "channels-last",
        "published",
    ),
    pairs: Pairs = 7,
) -> Result:
    """Compare one rank's step with that of each training loop."""
    figures: list[Figure] = []
    for form in against:
        config = bench_config(
            model=model,
            img_size=img_size,
            batch_size=batch_size,
            precision=precision,
            token_label=form == "published",
            lr=1e-4,
            warmup_epochs=0,
        )
        ours, peer = _sides(form, config)  # without drop path, whose random numbers differ
        with closing(ours):
            losses = ours.losses(_COMPARED_STEPS)
        expected = torch.tensor([float(peer.step()) for _ in range(_COMPARED_STEPS)])
        what = f"the losses of {_COMPARED_STEPS} steps ({form})"
        assert_agree(what, losses, expected, _TOLERANCES[precision])
        ours, peer = _sides(form, replace(config, model=replace(config.model, drop_path=drop_path)))
        with closing(ours):
            found = compare(ours.step, peer.step, ours.device, pairs)
        figures += [
            Figure.of_rate(f"beside {form}: images a second", found.ours, batch_size),
            Figure.of_rate(form, found.peer, batch_size),
            Figure.of(f"faster than {form}", found.ratios, "x"),
        ]
    title = f"step of one rank, {img_size} px, {precision}, batch {batch_size}, drop path {drop_path}"
    return Result(f"peers {model} {precision} {' '.join(against)}", title, figures)


def _sides(form: LoopName, config: Config) -> tuple[SyntheticRun, TrainingLoop]:
    """Build our run, and the peer with the same weights and batch; both mix tokens by the same box."""
    run = SyntheticRun(config)
    side = tokens_per_side(config.model.model, config.model.img_size)
    box = Box(0, 0, side // 2, side // 2, grid=side) if config.objective.mix_token else NO_BOX
    learner_of(run.context).mix = lambda step, number: box  # noqa: ARG005
    peer = training_loop(form, config, run.batch, run.device, box)
    peer.network.load_state_dict(run.context.state.model.state_dict())
    return run, peer


class OneLayer(nn.Module):
    """A network with negligible arithmetic, which does not look at the arguments of a network with tokens."""

    def __init__(self, img_size: int, num_classes: int, **_: object) -> None:
        super().__init__()
        self.head = nn.Linear(3 * img_size**2, num_classes)

    def training_logits(self, images: Tensor, swap_tokens: TokenSwap, seed: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return class logits, and no token logits."""
        logits: Tensor = self.head(images.flatten(1))
        return logits, logits.new_empty(0)

    class_logits = training_logits


register_model(ModelSpec("one_layer", OneLayer, stride=16))


def measure_overhead(*, batch_size: BatchSize = 8, pairs: Pairs = 7) -> Result:
    """Compare steps of one rank."""
    settings = {"num_classes": 10, "img_size": 32, "batch_size": batch_size, "weight_decay": _WEIGHT_DECAY}
    config = bench_config(model="one_layer", token_label=False, mix_token=True, **settings)
    # Synchronising several threads would take longer than either side computes.
    with closing(SyntheticRun(config)) as run, one_thread():
        run.context.lr = lambda step: _LR  # noqa: ARG005
        model = run.context.state.model
        start, peer_model = flat_weights(model), copy.deepcopy(model)
        bare_step = _bare_step(peer_model, run)
        for _ in range(_COMPARED_STEPS_OF_LAYER):
            run.step()
            bare_step()
        what = f"weights after {_COMPARED_STEPS_OF_LAYER} steps"
        assert_agree(what, flat_weights(model) - start, flat_weights(peer_model) - start, _LAYER_TOLERANCE)
        found = compare(run.step, bare_step, run.device, pairs)
    figures = [
        Figure.of_seconds("engine's step", found.ours, "µs"),
        Figure.of_seconds("bare loop", found.peer, "µs"),
        Figure.of_seconds("beyond torch", found.ours - found.peer, "µs"),
    ]
    title = f"a step of one layer beside a bare loop, batch {batch_size}, {run.device.type}, one thread"
    return Result("overhead", title, figures)


def _bare_step(model: nn.Module, run: SyntheticRun) -> Action:
    """Return a plain training step."""
    ours, batch, forward = learner_of(run.context), run.batch, training_forward(model)
    weight, bias = model.parameters()
    groups = [{"params": [weight], "weight_decay": _WEIGHT_DECAY}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_LR, fused=True)
    labels = Labels(batch.labels.classes)
    boxes = itertools.cycle([ours.mix(step, 0) for step in range(100)])

    def step() -> None:
        box = next(boxes)
        with ours.autocast:
            class_logits, token_logits = forward(batch.images, box.swap_tokens, 0)
        losses = ours.criterion(class_logits, token_logits, labels, box)
        losses.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step

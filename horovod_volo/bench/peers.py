"""Our training step against the training loops in use today, on the same random images and weights.

A plain loop around timm's network learns the images' classes: eager, in channels-last memory, or compiled.
The published training learns token labels from dense targets. Against each, ours learns from the same labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Literal

import torch

from horovod_volo.bench.cli import BatchSize, DropPath, Flag, ImgSize, ModelName, Pairs
from horovod_volo.bench.comparison import assert_agree, compare
from horovod_volo.bench.peers_timm import LoopName, TrainingLoop, training_loop
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import SyntheticRun, bench_config, learner_of
from horovod_volo.config.schema import Config
from horovod_volo.models.build import tokens_per_side
from horovod_volo.objective.mixing import NO_BOX, Box

_COMPARED_STEPS = 3
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
            model=model, img_size=img_size, batch_size=batch_size, precision=precision,
            token_label=form == "published", lr=1e-4, warmup_epochs=0,
        )  # fmt: skip
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

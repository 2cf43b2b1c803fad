"""Our training step against the loops that people train VOLO with today, on the same random images.

A plain loop around timm's network learns the images' classes: eager, in channels-last memory, compiled. The
published training learns token labels from dense targets. Beside each, ours learns the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.pairs import alternate, repeats_for, timed
from horovod_volo.bench.peers_step import PUBLISHED, Peer, plain_peer, published_peer
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import checked_config, losses_of, random_batch, step_of, synthetic_job
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.data.loader import Batch
from horovod_volo.engine.context import TrainContext
from horovod_volo.models.build import tokens_per_side
from horovod_volo.objective.mixtoken import NO_BOX, Box

CLASSES = 1000
_COMPARED_STEPS = 3
_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # of the largest loss


def measure(
    *,
    model: str,
    img_size: int,
    batch_size: int,
    drop_path: float,
    precision: str,
    against: list[str],
    pairs: int,
) -> Result:
    """Compare one rank's step with each peer's."""
    figures: list[Figure] = []
    for form in against:
        config = _config(model, img_size, batch_size, precision, tokens=form == PUBLISHED)
        _assert_same_losses(form, config)
        trained = replace(config, model=replace(config.model, drop_path=drop_path))
        figures += _compare(form, trained, pairs)
    title = f"step of one rank, {img_size} px, {precision}, batch {batch_size}, drop path {drop_path}"
    return Result(f"peers {model} {precision} {' '.join(against)}", title, figures)


def _config(model: str, img_size: int, batch_size: int, precision: str, *, tokens: bool) -> Config:
    settings = {
        "model": model,
        "num_classes": CLASSES,
        "img_size": img_size,
        "batch_size": batch_size,
        "precision": precision,
        "lr": 1e-4,
        "warmup_epochs": 0,
        "token_label": tokens,
        "token_label_data": "random" if tokens else "",
        "mix_token": tokens,
    }
    return checked_config(settings)


def _assert_same_losses(form: str, config: Config) -> None:
    """Stop unless both begin with the same weights and learn alike, no branch left out."""
    ours, batch, peer = _sides(form, config)
    found = losses_of(ours, batch, _COMPARED_STEPS)
    ours.close()
    wanted = torch.tensor([float(peer.step()) for _ in range(_COMPARED_STEPS)])
    what = f"the losses of {_COMPARED_STEPS} steps ({form})"
    assert_agree(what, found, wanted, _TOLERANCES[config.model.precision])


def _compare(form: str, config: Config, pairs: int) -> list[Figure]:
    ours, batch, peer = _sides(form, config)
    device, our_step = ours.resources.device, step_of(ours, batch)
    our_block = timed(our_step, repeats_for(our_step, device), device)
    peer_block = timed(peer.step, repeats_for(peer.step, device), device)
    result = alternate(our_block, peer_block, pairs)
    ours.close()
    images = config.data.batch_size
    return [
        Figure.of(f"beside {form}: images a second", [images / s for s in result.ours], "images/s"),
        Figure.of(f"{form}", [images / s for s in result.peer], "images/s"),
        Figure.of_estimate(f"faster than {form}", result.times_faster, "x"),
    ]


def _sides(form: str, config: Config) -> tuple[TrainContext, Batch, Peer]:
    """Build our run, its images, and the peer with the same weights."""
    context = synthetic_job(config, World.single(), CLASSES)
    device = context.resources.device
    batch = random_batch(config, CLASSES, device, seed=0)
    box = _average_box(config)
    if form == PUBLISHED:
        peer = published_peer(config, batch, device, box)
    else:
        peer = plain_peer(form, config, batch, device)
    peer.network.load_state_dict(context.state.model.state_dict())
    return replace(context, mix=lambda step, number: box), batch, peer  # noqa: ARG005


def _average_box(config: Config) -> Box:
    """Return the one box that both sides mix, or none where tokens are not mixed."""
    side = tokens_per_side(config.model.model, config.model.img_size)
    half = side // 2
    return Box(top=0, left=0, height=half, width=half, grid=side) if config.objective.mix_token else NO_BOX

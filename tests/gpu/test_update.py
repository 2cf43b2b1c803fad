"""The fused clipping, AdamW and EMA equal torch's own functions, called one after the other."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr
from horovod_volo.optim.clip import build_clip, divide
from horovod_volo.optim.ema import Ema

BOUND, WEIGHT_DECAY, EMA_DECAY, LR, STEPS = 0.35, 0.05, 0.9, 1e-3, 20


@pytest.mark.parametrize("scale", [1.0, 256.0], ids=["fp32", "scaled"])
def test_twenty_steps_give_the_same_weights_and_averages(device: torch.device, scale: float) -> None:
    """Two equal models, one updated as in a run, the other by torch's own functions."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 20, 3, bias=False), nn.BatchNorm2d(20), nn.Flatten(), nn.Linear(20, 300)
    ours = nn.Sequential(*layers).to(device).train()
    theirs = copy.deepcopy(ours)
    start, means = ([each.detach().clone() for each in ours.parameters()] for _ in range(2))
    exchange = Exchange(compression="none", bucket_mib=0.01)
    reducer = Reducer(ours, World.single(), exchange, micro_batches=1)
    assert len(reducer.buckets) > 1
    named = dict(ours.named_parameters())
    decays: dict[str, Any] = {"weight_decay": WEIGHT_DECAY, "layers": {}, "layer_decay": 1.0}
    optimizer = build_optimizer("adamw", parameter_groups(named, named, exempt=(), **decays), momentum=0.0)
    set_lr(optimizer, LR)
    flat, norm_of = reducer.local_gradients, reducer.global_grad_norm
    clip = build_clip("norm", BOUND, named, flat_gradients=flat, heads=(), global_grad_norm=norm_of)
    average = Ema(ours, reducer.buckets, EMA_DECAY)
    scaler = torch.amp.GradScaler(device.type, enabled=scale != 1.0, init_scale=scale)
    plain, others = ([each for each in theirs.parameters() if (each.ndim > 1) == b] for b in (False, True))
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": WEIGHT_DECAY}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    norms = []
    for step in range(STEPS):
        images = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(step)).to(device)
        scaler.scale(ours(images).square().mean()).backward()
        with reducer.synchronized_gradients():
            scaler.unscale_(optimizer)
            divide(optimizer, clip())
            scaler.step(optimizer)
        scaler.update()
        average.update(step=0)  # without warm-up the step does not matter
        theirs(images).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(theirs.parameters(), BOUND))
        adamw.step()
        adamw.zero_grad()
        for mean, parameter in zip(means, theirs.parameters(), strict=True):
            mean.mul_(EMA_DECAY).add_(parameter.detach(), alpha=1 - EMA_DECAY)
    assert min(norms) < BOUND < max(norms)  # some steps are clipped, others are not
    pairs = zip(ours.parameters(), theirs.parameters(), start, strict=True)
    for found, expected, before in pairs:
        assert (found - before).abs().max() > LR
        assert (found - expected).abs().max() <= 1e-6
    for found, mean in zip(average.models()["ema"].parameters(), means, strict=True):
        assert (found - mean).abs().max() <= 1e-6
